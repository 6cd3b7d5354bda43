"""A data set: its Parquet files in order, their row groups, and the columns that are read, checked by type."""

import glob
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import DataError, nearest
from .config import DataConfig

if TYPE_CHECKING:
    from .split import Split

Role = Literal["label", "sample_weight", "dense", "ids", "id_weights"]


@dataclass(frozen=True, slots=True)
class Column:
    """A column and what it is read as."""

    name: str
    role: Role
    limit: int | None = None
    """Of ids in a table with a fixed number of rows: they lie in [0, limit)."""
    owner: str | None = None
    """Of id weights: the column of the ids they belong to."""


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A row group of one of the files."""

    file: int
    index: int
    """Within the file."""
    rows: int
    first: int
    """Row number of its first row, within the file."""
    first_of_all: int
    """Row number of its first row, within the data set."""
    values: int
    """How many values the columns that are read hold."""


@contextmanager
def reading(path: Path, column: str | None = None) -> Iterator[None]:
    """Turns what Arrow says about a file that cannot be read into a DataError."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError("no such file", file=path, remedy="check data.files") from error
    except (pa.ArrowException, OSError) as error:
        said = str(error).splitlines()[0]
        remedy = "the file may be truncated or not Parquet: write it again, or leave it out of data.files"
        raise DataError(
            f"expected a readable Parquet file, got: {said}", file=path, column=column, remedy=remedy
        ) from error


def find_files(patterns: Sequence[str], root: Path) -> list[Path]:
    """The files that paths and patterns relative to `root` name: in the order given, matches of a pattern sorted."""
    found: list[Path] = []
    for pattern in patterns:
        path = root / os.path.expanduser(pattern)
        if path.is_dir():
            matches = sorted(path.glob("*.parquet"))
            problem = f"the folder '{path}' holds no *.parquet file"
        elif path.exists() or not glob.has_magic(pattern):
            matches, problem = [path] if path.exists() else [], f"no such file: '{path}'"
        else:
            matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))
            problem = f"no file matches '{path}'"
        if not matches:
            raise DataError(problem, remedy="check data.files; paths are relative to the recipe's folder")
        found += [match for match in matches if match not in found]
    return found


def is_list(kind: Any) -> bool:
    types = pa.types
    return bool(
        types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_fixed_size_list(kind)
        or types.is_list_view(kind)
        or types.is_large_list_view(kind)
    )


def is_text(kind: Any) -> bool:
    types = pa.types
    if types.is_dictionary(kind):
        return is_text(kind.value_type)
    return bool(
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_string_view(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_binary_view(kind)
    )


def is_number(kind: Any) -> bool:
    types = pa.types
    if types.is_dictionary(kind):
        return is_number(kind.value_type)
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind))


def is_id(kind: Any) -> bool:
    types = pa.types
    if types.is_dictionary(kind):
        return is_id(kind.value_type)
    whole = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_temporal(kind)
    return bool((whole and not types.is_interval(kind)) or is_text(kind))


