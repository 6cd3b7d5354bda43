"""How much is known of a row. What rows are worth is counted from what training has shown of them, and of a row that was read a
few times that is chance above all: what it would learn holds for those reads and not for the next ones. So a row counts with the
share n / (n + enough) of what it seems to be worth, n being how often it was read.

Nobody counts the reads of every row: of all that its table was read, a row has about the same share as of what all of the
table's rows seem to be worth. Then n / (n + enough) is worth / (worth + doubt), with one number, the doubt, for each table. It
takes tables of which all ids are followed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..storage.tally import Tally
from .measures import Totals, rounded
from .savings import Savings


@dataclass(slots=True)
class Reads:
    """How often each table was read in training."""

    tallies: Mapping[str, Tally]
    asked: dict[str, int] | None = None
    """many ranks: how often this one's samples did, by table, as the tallies of what others ask for do not say it"""
    before: dict[str, float] | None = None
    """this rank's part of what there was when rows were loaded; None where it is not known, and all is believed from then on"""
    seen: dict[str, int] = field(default_factory=dict)
    """of this rank's own by then"""

    def note(self, tables: Sequence[str], counts: Sequence[int]) -> None:
        """This rank's samples read these tables as often."""
        assert self.asked is not None
        for name, count in zip(tables, counts):
            self.asked[name] += count

    def _own(self) -> dict[str, int]:
        if self.asked is not None:
            return dict(self.asked)
        return dict(zip(self.tallies, Tally.reads_of(list(self.tallies.values()))))

    def counted(self) -> dict[str, float] | None:
        """This rank's part of all so far; ranks' parts add up."""
        before = self.before
        return None if before is None else {n: before[n] + own - self.seen[n] for n, own in self._own().items()}

    def load(self, part: Mapping[str, float] | None) -> None:
        """Goes on from there."""
        self.seen = self._own()
        self.before = dict(part) if part is not None and part.keys() == self.tallies.keys() else None

    @staticmethod
    def together(parts: Sequence[Mapping[str, float] | None]) -> dict[str, float] | None:
        """Of all ranks."""
        known = [part for part in parts if part is not None]
        if not known or len(known) < len(parts):
            return None
        return {name: sum(part[name] for part in known) for name in known[0]}


def shown_together(parts: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """What training has shown of the tables, from what all ranks have of it."""
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    savings = [part["savings"] for part in known]
    return {
        "reads": Reads.together([part["reads"] for part in known]),
        "savings": None if savings[0] is None else Savings.together(savings),
        "rates": known[0].get("rates"),
    }


def part_of_shown(shown: Mapping[str, Any] | None, rank: int, ranks: int) -> dict[str, Any] | None:
    """A rank's part of it."""
    if shown is None:
        return None
    savings = shown["savings"]
    return {
        "reads": divided(shown["reads"], ranks),
        "savings": None if savings is None else Savings.part(savings, rank),
        "rates": shown.get("rates"),
    }


def divided(reads: Mapping[str, float] | None, ranks: int) -> dict[str, float] | None:
    """A rank's part of what is known of all."""
    return None if reads is None else {name: count / ranks for name, count in reads.items()}


def doubts(
    tables: Sequence[str],
    reads: Reads,
    enough: float,
    utilities: Mapping[str, Tensor],
    whole: Collection[str],
    totals: Totals,
) -> dict[str, float]:
    """Of each table, what a row must seem to be worth to count with half of it: so much has one that was read `enough` times; 0
    where nothing was read. `utilities`: of those that this rank has a part of; `whole`: of which it follows all of its ids.

    Nothing where it is not known how often rows were read, or some ids of any table are not followed: then those that are seem to
    have been read more often than they were, and would be believed more than rows of other tables."""
    if reads.before is None:
        return {}
    here = [name for name in tables if name in utilities]
    numbers, lacking = np.zeros((2, len(tables))), any(name not in whole for name in here)
    counted = None if lacking else reads.counted()  # a device is waited for only where it matters
    if counted is not None:
        sums = [utilities[name].sum(dtype=torch.float64) for name in here]
        own = dict(zip(here, torch.stack(sums).tolist() if sums else ()))
        numbers = np.array([[own.get(name, 0.0) for name in tables], [counted[name] for name in tables]])
    *together, ranks_lacking = totals(np.append(numbers.ravel(), float(lacking))).tolist()
    if ranks_lacking:
        return {}
    worth, count = together[: len(tables)], together[len(tables) :]
    return {name: rounded(enough * of / n) if n else 0.0 for name, of, n in zip(tables, worth, count)}


def believed(utilities: Tensor, doubt: float) -> Tensor:
    """What rows count with."""
    return utilities * (utilities / (utilities + doubt)) if doubt > 0 else utilities
