"""What the importers share: finding the source, reading text and Parquet in pieces, errors that name the line."""

import gzip
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from ...errors import DataError, nearest
from ..config import SplitConfig
from ..dataset import check_present, reading
from ..writing import Progress

_BLOCK = 2**23
TEXT = (".txt", ".tsv", ".csv", ".dat")


def find_source(source: Path, names: Sequence[str], what: str) -> list[Path]:
    """The files to import: `source` itself, or in a folder the first of `names` that is there (patterns allowed)."""
    source = Path(source)
    if not source.exists():
        beside = [path.name for path in source.parent.glob("*")] if source.parent.is_dir() else []
        raise DataError("no such file or folder", file=source, remedy=nearest(source.name, sorted(beside)[:20]))
    if source.is_file():
        return [source]
    for name in names:
        found = sorted(source.glob(name))
        if found:
            return found
    raise DataError(f"the folder holds no {what}", file=source, remedy="expected one of: " + ", ".join(names))


@contextmanager
def reading_text(path: Path) -> Iterator[None]:
    """Turns Arrow's words about a broken line into a DataError with file and line."""
    try:
        yield
    except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError) as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        found = re.match(r"(?:CSV parse error: |In CSV column #\d+: )?Row #(\d+): (.*)", said)
        problem = f"line {found[1]}: {found[2]}" if found else said
        raise DataError(problem, file=path, remedy="mend or remove the line; the file may be truncated") from error


def text_tables(
    path: Path,
    types: Mapping[str, Any],
    *,
    header: bool,
    delimiter: str = ",",
    quoted: bool = False,
    stream: Any = None,
    encoding: str = "utf8",
    progress: Progress | None = None,
) -> Iterator[Any]:
    """The columns `types` of delimited text (also .gz) as tables of some rows each; empty fields are null."""
    packed = path.suffix == ".gz" and stream is None
    with reading_text(path):
        if header:
            with gzip.open(path, "rt", encoding="utf-8") if packed else path.open(encoding="utf-8") as lines:
                names = [name.strip('"') for name in lines.readline().rstrip("\r\n").split(delimiter)]
            for name in types:
                check_present(name, names, path)
        size = path.stat().st_size
        raw = pa.OSFile(str(path)) if stream is None else stream
        reader = pa.csv.open_csv(
            pa.CompressedInputStream(raw, "gzip") if packed else raw,
            pa.csv.ReadOptions(
                use_threads=False, block_size=_BLOCK, column_names=None if header else list(types), encoding=encoding
            ),
            pa.csv.ParseOptions(delimiter=delimiter, quote_char='"' if quoted else False),
            pa.csv.ConvertOptions(
                column_types=dict(types), include_columns=list(types), null_values=[""], strings_can_be_null=True
            ),
        )
    while True:
        with reading_text(path):
            try:
                batch = reader.read_next_batch()
            except StopIteration:
                return
        yield pa.Table.from_batches([batch])
        if progress is not None:
            progress(size if raw.closed else min(size, raw.tell()), size)


def parquet_tables(path: Path, names: Sequence[str], progress: Progress | None = None) -> Iterator[Any]:
    """The columns `names` of a Parquet file as tables of some rows each."""
    with reading(path):
        file = pq.ParquetFile(path)
    for name in names:
        check_present(name, file.schema_arrow.names, path)
    done, batches = 0, file.iter_batches(2**16, columns=list(names), use_threads=False)
    while True:
        with reading(path):
            batch = next(batches, None)
        if batch is None:
            return
        done += batch.num_rows
        yield pa.Table.from_batches([batch]).select(list(names))
        if progress is not None:
            progress(done, file.metadata.num_rows)


def has_column(path: Path, name: str) -> bool:
    with reading(path):
        return name in pq.read_schema(path).names


def cast_columns(table: Any, schema: Any, path: Path, first: int) -> Any:
    """The table in the schema's types. `first`: number of its first row, for the error."""
    arrays = []
    for field in schema:
        column = table.column(field.name)
        if pa.types.is_floating(column.type) and pa.types.is_integer(field.type):
            column = pc.if_else(pc.is_nan(column), None, column)
        try:
            arrays.append(column.cast(field.type))
        except pa.ArrowInvalid as error:
            said = str(error).splitlines()[0]
            where = f"among the rows {first} to {first + table.num_rows - 1}"
            problem = f"expected {field.type}, got {column.type} {where}: {said}"
            raise DataError(problem, file=path, column=field.name, remedy="mend the value") from error
    return pa.Table.from_arrays(arrays, schema=schema)


def check_labels(table: Any, name: str, path: Path, first: int, unit: str) -> int:
    """How many labels are 1; anything but 0 and 1 is an error. `first`: number of the table's first row, in `unit`s."""
    labels = table.column(name)
    fine = pc.fill_null(pc.is_in(labels, pa.array([0, 1], labels.type)), False).to_numpy()
    if not fine.all():
        at = int(np.argmin(fine))
        got = labels[at].as_py()
        problem = f"{unit} {first + at}: expected a label of 0 or 1, got {'nothing' if got is None else got}"
        raise DataError(problem, file=path, column=name, remedy=f"mend or remove the {unit}")
    return int(pc.sum(labels).as_py() or 0)


def split_by_column(values: set[str]) -> dict[str, Any]:
    """The split that a column `split` of the source describes, in the words that are in use for the parts."""
    words = {"train_values": ("train", "training"), "validation_values": ("validation", "valid", "val", "dev")}
    words["test_values"] = ("test", "testing")
    chosen: dict[str, Any] = {"by": "column", "column": "split"}
    for field, names in words.items():
        chosen[field] = tuple(sorted(value for value in values if value.lower() in names))
    if not chosen["train_values"] or not chosen["test_values"]:
        found = ", ".join(sorted(values)[:10])
        raise DataError(f"expected the parts train and test in the column 'split', got {found}", column="split")
    SplitConfig(**chosen)
    return chosen
