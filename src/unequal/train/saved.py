"""A checkpoint as it lies on the disk: its index, and its tables' rows in parts, whatever ranks and plan they were saved by."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, nearest
from ..plan.placement import part_of
from ..tensorfile import DTYPES, NAMES, Checksums, TensorFile, checksum_text
from .packing import unpack
from .saved_width import NarrowReader, SavedRows, SavedWidth

FORMAT = 2
FORMAT_WITH_WIDTH = 3
"""where rows of a table differ in width"""
STATE = "state.json"
MODEL = "model/"
TABLES = "embeddings."
"""what the names of tables start with in a model's state"""
AT_ONCE = 65536


class OtherTables(CheckpointError):
    """A whole checkpoint, but of other tables."""


@dataclass(frozen=True, slots=True)
class SavedShard:
    """Columns [first, last) of the rows of one part of a table, and where they are."""

    file: str
    first: int
    last: int
    part: int
    parts: int
    rows: int
    """of its tensors; of a table with unbounded ids one of them may be the row that rare ids share"""
    ids: int
    """that have a row"""
    tensors: dict[str, str]
    """weight, states, ids, slots → name in the file"""
    width: SavedRows | None = None
    """where rows differ in width"""

    @property
    def place(self) -> tuple[str, str]:
        return self.file, self.tensors["weight"]

    def to_json(self) -> dict[str, Any]:
        return {
            "file": self.file,
            "columns": [self.first, self.last],
            "part": self.part,
            "parts": self.parts,
            "rows": self.rows,
            "ids": self.ids,
            "tensors": self.tensors,
            **({} if self.width is None else {"width": asdict(self.width)}),
        }

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> SavedShard:
        first, last = entry["columns"]
        return cls(
            entry["file"], first, last, entry["part"], entry["parts"], entry["rows"], entry["ids"], entry["tensors"],
            SavedRows(**entry["width"]) if "width" in entry else None,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SavedTable:
    """A table of a checkpoint."""

    name: str
    rows: int
    """that have an id"""
    dim: int
    dtype: torch.dtype
    hashed: bool
    """whether its ids are unbounded"""
    admit_after: int | None
    """None: not noted, as in format 1"""
    optimizer: str | None
    state: dict[str, str]
    """its optimizer's states: one number per "row" or per "value" """
    kind: str | None
    """of sharding, where the run was sharded"""
    shards: tuple[SavedShard, ...]
    width: SavedWidth | None = None
    """where rows differ in width; `rows` are then those that there could be, where ids are not unbounded"""

    @property
    def shares_rare(self) -> bool:
        """Whether each shard's first row is the one that rare ids share."""
        if self.width is not None:
            return False
        if self.admit_after is not None:
            return self.admit_after > 1
        return self.hashed and any(shard.rows > shard.ids for shard in self.shards)

    @property
    def pieces(self) -> list[tuple[SavedShard, ...]]:
        """The shards of each piece of columns, in the order of columns and parts."""
        shards = sorted(self.shards, key=lambda shard: (shard.first, shard.last, shard.part))
        return [tuple(piece) for _, piece in groupby(shards, key=lambda shard: (shard.first, shard.last))]

    @property
    def live(self) -> int:
        """Ids that have a row."""
        return sum(shard.ids for shard in self.shards if shard.first == 0)

    def check(self) -> None:
        """Raises unless the shards make up the whole table, each part of it once."""
        pieces = self.pieces
        whole = [piece[0].first for piece in pieces] + [self.dim] == [0] + [piece[0].last for piece in pieces]
        if not whole or any([s.part for s in piece] != list(range(piece[0].parts)) for piece in pieces):
            held = ", ".join(f"columns {s.first} to {s.last} of part {s.part} of {s.parts}" for s in self.shards)
            raise CheckpointError(f"table '{self.name}': expected shards that make up all of it, got {held or 'none'}")

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "dim": self.dim,
            "dtype": NAMES[self.dtype],
            "hashed": self.hashed,
            "admit_after": self.admit_after,
            "optimizer": self.optimizer,
            "state": self.state,
            "kind": self.kind,
            "shards": [shard.to_json() for shard in self.shards],
            **({} if self.width is None else {"width": asdict(self.width)}),
        }

    @classmethod
    def from_json(cls, name: str, entry: dict[str, Any]) -> SavedTable:
        shards = tuple(SavedShard.from_json(shard) for shard in entry["shards"])
        width = SavedWidth(**entry["width"]) if "width" in entry else None
        return cls(name=name, **entry | {"dtype": DTYPES[entry["dtype"]], "shards": shards, "width": width})


