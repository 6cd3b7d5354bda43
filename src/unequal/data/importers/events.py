"""Events, one user and one item each, as clicks with the user's items before: sequences of any data set in Parquet."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ...errors import DataError, RecipeError
from ..columns import offsets_of, spread
from ..dataset import is_id, is_list
from ..split import ordered_keys
from ..writing import Progress, TableWriter, fresh_folder, model_sections, recipe_text, write_text
from .files import find_source, has_column, parquet_tables

_CHUNK = 2**15
TIMES = ("timestamp", "time")
ORDERS = (*TIMES, "position")
"""columns that are taken for the order of a user's events, the first that is there"""
OUTPUT = "events-clicks.parquet"

Ints = NDArray[np.int64]


def import_events(
    source: Path,
    out: Path,
    progress: Progress | None = None,
    *,
    user: str = "user_id",
    item: str = "item_id",
    order: str | None = None,
    history: int = 50,
    negatives: int = 1,
) -> dict[str, Any]:
    """Writes Parquet and recipe.toml into `out`: every event but a user's first is a click on its item, with up to `history` of
    the user's items before it; beside each stand so many items of other events that were not clicked.

    `order`: the column by which a user's events are sorted; by default timestamp, time or position, whichever is there, else the
    order of the rows. By time the last fifth is the test part, else a random fifth.
    """
    for name, value, least in (("history", history, 1), ("negatives", negatives, 0)):
        if value < least:
            raise RecipeError(name, f"{least} or more", value)
    files = find_source(Path(source), ("events.parquet", "*.parquet"), "Parquet file of events")
    order = order or next((name for name in ORDERS if has_column(files[0], name)), None)
    names = list(dict.fromkeys([user, item, *([order] if order is not None else [])]))
    events = pa.concat_tables([table for file in files for table in parquet_tables(file, names, progress)])
    events = events.combine_chunks()
    for name in names:
        _check(events, name, files[0])
    fresh_folder(Path(out), OUTPUT)
    users, items = (events.column(name).combine_chunks().dictionary_encode() for name in (user, item))
    if len(items.dictionary) < 2:
        raise DataError("expected events of two items or more, got one", file=files[0], column=item)
    times = None if order is None else ordered_keys(events.column(order).combine_chunks())[0]
    by_time = order in TIMES
    samples = _Samples(_codes(users), _codes(items), times, history, by_time)
    if not len(samples.rows):
        raise DataError("expected users with two events or more, got none", file=files[0], column=user)
    types = {"user": users.dictionary.type, "item": items.dictionary.type}
    fields = [("click", pa.int8()), *types.items(), ("history", pa.list_(types["item"]))]
    schema = pa.schema([*fields, *([("time", pa.int64())] if by_time else [])])
    random = np.random.default_rng(0)
    with TableWriter(Path(out) / OUTPUT, schema) as writer:
        for first in range(0, len(samples.rows), _CHUNK):
            rows = np.repeat(samples.rows[first : first + _CHUNK], 1 + negatives)
            clicked = np.arange(len(rows)) % (1 + negatives) == 0
            targets = samples.targets(rows, clicked, len(items.dictionary), random)
            ends, before = samples.history(rows)
            columns = {
                "click": pa.array(clicked.astype(np.int8)),
                "user": users.dictionary.take(pa.array(samples.users[rows])),
                "item": items.dictionary.take(pa.array(targets)),
                "history": pa.ListArray.from_arrays(pa.array(ends), items.dictionary.take(pa.array(before))),
            }
            if by_time:
                columns["time"] = pa.array(samples.times[rows])
            writer.write(pa.table(columns, schema=schema))
    count = len(samples.rows) * (1 + negatives)
    write_text(Path(out) / "recipe.toml", _recipe(by_time, count))
    return {
        "rows": count,
        "positives": len(samples.rows),
        "users": len(users.dictionary),
        "items": len(items.dictionary),
        "order": order or "as written",
        "files": [OUTPUT],
        "split": "time" if by_time else "random",
    }


def _check(events: Any, name: str, file: Path) -> None:
    column = events.column(name)
    if is_list(column.type) or not is_id(column.type):
        raise DataError(f"expected one integer or string per event, got {column.type}", file=file, column=name)
    if column.null_count:
        at = int(np.argmax(column.is_null().to_numpy()))
        raise DataError(
            "expected a value, got nothing", file=file, column=name, row=at, remedy="mend or remove the row"
        )
    if not len(column):
        raise DataError("the file holds no events", file=file)


def _codes(values: Any) -> Ints:
    return cast(Ints, values.indices.to_numpy().astype(np.int64))


class _Samples:
    """Events in the order of users and time; those that have one before them are samples."""

    def __init__(self, users: Ints, items: Ints, times: Ints | None, length: int, by_time: bool) -> None:
        keys = [users] if times is None else [times, users]
        order = np.lexsort(keys) if times is not None else np.argsort(users, kind="stable")
        self.users, self.items, self._length = users[order], items[order], length
        self.times = np.zeros(0, np.int64) if times is None else times[order]
        begins = np.flatnonzero(np.diff(self.users, prepend=-1))
        self._starts = np.repeat(begins, np.diff(np.append(begins, len(order))))
        rows = np.flatnonzero(np.arange(len(order)) > self._starts)
        # In the order of time, or of the rows of the source: neighbours should not all be of one user.
        self.rows: Ints = rows[np.argsort(self.times[rows] if by_time else order[rows], kind="stable")]

    def history(self, rows: Ints) -> tuple[NDArray[np.int32], Ints]:
        starts = np.maximum(self._starts[rows], rows - self._length)
        offsets = offsets_of(rows - starts)
        return offsets.astype(np.int32), self.items[spread(starts, offsets)]

    def targets(self, rows: Ints, clicked: NDArray[np.bool_], count: int, random: np.random.Generator) -> Ints:
        """The item of the event, or else another, as often as it is in events."""
        drawn = self.items[random.integers(0, len(self.items), len(rows))]
        other = (self.items[rows] + random.integers(1, count, len(rows))) % count
        return np.where(clicked, self.items[rows], np.where(drawn == self.items[rows], other, drawn))


def _recipe(by_time: bool, rows: int) -> str:
    split: dict[str, Any] = {"by": "time", "column": "time"} if by_time else {"by": "fraction"}
    sections: dict[str, dict[str, Any]] = {
        "data": {"files": [OUTPUT], "labels": ["click"], "categorical": ["user", "item"], "sequences": ["history"]},
        "data.split": split | {"test": 0.2, "validation": 0.08},
        "tables": {"dim": 16, "init_std": 0.01},
        "tables.items": {"columns": ["item", "history"]},
    }
    return recipe_text(
        sections | model_sections(rows, sequence={"history": "item"}), "Events as clicks, with what came before"
    )
