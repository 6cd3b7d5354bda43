"""Fills tables from a checkpoint that other ranks, or another plan, may have written: rows by their ids, columns by overlap.

Each rank reads the shards that can hold rows of its own, piece by piece. Of a table with unbounded ids it has one shard's ids
in memory at a time, and of every table a few MiB of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import gcd, prod
from typing import Protocol

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..optim import Optimizer
from ..plan.placement import Shard, part_of
from ..storage import HashedStorage, Storage
from ..storage.narrow import NarrowStorage
from ..storage.tables import RARE_SLOT
from ..tables import Table
from ..tensorfile import NAMES, TensorFile
from ..width import Width
from .resharding_width import fill_narrow
from .saved import OpenFiles, OtherTables, SavedCheckpoint, SavedShard, SavedTable, entries, live_entries

CHUNK = 16 << 20
"""bytes of rows that are read at a time"""
REMEDY = "load it with the recipe it was saved with"


class Tables(Protocol):
    """What holds tables: `uq.Embeddings` and what `uq.shard` makes of it."""

    @property
    def tables(self) -> Mapping[str, Table]: ...

    @property
    def optimizer(self) -> Optimizer: ...

    @property
    def step(self) -> int: ...

    @step.setter
    def step(self, step: int) -> None: ...

    def shard_storages(self) -> list[tuple[Shard, Storage]]: ...


def optimizer_of(embeddings: Tables, table: str) -> Optimizer:
    return embeddings.tables[table].optimizer or embeddings.optimizer


def budget_of(embeddings: Tables, table: str) -> str:
    """A table's width budget, or the one it shares, to compare it with another."""
    width: Width | None = getattr(embeddings, "width", None)
    if width is None:
        return ""
    budget = width.budget_of(table) or width.common
    return f"{budget.share} of all values" if budget.size is None else f"{budget.size} bytes"


def fill(saved: SavedCheckpoint, embeddings: Tables) -> bool:
    """Gives the shards this process holds the rows, optimizer state and ids of the checkpoint. Returns whether tables whose rows
    differ in width go on exactly as they were."""
    check(saved, embeddings)
    exact = True
    for shard, storage in embeddings.shard_storages():
        table = saved.tables[shard.table]
        with OpenFiles(saved) as files:
            if isinstance(storage, NarrowStorage):
                sources = [source for source in table.shards if _meets(source, shard)]
                exact = fill_narrow(table, sources, shard, storage, files) and exact
                exact = exact and table.width is not None and table.width.budget == budget_of(embeddings, shard.table)
            elif isinstance(storage, HashedStorage):
                _fill_hashed(table, shard, storage, files)
            else:
                _fill_dense(table, shard, storage, files)
    embeddings.step = saved.tables_step
    return exact


def check(saved: SavedCheckpoint, embeddings: Tables) -> None:
    """Raises unless the checkpoint holds these tables, all and no others, in the same shape and with the same optimizer."""
    narrow = {shard.table: isinstance(storage, NarrowStorage) for shard, storage in embeddings.shard_storages()}
    for name in dict.fromkeys([*embeddings.tables, *saved.tables]):
        if name not in saved.tables or name not in embeddings.tables:
            raise OtherTables(
                f"{saved.path}: expected the tables {list(embeddings.tables)}, the saved ones are {list(saved.tables)}; "
                f"{REMEDY}"
            )
        _check_width(saved, name, narrow)
        table, optimizer = embeddings.tables[name], optimizer_of(embeddings, name)
        found, expected = _described(saved.tables[name]), _description(table, optimizer)
        for what, value in expected.items():
            if found[what] is not None and found[what] != value:
                raise OtherTables(
                    f"{saved.path}: table '{name}': expected {what} {value}, the saved one has {found[what]}; {REMEDY}"
                )


def _check_width(saved: SavedCheckpoint, name: str, narrow: Mapping[str, bool]) -> None:
    """Raises where rows differ in width in one of the two only. A rank that holds nothing of the table has nothing to say."""
    if name not in narrow or narrow[name] == (saved.tables[name].width is not None):
        return
    if narrow[name]:
        raise OtherTables(
            f"{saved.path}: table '{name}': expected rows of different width, the saved ones are whole, and nothing says what "
            'each is worth; load it without a width budget, or train with one from the beginning (start = "full" begins with '
            "whole rows)"
        )
    raise OtherTables(
        f"{saved.path}: table '{name}': expected whole rows, the saved ones differ in width; load it with the width budget it "
        "was saved with, or write it out with `unequal export`"
    )


