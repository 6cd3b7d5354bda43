"""Where rows are found that are all equally wide: by their numbers, which takes no memory."""

from __future__ import annotations

import torch
from torch import Tensor


class NumberedDirectory:
    """Ids part, part + of, part + 2·of … below a bound → the first, second, third row of a class. Looks to the kernels like a
    directory of live rows: what they must know of it is in its kind."""

    NUMBERED = 3
    in_order = True

    def __init__(self, bound: int, part: int, of: int, chunks: int, class_bits: int, device: torch.device) -> None:
        self.bound, self.part, self.of, self.chunks, self.class_bits = bound, part, of, chunks, class_bits
        self.kind = self.NUMBERED | class_bits << 8 | chunks << 16 | of << 32
        self.capacity = bound
        self.memory = torch.empty(0, dtype=torch.int32, device=device)
        self.used = -(-(bound - part) // of)
        self.version = 0
        self.bytes = 0

    def find(self, ids: Tensor) -> Tensor:
        """The slot of every id; -1 of those that the table does not have."""
        numbers = ids if self.of == 1 else torch.div(ids, self.of, rounding_mode="floor")
        return torch.where((ids >= 0) & (ids < self.bound), (numbers << self.class_bits) | self.chunks, -1)

    def find_into(self, ids: Tensor, slots: Tensor) -> int:
        slots.copy_(self.find(ids))
        return int((slots < 0).sum())

    def insert(self, ids: Tensor, slots: Tensor) -> None:
        """Nothing: it has all ids that there are."""

    def make_room(self, count: int) -> None:
        """Nothing, likewise."""

    def entries(self) -> tuple[Tensor, Tensor]:
        ids = torch.arange(self.part, self.bound, self.of, device=self.memory.device)
        return ids, self.find(ids)