class OpenFiles(ExitStack):
    """The files of a checkpoint that are in use, each opened once."""

    def __init__(self, saved: SavedCheckpoint) -> None:
        super().__init__()
        self.path = saved.path
        self._files, self._open = saved.files, dict[str, TensorFile]()

    def __getitem__(self, name: str) -> TensorFile:
        if name not in self._open:
            self._open[name] = self.enter_context(TensorFile(self.path / name, self._files[name]))
        return self._open[name]


class SavedCheckpoint:
    """What a checkpoint holds, read when it is asked for; everything that is read is verified."""

    def __init__(self, path: Path, prefix: str = TABLES) -> None:
        """`prefix`: of tables in a checkpoint whose model state was saved with them, as format 1 does."""
        self.path, self._prefix = path, prefix
        self._index = read_index(path)
        self.step: int = self._index["step"]
        self.world: int = self._index.get("world", 1)
        """ranks that wrote it"""
        self.files = {name: Checksums.from_json(entry) for name, entry in self._index["files"].items()}

    def __repr__(self) -> str:
        return f"SavedCheckpoint('{self.path}', step {self.step}, {self.world} ranks, tables {list(self.tables)})"

    @cached_property
    def other(self) -> dict[str, Any]:
        """What was saved beside the model: the reader's position, the dense optimizer, counters."""
        state: dict[str, Any] = unpack(self._index["state"], self._main("other"))
        return state

    @property
    def model_state(self) -> dict[str, Tensor]:
        """The model's tensors; without its tables where those were saved as shards."""
        return {name.removeprefix(MODEL): tensor for name, tensor in self._main(MODEL).items()}

    @property
    def dense_state(self) -> dict[str, Tensor]:
        """The model's tensors without its tables."""
        found = self._main(MODEL, unless=MODEL + self._prefix)
        return {name.removeprefix(MODEL): tensor for name, tensor in found.items()}

    def own(self, rank: int) -> dict[str, Any] | None:
        """What that rank alone had to say; None where the checkpoint has no such rank."""
        if rank >= self.world:
            return None
        if "ranks" not in self._index:  # its one rank kept everything together
            return {"random": self.other["random"]} if "random" in self.other else {}
        prefix = own_prefix(rank) + "/"
        with OpenFiles(self) as files:
            file = files[file_name(rank)]
            tensors = {name: file.read(name) for name in file.header.entries if name.startswith(prefix)}
        state: dict[str, Any] = unpack(self._index["ranks"][rank], tensors)
        return state

    @cached_property
    def tables(self) -> dict[str, SavedTable]:
        if "tables" not in self._index:
            return self._tables_by_name()
        return {name: SavedTable.from_json(name, entry) for name, entry in self._index["tables"].items()}

    @cached_property
    def tables_step(self) -> int:
        """Updates of the tables until then."""
        if "tables_step" in self._index:
            return int(self._index["tables_step"])
        name = f"{MODEL}{self._prefix}step"
        found = self._main(name)
        if name not in found:
            raise CheckpointError(
                f"{self.path}: holds no tables; it was saved from a model without them, or under another name than "
                f"'{self._prefix}'"
            )
        return int(found[name])

    @property
    def purses(self) -> dict[str, float]:
        """Of tables with a width budget: values that new rows could still take up, of all tables that share the budget."""
        shards = {name: table.shards[0].width for name, table in self.tables.items()}
        return {name: width.purse for name, width in shards.items() if width is not None}

    @property
    def watched(self) -> dict[str, Any] | None:
        """What was known of the popularity of rows with a width budget; see `unequal.width.Shifts`."""
        return self._index.get("watched")

    @property
    def shown(self) -> dict[str, Any] | None:
        """What training had shown of tables whose rows have a width budget; see `unequal.width.evidence`."""
        return self._index.get("shown")

    def has(self, table: str, ids: Tensor | Iterable[int]) -> Tensor:
        """Of every id, whether it has a row."""
        saved, ids = self._table(table), _ids(ids)
        found = torch.zeros(ids.shape, dtype=torch.bool)
        with OpenFiles(self) as files:
            for shard in saved.pieces[0]:
                mine = part_of(ids, shard.parts, saved.hashed) == shard.part
                found[mine] = Directory(saved, shard, files).find(ids[mine]) >= 0
        return found

    def rows(self, table: str, ids: Tensor | Iterable[int]) -> dict[str, Tensor]:
        """The rows of these ids, "weight" and by name the optimizer's states; of the files only what they lie in is read. Where
        rows differ in width, what a row lacks is zero, and "width" says how many values it has."""
        saved, ids = self._table(table), _ids(ids)
        with OpenFiles(self) as files:
            return self._rows(saved, ids, files, {})

    def table(self, table: str, at_once: int = AT_ONCE) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """All ids that have rows, so many at a time, and what `rows` gives for them."""
        saved = self._table(table)
        with OpenFiles(self) as files:
            for shard in saved.pieces[0]:
                # Where columns are spread, too, the other pieces hold the same ids, perhaps in another order.
                directory = Directory(saved, shard, files)
                directories = {shard.place: directory}
                for ids in directory.ids(at_once):
                    yield ids, self._rows(saved, ids, files, directories)

    def _rows(
        self, saved: SavedTable, ids: Tensor, files: OpenFiles, directories: dict[tuple[str, str], Directory]
    ) -> dict[str, Tensor]:
        out = {"weight": torch.empty(ids.numel(), saved.dim, dtype=saved.dtype)}
        for name, per in saved.state.items():
            out[name] = torch.empty((ids.numel(), saved.dim) if per == "value" else ids.numel())
        if saved.width is not None:
            out["width"] = torch.empty(ids.numel(), dtype=torch.int64)
        for piece in saved.pieces:
            for shard in piece:
                mine = (part_of(ids, shard.parts, saved.hashed) == shard.part).nonzero().flatten()
                if not mine.numel():
                    continue
                if shard.place not in directories:
                    directories[shard.place] = Directory(saved, shard, files)
                rows = directories[shard.place].find(ids[mine])
                if bool((rows < 0).any()):
                    unknown = int(ids[mine][rows < 0][0])
                    raise CheckpointError(
                        f"{self.path}: table '{saved.name}' has no row for id {unknown}; ask with has() which ids have one"
                    )
                distinct, back = torch.unique(rows, return_inverse=True)
                if saved.width is not None:
                    found = NarrowReader(saved, shard, files).rows(distinct)
                    for name, target in out.items():
                        target[mine] = found[name][back]
                    continue
                for name, target in out.items():
                    values = files[shard.file].gather(shard.tensors[name], distinct)[back]
                    if target.dim() == 1:
                        target[mine] = values
                    else:
                        target[mine, shard.first : shard.last] = values
        return out

    def _table(self, name: str) -> SavedTable:
        if name not in self.tables:
            raise CheckpointError(f"{self.path}: has no table '{name}'; {nearest(name, self.tables)}")
        return self.tables[name]

    def _main(self, prefix: str, unless: str | None = None) -> dict[str, Tensor]:
        """Tensors of the part that one rank writes for all, by the beginning of their names."""
        found: dict[str, Tensor] = {}
        with OpenFiles(self) as files:
            for file in self.files if self._index["format"] == 1 else [file_name(0)]:
                for name in files[file].header.entries:
                    if name.startswith(prefix) and not (unless is not None and name.startswith(unless)):
                        found[name] = files[file].read(name)
        return found

    def _tables_by_name(self) -> dict[str, SavedTable]:
        """Of a model's state that was saved with its tables: each is one shard, and what it is lies in its tensors' names."""
        prefix, parts = MODEL + self._prefix, dict[str, dict[str, str]]()
        tables = {}
        with OpenFiles(self) as files:
            for file in self.files if self._index["format"] == 1 else [file_name(0)]:
                entries = files[file].header.entries
                for name in entries:
                    table, _, part = name.removeprefix(prefix).rpartition(".")
                    if name.startswith(prefix) and table:
                        parts.setdefault(table, {})[part] = name
                for table, tensors in parts.items():
                    if "weight" not in tensors or table in tables:
                        continue
                    weight, hashed = entries[tensors["weight"]], "ids" in tensors
                    if "widths" in tensors:
                        raise CheckpointError(
                            f"{self.path}: table '{table}' has rows of different width and was saved as a part of the model's "
                            "state; load it with load_state_dict, or save it with `embeddings=`"
                        )
                    rows, dim = weight.shape
                    ids = int((files[file].read(tensors["slots"]) >= 0).sum()) if hashed else rows
                    state = {
                        part: "row" if len(entries[name].shape) == 1 else "value"
                        for part, name in tensors.items()
                        if part not in ("weight", "ids", "slots")
                    }
                    shard = SavedShard(file, 0, dim, 0, 1, rows, ids, tensors)
                    tables[table] = SavedTable(table, ids, dim, weight.dtype, hashed, None, None, state, None, (shard,))
        return tables