def _description(table: Table, optimizer: Optimizer) -> dict[str, object]:
    return {
        "dim": table.dim,
        "rows": "unbounded" if table.rows is None else table.rows,
        "dtype": NAMES[table.dtype],
        "optimizer": type(optimizer).__name__,
        "optimizer state": dict(sorted(optimizer.state)),
        "a row for rare ids:": table.admit_after > 1,
    }


def _described(saved: SavedTable) -> dict[str, object]:
    """The same of a saved table; None where the checkpoint does not say."""
    return {
        "dim": saved.dim,
        "rows": "unbounded" if saved.hashed else saved.rows,
        "dtype": NAMES[saved.dtype],
        "optimizer": saved.optimizer,
        "optimizer state": dict(sorted(saved.state.items())),
        "a row for rare ids:": None if saved.width is not None else saved.shares_rare,
    }


def _meets(source: SavedShard, shard: Shard) -> bool:
    """Whether the two can have a row in common: an id's part is its remainder, of the id or of its hash."""
    return (source.part - shard.part) % gcd(source.parts, shard.parts) == 0


def _overlapping(table: SavedTable, shard: Shard) -> list[tuple[SavedShard, ...]]:
    return [piece for piece in table.pieces if piece[0].first < shard.last and shard.first < piece[0].last]


