"""The benchmarks' own promises: the workloads are what they say, wrong results are refused, results are merged."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks import codecs, distributed, workloads
from benchmarks.distributed_side import Samples, share
from benchmarks.distributed_worker import in_our_order
from benchmarks.embedding_step import check_agreement, summary
from benchmarks.processes import PEERS
from benchmarks.report import BenchmarkError, merge, spread, stamp


def save(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)
    return path


def test_workload_p_is_as_described() -> None:
    workload = workloads.pooled(batches=1)
    assert len(workload.rows) == 26 and max(workload.rows) <= 2_000_000
    assert 9_990_000 <= sum(workload.rows) <= 10_000_000
    per_sample = workload.lengths[0].reshape(26, 4096)
    assert sorted(per_sample[:, 0]) == [1] * 23 + [20] * 3 and (per_sample == per_sample[:, :1]).all()
    assert workload.output_shape(0) == (4096, 26 * 64)
    check_ids(workload)


def test_workload_s_is_as_described() -> None:
    workload = workloads.sequence(batches=1)
    assert workload.rows == [2_000_000] * 4
    lengths = workload.lengths[0]
    assert lengths.shape == (4 * 512,) and lengths.min() >= 50 and lengths.max() <= 150
    assert 95 < lengths.mean() < 105
    assert workload.output_shape(0) == (lengths.sum(), 64)
    check_ids(workload)


def check_ids(workload: workloads.Workload) -> None:
    parts = np.split(workload.ids[0], np.cumsum(workload.counts(0))[:-1])
    for ids, rows in zip(parts, workload.rows):
        assert ids.dtype == np.int64 and ids.min() >= 0 and ids.max() < rows
    ids, rows = max(zip(parts, workload.rows), key=lambda pair: len(pair[0]))
    _, counts = np.unique(ids, return_counts=True)
    expected = 1 / (np.arange(1.0, rows + 1) ** -workloads.ZIPF).sum()
    assert counts.max() / len(ids) == pytest.approx(expected, rel=0.15)


def test_workloads_repeat_and_survive_their_file(tmp_path: Path) -> None:
    for name in ("P", "S"):
        first, second = workloads.small(name), workloads.small(name)
        first.save(tmp_path / "w.npz")
        loaded = workloads.Workload.load(tmp_path / "w.npz")
        for other in (second, loaded):
            assert (first.name, first.pooled, first.rows, first.dim) == (
                other.name,
                other.pooled,
                other.rows,
                other.dim,
            )
            assert all(np.array_equal(a, b) for a, b in zip(first.ids + first.lengths, other.ids + other.lengths))
            assert np.array_equal(first.gradient(), other.gradient())


def test_gate_accepts_rounding_and_refuses_everything_else(tmp_path: Path) -> None:
    right = np.linspace(-1, 1, 50, dtype=np.float32)
    theirs = save(tmp_path / "theirs.npz", weights0=right)
    assert check_agreement(save(tmp_path / "ours.npz", weights0=right * np.float32(1 + 1e-6)), theirs) < 2e-6
    spoilt = right.copy()
    spoilt[7] += 1e-4
    missing = right.copy()
    missing[7] = np.nan
    for wrong in (spoilt, missing):
        with pytest.raises(BenchmarkError, match="1 of 50 values differ"):
            check_agreement(save(tmp_path / "ours.npz", weights0=wrong), theirs)
    with pytest.raises(BenchmarkError, match="shape"):
        check_agreement(save(tmp_path / "ours.npz", weights0=right[:-1]), theirs)
    with pytest.raises(BenchmarkError, match="weights1"):
        check_agreement(save(tmp_path / "ours.npz", weights0=right, weights1=right), theirs)


def test_ratios_are_taken_round_by_round() -> None:
    """A slow round that hits both leaves the ratio as it is."""
    ours = [{"forward": [1.0], "step": [2.0]}, {"forward": [10.0], "step": [20.0]}]
    theirs = [{"forward": [3.0], "step": [8.0]}, {"forward": [30.0], "step": [80.0]}]
    result = summary(ours, {"fbgemm": theirs})
    assert result["step_times_fbgemm"] == {"median": 4.0, "low": 4.0, "high": 4.0, "samples": 2}
    assert result["forward_times_fbgemm"]["median"] == 3.0
    assert result["step_ms"]["median"] == 11_000
    assert spread([1, 2, 3, 4, 5]) == {"median": 3, "low": 2, "high": 4, "samples": 5}


def test_a_partial_run_keeps_the_other_results(tmp_path: Path) -> None:
    path, order = tmp_path / "results" / "cpu.json", ("first", "second")
    merge(path, {"second": {"results": 1}}, order)
    merge(path, {"first": {"results": 2}}, order)
    merge(path, {"second": {"results": 3}}, order)
    assert json.loads(path.read_text()) == {"first": {"results": 2}, "second": {"results": 3}}
    assert [file.name for file in path.parent.iterdir()] == ["cpu.json"]


def test_stamp_names_neither_host_nor_path() -> None:
    import platform

    text = json.dumps(stamp(quick=False))
    assert str(Path(__file__).resolve().parents[2]) not in text
    assert json.loads(text)["machine"]["cores"] >= 1
    assert platform.node() == "" or f'"{platform.node()}"' not in text


@pytest.mark.parametrize("name", ["P", "S"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_shares_of_the_ranks_are_the_batch(name: str, world: int) -> None:
    workload = workloads.small(name)
    parts = [share(workload, 1, rank, world) for rank in range(world)]
    features = len(workload.rows)
    lengths = np.concatenate([part.reshape(features, -1) for _, part in parts], 1)
    assert np.array_equal(lengths.reshape(-1), workload.lengths[1])
    by_feature = [np.split(ids, np.cumsum(part.reshape(features, -1).sum(1))[:-1]) for ids, part in parts]
    joined = np.concatenate([np.concatenate([rank[f] for rank in by_feature]) for f in range(features)])
    assert np.array_equal(joined, workload.ids[1])


@pytest.mark.parametrize("name", ["P", "S"])
def test_samples_repeat_survive_their_file_and_have_both_labels(name: str, tmp_path: Path) -> None:
    workload = workloads.small(name)
    first, second = Samples.draw(workload), Samples.draw(workload)
    first.save(tmp_path / "samples.npz")
    loaded = Samples.load(tmp_path / "samples.npz")
    for other in (second, loaded):
        assert np.array_equal(first.dense, other.dense) and np.array_equal(first.labels, other.labels)
        assert list(first.weights) == list(other.weights)
        assert all(np.array_equal(first.weights[part], other.weights[part]) for part in first.weights)
    assert 0.3 < first.labels.mean() < 0.7


def test_columns_of_the_top_layer_follow_their_pairs() -> None:
    """Vectors 0 (dense), 1, 2, 3 with the pairs 01 02 03 12 13 23; ours count 1, 2, 3, 0: the pairs 12 13 10 23 20 30."""
    theirs = np.array([[-1.0, -2.0, 1, 2, 3, 12, 13, 23]], np.float32)
    assert in_our_order(theirs, features=3, dim=2).tolist() == [[-1, -2, 12, 13, 1, 23, 2, 3]]


def test_losses_that_differ_or_do_not_fall_are_refused() -> None:
    assert distributed.check_losses("P", [0.7, 0.6000001], [0.7, 0.6]) < 1e-6
    for wrong in ([0.7, 0.601], [0.7, float("nan")]):
        with pytest.raises(BenchmarkError, match="no time is reported"):
            distributed.check_losses("P", wrong, [0.7, 0.6])
    assert distributed.check_learning("P", [0.7, 0.7, 0.6, 0.5, 0.4], batches=2) == pytest.approx((0.7, 0.45))
    for wrong in ([0.7, 0.7, 0.7, 0.7], [0.7, float("nan"), 0.1, 0.1], [0.1, 0.2]):
        with pytest.raises(BenchmarkError, match="the loss went from"):
            distributed.check_learning("P", wrong, batches=2)


def test_codecs_that_were_not_used_are_refused() -> None:
    def sent(*amounts: float) -> dict[str, Any]:
        return {f"codec {k}": {"exchange_bytes_per_step": amount} for k, amount in enumerate(amounts)}

    codecs.check_fewer_bytes("frappe", sent(100, 60, 40))
    for wrong in (sent(100, 100, 40), sent(100, 60, 70)):
        with pytest.raises(BenchmarkError, match="the codecs were not used"):
            codecs.check_fewer_bytes("frappe", wrong)


def rank_of(seconds: float) -> dict[str, Any]:
    steps = distributed.STEPS
    return {
        "seconds": seconds * steps,
        "forward": [seconds / 4] * steps,
        "backward": [seconds / 2] * steps,
        "sent": 100 * steps,
        "counters": {},
    }


def test_a_job_is_as_fast_as_its_slowest_rank_and_ratios_are_taken_round_by_round() -> None:
    def job(*rounds: float) -> dict[str, Any]:
        blocks = [[rank_of(seconds / 2), rank_of(seconds)] for seconds in rounds]
        hello = [{"import_seconds": 1.0, "build_seconds": 2.0, "versions": {"torch": "x"}}] * 2
        return {"blocks": blocks, "hello": hello, "peaks": [3, 4], "losses": (0.7, 0.1)}

    ours, table_wise, column_wise = (("unequal", "plan"), ("torchrec", "table_wise"), ("torchrec", "column_wise"))
    sitting = {ours: job(0.1, 1.0), table_wise: job(0.2, 2.0), column_wise: job(0.3, 3.0)}
    values = distributed.summary([sitting[ours]], size=10)
    assert values["samples_per_second"] == {"median": 55.0, "low": 32.5, "high": 77.5, "samples": 2}
    assert values["forward_ms"]["low"] == pytest.approx(81.25) and values["step_ms"]["median"] == pytest.approx(550)
    assert values["sent_bytes_per_step"] == [100, 100] and values["peak_memory_bytes"] == [3, 4]
    found = distributed.ratios("P", [sitting])
    assert found["best_peer"] == "torchrec table_wise"
    assert found["times_best_peer"] == {"median": 2.0, "low": 2.0, "high": 2.0, "samples": 2}
    assert found["times_torchrec_column_wise"]["median"] == pytest.approx(3.0)


def test_a_rank_that_fails_ends_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    plain = distributed.Worker

    def watched(*arguments: Any, **options: Any) -> Any:
        started.append(plain(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(distributed, "Worker", watched)
    with pytest.raises(BenchmarkError, match=r"workload\.npz"):
        distributed.Job("unequal", "row_wise", tmp_path)
    assert len(started) == distributed.WORLD and all(worker.process.poll() is not None for worker in started)


@pytest.mark.parametrize("name", ["P", "S"])
def test_both_sides_train_alike_and_are_timed(name: str, tmp_path: Path) -> None:
    if not PEERS.exists():
        pytest.skip("the peers' environment .venv-peers was not found: run `make peers`")
    folder = distributed.prepare(workloads.small(name), tmp_path / name)
    jobs = [distributed.BESIDE[name][0], distributed.BESIDE[name][1]]
    found, sent = [], []
    for side, arrangement in jobs:
        job = distributed.Job(side, arrangement, folder, equal=True)
        try:
            answers = job.block(distributed.STEPS)
        finally:
            job.close()
        found.append(distributed.losses([answers]))
        sent.append([rank["sent"] for rank in answers])
    assert distributed.check_losses(name, *found) < distributed.AGREEMENT
    assert all(part > 0 for parts in sent for part in parts)
    assert answers[0]["seconds"] >= sum(answers[0]["forward"]) + sum(answers[0]["backward"])
