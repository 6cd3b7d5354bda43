"""`unequal export`: a run's result as one file for those who only read it: live values of the tables, the dense part, and what
the model is. Optimizer state and utilities stay behind. `exported.py` loads it with torch alone.

Values are written in the order of their ids, whatever shards they come from: tables of more than a few MiB are sorted in a file
beside the result, so that memory holds ids and little else.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import exported, tensorfile
from ..errors import CheckpointError
from ..exported import BLOCK, FILE, FORMAT, KIND, header_sum
from ..storage.tables import RARE_SLOT
from ..toml import to_mapping
from . import checkpoint
from .config import Recipe
from .run import CHECKPOINTS
from .saved import OpenFiles, SavedCheckpoint, SavedShard, SavedTable, live_entries
from .saved_width import NarrowReader

LOADER = "load.py"
SMALL = 64 << 20
"""bytes of values that are put in order in memory"""
AT_ONCE = 1 << 20
"""values that are read at a time"""
PLACEHOLDER = "." * 8


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedTable:
    rows: int
    values: int
    full: int | None
    """values of all rows at full width, where the number of rows is bounded"""
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportReport:
    """What was written."""

    file: str
    bytes: int
    step: int
    tables: dict[str, ExportedTable]
    dense_bytes: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def export_run(recipe: Recipe, folder: Path, out: Path) -> ExportReport:
    """The run's result: the best evaluation's weights where the recipe says so, else the last ones. A name without an ending is
    that of a folder, which gets the loader, too."""
    saved = result_of(recipe, folder)
    into_folder = out.is_dir() or not out.suffix
    with _explained(out):
        (out if into_folder else out.parent).mkdir(parents=True, exist_ok=True)
        report = write(saved, out / FILE if into_folder else out, describe(recipe, saved))
        if into_folder:
            shutil.copyfile(exported.__file__, out / LOADER)
    return report


def result_of(recipe: Recipe, folder: Path) -> SavedCheckpoint:
    newest = checkpoint.latest(folder / CHECKPOINTS)
    if newest is None:
        raise CheckpointError(f"{folder}: the run has no checkpoint yet; train it further with --resume {folder}")
    saved = checkpoint.open(newest)
    best = saved.other["position"]["best_step"] if recipe.run.select_best else None
    return saved if best in (None, saved.step) else checkpoint.open(checkpoint.path_of(folder / CHECKPOINTS, best))


def describe(recipe: Recipe, saved: SavedCheckpoint) -> dict[str, Any]:
    """What a reader needs to feed the model: features, other columns and what is done to them, and the model's own section."""
    data = recipe.data
    tables = recipe.table_of()
    poolings = {column: recipe.pooling_of(column) for column in tables}
    return {
        "name": recipe.name,
        "features": {
            column: {"table": table, "pooling": None if poolings[column] == "none" else poolings[column]}
            for column, table in tables.items()
        },
        "model": to_mapping(recipe.model),
        "labels": list(data.labels),
        "dense": {
            "columns": list(data.dense),
            "transform": data.dense_transform,
            "missing": data.dense_missing,
            "statistics": saved.other["reader"]["statistics"],
        },
        "sequences": list(data.sequences),
        "id_weights": dict(data.id_weights),
        "max_length": data.max_length,
    }


def write(saved: SavedCheckpoint, file: Path, description: Mapping[str, Any]) -> ExportReport:
    """Writes tables and dense part of a checkpoint. `description` has `features` (name → table, pooling) and whatever else a
    reader should know; it is JSON."""
    sums: dict[str, str] = {}
    sources: dict[str, tensorfile.Source] = {}
    about: dict[str, Any] = {"format": FORMAT, "step": saved.step, **description, "tables": {}}
    tables: dict[str, ExportedTable] = {}
    with OpenFiles(saved) as files:
        for name, table in saved.tables.items():
            ordered = _Ordered(table, files, file.parent)
            parts = ordered.parts()
            about["tables"][name] = ordered.about() | {"tensors": list(parts)}
            sources |= {f"tables/{name}/{part}": source for part, source in parts.items()}
            values, size = ordered.values, sum(part.nbytes for part in parts.values())
            full = None if table.hashed else table.rows * table.dim
            tables[name] = ExportedTable(rows=table.live, values=values, full=full, bytes=size)
        dense = {f"dense/{name}": tensor for name, tensor in saved.dense_state.items()}
        sources |= dense
        text = json.dumps(about, ensure_ascii=False)
        metadata = {"format": "pt", "kind": KIND, "description": text, "checksum": f"{zlib.crc32(text.encode()):08x}"}
        empty = json.dumps(dict.fromkeys(["header", *sources], PLACEHOLDER))
        size = _put(
            file, {name: _summed(name, source, sums) for name, source in sources.items()}, metadata, empty, sums
        )
    dense_bytes = sum(tensor.nbytes for tensor in dense.values())
    return ExportReport(file=str(file), bytes=size, step=saved.step, tables=tables, dense_bytes=dense_bytes)


