"""Rows of a tiered table that this rank reads without asking anybody: copies of their owners' rows, weights alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels import Backend
from ..kernels.reference.route import part_of
from ..kernels.request import TableRows
from ..optim import SGD
from ..tables import Table
from .memory import zeros

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
        self.slots = torch.where(self.held, self.held.cumsum(0) - 1, -1)
        self.directory = self._make_directory()
        count = max(1, int(self.held.sum()))
        self.rows = TableRows([zeros((count, table.dim), table.dtype, device)], [], count, NEVER_UPDATED)

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
