"""Rows of a tiered table that this rank reads without asking anybody: copies of their owners' rows, weights alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernels import Backend
from ..kernels.reference.route import part_of
from ..kernels.request import FeatureSpec, FeatureSpecs, Records, Request, TableRows
from ..optim import SGD
from ..tables import Table
from .memory import zeros
from .narrow import Narrowing

NEVER_UPDATED = SGD(lr=0.0)


class Copies:
    """Every rank knows all rows that have copies, by number: the replicated ones first, then those of nodes. It holds the
    replicated ones, and of the others those whose owner has its number in its own node."""

    def __init__(
        self, table: Table, replicated: Tensor, node: Tensor, *, rank: int, world: int, ranks_per_node: int,
        kernels: Backend, device: torch.device,
    ) -> None:  # fmt: skip
        self.table, self.kernels, self.device = table, kernels, device
        self.rank, self.world, self.ranks_per_node = rank, world, ranks_per_node
        self.cuts = (replicated.numel(), replicated.numel() + node.numel())
        self.ids = torch.cat([replicated, node]).to(device)
        """by number"""
        self.held = self._holds()
        """[numbers]: whether this rank has a copy"""
        self._start()

    def _start(self) -> None:
        """Room for what is held."""
        self.slots = torch.where(self.held, self.held.cumsum(0) - 1, -1)
        self.directory = self._make_directory()
        count = max(1, int(self.held.sum()))
        weight = zeros((count, self.table.dim), self.table.dtype, self.device)
        self.rows = TableRows([weight], [], count, NEVER_UPDATED)

    def _holds(self) -> Tensor:
        held = self.owners(self.ids) % self.ranks_per_node == self.rank % self.ranks_per_node
        held[: self.cuts[0]] = True
        return held

    def _make_directory(self) -> Any:
        kind, count = self.kernels.HashDirectory, self.ids.numel()
        directory = kind(1, 0, device=self.device) if self.kernels.on_device else kind()
        directory.restore(self.ids, torch.arange(count, device=self.device), count)
        return directory

    def rename(self, numbers: Tensor, ids: Tensor) -> None:
        """Gives some numbers other ids. Rows that stay are not moved; the values of the others are still to be written."""
        self.ids = self.ids.clone()
        self.ids[numbers] = ids
        before, self.held = self.held, self._holds()
        gone, come = before & ~self.held, (self.held & ~before).nonzero()[:, 0]
        used = torch.zeros(self.rows.rows, dtype=torch.bool, device=self.device)
        used[self.slots[before & self.held]] = True
        free = (~used).nonzero()[:, 0]
        self.slots[gone] = -1
        if free.numel() < come.numel():
            self._grow(self.rows.rows + come.numel() - free.numel())
            free = torch.cat([free, torch.arange(used.numel(), self.rows.rows, device=self.device)])
        self.slots[come] = free[: come.numel()]
        self.directory = self._make_directory()

    def _grow(self, least: int) -> None:
        """How many rows of the node tier fall to a rank changes with the ids."""
        old = self.rows.weights[0]
        count = max(least, old.shape[0] + old.shape[0] // 16)
        weight = zeros((count, self.table.dim), self.table.dtype, self.device)
        weight[: old.shape[0]] = old
        self.rows = TableRows([weight], [], count, NEVER_UPDATED)

    def owners(self, ids: Tensor) -> Tensor:
        """The rank whose row each of them is."""
        return part_of(ids, self.world, self.table.rows is None)

    @property
    def count(self) -> int:
        return self.cuts[1]

    def locate(self, ids: Tensor) -> Tensor:
        """The slot of every id's copy."""
        found: Tensor = self.slots[self.directory.find(ids)]
        return found

    def bits(self, numbers: Tensor) -> Tensor:
        """What is held of rows by number: [rows, values]."""
        return self.rows.weights[0][self.slots[numbers]]

    def write(self, numbers: Tensor, values: Tensor) -> None:
        """New values (float32) of rows by number; of those that are held here."""
        slots = self.slots[numbers]
        here = slots >= 0
        weight = self.rows.weights[0]
        weight.index_copy_(0, slots[here], values[here].to(weight.dtype))

    def memory(self) -> dict[str, int]:
        weight = self.rows.weights[0]
        known = self.ids.numel() * 8 + self.slots.numel() * 8 + self.held.numel()
        return {"copies": weight.numel() * weight.element_size(), "directory": known + int(self.directory.bytes)}