class Dataset:
    """The files of a configuration, opened and checked. Readers of several parts can share one."""

    def __init__(self, config: DataConfig, root: Path | str = ".", *, id_limits: dict[str, int] | None = None) -> None:
        self.config, self.root = config, Path(root)
        limits = id_limits or {}
        unknown = next((name for name in limits if name not in config.features), None)
        if unknown is not None:
            raise DataError(f"id_limits names '{unknown}', which is no id column; {nearest(unknown, config.features)}")
        self.columns = [
            *(Column(name, "label") for name in config.labels),
            *([Column(config.sample_weight, "sample_weight")] if config.sample_weight is not None else []),
            *(Column(name, "dense") for name in config.dense),
            *(Column(name, "ids", limit=limits.get(name)) for name in config.features),
            *(Column(weights, "id_weights", owner=ids) for ids, weights in config.id_weights.items()),
        ]
        self.files = self._find()
        self.row_groups: list[RowGroup] = []
        self.rows = 0
        self.lists: dict[str, bool] = {}
        """Of each id column: whether it holds a list per row."""
        self._text: dict[str, tuple[bool, Path]] = {}
        self._text_paths: list[list[str]] = []
        for number, path in enumerate(self.files):
            self._add(number, path)
        if not self.rows:
            raise DataError("the files hold no rows", file=self.files[0], remedy="check data.files")

    def _find(self) -> list[Path]:
        if self.config.files:
            return find_files(self.config.files, self.root)
        if self.config.generate is None:
            raise DataError("data.files names no file", remedy="name Parquet files, or add a [data.generate] table")
        from .generate import generated

        return sorted(generated(self.config.generate).glob("*.parquet"))

    def _add(self, number: int, path: Path) -> None:
        with reading(path):
            metadata = pq.read_metadata(path)
            schema = metadata.schema.to_arrow_schema()
        names = {column.name for column in self.columns}
        for column in self.columns:
            check_present(column.name, schema.names, path)
            self._check_type(path, column, schema.field(column.name).type)
        if self.config.split.column is not None:  # the split looks for it where a part is asked for
            names.add(self.config.split.column)
        leaves = [
            (leaf, metadata.schema.column(leaf).path)
            for leaf in range(metadata.num_columns)
            if any(_under(metadata.schema.column(leaf).path, name) for name in names)
        ]
        # Not within lists: Arrow cannot join lists of several dictionaries.
        plain = [(leaf, leaf_path) for leaf, leaf_path in leaves if leaf_path in names]
        text = [leaf_path for leaf, leaf_path in plain if metadata.schema.column(leaf).physical_type == "BYTE_ARRAY"]
        self._text_paths.append(text)
        first = 0
        for index in range(metadata.num_row_groups):
            group = metadata.row_group(index)
            values = sum(group.column(leaf).num_values for leaf, _ in leaves)
            if group.num_rows:
                self.row_groups.append(RowGroup(number, index, group.num_rows, first, self.rows, values))
            first += group.num_rows
            self.rows += group.num_rows

    def _check_type(self, path: Path, column: Column, kind: Any) -> None:
        def wrong(expected: str, remedy: str) -> DataError:
            return DataError(f"expected {expected}, got {kind}", file=path, column=column.name, remedy=remedy)

        listed = is_list(kind)
        element = kind.value_type if listed else kind
        if column.role in ("label", "sample_weight", "dense"):
            if not is_number(kind):
                remedy = (
                    "convert the column" if column.role != "dense" else "convert it, or name it under data.categorical"
                )
                raise wrong("numbers", remedy)
        elif column.role == "id_weights":
            assert column.owner is not None
            if listed != self.lists[column.owner] or not is_number(element):
                shape = "a list of numbers" if self.lists[column.owner] else "a number"
                raise wrong(f"{shape} per row, as weights of '{column.owner}'", "check data.id_weights")
        else:
            if column.name in self.config.sequences and not listed:
                raise wrong("a list per row", "name the column under data.categorical")
            if not is_id(element):
                raise wrong("integers or strings", "convert it, or name it under data.dense")
            text = is_text(element)
            if text and column.limit is not None:
                remedy = "leave `rows` out for columns of strings"
                raise wrong(f"integers, because its table has {column.limit} rows", remedy)
            seen, where = self._text.setdefault(column.name, (text, path))
            if self.lists.setdefault(column.name, listed) != listed or seen != text:
                raise wrong(f"the same kind of values as in {where}", "write both files alike")

    def is_text_list(self, column: str) -> bool:
        return self.lists.get(column, False) and self._text[column][0]

    def open(self, file: int, buffer_size: int = 0) -> Any:
        """A fresh handle; strings come dictionary-encoded, so that only dictionaries need to be hashed."""
        with reading(self.files[file]):
            return pq.ParquetFile(self.files[file], read_dictionary=self._text_paths[file], buffer_size=buffer_size)

    @cached_property
    def split(self) -> "Split":
        """Which rows belong to which part; found on first use."""
        from .split import Split

        return Split(self)

    @cached_property
    def fingerprint(self) -> str:
        """Changes with the files (names, sizes, row groups) and with what is read from them."""
        files = [(path.name, path.stat().st_size) for path in self.files]
        groups = [(group.file, group.rows) for group in self.row_groups]
        told = asdict(self.config)
        for name in ("files", "generate"):
            del told[name]
        limits = [(column.name, column.limit) for column in self.columns if column.limit is not None]
        text = json.dumps([files, groups, told, limits], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def check_present(name: str, names: Sequence[str], path: Path) -> None:
    if name not in names:
        raise DataError("no such column", file=path, column=name, remedy=nearest(name, names))
    if names.count(name) > 1:
        raise DataError("the file has two columns of this name", file=path, column=name, remedy="rename one")


def _under(path: str, name: str) -> bool:
    """Whether a leaf's dotted path belongs to the top-level column `name`, whose own name may hold dots."""
    return path == name or path.startswith(name + ".")