def _put(
    file: Path, sources: dict[str, tensorfile.Source], metadata: dict[str, str], empty: str, sums: dict[str, str]
) -> int:
    """Writes aside and renames. Checksums are known when all is written; until then dots keep their place in the header."""
    partial = file.with_name(f".partial-{file.name}")
    metadata = metadata | {"checksums": empty}
    size = tensorfile.size_of(sources, metadata)
    if shutil.disk_usage(file.parent).free < size:
        raise OSError(errno.ENOSPC, f"{size:,} bytes are needed, {shutil.disk_usage(file.parent).free:,} are free")
    try:
        tensorfile.write(partial, sources, metadata)
        with partial.open("r+b") as written:
            header = written.read(int.from_bytes(written.read(8), "little"))
            entries = json.loads(header)
            del entries["__metadata__"]
            known = json.dumps({"header": header_sum(entries)} | {name: sums[name] for name in sources})
            before, after = (json.dumps(text)[1:-1].encode() for text in (empty, known))
            assert header.count(before) == 1 and len(before) == len(after)
            written.seek(8)
            written.write(header.replace(before, after))
            written.flush()
            os.fsync(written.fileno())
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    return size


def _summed(name: str, source: tensorfile.Source, sums: dict[str, str]) -> tensorfile.Streamed:
    """The same, and its checksum once it is written."""

    def parts() -> Iterator[Tensor]:
        running = 0
        for part in source.parts() if isinstance(source, tensorfile.Streamed) else [source]:
            part = part.detach().cpu().contiguous()
            if part.numel():
                running = zlib.crc32(part.reshape(-1).view(torch.uint8).numpy().data, running)
            yield part
        sums[name] = f"{running:08x}"

    return tensorfile.Streamed(source.dtype, tuple(source.shape), parts)


