"""What each rank writes of the tables: which shards are its own to write, and their rows slab by slab, never joined."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from ..optim import Optimizer
from ..storage import HashedStorage, Storage, classes
from ..storage.narrow import NarrowStorage
from ..tensorfile import Source, Streamed
from .resharding import Tables, budget_of, optimizer_of
from .saved import SavedShard, SavedTable, file_name
from .saved_width import SavedRows, SavedWidth

Listed = list[Any]
"""A shard for other ranks to read: table, first, last, part, parts, rows, ids, bytes; where rows differ in width how they do in
the table, and how they lie in the shard, else twice None."""


def list_shards(embeddings: Tables) -> list[Listed]:
    """What this rank holds."""
    return [
        [shard.table, shard.first, shard.last, shard.part, shard.parts, storage.live, _ids(storage), _bytes(storage),
         *_widths(storage)]
        for shard, storage in embeddings.shard_storages()
    ]  # fmt: skip


def assign(embeddings: Tables, listed: list[list[Listed]], kinds: dict[str, str]) -> dict[str, SavedTable]:
    """Who writes what, from what every rank holds. A shard that several hold is written once, by the one with least to write."""
    holders: dict[tuple[Any, ...], dict[int, Listed]] = {}
    for rank, shards in enumerate(listed):
        for shard in shards:
            holders.setdefault(tuple(shard[:5]), {})[rank] = shard
    load = [0] * len(listed)
    widths: dict[str, SavedWidth] = {}
    written: dict[str, list[SavedShard]] = {name: [] for name in embeddings.tables}
    for held in sorted(holders.values(), key=lambda held: (len(held) > 1, -next(iter(held.values()))[7])):
        rank = min(held, key=load.__getitem__)
        table, first, last, part, parts, rows, ids, size, width, lie = held[rank]
        load[rank] += size
        names = _tensor_names(embeddings.tables[table].rows is None, optimizer_of(embeddings, table))
        if width is not None:
            widths[table] = SavedWidth(**width, budget=budget_of(embeddings, table))
            names = _narrow_names(optimizer_of(embeddings, table), widths[table].masked)
        where = f"tables/{table}/columns-{first}-{last}/part-{part}-of-{parts}"
        tensors = {name: f"{where}/{name}" for name in names}
        written[table].append(
            SavedShard(
                file_name(rank), first, last, part, parts, rows, ids, tensors, None if lie is None else SavedRows(**lie)
            )
        )
    tables = {}
    for name, table in embeddings.tables.items():
        optimizer = optimizer_of(embeddings, name)
        ordered = tuple(sorted(written[name], key=lambda shard: (shard.first, shard.part)))
        live = sum(shard.ids for shard in ordered if shard.first == 0)
        tables[name] = SavedTable(
            name,
            live if name not in widths or table.rows is None else table.rows,
            table.dim,
            table.dtype,
            table.rows is None,
            table.admit_after,
            type(optimizer).__name__,
            dict(optimizer.state),
            kinds.get(name),
            ordered,
            widths.get(name),
        )
        tables[name].check()
    return tables


def sources(embeddings: Tables, tables: dict[str, SavedTable], rank: int) -> dict[str, Source]:
    """The tensors that this rank writes, by their names in its file."""
    found: dict[str, Source] = {}
    held = {(shard.table, shard.first, shard.last, shard.part): s for shard, s in embeddings.shard_storages()}
    for name, table in tables.items():
        for shard in table.shards:
            if shard.file == file_name(rank):
                storage = held[name, shard.first, shard.last, shard.part]
                found |= {shard.tensors[part]: source for part, source in _sources(storage, shard.rows).items()}
    return found


def _sources(storage: Storage, rows: int) -> dict[str, Source]:
    if isinstance(storage, NarrowStorage):
        return _narrow_sources(storage)
    found: dict[str, Source] = {}
    if isinstance(storage, HashedStorage):
        entries = _Entries(storage)
        found["ids"] = Streamed(torch.int64, (entries.count,), entries.ids)
        found["slots"] = Streamed(torch.int64, (entries.count,), entries.slots)
    for name, slabs in zip(storage.parts, (storage.rows.weights, *storage.rows.states)):
        found[name] = Streamed(slabs[0].dtype, (rows, *slabs[0].shape[1:]), _Cut(slabs, rows))
    return found


def _narrow_sources(storage: NarrowStorage) -> dict[str, Source]:
    rows, values, records = storage.live, storage.values, storage.records
    followed, places, worth = classes.candidates(storage)
    found: dict[str, Source] = {
        "ids": Streamed(torch.int64, (rows,), lambda: [classes.listed(storage)]),
        "candidates": followed,
        "candidate_places": places,
        "candidate_utilities": worth,
    }
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {"weight": (storage.table.dtype, (values,))}
    for name, per in storage.optimizer.state:
        shapes[name] = torch.float32, (rows if per == "row" else values,)
    shapes["utilities"] = torch.float32, (rows, records.utilities)
    if records.masked:
        shapes["masks"] = torch.int64, (rows,)
    for name, (dtype, shape) in shapes.items():
        found[name] = Streamed(dtype, shape, lambda name=name: classes.pieces(storage, name))  # type: ignore[misc]
    return found


def _widths(storage: Storage) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """How rows differ in width, and how they will lie in the file."""
    if not isinstance(storage, NarrowStorage):
        return None, None
    records = storage.records
    width = {"chunk": records.chunk, "masked": records.masked, "utilities": records.utilities, "kind": records.kind}
    lie = SavedRows(
        storage.counts[1:], classes.candidates(storage)[0].numel(), storage.followed.numel(), records.gain,
        storage.how.purse.left,
    )  # fmt: skip
    return width, asdict(lie)


class _Cut:
    """The first rows of slabs."""

    def __init__(self, slabs: list[Tensor], rows: int) -> None:
        self.slabs, self.rows = slabs, rows

    def __call__(self) -> Iterator[Tensor]:
        left = self.rows
        for slab in self.slabs:
            yield slab[:left]
            left -= min(left, slab.shape[0])


class _Entries:
    """A directory's entries, made when they are written: ids and slots come from one listing, which is then let go."""

    def __init__(self, storage: HashedStorage) -> None:
        self.directory, self.count = storage.directory, int(storage.directory.known)
        self._listed: tuple[Tensor, Tensor] | None = None

    def ids(self) -> list[Tensor]:
        self._listed = self.directory.entries()
        return [self._listed[0]]

    def slots(self) -> list[Tensor]:
        _, slots = self._listed if self._listed is not None else self.directory.entries()
        self._listed = None
        return [slots]


def _ids(storage: Storage) -> int:
    return storage.live - int(isinstance(storage, HashedStorage) and storage.shares_rare)


def _bytes(storage: Storage) -> int:
    return sum(source.nbytes for source in _sources(storage, storage.live).values())


def _narrow_names(optimizer: Optimizer, masked: bool) -> tuple[str, ...]:
    states = (name for name, _ in optimizer.state)
    candidates = ("candidates", "candidate_places", "candidate_utilities")
    return ("weight", *states, "ids", "utilities", *(("masks",) if masked else ()), *candidates)


def _tensor_names(hashed: bool, optimizer: Optimizer) -> tuple[str, ...]:
    return ("weight", *(name for name, _ in optimizer.state), *(("ids", "slots") if hashed else ()))
