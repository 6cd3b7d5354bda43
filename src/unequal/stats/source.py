"""What data a profile is of: enough to tell other data from the same, whatever seed and batch size it is read with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..data.config import DataConfig
from ..errors import UserError
from ..tables import Feature

if TYPE_CHECKING:
    from ..data.dataset import Dataset

WORDS = {
    "files": "files",
    "tables": "columns of tables",
    "split": "data.split",
    "max_length": "data.max_length",
    "bad_rows": "data.bad_rows",
}
SHOWN = 60
"""characters of a value in an error"""


def source_of(config: DataConfig, features: Mapping[str, Feature], dataset: Dataset | None = None) -> dict[str, Any]:
    """What is read, as JSON. Without the data set, which may be elsewhere, its files are left out, and are not compared."""
    tables: dict[str, list[str]] = {}
    for name, feature in features.items():
        tables.setdefault(feature.table.name, []).append(name)
    source: dict[str, Any] = {
        "tables": tables,
        "split": {
            key: list(value) if isinstance(value, tuple) else value for key, value in asdict(config.split).items()
        },
        "max_length": config.max_length,
        "bad_rows": config.bad_rows,
    }
    if dataset is not None:
        rows = [0] * len(dataset.files)
        for group in dataset.row_groups:
            rows[group.file] += group.rows
        source["files"] = [
            [path.name, path.stat().st_size, count] for path, count in zip(dataset.files, rows, strict=True)
        ]
    return source


def difference(expected: Mapping[str, Any], got: Mapping[str, Any]) -> str | None:
    """In words, what of two sources differs; None where nothing does that both of them know."""
    for key, words in WORDS.items():
        if key in expected and key in got and expected[key] != got[key]:
            if key == "files":
                return _files(expected[key], got[key])
            if isinstance(expected[key], Mapping):
                return _entries(words, expected[key], got[key])
            return f"{words} was {expected[key]!r} and is {got[key]!r}"
    return None


def _entries(words: str, expected: Mapping[str, Any], got: Mapping[str, Any]) -> str:
    name = next(key for key in [*expected, *got] if expected.get(key, ...) != got.get(key, ...))
    was, now = (_short(side[name]) if name in side else "absent" for side in (expected, got))
    return f"{words}, '{name}' was {was} and is {now}"


def _files(expected: list[Any], got: list[Any]) -> str:
    before, after = ({name: (size, rows) for name, size, rows in files} for files in (expected, got))
    for name, (size, rows) in before.items():
        if name not in after:
            return f"it was made of {len(expected)} files, of which '{name}' is not among the {len(got)} of now"
        if after[name] != (size, rows):
            now = after[name]
            return f"'{name}' had {rows:,} rows in {size:,} bytes and has {now[1]:,} in {now[0]:,}"
    more = [name for name in after if name not in before]
    if more:
        return f"'{more[0]}' is new among the files"
    return "its files are read in another order"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def join_sources(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Of two parts of a data set: everything but the files must be the same."""
    if not one or not other:
        return dict(one or other)
    found = difference({k: v for k, v in one.items() if k != "files"}, other)
    if found is not None:
        raise UserError(f"profiles of different data cannot be merged: {found}; merge those of one recipe")
    joined = dict(one)
    if one.get("files") != other.get("files"):
        files = [tuple(file) for file in [*one.get("files", ()), *other.get("files", ())]]
        joined["files"] = [list(file) for file in dict.fromkeys(files)]
    return joined
