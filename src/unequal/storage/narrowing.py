"""How a table's rows are kept as wide as they deserve: what is decided before the first step, and what a round looks at."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..kernels.request import Records
from .tally import Tally


@dataclass(slots=True)
class Purse:
    """Values that tables which share a budget may still take up before the next round."""

    left: float = 0.0
    early: bool = False
    """whether there has been no round yet"""

    def take(self, wanted: int, each: int) -> int:
        """For how many of so many rows there is enough; it is taken."""
        rows = max(0, min(wanted, int(self.left // each)))
        self.left -= rows * each
        return rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Narrowing:
    """How a table's rows are kept and followed."""

    chunk: int
    masked: bool
    """whether any chunks may be live, or only the first ones"""
    by_chunk: bool
    """whether each chunk's utility is followed, or each row's"""
    kind: int
    """of utilities; see Records"""
    start: int
    """chunks of a row that is new, once there are rounds"""
    rows: float
    """expected to be live, about: slabs and candidates are sized by it"""
    candidates: int
    decay: float
    """of utilities, per step"""
    uniform: bool = False
    """whether all rows are there and as wide as new ones, for good: nothing is followed, and rows are found by their numbers"""
    by_id: bool = False
    """whether every id has its place among the candidates; otherwise so many are followed as there are, and found by hashing"""
    early: int = 0
    """chunks of a row that is new before the first round, where that is more than `start`"""
    inherit: float = 0.0
    """squares of gradients of regained values begin as such a share of the largest of the row's others; an average over the row
    counts them with as much"""
    purse: Purse = field(default_factory=Purse)
    tally: Tally = field(default_factory=Tally)

    @property
    def in_directory(self) -> bool:
        """Whether the directory holds what candidates are worth, too: one word for each id, see FollowedDirectory."""
        return self.by_id and not self.by_chunk

    @property
    def begins(self) -> int:
        """Chunks of a row that is made now."""
        return self._begins(self.purse.early)

    @property
    def takes(self) -> int:
        """Values of a row that is made now."""
        return self.takes_when(self.purse.early)

    def takes_when(self, early: bool) -> int:
        """The same before the first round, or after it."""
        return self._begins(early) * self.chunk

    def _begins(self, early: bool) -> int:
        return max(self.start, self.early) if early else self.start


@dataclass(slots=True)
class Census:
    """All rows of a table that a round decides on: live ones first, then candidates."""

    ids: Tensor
    slots: Tensor
    utilities: Tensor
    """[rows, 1 or chunks]"""
    masks: Tensor | None
    """of live chunks, as bits"""
    live: int

    def chunks(self, records: Records) -> Tensor:
        """int16: there is one for every row of all tables while a round decides"""
        low = self.slots.contiguous().view(torch.int16)[::4]  # of each slot's four parts: no slots are made on the way
        return low & ((1 << records.class_bits) - 1)
