"""Any Parquet of events in, clicks with histories out."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from unequal.cli import app
from unequal.data.importers import import_events
from unequal.data.importers.events import OUTPUT
from unequal.errors import DataError, RecipeError
from unequal.recipe import load_recipe

EVENTS = {
    "user_id": [7, 3, 7, 7, 3, 9, 7],
    "item_id": ["a", "b", "b", "c", "a", "d", "d"],
    "timestamp": [10, 11, 30, 20, 12, 13, 40],
}


def write(folder: Path, **columns: list[object]) -> Path:
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table({**EVENTS, **columns}), folder / "events.parquet")
    return folder


def rows(out: Path) -> list[dict[str, object]]:
    return list(pq.read_table(out / OUTPUT).to_pylist())


def test_clicks_and_what_came_before(tmp_path: Path) -> None:
    summary = import_events(write(tmp_path / "in"), tmp_path / "out", history=2)
    assert summary["rows"] == 8 and summary["positives"] == 4 and summary["split"] == "time"
    assert (summary["users"], summary["items"], summary["order"]) == (3, 4, "timestamp")
    found = rows(tmp_path / "out")
    clicks = [row for row in found if row["click"]]
    assert [(row["user"], row["item"], row["history"], row["time"]) for row in clicks] == [
        (3, "a", ["b"], 12),
        (7, "c", ["a"], 20),
        (7, "b", ["a", "c"], 30),
        (7, "d", ["c", "b"], 40),
    ]
    for click, other in zip(found[::2], found[1::2]):
        assert click["click"] == 1 and other["click"] == 0 and click["item"] != other["item"]
        assert all(click[name] == other[name] for name in ("user", "history", "time"))
    recipe = load_recipe(tmp_path / "out" / "recipe.toml")
    assert recipe.table_of() == {"user": "user", "item": "items", "history": "items"}
    assert recipe.data.split.by == "time" and recipe.pooling_of("history") == "none"


def test_other_orders_and_names(tmp_path: Path) -> None:
    source = write(tmp_path / "in", who=EVENTS["user_id"], place=[4, 1, 3, 2, 2, 1, 1])
    import_events(source, tmp_path / "a", user="who", order="place", negatives=0)
    found = rows(tmp_path / "a")
    assert [(row["item"], row["history"]) for row in found if row["user"] == 7] == [
        ("a", ["d", "c", "b"]),
        ("b", ["d", "c"]),
        ("c", ["d"]),
    ]
    assert "time" not in found[0] and load_recipe(tmp_path / "a" / "recipe.toml").data.split.by == "fraction"
    table = pq.read_table(source / "events.parquet").drop_columns(["timestamp"])
    pq.write_table(table, source / "events.parquet")
    assert import_events(source, tmp_path / "b", negatives=3)["order"] == "as written"
    assert [row["history"] for row in rows(tmp_path / "b") if row["user"] == 3 and row["click"]] == [["b"]]


def test_what_is_wrong(tmp_path: Path) -> None:
    def refused(what: str, **columns: list[object]) -> None:
        with pytest.raises(DataError, match=what):
            import_events(write(tmp_path / "in", **columns), tmp_path / "out")

    refused("column 'item_id', row 2: expected a value, got nothing", item_id=["a", "b", None, "c", "a", "d", "d"])
    refused("expected one integer or string per event", item_id=[[1]] * 7)
    refused("events of two items or more", item_id=["a"] * 7)
    refused("users with two events or more", user_id=list(range(7)))
    with pytest.raises(DataError, match="column 'who': no such column"):
        import_events(write(tmp_path / "in"), tmp_path / "out", user="who")
    with pytest.raises(RecipeError, match="history: expected 1 or more, got 0"):
        import_events(write(tmp_path / "in"), tmp_path / "out", history=0)
    assert not (tmp_path / "out" / OUTPUT).exists()


def test_real_sessions_are_profiled(tmp_path: Path, shared_data, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts of the profile are those of the training part's rows."""
    from unequal.stats.profile import Profile

    monkeypatch.chdir(tmp_path)
    for command in (
        ["import", "events", str(shared_data("sessions_diginetica")), "out", "--history", "5"],
        ["profile", "out/recipe.toml", "--out", "p", "--set", "data.split.test=0", "--set", "data.split.validation=0"],
    ):
        done = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
        assert done.exit_code == 0, done.output
    profile = Profile.load("p")
    table = pq.read_table(f"out/{OUTPUT}")
    assert profile.samples == table.num_rows == 1_438_940
    items = profile.tables["items"]
    assert items.rows_seen == 43_097 and items.exact
    counts = pa.chunked_array(table["item"].chunks + [c.flatten() for c in table["history"].chunks]).value_counts()
    best = max(counts.to_pylist(), key=lambda one: one["counts"])
    assert items.top(1)[0] == best["values"]
    assert items.top_reads(1)[0] * profile.samples == pytest.approx(best["counts"])
