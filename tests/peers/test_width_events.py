"""The benchmark of budgets on events: what it trains, and what it makes of it."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from benchmarks import width_events
from benchmarks.report import BenchmarkError


def test_events_are_imported_and_trained(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    users, items = random.integers(0, 60, 1500), random.integers(0, 40, 1500)
    source = tmp_path / "events.parquet"
    pq.write_table(pa.table({"user_id": users, "item_id": items, "position": np.arange(1500)}), source)
    folder = tmp_path / "data"
    rows = width_events.imported(source, folder)
    assert rows == {"user": 60, "items": 40}
    found = {}
    for method, kept in (("full", 1.0), ("water-filling", 0.25)):
        job = width_events.Job(data="video games", method=method, kept=kept, seed=0)
        found[method] = width_events.trained(job, folder, rows, 1)
        assert 0 < found[method]["auc"] < 1
    assert found["full"]["bytes"] == 100 * (16 * 4 + 4)
    cell = width_events.summarised("video games", "full", 1.0, [found["full"], found["full"] | {"auc": 0.7}])
    assert cell["deviation"] > 0 and cell["bytes"] == found["full"]["bytes"] and len(cell["seeds"]) == 2
    assert width_events.table({"cells": [cell]}).row_count == 1
    with pytest.raises(BenchmarkError, match="import events failed"):
        width_events.imported(tmp_path / "none.parquet", tmp_path / "other")


def test_what_is_trained() -> None:
    jobs = list(width_events.jobs("video games", 2, ("full", "dim", "water-filling", "fiited"), (0.5, 0.25)))
    assert len(jobs) == len(set(jobs)) == 2 * (1 + len(width_events.DIMS) + 4)
    assert jobs[0].settings({"user": 3}) == ["tables.user.rows=3"]
    assert 'width.budget="25%"' in jobs[-1].settings({"user": 3}) and jobs[-1].seed == 1
