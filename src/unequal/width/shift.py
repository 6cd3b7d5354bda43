"""Popularity that shifts. Ids that have become popular have no row, and would wait for one until the next round: so the share of
ids without a row is watched, and where it is far above what is usual, rounds come as densely as at the start of training.

It is looked at in windows, of which an interval between rounds has 16. All ranks see the same sums, and decide alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..storage.tally import Tally

WINDOWS = 16
"""in an interval; shorter intervals are not watched: the next round is near"""
ODDS, LEAST = 1.5, 0.01
"""how many times as high the odds that an id has no row must be as they usually are, and by how much more: a share of ids"""
DEVIATIONS = 5.0
"""of a window's share, by which it must be above what is usual"""
ALLOWED = 2.0
"""deviations by which it must be above what rounds have changed before"""
KNOWN = 4
"""windows before anything is unusual"""
WEIGHT = 0.25
"""of a window in what is usual after it"""


@dataclass(slots=True)
class Usual:
    """What share of the ids of tables that share a budget has no row."""

    share: float = 0.0
    variance: float = 0.0
    """of windows' shares"""
    windows: int = 0
    """that it is known from"""
    reads: float = 0.0
    """of this window, before it was loaded: on all ranks together"""
    unfound: float = 0.0
    last: float = 0.0
    """of the last window"""
    jump: float = 0.0
    """by how much more it was after rounds than before them: the most of the last ones"""
    allowed: float = 0.0
    """by how much more it may be, now that a round has dropped rows"""
    is_after_round: bool = False

    def exceeded(self, share: float, reads: float) -> bool:
        """Whether a window of so many reads is far above it."""
        if self.windows < KNOWN or self.share >= 1:
            return False
        # Counts vary by chance, and by more than that where reads of a batch are alike.
        chance = max(self.share * (1 - self.share), share * (1 - share)) / reads
        odds = ODDS * self.share / (1 - self.share)
        deviation = math.sqrt(chance + self.variance)
        allowed = self.allowed + ALLOWED * deviation if self.allowed else 0.0
        above = max(DEVIATIONS * deviation, odds / (1 + odds) - self.share + LEAST, allowed)
        return share > self.share + above

    def note(self, share: float, shifted: bool) -> None:
        """A window's, whether or not anything is to be noticed yet."""
        if self.is_after_round and not shifted:
            self.jump = max(share - self.last, self.jump / 2)
        self.last, self.is_after_round = share, False

    def learn(self, share: float) -> None:
        weight = max(WEIGHT, 1 / (self.windows + 1))
        apart = share - self.share
        self.share += weight * apart
        if self.windows:
            self.variance = (1 - weight) * (self.variance + weight * apart**2)
        self.windows += 1
        self.allowed *= 1 - WEIGHT

    def forget(self) -> None:
        self.share = self.variance = self.allowed = 0.0
        self.windows = 0


@dataclass(slots=True)
class Shifts:
    """When popularity shifts, for all budgets of a module. `settled`: steps after which it can be known what is usual."""

    every: int
    settled: int
    tallies: Mapping[str, Sequence[Tally]]
    """of the tables of each budget"""
    usual: dict[str, Usual] = field(init=False)
    seen: dict[str, tuple[int, int]] = field(init=False)
    """of this rank's tallies, before the window that is not yet over"""
    since: int | None = None
    """the step as if at which training had begun when popularity last shifted"""

    def __post_init__(self) -> None:
        self.usual = {name: Usual() for name in self.tallies}
        self.seen = {name: Tally.sums(tallies) for name, tallies in self.tallies.items()}

    def _counted(self, name: str) -> tuple[int, int]:
        """Reads of this window on this rank, and how many found no row."""
        (reads, unfound), (reads_before, unfound_before) = Tally.sums(self.tallies[name]), self.seen[name]
        return reads - reads_before, unfound - unfound_before

    def ends_window(self, step: int) -> bool:
        return self.every >= WINDOWS and step % (self.every // WINDOWS) == 0

    def look(self, step: int, total: Callable[[float], float], spent: Callable[[int], bool]) -> bool:
        """At the end of a window: whether popularity has shifted in it. `spent`: whether a budget has nothing left for new rows;
        where it has, ids that are popular get one anyway."""
        shifted = False
        knows = step >= self.settled and (self.since is None or step - self.since >= self.every)
        for number, name in enumerate(self.tallies):
            usual = self.usual[name]
            own = self._counted(name)
            reads, unfound = usual.reads + total(float(own[0])), usual.unfound + total(float(own[1]))
            usual.reads = usual.unfound = 0.0
            self.seen[name] = self.seen[name][0] + own[0], self.seen[name][1] + own[1]
            if not reads:
                continue
            exceeded = False
            if knows and spent(number):
                exceeded = usual.exceeded(unfound / reads, reads)
                usual.learn(unfound / reads)
            usual.note(unfound / reads, exceeded)
            shifted |= exceeded
        if shifted:
            self.since = step - max(1, self.every >> 5)
            for usual in self.usual.values():
                usual.forget()
        return shifted

    def after_round(self) -> None:
        """Rows have come and gone: as much as they have changed the share of ids without one before, they may again."""
        for usual in self.usual.values():
            usual.allowed, usual.is_after_round = usual.jump, True

    def state(self) -> dict[str, Any]:
        """What is to be saved, as far as this rank knows it: `together` makes one of all ranks'."""
        counted = {name: self._counted(name) for name in self.tallies}
        return {
            "since": self.since,
            "usual": {name: asdict(usual) for name, usual in self.usual.items()},
            "counted": counted,
        }

    @staticmethod
    def together(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What all ranks know alike, and the counts of all of them."""
        usual = {name: dict(known) for name, known in states[0]["usual"].items()}
        for name, known in usual.items():
            for number, what in enumerate(("reads", "unfound")):
                known[what] += sum(state["counted"][name][number] for state in states)
        return {"since": states[0]["since"], "usual": usual}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """`state`: as `together` gives it. Of budgets that it does not have nothing is known."""
        self.seen = {name: Tally.sums(tallies) for name, tallies in self.tallies.items()}
        known = {} if state is None else state["usual"]
        self.since = None if state is None else state["since"]
        self.usual = {name: Usual(**known[name]) if name in known else Usual() for name in self.tallies}