class NarrowCopies(Copies):
    """Copies of rows of different width, as narrow as these. Widths change in rounds alone, so that all ranks know them. A row
    without a value has no copy: it is asked for, and whoever reads it when it gets some reads them at once."""

    def __init__(self, table: Table, replicated: Tensor, node: Tensor, *, how: Narrowing, **rest: Any) -> None:
        self.how = how
        super().__init__(table, replicated, node, **rest)

    def _start(self) -> None:
        count = self.ids.numel()
        self.slots = torch.full((count,), -1, device=self.device)
        self.chunks = torch.zeros(count, dtype=torch.uint8, device=self.device)
        """of every row, held here or not"""
        self.masks = torch.zeros(count, dtype=torch.int64, device=self.device) if self.how.masked else None
        self.directory = self._make_directory()
        self.rows = self._make_rows(0)

    def _make_directory(self) -> Any:
        kind, live = self.kernels.HashDirectory, self.chunks.nonzero()[:, 0]
        directory = kind(1, 0, device=self.device) if self.kernels.on_device else kind()
        directory.restore(self.ids[live], live, self.ids.numel())
        return directory

    def _make_rows(self, rows: int) -> TableRows:
        per_class = rows * self.how.chunk / self.table.dim
        records = Records.make(
            self.table.dim, self.table.dtype, NEVER_UPDATED, chunk=self.how.chunk, masked=self.how.masked, by_chunk=False,
            kind=0, slab_log2=max(4, min(14, int(max(1.0, per_class / 16)).bit_length())),
        )  # fmt: skip
        records.slabs[0].append(torch.zeros(1, 1, device=self.device))
        return TableRows([], [], 0, NEVER_UPDATED, strict=False, records=records)

    def rename(self, numbers: Tensor, ids: Tensor) -> None:
        """Gives some numbers other ids; how wide their rows are, and what is in them, is still to be told."""
        self.ids = self.ids.clone()
        self.ids[numbers] = ids
        self.held = self._holds()
        self._start()

    def lay_out(self, chunks: Tensor, masks: Tensor | None) -> Tensor:
        """Rows are so wide from now on. Gives the numbers of those whose values must be written: the others keep theirs."""
        same = self.chunks == chunks
        if masks is not None and self.masks is not None:
            same &= self.masks == masks
        old, old_slots = self.rows, self.slots
        self.chunks, self.masks = chunks, masks
        self.rows = self._make_rows(int((self.held & (chunks > 0)).sum()))
        records = self.rows.records
        assert records is not None and old.records is not None
        self.slots = torch.full_like(old_slots, -1)
        size = 1 << records.slab_log2
        for k in range(1, records.chunks + 1):
            members = (self.held & (chunks == k)).nonzero()[:, 0]
            if not members.numel():
                continue
            self.slots[members] = (torch.arange(members.numel(), device=self.device) << records.class_bits) | k
            whole = zeros((members.numel(), int(records.layout[k, 5])), torch.float32, self.device)
            stays = (same[members] & (old_slots[members] >= 0)).nonzero()[:, 0]
            if stays.numel():
                places = old_slots[members[stays]] >> records.class_bits
                whole[stays] = torch.cat(old.records.slabs[k])[places]
            records.slabs[k] += whole.split(size)  # type: ignore[no-untyped-call]
        self.rows.rows = records.bound
        self.directory = self._make_directory()
        return ((chunks > 0) & ~same).nonzero()[:, 0]

    def bits(self, numbers: Tensor) -> Tensor:
        """At full width, as float32."""
        slots = self.slots[numbers]
        values = torch.zeros(numbers.numel(), self.table.dim, device=self.device)
        if numbers.numel():
            ends = torch.tensor([0, numbers.numel()], device=self.device)
            specs = FeatureSpecs([FeatureSpec("rows", 0, None, self.table.dim, 0)])
            request = Request([self.rows], specs, 1, np.zeros(1, np.int64), slots, slots, ends)
            noted = (torch.zeros(1, 2, dtype=torch.int64, device=self.device),) if self.kernels.on_device else ()
            self.kernels.lookup(request, None, [values], *noted)
        return values

    def write(self, numbers: Tensor, values: Tensor) -> None:
        self.kernels.write_rows(
            self.rows, self.slots[numbers], values, None if self.masks is None else self.masks[numbers]
        )

    def memory(self) -> dict[str, int]:
        records = self.rows.records
        assert records is not None
        held = sum(slab.nbytes for slabs in records.slabs for slab in slabs)
        known = self.ids.nbytes + self.slots.nbytes + self.held.nbytes + self.chunks.nbytes
        known += 0 if self.masks is None else self.masks.nbytes
        return {"copies": held, "directory": known + int(self.directory.bytes)}
