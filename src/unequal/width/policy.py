"""What decides how wide a row is. A policy says what is followed (gradients, reads, or both; of rows or of chunks) and, given a
threshold, which chunks of a row live; the rounds find the threshold at which the budget is spent. One interface, so that policies
can be compared.

Thresholds fall, rows grow: `chosen` must not shrink a row when the threshold falls."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

from ..kernels import Backend
from .savings import assumed

GRADIENT, READS = 1, 2


SPAN = 4096.0
"""between the limits of two tables that are looked at together: more than logarithms of what rows are worth are apart"""
NOTHING = -1000.0
"""logarithm of what a row is worth of which nothing is known"""


@dataclass(slots=True)
class Rows:
    """Rows of one table, or of several of one shape, as a policy sees them."""

    utilities: Tensor
    """[rows, 1], or [rows, chunks]; what rows are worth as it is compared"""
    chunks: int
    """of a whole row"""
    values: int
    """of a chunk"""
    limits: Tensor | None = None
    """[tables, chunks], where utilities are logarithms: how much a row must be worth for a first, second … chunk, beside the
    threshold. None is below one before it"""
    table: Tensor | None = None
    """[rows]: its number, where there are several"""
    kernels: Backend | None = None
    """that finds all widths in one pass; then `table` is not made"""
    ends: list[int] = field(init=False)
    """where the rows of each table end"""

    def __post_init__(self) -> None:
        self.ends = [len(self.utilities)]

    @staticmethod
    def joined(parts: Sequence[Rows]) -> Rows:
        """Those of several tables."""
        first = parts[0]
        whole = Rows(torch.cat([part.utilities for part in parts]), first.chunks, first.values, kernels=first.kernels)
        whole.ends = list(accumulate(len(part.utilities) for part in parts))
        if first.limits is not None:
            whole.limits = torch.cat([part.limits for part in parts if part.limits is not None])
        if first.limits is not None and first.kernels is None:
            counts = torch.tensor([len(part.utilities) for part in parts], device=whole.utilities.device)
            numbers = torch.arange(len(parts), dtype=torch.int32, device=whole.utilities.device)
            whole.table = numbers.repeat_interleave(counts, output_size=len(whole.utilities))
        return whole

    def thin(self, by: int) -> Rows:
        """Every so many of them."""
        table = None if self.table is None else self.table[::by].contiguous()
        thin = Rows(self.utilities[::by].contiguous(), self.chunks, self.values, self.limits, table, self.kernels)
        thin.ends = [-(-end // by) for end in self.ends]
        return thin

    def limits_at(self, threshold: float) -> Tensor:
        """[tables, chunks], as utilities are compared with them."""
        assert self.limits is not None
        return (self.limits + math.log2(threshold * self.values)).float()


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy(ABC):
    name: ClassVar[str]
    kind: ClassVar[int]
    """of what is added up: gradients, reads, or their product"""
    masked: ClassVar[bool] = False
    """whether any chunks may live, or the first ones"""
    by_chunk: ClassVar[bool] = False
    fades: ClassVar[bool] = True
    """whether what is long ago counts less"""
    saves: ClassVar[bool] = False
    """whether it asks what the chunks of a table's rows save; see savings.py"""
    whole: ClassVar[bool] = False
    """whether rows exist wholly or not at all"""
    levels: ClassVar[bool] = False
    """whether small tables may have rows that are all equally wide, where following them would cost more than it brings"""
    inherits: ClassVar[bool] = False
    """whether new chunks of a row begin with what the optimizer knows of its others, unless Width.state says otherwise"""
    enough: float = 0.0
    """reads of a row after which half of what it seems to be worth is believed; 0: all of it, always"""
    percentile: ClassVar[float | None] = None
    """of a table's rows, in whose worth the others' is measured; None: as Width.thresholds says"""

    def measure(
        self, utilities: Tensor, chunks: int, values: int, share: float, priorities: Tensor | None = None
    ) -> Rows:
        """Rows of so many chunks of so many values, with their utilities in their table's unit, as they are compared where the
        budget is this share of all values. `priorities` [chunks]: what the first, second … chunk saves, in the table."""
        return Rows(utilities, chunks, values)

    @abstractmethod
    def chosen(self, rows: Rows, threshold: float) -> Tensor:
        """[rows] int16: how many chunks live; [rows, chunks] bool where any may. Thresholds are above 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WaterFilling(Policy):
    """The k-th chunk of a row has the priority importance^alpha × what the k-th chunks of its table's rows save; as long as that
    is not known, 1 / (2k − 1) of the first. With alpha 0 all rows of a table are equally wide, with a large one they are whole
    or not there. Importance: norms of gradients, whatever of the row exists.

    Where little is kept a first value for one more row is worth more than one more for a row that has some; with much,
    rows that are read seldom may get less. So alpha grows with the share, by little: of which rows nothing is learnt differs
    between data.

    Rows that were read a few times count with less than they seem to be worth; see evidence.py."""

    name: ClassVar[str] = "water-filling"
    kind: ClassVar[int] = GRADIENT
    saves: ClassVar[bool] = True
    levels: ClassVar[bool] = True
    inherits: ClassVar[bool] = True
    alpha: float = 0.8
    """where little is kept"""
    rise: float = 0.4
    enough: float = 50.0

    def power(self, share: float) -> float:
        """alpha, where this share of all values is kept: 0.9 at a quarter, 1 at a half."""
        return self.alpha + self.rise * share

    def measure(
        self, utilities: Tensor, chunks: int, values: int, share: float, priorities: Tensor | None = None
    ) -> Rows:
        """Logarithms, so that a row's width is found by comparing with a few limits."""
        power = self.power(share)
        if priorities is None:
            priorities = torch.from_numpy(assumed(chunks)).to(utilities.device)
        # What the first chunks of a table save counts with the importance, to the power.
        limits = -priorities.log2() - (power - 1) * priorities[0].log2()
        return Rows(utilities.log2().mul_(power).clamp_(min=NOTHING), chunks, values, limits[None])

    def chosen(self, rows: Rows, threshold: float) -> Tensor:
        limits = rows.limits_at(threshold)
        utilities = rows.utilities[:, 0]
        if rows.table is None:
            return torch.bucketize(utilities, limits[0], right=True, out_int32=True).to(torch.int16)
        # Limits of all tables one above the other, so that one search serves all rows.
        apart = SPAN * torch.arange(len(limits), dtype=torch.float64, device=limits.device)
        ordered = (limits + apart[:, None]).flatten()
        found = torch.bucketize(utilities + apart[rows.table], ordered, right=True, out_int32=True)
        return found.sub_(rows.table * rows.chunks).to(torch.int16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fiited(Policy):
    """Each chunk for itself: its reads × the norm of its gradient."""

    name: ClassVar[str] = "fiited"
    kind: ClassVar[int] = GRADIENT | READS
    masked: ClassVar[bool] = True
    by_chunk: ClassVar[bool] = True

    def chosen(self, rows: Rows, threshold: float) -> Tensor:
        return rows.utilities >= threshold


@dataclass(frozen=True, kw_only=True, slots=True)
class _WholeRows(Policy):
    whole: ClassVar[bool] = True

    def chosen(self, rows: Rows, threshold: float) -> Tensor:
        return (rows.utilities[:, 0] >= threshold).to(torch.int16) * rows.chunks


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaEmbed(_WholeRows):
    """Whole rows by reads × the norm of their gradient, tables measured by their 95th percentile."""

    name: ClassVar[str] = "adaembed"
    kind: ClassVar[int] = GRADIENT | READS
    percentile: ClassVar[float | None] = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Itep(_WholeRows):
    """Whole rows by how often they are read of late."""

    name: ClassVar[str] = "itep"
    kind: ClassVar[int] = READS


@dataclass(frozen=True, kw_only=True, slots=True)
class Frequency(_WholeRows):
    """Whole rows by how often they were ever read."""

    name: ClassVar[str] = "frequency"
    kind: ClassVar[int] = READS
    fades: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepFirst(Policy):
    """Nothing is followed or changed: rows keep the width that they got when they were new, while the budget lasts."""

    name: ClassVar[str] = "none"
    kind: ClassVar[int] = 0

    def chosen(self, rows: Rows, threshold: float) -> Tensor:
        raise AssertionError("there are no rounds")


POLICIES: dict[str, Callable[[], Policy]] = {
    kind.name: kind for kind in (WaterFilling, Fiited, AdaEmbed, Itep, Frequency, KeepFirst)
}


def policy_of(name: str) -> Policy:
    return POLICIES[name]()
