"""The benchmarks' own promises: the workloads are what they say, wrong results are refused, results are merged."""

import json
from pathlib import Path

import numpy as np
import pytest
from benchmarks import workloads
from benchmarks.embedding_step import check_agreement, summary
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
