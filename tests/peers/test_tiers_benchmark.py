"""The cluster benchmark's own promises: workloads, the least that must cross, clocks, and what is refused."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from benchmarks import cluster, tiers, tiers_data
from benchmarks.processes import PEERS
from benchmarks.quality import DATA
from benchmarks.report import BenchmarkError
from benchmarks.tiers_side import Blocked
from benchmarks.workloads import Workload

PROBLEM = cluster.missing()


def tiny(ids: list[list[int]], lengths: list[list[int]], rows: list[int], size: int) -> Workload:
    return Workload(
        name="tiny",
        pooled=False,
        rows=rows,
        dim=2,
        size=size,
        ids=[np.array(part, np.int64) for part in ids],
        lengths=[np.array(part, np.int64) for part in lengths],
    )


def test_what_is_profiled_is_not_what_is_measured() -> None:
    study = tiers_data.generated(rows=500, size=16, mean=10, batches=2, profiled=3)
    assert (len(study.measured.ids), len(study.profiled.ids)) == (2, 3)
    assert study.measured.rows == study.profiled.rows == [500, 500]
    assert all(len(ids) == lengths.sum() for ids, lengths in zip(study.measured.ids, study.measured.lengths))
    again = tiers_data.generated(rows=500, size=16, mean=10, batches=2, profiled=3)
    assert all(np.array_equal(a, b) for a, b in zip(study.measured.ids, again.measured.ids))


def test_the_least_that_crosses_is_counted_by_hand() -> None:
    """Eight ranks with a sample each: row i lives on rank i % 8, so rows 0 to 3 on the first node."""
    ids = [[4, 4], [4], [0], [5], [0], [0, 9], [12], [20]]
    flat, lengths = [i for part in ids for i in part], [len(part) for part in ids]
    # The first node reads 4 and 5 of the second, the second 0 and 9 of the first (9 % 8 = 1), and 12, 20 of its own.
    assert tiers.least_bytes(tiny([flat], [lengths], [24], 8)) == 2 * 4 * 2 * 4 / 2
    # A second table whose rows are read where they live adds nothing.
    own = [0, 1, 2, 3, 4, 5, 6, 7]
    assert tiers.least_bytes(tiny([flat + own], [lengths + [1] * 8], [24, 8], 8)) == 2 * 4 * 2 * 4 / 2


@pytest.mark.skipif(not DATA.is_dir(), reason="real data not found: ../shared/data")
@pytest.mark.parametrize("name", tiers_data.ORDER)
def test_real_sequences_are_whole_and_in_order(name: str) -> None:
    sequences = tiers_data.read(name)
    assert all(1 <= len(ids) <= tiers_data.LONGEST for ids in sequences)
    study = tiers_data.real(name, size=64, batches=2)
    assert [len(part) for part in study.measured.lengths] == [64, 64]
    assert sum(len(part) for part in study.profiled.lengths) == len(sequences) // 64 * 64
    assert max(ids.max() for ids in study.profiled.ids) < study.measured.rows[0]
    if name == "sessions_diginetica":  # the file's first two sessions
        assert sequences[0].tolist() == [1, 2] and sequences[1][0] == 3


@pytest.mark.alone
def test_only_the_outermost_call_is_timed() -> None:
    module = SimpleNamespace()
    module.inner = lambda: time.sleep(0.02)
    module.outer = lambda: module.inner() or "done"
    clock = Blocked()
    clock.watch(module, "inner", "outer")
    assert module.outer() == "done"
    assert 0.02 <= clock.seconds < 0.039
    module.inner()
    assert 0.04 <= clock.seconds < 0.1


def job(sent: float, exchange: float, losses: list[float], *, planned: bool = True) -> list[dict[str, Any]]:
    """What the ranks of a job answer."""
    counters = {"collective_seconds": exchange} | (
        {"across": sent / 4, "push_seconds": 0.0, "inside": 1.0} if planned else {}
    )
    block = {"seconds": 2 * exchange, "sent": sent, "received": sent, "losses": losses, "counters": counters}
    return [{"blocks": [block] * 3, "warm_up": block, "peak_bytes": 10**8, "dense_sent": 2e5} for _ in range(8)]


def test_jobs_are_judged_by_their_bytes_and_times() -> None:
    jobs = {
        "torchrec": tiers.summary(job(100e6, 2.0, [0.7], planned=False), 64),
        "none": tiers.summary(job(100e6, 2.0, [0.7]), 64),
        "tiers_node": tiers.summary(job(20e6, 0.25, [0.7]), 64),
    }
    jobs["tiers_node"]["predicted"] = {"mb_per_node": 19.8, "exchange_seconds": 0.3}
    tiers.check_losses(jobs, "torchrec")
    said = tiers.judged(jobs, 18.0)["tiers_node"]
    assert said["fewer_bytes"] == said["fewer_bytes_than_torchrec"] == pytest.approx(0.8)
    assert said["times_least"] == pytest.approx(20 / 18, abs=1e-3) and said["exchange_times_torchrec"] == 8
    assert said["bytes_predicted_over_measured"] == pytest.approx(1.0), "without what the dense part sends"
    assert jobs["none"]["counted_mb_per_node"]["median"] == pytest.approx(100)
    assert jobs["none"]["samples_per_second"]["median"] == pytest.approx(16)


def test_what_a_push_still_costs() -> None:
    """The job beside pays 0.3 of the 0.5 seconds that the waiting one sees: 0.2 of them are hidden."""
    times = {name: {"median": value} for name, value in {"exchange_seconds": 1.3, "push_seconds": 0.0}.items()}
    waiting = {"exchange_seconds": {"median": 1.5}, "push_seconds": {"median": 0.5}}
    assert tiers.counted_of_push(times, waiting)["counted"] == pytest.approx(0.6)


def test_wrong_losses_are_refused() -> None:
    right = tiers.summary(job(1e6, 1.0, [0.7, 0.6]), 64)
    for name, losses, good in (
        ("tiers", [0.7, 0.6000001], True),
        ("tiers", [0.7, 0.6001], False),
        ("tiers", [0.7, float("nan")], False),
        ("tiers_node_16", [0.7, 0.6001], True),
        ("tiers_node_16", [0.7, 0.63], False),
    ):
        jobs = {"none": right, name: tiers.summary(job(1e6, 1.0, losses), 64)}
        if good:
            tiers.check_losses(jobs, "none")
        else:
            with pytest.raises(BenchmarkError, match="no number is reported on a wrong result"):
                tiers.check_losses(jobs, "none")


@pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))
def test_plans_and_torchrec_train_alike_on_a_small_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of one rank: bytes as predicted, fewer with tiers, equal losses."""
    monkeypatch.setattr(tiers, "RANKS", 1)
    study = tiers_data.generated(rows=2_000, size=2 * 64, mean=40, batches=2, profiled=4)
    found = tiers.compare(study, tmp_path, 0.0, ["none", "tiers_node"], 1, 1.0, peer=PEERS.exists())
    sent = {name: part["wire_mb_per_node"]["median"] for name, part in found["jobs"].items()}
    counted = {name: found["jobs"][name]["counted_mb_per_node"]["median"] for name in ("none", "tiers_node")}
    for name, amount in counted.items():
        dense = found["jobs"][name]["dense_mb_per_node"]
        assert amount + dense <= sent[name] < 1.03 * (amount + dense), (
            "what is counted crosses the wire, and little else"
        )
        assert found["jobs"][name]["predicted"]["mb_per_node"] == pytest.approx(amount, rel=0.05)
    assert sent["tiers_node"] < 0.5 * sent["none"]
    if PEERS.exists():
        assert sent["torchrec"] == pytest.approx(sent["none"], rel=0.1)
