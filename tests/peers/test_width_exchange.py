"""The benchmark of narrow rows on the cluster: what it judges, what it refuses, and a small run of it."""

from pathlib import Path
from typing import Any

import pytest
from benchmarks import cluster, width_exchange
from benchmarks.report import BenchmarkError

PROBLEM = cluster.missing()


def job(sent: float, loss: float, values: int | None = None) -> list[dict[str, Any]]:
    """What the ranks of a job answer."""
    block = {
        "seconds": 0.5,
        "sent": sent,
        "losses": [loss, loss],
        "counters": {"collective_seconds": 0.25, "cpu_seconds": 0.1},
    }
    rounds = [] if values is None else [[8, 10, 1], [16, 10, values]]
    return [{"blocks": [block] * 3, "dense_sent": 1e5, "rounds": rounds} for _ in range(8)]


def jobs_of(loss: float = 0.6, kept: int = 250) -> dict[str, Any]:
    return {
        "tiers": width_exchange.summary(job(20e6, 0.61), 1000),
        "tiers+norms": width_exchange.summary(job(8e6, loss, kept), 1000),
    }


def test_narrow_rows_are_judged_by_whole_ones() -> None:
    jobs = jobs_of()
    width_exchange.check(jobs)
    assert width_exchange.judged(jobs) == {
        "tiers+norms": {"bytes_times": 2.5, "exchange_times": 1.0, "step_times": 1.0, "cpu_times": 1.0}
    }
    view = width_exchange.table({"jobs": jobs, "judged": width_exchange.judged(jobs)})
    assert view.row_count == 2


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"kept": 251}, "keeps 25.10% of all values, expected 25%"),
        ({"kept": 200}, "keeps 20.00% of all values"),
        ({"loss": 0.7}, "its loss is 0.7, that of whole rows 0.61"),
        ({"loss": float("nan")}, "its loss is nan"),
    ],
)
def test_wrong_results_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(BenchmarkError, match=said):
        width_exchange.check(jobs_of(**wrong))


def test_rates_are_those_of_the_tiers_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = width_exchange.measured()
    assert (found.nodes, found.ranks_per_node) == (2, 4)
    assert 0 < found.across.bytes_per_second < width_exchange.SPEED * 1e6 / 8
    monkeypatch.setattr(width_exchange, "RATES", tmp_path / "cluster.json")
    with pytest.raises(BenchmarkError, match="measure them with `python -m benchmarks --only tiers`"):
        width_exchange.measured()


@pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))
def test_narrow_rows_send_less_on_a_small_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of one rank."""
    monkeypatch.setattr(width_exchange, "RANKS", 1)
    result = width_exchange.run(quick=True)
    assert list(result["jobs"]) == ["tiers", "tiers+norms"]
    assert result["judged"]["tiers+norms"]["bytes_times"] > 1.3
    assert result["jobs"]["tiers+norms"]["kept"] <= 0.25
