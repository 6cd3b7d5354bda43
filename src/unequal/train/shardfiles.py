"""What each rank writes of the tables: which shards are its own to write, and their rows slab by slab, never joined."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..optim import Optimizer
from ..storage import HashedStorage, Storage
from ..tensorfile import Source, Streamed
from .resharding import Tables, optimizer_of
from .saved import SavedShard, SavedTable, file_name

Listed = list[Any]
"""A shard for other ranks to read: table, first, last, part, parts, rows, ids, bytes."""


def list_shards(embeddings: Tables) -> list[Listed]:
    """What this rank holds."""
    return [
        [shard.table, shard.first, shard.last, shard.part, shard.parts, storage.live, _ids(storage), _bytes(storage)]
        for shard, storage in embeddings.shard_storages()
    ]


def assign(embeddings: Tables, listed: list[list[Listed]], kinds: dict[str, str]) -> dict[str, SavedTable]:
    """Who writes what, from what every rank holds. A shard that several hold is written once, by the one with least to write."""
    holders: dict[tuple[Any, ...], list[int]] = {}
    contents: dict[tuple[Any, ...], Listed] = {}
    for rank, shards in enumerate(listed):
        for shard in shards:
            holders.setdefault(tuple(shard[:5]), []).append(rank)
            contents.setdefault(tuple(shard[:5]), shard)
    load = [0] * len(listed)
    written: dict[str, list[SavedShard]] = {name: [] for name in embeddings.tables}
    for key in sorted(contents, key=lambda key: (len(holders[key]) > 1, -contents[key][7])):
        table, first, last, part, parts, rows, ids, size = contents[key]
        rank = min(holders[key], key=load.__getitem__)
        load[rank] += size
        names = _tensor_names(embeddings.tables[table].rows is None, optimizer_of(embeddings, table))
        where = f"tables/{table}/columns-{first}-{last}/part-{part}-of-{parts}"
        tensors = {name: f"{where}/{name}" for name in names}
        written[table].append(SavedShard(file_name(rank), first, last, part, parts, rows, ids, tensors))
    tables = {}
    for name, table in embeddings.tables.items():
        optimizer = optimizer_of(embeddings, name)
        ordered = tuple(sorted(written[name], key=lambda shard: (shard.first, shard.part)))
        tables[name] = SavedTable(
            name,
            sum(shard.ids for shard in ordered if shard.first == 0),
            table.dim,
            table.dtype,
            table.rows is None,
            table.admit_after,
            type(optimizer).__name__,
            dict(optimizer.state),
            kinds.get(name),
            ordered,
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
    found: dict[str, Source] = {}
    if isinstance(storage, HashedStorage):
        entries = _Entries(storage)
        found["ids"] = Streamed(torch.int64, (entries.count,), entries.ids)
        found["slots"] = Streamed(torch.int64, (entries.count,), entries.slots)
    for name, slabs in zip(storage.parts, (storage.rows.weights, *storage.rows.states)):
        found[name] = Streamed(slabs[0].dtype, (rows, *slabs[0].shape[1:]), _Cut(slabs, rows))
    return found


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


def _tensor_names(hashed: bool, optimizer: Optimizer) -> tuple[str, ...]:
    return ("weight", *(name for name, _ in optimizer.state), *(("ids", "slots") if hashed else ()))
