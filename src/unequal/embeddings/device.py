"""What a module on a GPU keeps there so that a step waits for nothing: the clock its updates read, and the note of a wrong id."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import UserError
from ..kernels.request import capturing
from ..optim import Optimizer
from ..tables import Table

CHECK_EVERY = 32
"""lookups between two looks at the note of wrong ids"""


class DeviceSide:
    """The kernels read the step from here and advance it, so that a captured step counts on when it is replayed."""

    def __init__(self, device: torch.device, features: int) -> None:
        self.device = device
        self.clock = torch.tensor([0.0, 1.0], dtype=torch.float64).to(device)
        """step, factor of the learning rate"""
        self.wrong = torch.zeros(features, 2, dtype=torch.int64, device=device)
        """per feature whether its table lacked an id, and which"""
        self.captured = False
        self._factor = 1.0
        self._lookups = 0
        self._copy = torch.zeros(features, 2, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._arrival: torch.cuda.Event | None = None

    def __getstate__(self) -> dict[str, Any]:
        """An event can be neither copied nor saved; without it the next look at the note starts afresh."""
        return {**self.__dict__, "_arrival": None}

    def set_step(self, step: int) -> None:
        self.clock[0] = step

    def set_factor(self, factor: float) -> None:
        if factor != self._factor:
            self.clock[1:].fill_(factor)
            self._factor = factor

    def wrong_id(self, wait: bool) -> tuple[int, int] | None:
        """(feature, id) of an id that a table did not hold. Unless it may wait, this looks now and then,
        at a copy that was on its way since the last time."""
        if capturing(self.device):
            return None
        self._lookups += 1
        if not wait and self._lookups % CHECK_EVERY:
            return None
        if wait or self.device.type != "cuda":
            self._copy.copy_(self.wrong)
        elif self._arrival is not None and not self._arrival.query():  # type: ignore[no-untyped-call]
            return None
        for feature, (found, id_) in enumerate(self._copy.tolist()):
            if found:
                self.wrong.zero_()
                self._copy.zero_()
                return feature, id_
        if self.device.type == "cuda" and not wait:
            self._copy.copy_(self.wrong, non_blocking=True)
            self._arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrival.record()
        return None


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB"


def bytes_of(table: Table, optimizer: Optimizer) -> int:
    """Weights and optimizer state of a table with a fixed number of rows."""
    return (table.rows or 0) * (table.dim * table.dtype.itemsize + optimizer.state_bytes_per_row(table.dim))


def out_of_memory(device: torch.device, sizes: Mapping[str, tuple[Table, int]], what: str) -> UserError:
    """What was asked, what is free, and what can be done about which tables."""
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    largest = sorted(sizes.items(), key=lambda item: -item[1][1])[:5]
    asked = sum(size for _, size in sizes.values())
    lines = []
    for name, (table, size) in largest:
        narrow = (table.rows or 0) * table.dim * 2 if table.dtype == torch.float32 else 0
        hint = f", float16 would save {gigabytes(narrow)}" if narrow else ""
        lines.append(
            f"'{name}' {gigabytes(size)} ({table.rows or 'unbounded'} × {table.dim} {str(table.dtype)[6:]}{hint})"
        )
    ranks = max(2, -(-asked // max(1, int(total * 0.8))))
    return UserError(
        f"out of memory on {device} {what}: the tables take {gigabytes(asked)}, and {gigabytes(free)} of "
        f"{gigabytes(total)} are free; "
        f'largest tables: {"; ".join(lines)}. Narrow them (smaller dim, float16 rows: dtype = "fp16" in a recipe, an optimizer '
        f"with one state per row), move them to the CPU (--device cpu), or shard them over {ranks} or more GPUs"
    )
