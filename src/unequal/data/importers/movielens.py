"""MovieLens ratings as clicks (a rating of 4 or more), each with the items that the user liked before."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ...errors import DataError, RecipeError
from ..columns import offsets_of, spread
from ..dataset import check_present
from ..writing import Progress, TableWriter, fresh_folder, model_sections, recipe_text, write_text
from .files import has_column, parquet_tables, reading_text, text_tables

LIKED = 4.0
HISTORY = 50
_CHUNK = 2**16
_RATINGS = {"user_id": pa.int64(), "item_id": pa.int64(), "rating": pa.float64(), "timestamp": pa.int64()}
_USERS = {
    "user_id": pa.int64(),
    "gender": pa.string(),
    "age": pa.int64(),
    "occupation": pa.int64(),
    "zip_code": pa.string(),
}
_ITEMS = {"item_id": pa.int64(), "title": pa.string(), "genres": pa.string()}
_LATEST = {"userId": "user_id", "movieId": "item_id"}
# File names and how their columns are told apart, by what they hold; the first that is there is taken.
_FILES = {
    "ratings": ("ratings.dat", "ratings.csv", "events.parquet", "ratings.parquet"),
    "users": ("users.dat", "users.csv", "users.parquet"),
    "items": ("movies.dat", "movies.csv", "items.parquet", "movies.parquet"),
}

Ints = NDArray[np.int64]


def import_movielens(
    source: Path, out: Path, progress: Progress | None = None, *, split: str = "time"
) -> dict[str, Any]:
    """Writes ratings.parquet and recipe.toml into `out`.

    `source`: the folder of MovieLens-1M (ratings.dat, users.dat, movies.dat), of MovieLens-latest (ratings.csv,
    movies.csv), or of Parquet files with the same columns. `split`: "time", the last fifth is the test part; or
    "random", 80/20, where only ratings of the training part enter histories.
    """
    if split not in ("time", "random"):
        raise RecipeError("split", "'time' or 'random'", split)
    source = Path(source)
    folder = source.parent if source.is_file() else source
    ratings = _read(folder, "ratings", _RATINGS, progress)
    if ratings is None:
        names = ", ".join(_FILES["ratings"])
        raise DataError("the folder holds no ratings", file=folder, remedy=f"expected one of: {names}")
    fresh_folder(Path(out), "ratings.parquet")
    users, items = _read(folder, "users", _USERS), _read(folder, "items", _ITEMS)
    order = np.lexsort([_ints(ratings, name) for name in ("item_id", "user_id", "timestamp")])
    ratings = ratings.take(pa.array(order))
    liked = ratings.column("rating").to_numpy() >= LIKED
    parts = _random_parts(len(order)) if split == "random" else None
    histories = _Histories(ratings, liked if parts is None else liked & (parts == 0))
    features = _features(users, items)
    target = Path(out) / "ratings.parquet"
    with TableWriter(target, _schema(features, parts is not None)) as writer:
        for first in range(0, len(order), _CHUNK):
            chunk = ratings.slice(first, _CHUNK)
            rows = np.arange(first, first + chunk.num_rows)
            columns = {name: chunk.column(name) for name in _RATINGS}
            columns |= {name: _look_up(chunk, key, table, name) for name, (key, table) in features.items()}
            columns |= {"click": pa.array(liked[rows].astype(np.int8)), "history": histories.of(rows)}
            if parts is not None:
                columns["split"] = pa.array(["train", "validation", "test"]).take(pa.array(parts[rows]))
            writer.write(pa.table(columns, schema=_schema(features, parts is not None)))
    write_text(Path(out) / "recipe.toml", _recipe(features, split, len(order)))
    columns_written = len(_schema(features, parts is not None))
    return {"rows": len(order), "columns": columns_written, "positives": int(liked.sum()), "files": [target.name],
            "split": split}  # fmt: skip


def _read(folder: Path, what: str, types: Mapping[str, Any], progress: Progress | None = None) -> Any:
    """A table of the folder, whichever of its forms is there, or None."""
    path = next((folder / name for name in _FILES[what] if (folder / name).exists()), None)
    if path is None:
        return None
    if path.suffix == ".parquet":
        return _read_parquet(path, what, types, progress)
    if path.suffix == ".csv":
        spelt = {new: old for old, new in _LATEST.items()}
        wanted = {spelt.get(name, name): kind for name, kind in types.items()}
        tables = list(text_tables(path, wanted, header=True, quoted=True, progress=progress))
    else:
        # Arrow splits at single characters only; the originals separate by two.
        with reading_text(path):
            stream = pa.BufferReader(path.read_bytes().replace(b"::", b"\x01"))
        options: dict[str, Any] = {"header": False, "delimiter": "\x01", "encoding": "latin-1"}
        tables = list(text_tables(path, types, stream=stream, **options))
    if not tables:
        raise DataError("the file holds no rows", file=path)
    table = pa.concat_tables(tables).rename_columns(list(types))
    _check_complete(table, path, 2 if path.suffix == ".csv" else 1, "line")
    if what == "items":
        years = [_year(title) for title in table.column("title").to_pylist()]
        table = table.append_column("release_year", pa.array(years, pa.int64()))
        table = _with_genres(table, "genres", "|")
    return table


def _read_parquet(path: Path, what: str, types: Mapping[str, Any], progress: Progress | None) -> Any:
    names = list(types)
    if what == "items":
        genre = "genres" if has_column(path, "genres") else "genre"
        names = ["item_id", *(name for name in ("release_year",) if has_column(path, name)), genre]
    table = pa.concat_tables(list(parquet_tables(path, names, progress)))
    _check_complete(table, path, 0, "row")
    if what == "items":
        return _with_genres(table, genre, " ")
    return table.cast(pa.schema(list(types.items())))


def _check_complete(table: Any, path: Path, first: int, unit: str) -> None:
    """Keys and ratings must be there; what describes a user or an item may be missing."""
    for name in ("user_id", "item_id", "rating", "timestamp"):
        if name in table.column_names and table.column(name).null_count:
            at = int(np.argmax(table.column(name).is_null().to_numpy()))
            remedy = f"mend or remove the {unit}"
            raise DataError(
                f"{unit} {first + at}: expected a value, got nothing", file=path, column=name, remedy=remedy
            )


def _year(title: str | None) -> int | None:
    found = re.search(r"\((\d{4})\)\s*$", title or "")
    return int(found[1]) if found else None


def _with_genres(table: Any, column: str, separator: str) -> Any:
    text = pc.fill_null(table.column(column), "")
    lists = [
        [genre for genre in value.split(separator) if genre] if value != "(no genres listed)" else []
        for value in text.to_pylist()
    ]
    kept = table.drop_columns([name for name in (column, "title") if name in table.column_names])
    return kept.append_column("genres", pa.array(lists, pa.list_(pa.string())))


def _ints(table: Any, name: str) -> Ints:
    return cast(Ints, table.column(name).to_numpy().astype(np.int64))


def _random_parts(rows: int) -> NDArray[np.int8]:
    """0 train, 1 validation, 2 test: a fifth of all rows is the test part, a tenth of the rest validates."""
    shuffled = np.random.default_rng(7).permutation(rows)
    cut = int(0.8 * rows)
    training = np.random.default_rng(123).permutation(np.sort(shuffled[:cut]))
    parts = np.zeros(rows, np.int8)
    parts[shuffled[cut:]] = 2
    parts[training[: int(0.1 * len(training))]] = 1
    return parts


class _Histories:
    """The last items a user liked before a rating, strictly earlier in time."""

    def __init__(self, ratings: Any, counted: NDArray[np.bool_]) -> None:
        """`ratings` in the order of time; `counted`: which of them may enter histories."""
        _, users = np.unique(_ints(ratings, "user_id"), return_inverse=True)
        times = _ints(ratings, "timestamp")
        times = times - times.min(initial=0)
        self._span = int(times.max(initial=0)) + 1
        self._keys = users.astype(np.int64) * self._span + times
        chosen = np.flatnonzero(counted)
        chosen = chosen[np.argsort(self._keys[chosen], kind="stable")]
        self._liked_keys, self._liked_items = self._keys[chosen], _ints(ratings, "item_id")[chosen]

    def of(self, rows: Ints) -> Any:
        keys = self._keys[rows]
        ends = np.searchsorted(self._liked_keys, keys, side="left")
        starts = np.searchsorted(self._liked_keys, keys - keys % self._span, side="left")
        starts = np.maximum(starts, ends - HISTORY)
        offsets = offsets_of(ends - starts)
        values = self._liked_items[spread(starts, offsets)]
        return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values))


def _features(users: Any, items: Any) -> dict[str, tuple[str, Any]]:
    """Further columns: name → (key column, table)."""
    found: dict[str, tuple[str, Any]] = {}
    for key, table in (("user_id", users), ("item_id", items)):
        if table is not None:
            check_present(key, table.column_names, Path(key))
            found |= {name: (key, table) for name in table.column_names if name != key}
    return found


def _look_up(chunk: Any, key: str, table: Any, name: str) -> Any:
    """The column `name` of the table's rows with the chunk's keys; null where the table has no such row."""
    return table.column(name).take(pc.index_in(chunk.column(key), table.column(key).cast(pa.int64()).combine_chunks()))


def _schema(features: Mapping[str, tuple[str, Any]], split: bool) -> Any:
    fields = [*_RATINGS.items(), *((name, table.schema.field(name).type) for name, (_, table) in features.items())]
    fields += [("click", pa.int8()), ("history", pa.list_(pa.int64()))]
    return pa.schema([*fields, *([("split", pa.string())] if split else [])])


def _recipe(features: Mapping[str, tuple[str, Any]], split: str, rows: int) -> str:
    if split == "time":
        by: dict[str, Any] = {"by": "time", "column": "timestamp", "test": 0.2, "validation": 0.08}
    else:
        by = {"by": "column", "column": "split", "train_values": ["train"], "validation_values": ["validation"]}
        by["test_values"] = ["test"]
    sections: dict[str, dict[str, Any]] = {
        "data": {
            "files": ["ratings.parquet"],
            "labels": ["click"],
            "categorical": ["user_id", "item_id", *(name for name in features if name != "genres")],
            "sequences": ["history", *(["genres"] if "genres" in features else [])],
        },
        "data.split": by,
        "tables": {"dim": 16, "init_std": 0.01},
        "tables.item": {"columns": ["item_id", "history"]},
        "pooling": {"history": "none"} | ({"genres": "mean"} if "genres" in features else {}),
    }
    return recipe_text(
        sections | model_sections(rows, sequence={"history": "item_id"}), "MovieLens ratings of 4 or more as clicks"
    )
