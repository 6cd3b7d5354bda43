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
        return ids if self.of == 1 else ids // self.of


class HashedShard(_Columns, HashedStorage):
    """The ids of one part of a table with unbounded ids; who asks sends no others here."""

    def __init__(self, whole: Table, first: int, last: int, part: int, parts: int, *rest: Any) -> None:
        self.whole, self.first, self.part, self.of = whole, first, part, parts
        super().__init__(replace(whole, dim=last - first), *rest)


def make_shard(
    table: Table, first: int, last: int, part: int, parts: int,
    optimizer: Optimizer, seed: int, kernels: Backend, device: torch.device,
) -> DenseShard | HashedShard:  # fmt: skip
    """Columns [first, last) of the rows of one part of the table."""
    kind = HashedShard if table.rows is None else DenseShard
    return kind(table, first, last, part, parts, optimizer, seed, kernels, device)
