"""Criteo's display advertising data (Kaggle): a label, 13 integers and 26 hashed categories per line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..writing import Progress, TableWriter, fresh_folder, model_sections, recipe_text, write_text
from .files import cast_columns, check_labels, find_source, has_column, parquet_tables, split_by_column, text_tables

LABEL = "label"
DENSE = tuple(f"I{number}" for number in range(1, 14))
CATEGORICAL = tuple(f"C{number}" for number in range(1, 27))
_SOURCES = ("train.txt", "train.txt.gz", "train.tsv", "train.csv", "*.parquet", "*.txt", "*.txt.gz", "*.tsv")


def import_criteo(source: Path, out: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Writes criteo-*.parquet and recipe.toml into `out`. The lines are in the order of time, so the last are the test.

    `source`: train.txt (tab-separated, no header; also .gz), Parquet files with the same columns, or their folder.
    """
    files = find_source(source, _SOURCES, "Criteo data")
    fresh_folder(Path(out), "criteo-*.parquet")
    split = all(path.suffix == ".parquet" and has_column(path, "split") for path in files)
    rows, positives, written, parts = 0, 0, [], set[str]()
    schema = pa.schema(
        [
            ("row", pa.int64()),
            (LABEL, pa.int8()),
            *((name, pa.int64()) for name in DENSE),
            *((name, pa.string()) for name in CATEGORICAL),
            *([("split", pa.string())] if split else []),
        ]
    )
    for number, path in enumerate(files):
        target, first = Path(out) / f"criteo-{number:05d}.parquet", rows
        with TableWriter(target, schema) as writer:
            for table in _tables(path, split, progress):
                table = table.add_column(0, "row", pa.array(np.arange(rows, rows + table.num_rows)))
                table = cast_columns(table, schema, path, rows - first)
                line, unit = (rows - first, "row") if path.suffix == ".parquet" else (rows - first + 1, "line")
                positives += check_labels(table, LABEL, path, line, unit)
                if split:
                    parts |= {value for value in pc.unique(table.column("split")).to_pylist() if value is not None}
                writer.write(table)
                rows += table.num_rows
        written.append(target.name)
    by = split_by_column(parts) if split else {"by": "time", "column": "row", "test": 0.15, "validation": 0.05}
    write_text(Path(out) / "recipe.toml", _recipe(by, rows))
    return {"rows": rows, "columns": len(schema), "positives": positives, "files": written, "split": by["by"]}


def _tables(path: Path, split: bool, progress: Progress | None) -> Iterator[Any]:
    if path.suffix == ".parquet":
        return parquet_tables(path, [LABEL, *DENSE, *CATEGORICAL, *(["split"] if split else [])], progress)
    types = {LABEL: pa.int8()} | dict.fromkeys(DENSE, pa.int64()) | dict.fromkeys(CATEGORICAL, pa.string())
    return text_tables(path, types, header=False, delimiter="\t", progress=progress)


def _recipe(split: dict[str, Any], rows: int) -> str:
    sections: dict[str, dict[str, Any]] = {
        "data": {
            "files": ["criteo-*.parquet"],
            "labels": [LABEL],
            "dense": DENSE,
            "categorical": CATEGORICAL,
            "dense_transform": "log1p",
        },
        "data.split": split,
        "tables": {"dim": 16, "init_std": 0.01},
    }
    return recipe_text(sections | model_sections(rows), "Criteo display advertising")
