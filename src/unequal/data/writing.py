"""Writes Parquet files and the recipe beside them, for the generator and the importers."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import UserError

ROW_GROUP = 2**17
"""Rows per row group: small enough that a shuffle window mixes many."""

Progress = Callable[[int, int], None]
"""Called with what is done and what there is in all, in rows or bytes."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns a full disk or a folder that cannot be written into a one-line error."""
    try:
        yield
    except OSError as error:
        said = os.strerror(error.errno) if error.errno else str(error).splitlines()[0]
        raise UserError(f"{path}: cannot be written: {said}; free some space or choose another folder") from error


def fresh_folder(out: Path, names: str) -> None:
    """Makes the folder; refuses one that holds files of an earlier run, which would be mixed with the new ones."""
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    old = sorted(out.glob(names))
    if old:
        raise UserError(
            f"{old[0]}: expected a folder without {names}, got {len(old)}; choose an empty folder for the output"
        )


class TableWriter:
    """One Parquet file, written part by part. It takes its name when it is complete, so that no half file is left."""

    def __init__(self, path: Path, schema: Any) -> None:
        self.path, self.rows = path, 0
        self._part = path.with_name(path.name + ".part")
        self._waiting: list[Any] = []
        self._waiting_rows = 0
        try:
            with writing(self._part):
                self._writer = pq.ParquetWriter(self._part, schema)
        except UserError:
            self._part.unlink(missing_ok=True)
            raise

    def write(self, table: Any) -> None:
        self._waiting.append(table)
        self._waiting_rows += table.num_rows
        if self._waiting_rows >= ROW_GROUP:
            joined = pa.concat_tables(self._waiting)
            whole = joined.num_rows // ROW_GROUP * ROW_GROUP
            self._flush(joined.slice(0, whole))
            self._waiting, self._waiting_rows = [joined.slice(whole)], joined.num_rows - whole

    def _flush(self, table: Any) -> None:
        with writing(self._part):
            self._writer.write_table(table, row_group_size=ROW_GROUP)
        self.rows += table.num_rows

    def __enter__(self) -> "TableWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                if self._waiting_rows:
                    self._flush(pa.concat_tables(self._waiting))
                with writing(self._part):
                    self._writer.close()
                    os.replace(self._part, self.path)
        finally:
            if self._part.exists():
                with suppress(OSError):  # the disk may be full; what went wrong first is on its way already
                    self._writer.close()
                self._part.unlink(missing_ok=True)


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False)  # strings, numbers and booleans are written alike in TOML


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else json.dumps(name)


def recipe_text(sections: Mapping[str, Mapping[str, Any]], comment: str) -> str:
    """A recipe in TOML: `sections` by their dotted names; empty lists and values of None are left out."""
    lines = [f"# {comment}"]
    for name, fields in sections.items():
        lines += ["", f"[{name}]"]
        lines += [f"{_key(field)} = {_toml(value)}" for field, value in fields.items() if value not in (None, [], ())]
    return "\n".join(lines) + "\n"


def write_text(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    with writing(path):
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)


def model_sections(rows: int, *, sequence: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """Model, optimizer and run of a ready recipe for that many rows; `sequence`: history column → target column."""
    few = rows < 100_000  # smaller batches, so that there are steps enough to learn from
    model: dict[str, Any] = {"kind": "dlrm", "bottom": [64, 16], "top": [128, 64], "interaction": "dot"}
    if sequence:
        model |= {"kind": "sequence", "history": dict(sequence), "encoder": "attention"}
    return {
        "model": model,
        "optimizer": {"tables": "row_wise_adagrad", "tables_lr": 0.05, "dense": "adam", "dense_lr": 0.001},
        "run": {"epochs": 3 if few else 2, "batch_size": 256 if few else 2048, "seed": 0},
    }
