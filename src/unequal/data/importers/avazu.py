"""Avazu's click-through data (Kaggle): a header line, then id, click, hour as YYMMDDHH, and 21 categories per line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...errors import DataError
from ..writing import Progress, TableWriter, fresh_folder, model_sections, recipe_text, write_text
from .files import cast_columns, check_labels, find_source, has_column, parquet_tables, split_by_column, text_tables

CATEGORICAL = ("C1", "banner_pos", "site_id", "site_domain", "site_category", "app_id", "app_domain", "app_category",
               "device_id", "device_ip", "device_model", "device_type", "device_conn_type",
               *(f"C{number}" for number in range(14, 22)))  # fmt: skip
_TIMES = ("time", "hour_of_day", "weekday")
_SOURCES = ("train", "train.csv", "train.gz", "train.csv.gz", "*.parquet", "*.csv", "*.csv.gz", "*.gz")
_FEWEST_HOURS = 20
"""With fewer distinct hours than this a split by time would miss its fractions by far."""


def import_avazu(source: Path, out: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Writes avazu-*.parquet and recipe.toml into `out`; the last hours are the test part.

    `source`: train.csv (also .gz), Parquet files with the same columns, or their folder. Rows of fewer than 20 hours
    are split at random instead, and a column `split` is followed where the source has one.
    """
    files = find_source(source, _SOURCES, "Avazu data")
    fresh_folder(Path(out), "avazu-*.parquet")
    split = all(path.suffix == ".parquet" and has_column(path, "split") for path in files)
    rows, positives, written, parts, hours = 0, 0, [], set[str](), set[int]()
    schema = pa.schema(
        [
            ("click", pa.int8()),
            ("time", pa.int64()),
            ("hour_of_day", pa.int8()),
            ("weekday", pa.int8()),
            *((name, pa.string()) for name in CATEGORICAL),
            *([("split", pa.string())] if split else []),
        ]
    )
    for number, path in enumerate(files):
        target, first = Path(out) / f"avazu-{number:05d}.parquet", rows
        with TableWriter(target, schema) as writer:
            for table in _tables(path, split, progress):
                line, unit = (rows - first, "row") if path.suffix == ".parquet" else (rows - first + 2, "line")
                time = _seconds(table.column("hour"), path, line, unit)
                hours |= set(np.unique(time).tolist())
                for name, values in zip(_TIMES, (time, time // 3600 % 24, (time // 86400 + 3) % 7)):
                    table = table.append_column(name, pa.array(values))
                table = cast_columns(table, schema, path, rows - first)
                positives += check_labels(table, "click", path, line, unit)
                if split:
                    parts |= {value for value in pc.unique(table.column("split")).to_pylist() if value is not None}
                writer.write(table)
                rows += table.num_rows
        written.append(target.name)
    if split:
        by = split_by_column(parts)
    elif len(hours) >= _FEWEST_HOURS:
        by = {"by": "time", "column": "time", "test": 0.1, "validation": 0.1}
    else:
        by = {"by": "fraction", "test": 0.1, "validation": 0.1}
    write_text(Path(out) / "recipe.toml", _recipe(by, rows))
    return {"rows": rows, "columns": len(schema), "positives": positives, "files": written, "split": by["by"]}


def _tables(path: Path, split: bool, progress: Progress | None) -> Iterator[Any]:
    if path.suffix == ".parquet":
        return parquet_tables(path, ["click", "hour", *CATEGORICAL, *(["split"] if split else [])], progress)
    types = {"click": pa.int8(), "hour": pa.string()} | dict.fromkeys(CATEGORICAL, pa.string())
    return text_tables(path, types, header=True, progress=progress)


def _seconds(hours: Any, path: Path, first: int, unit: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """YYMMDDHH as seconds since 1970; `first`: number of the first row, for the error."""
    text = hours.cast(pa.string()).combine_chunks().dictionary_encode()
    times: list[int] = []
    for value in text.dictionary.to_pylist():
        try:
            if len(value) != 8 or not value.isdecimal():
                raise ValueError
            moment = np.datetime64(f"20{value[:2]}-{value[2:4]}-{value[4:6]}T{value[6:]}:00:00", "s")
            times.append(int(moment.astype(np.int64)))
        except ValueError:
            at = pc.index(text.cast(pa.string()), value).as_py()
            problem = f"{unit} {first + at}: expected an hour as YYMMDDHH, got '{value}'"
            raise DataError(problem, file=path, column="hour", remedy=f"mend or remove the {unit}") from None
    if text.null_count:
        at = int(np.argmax(text.is_null().to_numpy(zero_copy_only=False)))
        problem = f"{unit} {first + at}: expected an hour as YYMMDDHH, got nothing"
        raise DataError(problem, file=path, column="hour", remedy=f"mend or remove the {unit}")
    return np.asarray(np.array(times, np.int64)[text.indices.to_numpy()])


def _recipe(split: dict[str, Any], rows: int) -> str:
    sections: dict[str, dict[str, Any]] = {
        "data": {
            "files": ["avazu-*.parquet"],
            "labels": ["click"],
            "categorical": (*CATEGORICAL, "hour_of_day", "weekday"),
        },
        "data.split": split,
        "tables": {"dim": 16, "init_std": 0.01},
    }
    return recipe_text(sections | model_sections(rows), "Avazu click-through rate")