class Directory:
    """Which row of a shard an id has. Of unbounded ids it holds 16 bytes each; dense ones take arithmetic alone."""

    def __init__(self, saved: SavedTable, shard: SavedShard, files: OpenFiles) -> None:
        self.saved, self.shard = saved, shard
        self._sorted: tuple[Tensor, Tensor] | None = None
        self._listed = saved.hashed or saved.width is not None
        if self._listed:
            ids, rows = live_entries(shard, files)
            self._in_order = ids
            order = ids.argsort()
            self._sorted = ids[order], rows[order]

    def find(self, ids: Tensor) -> Tensor:
        """The row of every id; -1 where it has none."""
        if self._sorted is None:
            rows = (ids - self.shard.part).div(self.shard.parts, rounding_mode="floor")
            return torch.where((ids >= 0) & (ids < self.saved.rows), rows, -1)
        known, rows = self._sorted
        if not known.numel():
            return torch.full_like(ids, -1)
        at = torch.searchsorted(known, ids).clamp(max=known.numel() - 1)
        return torch.where(known[at] == ids, rows[at], -1)

    def ids(self, at_once: int) -> Iterator[Tensor]:
        """In the order of their rows."""
        if self._listed:
            yield from (part for part in self._in_order.split(at_once) if part.numel())  # type: ignore[no-untyped-call]
        else:
            for first in range(0, self.shard.rows, at_once):
                numbers = torch.arange(first, min(first + at_once, self.shard.rows))
                yield numbers * self.shard.parts + self.shard.part


