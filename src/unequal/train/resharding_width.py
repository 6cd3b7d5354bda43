"""Fills a table whose rows differ in width from a checkpoint: rows by their ids, a class at a time, a few MiB at a time.

Where one saved shard is the source, and chunks and utilities are the same, all goes on bitwise. Otherwise rows keep their values,
their state and what they are worth, and lie elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..kernels.request import Records
from ..plan.placement import Shard, part_of
from ..storage.classes import Filling
from ..storage.narrow import NarrowStorage
from .saved import OpenFiles, OtherTables, SavedShard, SavedTable
from .saved_width import NarrowReader, SavedClass, spread_masks

CHUNK = 16 << 20
"""bytes of rows that are read at a time"""
BY_GRADIENT = 1
"""of the kinds of utilities those that hold norms: a row's is the root of the sum of its chunks' squares"""


def fill_narrow(
    table: SavedTable, sources: list[SavedShard], shard: Shard, storage: NarrowStorage, files: OpenFiles
) -> bool:
    """Returns whether the table goes on exactly as it was."""
    filling = _Fill(table, sources, shard, storage, files)
    filling.check()
    filling.run()
    return filling.exact


class _Fill:
    def __init__(
        self, table: SavedTable, sources: list[SavedShard], shard: Shard, storage: NarrowStorage, files: OpenFiles
    ) -> None:
        assert table.width is not None
        self.table, self.sources, self.shard, self.storage, self.files = table, sources, shard, storage, files
        self.how, self.records = table.width, storage.records
        self.same_chunks = self.how.chunk == self.records.chunk and self.how.masked == self.records.masked
        self.exact = (
            self.same_chunks
            and self.how.utilities == self.records.utilities
            and [source.parts for source in sources] == [shard.parts]
            and sources[0].width is not None
            and sources[0].width.places == storage.followed.numel()
        )

    def check(self) -> None:
        """Raises where rows cannot have the chunks that the storage keeps."""
        if self.how.kind != self.records.kind:
            raise OtherTables(
                f"{self.files.path}: table '{self.table.name}': what its rows are worth was counted in another way; "
                "load it with the width.policy and width.budget it was saved with"
            )
        for source in self.sources:
            for of in self._reader(source).classes:
                if of.width % self.records.chunk:
                    raise self._other_chunks(f"a row of {of.width} values")

    def _other_chunks(self, what: str) -> OtherTables:
        return OtherTables(
            f"{self.files.path}: table '{self.table.name}': expected rows of whole chunks of {self.records.chunk} values, got "
            f"{what}, saved in chunks of {self.how.chunk}{' of any columns' if self.how.masked else ''}; load it with the "
            "width.chunk and width.policy it was saved with"
        )

    def _reader(self, source: SavedShard) -> NarrowReader:
        return NarrowReader(self.table, source, self.files)

    def _is_mine(self, ids: Tensor) -> Tensor:
        return part_of(ids, self.shard.parts, self.table.hashed) == self.shard.part

    def run(self) -> None:
        found = [self.files[source.file].read(source.tensors["ids"]) for source in self.sources]
        mine = [self._is_mine(ids) for ids in found]
        counts = [0] * (self.records.chunks + 1)
        for source, chosen in zip(self.sources, mine):
            for of in self._reader(source).classes:
                counts[of.width // self.records.chunk] += int(chosen[of.first : of.last].sum())
        filling = Filling(self.storage, counts)
        for source, ids, chosen in zip(self.sources, found, mine):
            reader = self._reader(source)
            for of in reader.classes:
                for first, last in self._spans(of):
                    rows = chosen[first:last]
                    parts = {name: part[rows] for name, part in self._read(reader, of, first, last).items()}
                    filling.add(of.width // self.records.chunk, ids[first:last][rows], parts)
        self._finish(filling)

    def _spans(self, of: SavedClass) -> Iterator[tuple[int, int]]:
        at_once = max(1, CHUNK // (of.width * 4))
        for first in range(of.first, of.last, at_once):
            yield first, min(first + at_once, of.last)

    def _read(self, reader: NarrowReader, of: SavedClass, first: int, last: int) -> dict[str, Tensor]:
        file, names = reader.file, reader.shard.tensors
        parts = {"weight": reader.values("weight", of, first, last)}
        for name, per in self.table.state.items():
            if per == "row":
                parts[name] = file.read(names[name], first, last)
            else:
                parts[name] = reader.values(name, of, first, last)
        parts["utilities"] = self._worth(file.read(names["utilities"], first, last), reader.shard)
        masks = file.read(names["masks"], first, last) if self.how.masked else None
        if self.records.masked or masks is not None:
            masks = self._masks(masks, of.width, last - first)
        if self.records.masked:
            assert masks is not None
            parts["masks"] = masks
        return parts

    def _masks(self, masks: Tensor | None, width: int, rows: int) -> Tensor:
        """Bits of the chunks that the storage keeps. Without masks the first ones are live."""
        if self.same_chunks and masks is not None:
            return masks
        records = self.records
        if masks is None:
            live = (torch.arange(records.dim) < width).expand(rows, -1)
        else:
            live = spread_masks(masks, records.dim // self.how.chunk, self.how.chunk)
        by_chunk = live.reshape(rows, records.chunks, records.chunk)
        if bool((by_chunk.any(2) != by_chunk.all(2)).any()):
            raise self._other_chunks("a row with a part of one")
        if not records.masked and not bool(live[:, :width].all()):
            raise self._other_chunks("a row without its first ones")
        bits: Tensor = (by_chunk.all(2).long() << torch.arange(records.chunks)).sum(1)
        return bits

    def _worth(self, utilities: Tensor, source: SavedShard) -> Tensor:
        """Utilities in today's measure, of the row or of its chunks, as the storage counts them."""
        if self.exact:
            return utilities
        assert source.width is not None
        return converted(utilities * (1 / source.width.gain), self.records)

    def _finish(self, filling: Filling) -> None:
        found = []
        for source in self.sources:
            file, names = self.files[source.file], source.tensors
            ids = file.read(names["candidates"])
            mine = self._is_mine(ids)
            found.append((ids[mine], self._worth(file.read(names["candidate_utilities"]), source)[mine]))
        ids, utilities = torch.cat([ids for ids, _ in found]), torch.cat([worth for _, worth in found])
        if self.exact:
            source = self.sources[0]
            assert source.width is not None
            places = self.files[source.file].read(source.tensors["candidate_places"])
            filling.finish(ids, places, utilities, source.width.gain)
        else:
            filling.finish(ids, None, utilities, 1.0)


def converted(utilities: Tensor, records: Records) -> Tensor:
    """Of the row, or of other chunks, to those that the records keep."""
    had, wanted = utilities.shape[1], records.utilities
    if had == wanted:
        return utilities
    norms = records.kind & BY_GRADIENT > 0
    if had % wanted:  # neither fits into the other, unless it is the row's that is divided
        if had > 1 and wanted % had:
            utilities = utilities.norm(dim=1, keepdim=True) if norms else utilities.amax(1, keepdim=True)
            had = 1
        times = wanted // had
        return utilities.repeat_interleave(times, 1) / (math.sqrt(times) if norms else 1)
    together = utilities.view(-1, wanted, had // wanted)
    return together.norm(dim=2) if norms else together.amax(2)
