"""What a rank holds of a table that is spread: some of its rows, some of its columns, with the values the whole table has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..kernels import Backend
from ..kernels.request import TableRows
from ..optim import Optimizer
from ..tables import Table
from .narrow import Narrowing, NarrowStorage
from .tables import DenseStorage, HashedStorage, Storage

CHUNK = 65536
"""rows that are made at a time"""


class _Columns(Storage):
    """Columns [first, …) of a table. Fresh values depend on the column, so whole rows are made and cut."""

    whole: Table
    first: int

    def _fresh(self, ids: Tensor | None, first: int | Tensor, count: int | Tensor) -> None:
        if self.whole.dim == self.table.dim:
            super()._fresh(ids, first, count)
            return
        assert ids is not None, "the rows of a part are not numbered by their slots"
        start, columns = int(first), slice(self.first, self.first + self.table.dim)
        for chunk in ids[: int(count)].split(CHUNK):  # type: ignore[no-untyped-call]
            rows = torch.empty(chunk.numel(), self.whole.dim, dtype=self.whole.dtype, device=self.device)
            made = TableRows([rows], [], chunk.numel(), self.optimizer, key=self.rows.key)
            self.kernels.initialize(made, chunk, 0, chunk.numel(), self.whole.init_std)
            self._write(torch.arange(start, start + chunk.numel(), device=self.device), rows[:, columns])
            start += chunk.numel()

    def _write(self, slots: Tensor, values: Tensor) -> None:
        """Rows of fresh slots, which lie one after the other, slab after slab."""
        first, at = int(slots[0]) if slots.numel() else 0, 0
        for slab in self.rows.weights:
            count = max(0, min(slab.shape[0] - first, values.shape[0] - at))
            if first < slab.shape[0] and count:
                slab[first : first + count] = values[at : at + count]
                at, first = at + count, slab.shape[0]
            first -= slab.shape[0]


class DenseShard(_Columns, DenseStorage):
    """Ids part, part + parts, part + 2·parts … of a table with a fixed number of rows: id // parts is the slot."""

    def __init__(self, whole: Table, first: int, last: int, part: int, parts: int, *rest: Any) -> None:
        assert whole.rows is not None
        self.whole, self.first, self.part, self.of = whole, first, part, parts
        self.count = max(0, -(-(whole.rows - part) // parts))
        super().__init__(replace(whole, rows=max(1, self.count), dim=last - first), *rest)
        self.rows.rows = self.count

    def _fill_fresh(self, rows: int) -> None:
        for begin in range(0, self.count, CHUNK):
            count = min(CHUNK, self.count - begin)
            numbers = torch.arange(begin, begin + count, device=self.device)
            self._fresh(numbers * self.of + self.part, begin, count)

    def locate(self, ids: Tensor, insert: bool) -> Tensor:
        if self.of & (self.of - 1):
            return ids // self.of
        return ids if self.of == 1 else ids >> (self.of.bit_length() - 1)  # much faster than a division


class HashedShard(_Columns, HashedStorage):
    """The ids of one part of a table with unbounded ids; who asks sends no others here."""

    def __init__(self, whole: Table, first: int, last: int, part: int, parts: int, *rest: Any) -> None:
        self.whole, self.first, self.part, self.of = whole, first, part, parts
        super().__init__(replace(whole, dim=last - first), *rest)


class NarrowShard(NarrowStorage):
    """The rows of one part of a table, each as wide as it is. Ids are those of the whole table. Which of them get rows
    all ranks agree upon, who share one purse, before a step's ids are located."""

    def __init__(self, whole: Table, part: int, parts: int, *rest: Any) -> None:
        self.part, self.of = part, parts
        super().__init__(whole, *rest)

    def without_row(self, ids: Tensor) -> Tensor:
        """Those of the ids that have none: each once, in order."""
        found: Tensor = self.kernels.unique(ids[self.directory.find(ids) < 0])[0].sort().values
        return found

    def admit(self, ids: Tensor) -> None:
        """Gives new rows to such ids."""
        if ids.numel():
            self._admit(ids)

    def locate(self, ids: Tensor, insert: bool, out: Tensor | None = None) -> Tensor:
        ids = ids.contiguous()
        slots = torch.empty_like(ids) if out is None else out
        unfound = self.directory.find_into(ids, slots)
        if insert:
            self.how.tally.note(ids.numel(), unfound)
        if unfound and insert and self.records.kind:
            self.follow(ids, slots)
        return slots

    def chunks_of(self, slots: Tensor) -> Tensor:
        """How many chunks the rows at these slots have; 0 where there is none."""
        return torch.where(slots >= 0, slots & ((1 << self.records.class_bits) - 1), 0)

    def masks_of(self, slots: Tensor) -> Tensor:
        """Which ones, as bits."""
        records, chunks = self.records, self.chunks_of(slots)
        masks = torch.zeros_like(slots)
        for k in range(1, records.chunks + 1):
            which = (chunks == k).nonzero()[:, 0]
            if which.numel():
                first = int(records.layout[k, 4])
                words = self._read(k, slice(first, first + 2)).contiguous().view(torch.int64)[:, 0]
                masks[which] = words[slots[which] >> records.class_bits]
        return masks


def make_shard(
    table: Table, first: int, last: int, part: int, parts: int,
    optimizer: Optimizer, seed: int, kernels: Backend, device: torch.device, narrowing: Narrowing | None = None,
) -> DenseShard | HashedShard | NarrowShard:  # fmt: skip
    """Columns [first, last) of the rows of one part of the table. `narrowing`: how rows are kept as wide as they deserve."""
    if narrowing is not None:
        assert (first, last) == (0, table.dim), "rows of different width are not cut into columns"
        return NarrowShard(table, part, parts, optimizer, seed, kernels, device, narrowing)
    kind = HashedShard if table.rows is None else DenseShard
    return kind(table, first, last, part, parts, optimizer, seed, kernels, device)
