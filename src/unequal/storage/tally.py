"""How many ids of training batches had a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Tally:
    """Ids of a table that were looked up to be trained on, as often as they were, and how many of them had no row."""

    reads: int = 0
    unfound: int = 0
    counter: Tensor | None = None
    """the same two on a device, where kernels add to them: they are waited for when they are read"""

    def note(self, reads: int, unfound: int) -> None:
        self.reads += reads
        self.unfound += unfound

    def count_on(self, device: torch.device) -> None:
        """From now on there."""
        self.note(*_on_devices([self]))
        self.counter = torch.zeros(2, dtype=torch.int64, device=device)

    @staticmethod
    def sums(tallies: Sequence[Tally]) -> tuple[int, int]:
        """Reads, and how many found no row, of all of them."""
        reads, unfound = _on_devices(tallies)
        return reads + sum(tally.reads for tally in tallies), unfound + sum(tally.unfound for tally in tallies)

    @staticmethod
    def reads_of(tallies: Sequence[Tally]) -> list[int]:
        """Of each of them."""
        counters = [tally.counter for tally in tallies if tally.counter is not None]
        counted = iter(torch.stack(counters)[:, 0].tolist() if counters else ())  # one wait for all
        return [tally.reads + (0 if tally.counter is None else next(counted)) for tally in tallies]


def _on_devices(tallies: Sequence[Tally]) -> tuple[int, int]:
    counters = [tally.counter for tally in tallies if tally.counter is not None]
    if not counters:
        return 0, 0
    reads, unfound = torch.stack(counters).sum(0).tolist()  # one wait for all
    return reads, unfound
