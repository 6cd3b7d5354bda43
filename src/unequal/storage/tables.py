"""One storage per table: rows, optimizer state and the directory that says where an id's row lies."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..kernels import Backend
from ..kernels.request import TableRows, capturing, mix64, slab_rows
from ..optim import Optimizer
from ..tables import Table
from .memory import zeros

RARE_SLOT = 0


def table_key(name: str, seed: int) -> int:
    """The generator key of a table: differs between tables and seeds, and is the same wherever the table is."""
    return mix64(mix64(seed) ^ zlib.crc32(name.encode()))


class Storage(ABC):
    """What dense and hashed tables share. `rows` is what the kernels see."""

    def __init__(self, table: Table, optimizer: Optimizer, seed: int, kernels: Backend, device: torch.device) -> None:
        self.table = table
        self.optimizer = optimizer
        self.kernels = kernels
        self.device = device
        self.rows = TableRows([], [[] for _ in optimizer.state], 0, optimizer, key=table_key(table.name, seed))

    def _fresh(self, ids: Tensor | None, first: int | Tensor, count: int | Tensor) -> None:
        """Fills slots [first, first + count) with the fresh rows of these ids, or of the slots' own numbers."""
        self.kernels.initialize(self.rows, ids, first, count, self.table.init_std)

    def _add_slab(self, count: int) -> None:
        self.rows.weights.append(zeros((count, self.table.dim), self.table.dtype, self.device))
        for slabs, (_, per) in zip(self.rows.states, self.optimizer.state):
            shape = (count,) if per == "row" else (count, self.table.dim)
            slabs.append(zeros(shape, torch.float32, self.device))
        self.rows.cached = None

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the tensors that `state` gives."""
        return ("weight", *(name for name, _ in self.optimizer.state))

    @abstractmethod
    def locate(self, ids: Tensor, insert: bool) -> Tensor:
        """The slot of every id; -1 where it has none. `insert`: unknown ids may get a row."""

    @property
    def live(self) -> int:
        """How many rows are in use."""
        return self.rows.rows

    def memory(self) -> dict[str, int]:
        """Bytes of live rows, of their optimizer state, and of the directory."""
        rows = self.live
        return {
            "weights": rows * self.table.dim * self.table.dtype.itemsize,
            "optimizer": rows * self.optimizer.state_bytes_per_row(self.table.dim),
            "directory": 0,
        }

    def state(self) -> dict[str, Tensor]:
        """Everything that must be saved, as plain tensors of `rows` rows."""
        return {name: self._joined(slabs) for name, slabs in zip(self.parts, (self.rows.weights, *self.rows.states))}

    def _joined(self, slabs: list[Tensor]) -> Tensor:
        return slabs[0] if len(slabs) == 1 and slabs[0].shape[0] == self.live else torch.cat(slabs)[: self.live]

    def _fill(self, state: dict[str, Tensor]) -> None:
        for name, slabs in zip(self.parts, (self.rows.weights, *self.rows.states)):
            source = state.get(name)
            expected = (self.live, *slabs[0].shape[1:])
            if source is None or tuple(source.shape) != expected or source.dtype != slabs[0].dtype:
                came = "nothing" if source is None else f"{tuple(source.shape)} {source.dtype}"
                raise CheckpointError(
                    f"table '{self.table.name}', {name}: expected {expected} {slabs[0].dtype}, got {came}; "
                    "load it with the recipe it was saved with"
                )
            first = 0
            for slab in slabs:
                part = source[first : first + slab.shape[0]]
                slab[: part.shape[0]].copy_(part)
                first += slab.shape[0]

    def load(self, state: dict[str, Tensor]) -> None:
        self._fill(state)

    def move(self, kernels: Backend, device: torch.device) -> None:
        """To another device, with everything it holds."""
        self.kernels, self.device = kernels, device
        for slabs in (self.rows.weights, *self.rows.states):
            for k, slab in enumerate(slabs):
                slabs[k] = zeros(tuple(slab.shape), slab.dtype, device).copy_(slab)
        self.rows.cached = None


class DenseStorage(Storage):
    """Ids in [0, rows): an id is its own slot, by arithmetic alone."""

    def __init__(self, table: Table, optimizer: Optimizer, seed: int, kernels: Backend, device: torch.device) -> None:
        super().__init__(table, optimizer, seed, kernels, device)
        assert table.rows is not None
        self._add_slab(table.rows)
        self.rows.rows = table.rows
        self._fill_fresh(table.rows)

    def _fill_fresh(self, rows: int) -> None:
        self._fresh(None, 0, rows)

    def locate(self, ids: Tensor, insert: bool) -> Tensor:
        return ids


class HashedStorage(Storage):
    """Unbounded 64-bit ids: a hash directory gives the slot; slabs double, so growing copies nothing.

    With admission, slot 0 is the row that ids seen too rarely share."""

    FIRST_SLAB_BYTES = 64 << 10

    def __init__(self, table: Table, optimizer: Optimizer, seed: int, kernels: Backend, device: torch.device) -> None:
        super().__init__(table, optimizer, seed, kernels, device)
        row_bytes = table.dim * table.dtype.itemsize
        self.rows.slab_log2 = max(4, (self.FIRST_SLAB_BYTES // row_bytes).bit_length() - 1)
        self.rows.strict = False
        self.shares_rare = table.admit_after > 1
        self._start()

    @property
    def parts(self) -> tuple[str, ...]:
        return (*super().parts, "ids", "slots")

    def _start(self) -> None:
        self.rows.weights.clear()
        for slabs in self.rows.states:
            slabs.clear()
        self.rows.rows = 0
        first_slot = int(self.shares_rare)
        self.directory = self._make_directory(first_slot)
        self._grow(first_slot)
        if self.shares_rare:
            rare_id = torch.tensor([-1], device=self.device)
            self._fresh(rare_id, RARE_SLOT, 1)

    def _make_directory(self, first_slot: int) -> Any:
        if self.kernels.on_device:
            return self.kernels.HashDirectory(self.table.admit_after, first_slot, device=self.device)
        return self.kernels.HashDirectory(self.table.admit_after, first_slot)

    @property
    def live(self) -> int:
        """Where the directory is on a GPU this waits for it."""
        return int(self.directory.next_slot)

    def _grow(self, rows: int) -> None:
        capacity = sum(slab.shape[0] for slab in self.rows.weights)
        while capacity < max(1, rows):
            count = slab_rows(self.rows.slab_log2, len(self.rows.weights))
            self._add_slab(count)
            capacity += count
        # On a GPU the host does not know how many rows there are, only that they all have room.
        self.rows.rows = capacity if self.kernels.on_device else rows

    def locate(self, ids: Tensor, insert: bool) -> Tensor:
        otherwise = RARE_SLOT if self.shares_rare else -1
        if not insert:
            found: Tensor = self.directory.find(ids, otherwise)
            return found
        if self.kernels.on_device:
            return self._insert_on_device(ids, otherwise)
        slots: Tensor
        slots, admitted = self.directory.insert(ids, otherwise)
        if admitted.numel():
            first = self.rows.rows
            self._grow(self.directory.next_slot)
            self._fresh(admitted, first, admitted.numel())
        return slots

    def _insert_on_device(self, ids: Tensor, otherwise: int) -> Tensor:
        """Waits for the device only where the rows might not be enough: the bound on their number counts every id as new."""
        slots: Tensor
        slots, admitted, number, first = self.directory.insert_padded(ids, otherwise)
        if self.directory.slot_bound > self.rows.rows and not capturing(self.device):
            self.directory.refresh()
            self._grow(self.directory.slot_bound)
        self._fresh(admitted, first, number)
        return slots

    def move(self, kernels: Backend, device: torch.device) -> None:
        entries, next_slot = self.directory.entries(), self.live
        super().move(kernels, device)
        self.directory = self._make_directory(int(self.shares_rare))
        self.directory.restore(*(part.to(device) for part in entries), next_slot)
        self._grow(next_slot)

    def memory(self) -> dict[str, int]:
        return {**super().memory(), "directory": self.directory.bytes}

    def state(self) -> dict[str, Tensor]:
        ids, slots = self.directory.entries()
        return {**super().state(), "ids": ids, "slots": slots}

    def load(self, state: dict[str, Tensor]) -> None:
        if "ids" not in state or "slots" not in state or "weight" not in state:
            raise CheckpointError(
                f"table '{self.table.name}' has unbounded ids, but the saved one has none; "
                "load it with the recipe it was saved with"
            )
        self.restore(state["ids"], state["slots"], state["weight"].shape[0])
        self._fill(state)

    def restore(self, ids: Tensor, slots: Tensor, rows: int) -> None:
        """Takes the place of everything held: these entries, and room for so many rows, which are still to be filled."""
        self._start()
        self._grow(rows)
        self.directory.restore(ids.to(self.device), slots.to(self.device), rows)


def make_storage(
    table: Table, optimizer: Optimizer, seed: int, kernels: Backend, device: torch.device, narrowing: Any = None
) -> Storage:
    """`narrowing`: how rows are kept as wide as they deserve; without it all are whole."""
    if narrowing is not None:
        from .narrow import NarrowStorage

        return NarrowStorage(table, optimizer, seed, kernels, device, narrowing)
    kind = HashedStorage if table.rows is None else DenseStorage
    return kind(table, optimizer, seed, kernels, device)