def entries(shard: SavedShard, files: OpenFiles) -> tuple[Tensor, Tensor]:
    """Ids and slots of a shard of a table with unbounded ids: those with rows in the order of their slots, then the others."""
    file = files[shard.file]
    return file.read(shard.tensors["ids"]), file.read(shard.tensors["slots"])


def live_entries(shard: SavedShard, files: OpenFiles) -> tuple[Tensor, Tensor]:
    if shard.width is not None:
        return files[shard.file].read(shard.tensors["ids"]), torch.arange(shard.rows)
    ids, slots = entries(shard, files)
    live = slots >= 0
    return ids[live], slots[live]


def file_name(rank: int) -> str:
    return f"tensors-{rank:05d}.safetensors"


def own_prefix(rank: int) -> str:
    return f"rank-{rank:05d}"


def read_index(path: Path) -> dict[str, Any]:
    """state.json, once its own checksum is found right and its files are there in full size."""
    where = path / STATE
    try:
        text = where.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{where}: cannot be read ({error.strerror or error}); not a whole checkpoint") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{where}: is damaged: it is not UTF-8 text") from None
    try:
        index = json.loads(text)
        version, checksum = index["format"], index["checksum"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{where}: is damaged: it is not a checkpoint's index ({error})") from None
    if version not in (1, FORMAT, FORMAT_WITH_WIDTH):
        raise CheckpointError(
            f"{where}: expected checkpoint format 1 to {FORMAT_WITH_WIDTH}, got {version!r}; "
            "read it with the version of unequal that wrote it"
        )
    if checksum != _checksum({key: index[key] for key in index if key != "checksum"}):
        raise CheckpointError(f"{where}: is damaged: it does not match its checksum")
    for name, entry in index["files"].items():
        size = (path / name).stat().st_size if (path / name).is_file() else None
        if size != entry["bytes"]:
            got = "no such file" if size is None else f"{size} bytes"
            raise CheckpointError(f"{path / name}: is damaged: expected {entry['bytes']} bytes, got {got}")
    found: dict[str, Any] = index
    return found


def sealed(content: dict[str, Any]) -> str:
    """The content as JSON, with a checksum of itself."""
    return json.dumps({"checksum": _checksum(content)} | content, indent=1, allow_nan=False) + "\n"


def _checksum(content: dict[str, Any]) -> str:
    return checksum_text(zlib.crc32(json.dumps(content, separators=(",", ":")).encode()))


def _ids(ids: Tensor | Iterable[int]) -> Tensor:
    return torch.as_tensor(ids if isinstance(ids, Tensor) else list(ids), dtype=torch.int64).reshape(-1).cpu()
