"""Calibration: known lines are found in noise, every rate is measured, and the file is a topology."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unequal.plan.topology import LINKS, Topology
from unequal.train import calibrate as calibration
from unequal.train.calibrate import Point, fit, line
from unequal.train.kernel_rates import popular
from unequal.train.processes import Ranks

from .pool import Pool

SIZES = np.array(calibration.SIZES, np.float64)


@given(st.floats(1e-6, 1e-2), st.floats(1e6, 1e11))
def test_a_line_is_found_again(start: float, rate: float) -> None:
    found, slope = line(SIZES, start + SIZES / rate)
    # What a byte takes can be seen where the largest message takes clearly longer than the smallest.
    if SIZES[-1] / rate > 0.01 * start:
        assert 1 / slope == pytest.approx(rate, rel=1e-3)
    if start > 0.01 * SIZES[0] / rate:
        assert found == pytest.approx(start, rel=1e-3)


def test_a_line_never_has_impossible_rates() -> None:
    start, slope = line(SIZES, 1e-3 - SIZES * 1e-11)  # larger messages look faster
    assert slope > 0 and 0 <= start <= 1e-3
    start, slope = line(SIZES, SIZES**1.3)  # it bends
    assert slope > 0 and start == 0


def test_what_a_buffer_holds_does_not_make_a_link_fast() -> None:
    """A link that takes 100,000 bytes at once and then 10 MB a second."""
    start, slope = line(SIZES, 1e-3 + np.maximum(SIZES - 1e5, 0) / 1e7)
    assert 1 / slope == pytest.approx(1e7, rel=0.15) and start <= 1e-3


def test_spread_is_that_of_the_rounds() -> None:
    noise = np.random.default_rng(0).lognormal(0, 0.2, (len(SIZES), 40))
    points = [
        Point("inside", "all_to_all", 3, int(size), (2e-4 + size / 1e9) * part) for size, part in zip(SIZES, noise)
    ]
    found = fit(points)
    assert found.rate.median == pytest.approx(1e9, rel=0.1)
    assert found.message.median == pytest.approx(1e-4, rel=0.1), "two other ranks share what is left at no bytes"
    for quartiles in (found.rate, found.message):
        assert quartiles.low <= quartiles.median <= quartiles.high
        assert 1.05 < quartiles.high / quartiles.low < 2


def test_popular_ids_follow_the_law() -> None:
    ids = popular(10_000, 50_000, 1)
    assert int(ids.min()) >= 0 and int(ids.max()) < 10_000
    counts = np.sort(np.bincount(ids.numpy()))[::-1]
    assert counts[0] / counts[9] == pytest.approx(10**1.05, rel=0.2)


def measure(rank: int, world: int, seconds: float) -> dict[str, Any]:
    """On every rank of the pool."""
    heard = []
    with Ranks("cpu") as ranks:
        found = calibration.calibrate(ranks, seconds, lambda done, of: heard.append((done, of)))
    assert heard and all(0 <= done <= of == 1000 * seconds for done, of in heard)
    return {"toml": found.topology.to_toml(), "rounds": found.rounds, "links": list(found.links)}


@pytest.mark.parametrize(("world", "ranks_per_node"), [(1, 1), (2, 2), (4, 2), (2, 1)])
def test_every_link_that_there_is_is_measured(pool: Pool, tmp_path: Path, world: int, ranks_per_node: int) -> None:
    results = pool.run(measure, 1.0, world=world, ranks_per_node=ranks_per_node, timeout=120)
    assert len({result["rounds"] for result in results}) == 1, "ranks stop together"
    file = tmp_path / "topology.toml"
    file.write_text(results[0]["toml"])
    found = Topology.load(file)
    assert (found.nodes, found.ranks_per_node, found.device) == (world // ranks_per_node, ranks_per_node, "cpu")
    assert found.memory_per_rank == Topology.here(world, ranks_per_node).memory_per_rank
    measured = found.measured
    there = [name for name, is_there in (("inside", ranks_per_node > 1), ("across", found.nodes > 1)) if is_there]
    assert results[0]["links"] == [(name, kind) for name in there for kind in calibration.COLLECTIVES]
    assert set(measured["assumed"]) == {"inside", "across"} - set(there)
    for name in ("inside", "across"):
        rates = getattr(found, name)
        if name in there:
            low, median, high = measured[f"{name}_all_to_all"]["bytes_per_second"]
            assert low <= median == rates.bytes_per_second <= high and 1e6 < median < 1e12
            points = [point for point in measured["points"] if point[:2] == [name, "all_to_all"]]
            assert [point[3] for point in points] == sorted({point[3] for point in points}) and len(points) >= 4
            assert all(point[2] == (ranks_per_node if name == "inside" else found.nodes) for point in points)
        else:
            assert rates == LINKS["cpu"][name]
    for rate in ("reads", "updates", "copies", "ids"):
        assert 1e6 < getattr(found.compute, rate) < 1e13
        assert measured["compute_quartiles"][rate][1] == getattr(found.compute, rate)
    assert 0 <= found.compute.seconds_per_piece < 0.1
    assert measured["rounds"] == results[0]["rounds"] >= calibration.FEWEST and measured["date"].startswith("20")


def without_scatter(rank: int, world: int) -> str:
    """A backend that lacks one collective."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("this backend has no\nreduce_scatter")

    whole = calibration.dist.reduce_scatter
    calibration.dist.reduce_scatter = refuse
    try:
        with Ranks("cpu") as ranks:
            return calibration.calibrate(ranks, 0.5).topology.measured["reduce_scatter"]
    finally:
        calibration.dist.reduce_scatter = whole


def test_a_backend_without_reduce_scatter_uses_what_it_has_and_says_so(pool: Pool) -> None:
    said = pool.run(without_scatter, world=2, timeout=120)
    assert said == ["as an all-to-all and a sum, because the backend has none: this backend has no reduce_scatter"] * 2
