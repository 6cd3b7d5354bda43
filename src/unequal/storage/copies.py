"""Rows of a tiered table that this rank reads without asking anybody: copies of their owners' rows, weights alone."""

from __future__ import annotations

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
        self.set_ids(self.ids)
        count = max(1, int(self.held.sum()))
        self.rows = TableRows([zeros((count, table.dim), table.dtype, device)], [], count, NEVER_UPDATED)

    def set_ids(self, ids: Tensor) -> None:
        """Which id has which number."""
        self.ids = ids
        count = ids.numel()
        owner = self.owners(ids)
        self.held = owner % self.ranks_per_node == self.rank % self.ranks_per_node
        self.held[: self.cuts[0]] = True
        """[numbers]: whether this rank has a copy"""
        self.slots = torch.where(self.held, self.held.cumsum(0) - 1, -1)
        self.directory = (
            self.kernels.HashDirectory(1, 0, device=self.device)
            if self.kernels.on_device
            else self.kernels.HashDirectory()
        )
        self.directory.restore(ids, torch.arange(count, device=self.device), count)

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
