"""Simulated clusters: the published numbers remade, and what must hold whatever the numbers."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from unequal.errors import UserError
from unequal.plan.popularity import Popularity
from unequal.plan.simulate import (
    NODES,
    REPEATED,
    TIERS_NODE,
    TIERS_REPEATED,
    WAYS,
    Outcome,
    Simulation,
    Way,
    cluster,
    fewer,
    popularity_load,
    zipf_load,
)
from unequal.plan.topology import Topology

PUBLISHED = [
    # rows, Zipf, samples and ids of each, nodes, ranks: fewer bytes than repeated ids, in percent, unique per rank, tiers, both
    (10_000_000, 1.05, 4096, 500, 16, 8, 78, 85, 87),
    (100_000_000, 1.05, 1024, 500, 16, 8, 65, 72, 75),
    (100_000_000, 1.20, 1024, 500, 16, 8, 87, 91, 92),
    (100_000_000, 0.80, 1024, 500, 16, 8, 16, 23, 28),
    (100_000, 1.05, 256, 200, 2, 4, 75, 81, 84),
]


def of(outcomes: list[Outcome], plan: str, codec: str = "fp32") -> Outcome:
    return next(one for one in outcomes if one.plan == plan and one.codec == codec)


@pytest.mark.parametrize(("rows", "skew", "samples", "length", "nodes", "ranks", "rank", "tiers", "both"), PUBLISHED)
def test_the_published_reductions(
    rows: int, skew: float, samples: int, length: int, nodes: int, ranks: int, rank: int, tiers: int, both: int
) -> None:
    """By theory, from how often rows of one table are read: to within a point."""
    load = zipf_load(rows=rows, skew=skew, dim=64, length=length)
    found = Simulation([load], cluster(nodes, ranks), samples=samples, objective="bytes").plans(["fp32"])
    base = of(found, "row-wise, repeated ids")
    for plan, expected in (
        ("row-wise, unique per rank", rank),
        ("tiers, repeated ids", tiers),
        ("tiers, unique per node", both),
    ):
        assert 100 * fewer(of(found, plan), base) == pytest.approx(expected, abs=1), plan


def test_the_papers_claim() -> None:
    """85% fewer bytes over the network and about 6 times less time, without more memory."""
    load = zipf_load(rows=10_000_000, skew=1.05, dim=64, length=500)
    for objective in ("bytes", "seconds"):
        simulation = Simulation([load], cluster(16, 8), samples=4096, objective=objective)  # type: ignore[arg-type]
        found = simulation.plans(["fp32"], [REPEATED, TIERS_REPEATED, TIERS_NODE])
        base, alone, both = found
        assert 100 * fewer(alone, base) == pytest.approx(84.8, abs=1)
        assert 100 * fewer(both, base) == pytest.approx(87.0, abs=1)
        assert base.exchange_seconds > 5 * alone.exchange_seconds and base.exchange_seconds > 6 * both.exchange_seconds
        assert alone.memory <= base.memory and both.memory <= base.memory
        # Nothing exact moves less than each distinct row once to every node that reads it, and its gradient once back.
        distinct = load.distinct(4096 * 8)
        assert both.bytes_across >= (1 - 1e-3) * 2 * 64 * 4 * 15 / 16 * distinct / 8


def test_every_plan_in_every_precision() -> None:
    loads = [zipf_load(rows=50_000, skew=1.0, dim=dim, length=30, name=f"t{dim}") for dim in (16, 64)]
    found = Simulation(loads, cluster(2, 4), samples=64).plans()
    assert len(found) == 3 * len(WAYS) and [one.plan for one in found[: len(WAYS)]] == [way.name for way in WAYS]
    for way in WAYS:
        each = [of(found, way.name, codec) for codec in ("fp32", "16 bit", "8 bit")]
        if way.name != "column-wise":  # statistics of rows travel as they are
            assert each[0].bytes_across > each[1].bytes_across > each[2].bytes_across > 0
        assert all(one.exchange_seconds > 0 and one.step_seconds >= one.exchange_seconds and one.fits for one in each)
    assert not Simulation(loads, cluster(2, 4, Topology.make(memory_per_rank=10**6)), samples=64).outcome(REPEATED).fits


def test_growth_and_one_node() -> None:
    load = zipf_load(rows=200_000, skew=1.05, dim=32, length=40)
    grown = Simulation([load], cluster(16, 4), samples=128).growth()
    assert sorted({one.nodes for one in grown}) == list(NODES)
    first = [one for one in grown if one.nodes == 1]
    assert all(one.bytes_across == 0 and one.bytes_inside > 0 and one.node_rows == 0 for one in first)
    repeated = [one.bytes_across for one in grown if one.plan == REPEATED.name]
    assert (np.diff(repeated) > 0).all(), "ever more of the rows are on other nodes"
    assert fewer(first[1], first[0]) > 0, "on one node, of the bytes inside it"


def test_memory_bounds_copies() -> None:
    load = zipf_load(rows=10_000_000, skew=1.05, dim=64, length=500)

    def copied(way: Way, budget: float | None) -> Outcome:
        return Simulation([load] * 4, cluster(16, 8), samples=4096, memory_budget=budget).outcome(way)

    free, own, none = (copied(TIERS_NODE, budget) for budget in (float("inf"), None, 1.0))
    assert free.node_rows >= own.node_rows > 0 and none.node_rows == none.replicated_rows == 0
    budget = (9 * free.memory + none.memory) / 10  # with much less, copies are not worth the messages that they add
    between = copied(TIERS_NODE, budget)
    assert between.memory <= budget
    assert 0 < between.node_rows + between.replicated_rows < free.node_rows + free.replicated_rows
    # Against repeated ids copies save more memory in messages than they take.
    assert copied(TIERS_REPEATED, 1.0).node_rows > 0
    assert copied(TIERS_REPEATED, 1.0).memory < copied(REPEATED, None).memory


def test_any_popularity() -> None:
    flat = popularity_load(Popularity(np.array([1000.0]), np.array([0.02])), rows=1000, dim=8)
    assert flat.ids == pytest.approx(20)
    outcome = Simulation([flat], cluster(2, 2), samples=1000).outcome(TIERS_REPEATED)
    assert outcome.replicated_rows + outcome.node_rows in (0, 1000), "all rows are alike"


def test_nothing_to_simulate() -> None:
    with pytest.raises(UserError, match="expected tables"):
        Simulation([], cluster(2, 2), samples=8)
    with pytest.raises(UserError, match="1 sample a rank or more"):
        Simulation([zipf_load(rows=10, skew=1, dim=4, length=2)], cluster(2, 2), samples=0)


def test_production_histograms_add_up(shared_data: Callable[[str], Path]) -> None:
    """Rows and reads of the bins are those of the trace; a part of the batch reads fewer rows than the whole."""
    from benchmarks.simulate import parse, popularity, trace_load

    traces = [
        one for file in sorted(shared_data("meta_dlrm_locality_stats").glob("*.txt")) for one in parse(file.read_text())
    ]
    assert len(traces) == 33 and {one.samples for one in traces} == {65536, 131072}
    for trace in traces:
        rows, reads = popularity(trace)
        assert rows.sum() == pytest.approx(trace.rows, rel=0.03) and rows @ reads == pytest.approx(
            trace.reads, rel=0.01
        )
    load = trace_load(traces[0], (512, 4096, 65536))
    found = Simulation([load], cluster(16, 8), samples=512, objective="bytes").plans(["fp32"])
    saved = [
        fewer(of(found, name), found[0])
        for name in ("row-wise, unique per rank", "tiers, repeated ids", "tiers, unique per node")
    ]
    assert 0.2 < saved[0] < saved[1] < saved[2] < 0.9