class _Ordered:
    """A table's rows by their ids."""

    def __init__(self, table: SavedTable, files: OpenFiles, folder: Path) -> None:
        self.table, self.files, self.folder = table, files, folder
        self.ids: Tensor | None = None
        self.chunks: Tensor | None = None
        """of every row, where rows differ"""
        self.masks: Tensor | None = None
        self.rows, self.values = table.live, table.live * table.dim
        if table.width is not None:
            self._order_narrow()
        elif table.hashed:
            self.ids = torch.cat([live_entries(shard, files)[0] for shard in table.pieces[0]]).sort().values

    def _order_narrow(self) -> None:
        assert self.table.width is not None
        shards = self.table.shards
        ids = torch.cat([self.files[shard.file].read(shard.tensors["ids"]) for shard in shards])
        chunks = torch.empty(ids.numel(), dtype=torch.uint8)
        begin = 0
        for shard in shards:
            for of in self._reader(shard).classes:
                chunks[begin + of.first : begin + of.last] = of.width // self.table.width.chunk
            begin += shard.rows
        self.ids, order = ids.sort()
        self.chunks = chunks[order]
        self.values = int(self.chunks.sum(dtype=torch.int64)) * self.table.width.chunk
        if self.table.width.masked:
            masks = torch.cat([self.files[shard.file].read(shard.tensors["masks"]) for shard in shards])
            self.masks = masks[order].to(self._mask_dtype())

    def _mask_dtype(self) -> torch.dtype:
        assert self.table.width is not None
        chunks = self.table.dim // self.table.width.chunk
        fits = ((8, torch.uint8), (16, torch.int16), (32, torch.int32))
        return next((dtype for bits, dtype in fits if chunks <= bits), torch.int64)

    def _reader(self, shard: SavedShard) -> NarrowReader:
        return NarrowReader(self.table, shard, self.files)

    def about(self) -> dict[str, Any]:
        width = self.table.width
        return {"dim": self.table.dim, "rows": self.rows, "chunk": None if width is None else width.chunk}

    def parts(self) -> dict[str, tensorfile.Source]:
        found: dict[str, tensorfile.Source] = {}
        if self.ids is not None:
            limits = torch.iinfo(torch.int32)
            short = not self.rows or (int(self.ids[0]) >= limits.min and int(self.ids[-1]) <= limits.max)
            found["ids"] = self.ids.int() if short else self.ids
        if self.chunks is not None:
            padded = torch.zeros(-(-self.rows // BLOCK) * BLOCK, dtype=torch.uint8)
            padded[: self.rows] = self.chunks
            found["widths"] = padded
        if self.masks is not None:
            found["masks"] = self.masks
        if self.table.shares_rare:
            found["rare"] = self._rare()
        found["values"] = tensorfile.Streamed(self.table.dtype, (self.values,), self._sorted)
        return found

    def _rare(self) -> Tensor:
        """The row that rare ids share: every shard of the same columns has it."""
        slot = torch.tensor([RARE_SLOT])
        shards = [piece[0] for piece in self.table.pieces]
        return torch.cat([self.files[shard.file].gather(shard.tensors["weight"], slot)[0] for shard in shards])

    def _sorted(self) -> Iterator[Tensor]:
        starts = self._starts()
        with _room(self.values, self.table.dtype, self.folder) as out:
            for shard in self.table.shards:
                if starts is not None:
                    self._place_narrow(shard, starts, out)
                else:
                    self._place_whole(shard, out.view(self.rows, self.table.dim))
            yield from out.split(AT_ONCE)  # type: ignore[no-untyped-call]

    def _starts(self) -> Tensor | None:
        """Where the values of every row begin, where rows differ."""
        if self.chunks is None or self.table.width is None:
            return None
        widths = self.chunks.long() * self.table.width.chunk
        return widths.cumsum(0) - widths

    def _place_narrow(self, shard: SavedShard, starts: Tensor, out: Tensor) -> None:
        assert self.ids is not None
        reader, ids = self._reader(shard), self.files[shard.file].read(shard.tensors["ids"])
        for of in reader.classes:
            rows = max(1, AT_ONCE // of.width)
            for first in range(of.first, of.last, rows):
                last = min(first + rows, of.last)
                numbers = torch.searchsorted(self.ids, ids[first:last])
                places = starts[numbers][:, None] + torch.arange(of.width)
                out[places] = reader.values("weight", of, first, last)

    def _place_whole(self, shard: SavedShard, out: Tensor) -> None:
        file, rows = self.files[shard.file], max(1, AT_ONCE // self.table.dim)
        ids = slots = torch.empty(0, dtype=torch.int64)
        if self.ids is not None:
            ids, slots = live_entries(shard, self.files)
        for first in range(0, shard.ids, rows):
            last = min(first + rows, shard.ids)
            if self.ids is None:
                taken = torch.arange(first, last)
                numbers = taken * shard.parts + shard.part
            else:
                taken, numbers = slots[first:last], torch.searchsorted(self.ids, ids[first:last])
            out[numbers, shard.first : shard.last] = file.gather(shard.tensors["weight"], taken)


@contextmanager
def _room(count: int, dtype: torch.dtype, folder: Path) -> Iterator[Tensor]:
    """So many values to put in order: in memory, or in a file that is gone afterwards."""
    if count * dtype.itemsize <= SMALL:
        yield torch.empty(count, dtype=dtype)
        return
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".sorting-") as file:
        if hasattr(os, "posix_fallocate"):  # a full disk is an error here, not a signal later
            os.posix_fallocate(file.fileno(), 0, count * dtype.itemsize)
        yield torch.from_file(file.name, shared=True, size=count, dtype=dtype)


@contextmanager
def _explained(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{out}: cannot be written ({error.strerror or error}); choose another --out") from error