def _fill_dense(table: SavedTable, shard: Shard, storage: Storage, files: OpenFiles) -> None:
    for number, piece in enumerate(_overlapping(table, shard)):
        for source in filter(lambda source: _meets(source, shard), piece):
            # Rows source.part + k·source.parts that are also shard.part + j·shard.parts: every so many k, every so many j.
            common = gcd(source.parts, shard.parts)
            step = shard.parts // common
            first = next(k for k in range(step) if (source.part + k * source.parts - shard.part) % shard.parts == 0)
            copier = _Copier(table, source, shard, storage, files[source.file], per_row=number == 0)
            for begin in range(first, source.rows, step * copier.at_once):
                rows = torch.arange(begin, min(source.rows, begin + step * copier.at_once), step)
                ids = source.part + rows * source.parts
                copier.copy(rows, (ids - shard.part) // shard.parts)


def _fill_hashed(table: SavedTable, shard: Shard, storage: HashedStorage, files: OpenFiles) -> None:
    pieces = _overlapping(table, shard)
    count = _restore_directory(pieces[0], shard, storage, files)
    for number, piece in enumerate(pieces):
        found = missing = 0
        for source in filter(lambda source: _meets(source, shard), piece):
            copier = _Copier(table, source, shard, storage, files[source.file], per_row=number == 0)
            ids, slots = live_entries(source, files)
            mine = part_of(ids, shard.parts, hashed=True) == shard.part
            ids, slots = ids[mine], slots[mine]
            for begin in range(0, ids.numel(), copier.at_once):
                span = slice(begin, begin + copier.at_once)
                targets = storage.directory.find(ids[span].to(storage.device)).cpu()
                found, missing = found + int((targets >= 0).sum()), missing + int((targets < 0).sum())
                copier.copy(slots[span], targets)
        if found != count or missing:
            raise CheckpointError(
                f"{files.path}: table '{table.name}': columns {piece[0].first} to {piece[0].last} have {found} of the "
                f"{count} ids that columns {pieces[0][0].first} to {pieces[0][0].last} have, and {missing} others; "
                "the checkpoint is damaged: choose another"
            )
        if storage.shares_rare:  # every shard has that row, and all have the same
            copier = _Copier(table, piece[0], shard, storage, files[piece[0].file], per_row=number == 0)
            copier.copy(torch.tensor([RARE_SLOT]), torch.tensor([RARE_SLOT]))


def _restore_directory(piece: tuple[SavedShard, ...], shard: Shard, storage: HashedStorage, files: OpenFiles) -> int:
    """Gives the storage its ids, and room for their rows; returns how many have rows. Slots follow the order of the saved
    shards and of the slots there; where just one shard is the source they stay what they were."""
    ids_with_rows: list[Tensor] = []
    new_slots: list[Tensor] = []
    waiting: list[tuple[Tensor, Tensor]] = []
    next_slot = int(storage.shares_rare)
    for source in filter(lambda source: _meets(source, shard), piece):
        ids, slots = entries(source, files)
        mine = part_of(ids, shard.parts, hashed=True) == shard.part
        live, not_yet = mine & (slots >= 0), mine & (slots < 0)
        ids_with_rows.append(ids[live])
        waiting.append((ids[not_yet], slots[not_yet]))
        count = ids_with_rows[-1].numel()
        if source.parts == shard.parts:
            new_slots.append(slots[live])
            next_slot = source.rows
        else:
            new_slots.append(torch.arange(next_slot, next_slot + count))
            next_slot += count
    ids = torch.cat([*ids_with_rows, *(part for part, _ in waiting)])
    slots = torch.cat([*new_slots, *(part for _, part in waiting)])
    storage.restore(ids, slots, next_slot)
    return sum(part.numel() for part in ids_with_rows)


class _Copier:
    """Copies rows of a saved shard to a storage: weights, and the states of the optimizer."""

    def __init__(
        self, table: SavedTable, source: SavedShard, shard: Shard, storage: Storage, file: TensorFile, per_row: bool
    ) -> None:
        """`per_row`: states of one number per row are taken, too; every piece of columns has the same."""
        self.file, self.device = file, storage.device
        first, last = max(source.first, shard.first), min(source.last, shard.last)
        self.columns = slice(first - source.first, last - source.first)
        self.into = slice(first - shard.first, last - shard.first)
        self.whole = last - first == source.last - source.first == shard.width
        self.names = []
        for name, slabs in zip(storage.parts, (storage.rows.weights, *storage.rows.states)):
            if name == "weight" or table.state[name] == "value" or per_row:
                self.names.append((source.tensors[name], slabs))
        entries = [file.header.entries[name] for name, _ in self.names]
        self.at_once = max(1, CHUNK // max(prod(entry.shape[1:]) * entry.dtype.itemsize for entry in entries))

    def copy(self, rows: Tensor, targets: Tensor) -> None:
        """Row numbers in the saved shard, which ascend, and in the storage."""
        in_a_row = self.whole and self.device.type == "cpu" and _in_a_row(rows) and _in_a_row(targets)
        for name, slabs in self.names:
            if in_a_row and self._read_in_place(name, slabs, int(rows[0]), int(targets[0]), rows.numel()):
                continue
            values = self.file.gather(name, rows)
            if values.dim() == 2 and not self.whole:
                values = values[:, self.columns]
            self._put(slabs, targets, values)

    def _read_in_place(self, name: str, slabs: list[Tensor], row: int, target: int, count: int) -> bool:
        """Straight from the file to where the rows belong, where that is one slab."""
        for slab, start in _starts(slabs):
            if start <= target and target + count <= start + slab.shape[0]:
                self.file.read(name, row, row + count, slab[target - start : target - start + count])
                return True
        return False

    def _put(self, slabs: list[Tensor], targets: Tensor, values: Tensor) -> None:
        for slab, start in _starts(slabs):
            inside = ((targets >= start) & (targets < start + slab.shape[0])).nonzero().flatten()
            if not inside.numel():
                continue
            numbers = targets[inside] - start
            part = (values if inside.numel() == values.shape[0] else values[inside]).to(self.device)
            where = slice(int(numbers[0]), int(numbers[-1]) + 1) if _in_a_row(numbers) else numbers.to(self.device)
            if slab.dim() == 1:
                slab[where] = part
            else:
                slab[where, self.into] = part


def _in_a_row(numbers: Tensor) -> bool:
    ends = numbers.numel() and int(numbers[-1]) - int(numbers[0]) + 1 == numbers.numel()
    return bool(ends) and bool((numbers.diff() == 1).all())


def _starts(slabs: list[Tensor]) -> Iterator[tuple[Tensor, int]]:
    start = 0
    for slab in slabs:
        yield slab, start
        start += slab.shape[0]
