"""The solver: which rows of which tables get copies, so that a step costs least within the memory there is.

Every row is in one of three tiers, each with a cost and bytes of memory. What a tier gains falls with popularity, so a table's
tiers are prefixes of its rows in falling popularity: two cuts. Over all tables it is a convex allocation: rows are moved up in
falling order of gain per byte until the memory is full. That is the best there is, up to the one row at which it was full."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .tiered import Tier

Floats = npt.NDArray[np.float64]
Evaluate = Callable[[int, int], tuple[Floats, Floats]]
"""Of bins [first, last): (cost, bytes) of one row in each tier, both [bins, tiers]."""
BLOCK = 512
"""bins that are looked at first; then twice as many, and so on, as far as the price goes"""
FALL = 0.5
"""factor by which the price falls from round to round"""
EXACT = 1e-9
"""relative error of sums of bytes"""
_Partial = tuple[tuple[int, int], float]
"""from which tier to which, and how many rows of the next bin"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidates:
    """The rows of one table that may have copies."""

    rows: Floats
    """of bins, most read first"""
    evaluate: Evaluate
    limit: float = np.inf
    """rows that may have copies: no more can be named"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Where one cut lies, and what lies on either side of it, as gain per byte of a row."""

    rows: int
    """before it"""
    last: float | None
    """of the last row before it"""
    next: float | None
    """of the first row behind it; None where there is none, 0 or less where a copy would cost more than it saves"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cuts:
    """The tiers of one table."""

    replicated: Cut
    copied: Cut
    """rows with copies of either kind: what is not replicated of them is in the node tier"""
    limited: bool
    """whether there are more rows worth a copy that cannot be named"""

    @property
    def node_rows(self) -> int:
        return self.copied.rows - self.replicated.rows


@dataclass(frozen=True, slots=True)
class Allocation:
    """What the solver found."""

    tables: list[Cuts]
    price: float
    """what the next byte of memory would gain; 0 where there is no use for more"""
    gain: float
    """of all copies together"""
    memory: float
    """bytes they take of each rank"""


class _Ladder:
    """One table's rows, evaluated as far as they are asked for: at which price each is copied, and at which replicated."""

    def __init__(self, table: Candidates, tiers: Sequence[Tier]) -> None:
        ends = np.cumsum(table.rows)
        count = int(np.searchsorted(ends, table.limit)) + 1 if ends[-1] > table.limit else len(ends)
        self.rows = table.rows[:count].astype(np.float64)
        if ends[-1] > table.limit:
            self.rows = self.rows.copy()
            self.rows[-1] -= ends[count - 1] - table.limit
        self.limited = bool(ends[-1] > table.limit)
        self._evaluate, self._tiers = table.evaluate, tiers
        self.enter = self.top = np.empty(0)
        """[bins]: gain per byte at which a bin is copied at all, and at which it is replicated"""
        self._gain, self._memory = np.zeros((0, 3)), np.zeros((0, 3))
        self._sums = np.zeros((1, 3, 2))
        self.copied = self.replicated = 0
        """whole bins that are taken"""

    def _look(self) -> None:
        """Evaluates some more bins."""
        first = len(self.enter)
        last = min(len(self.rows), first + max(BLOCK, first))
        cost, memory = self._evaluate(first, last)
        gain, memory = cost[:, :1] - cost, memory - memory[:, :1]
        enter, top = _thresholds(gain, memory, self._tiers)
        # Prefixes, also where rounding or a kink of the costs has a rarer row gain a little more.
        self.enter = np.minimum.accumulate(np.concatenate([self.enter, enter]))
        self.top = np.minimum.accumulate(np.concatenate([self.top, np.minimum(top, self.enter[first:])]))
        self._gain, self._memory = np.concatenate([self._gain, gain]), np.concatenate([self._memory, memory])
        both = np.stack([gain, memory], axis=2) * self.rows[first:last, None, None]
        self._sums = np.concatenate([self._sums, self._sums[-1] + np.cumsum(both, axis=0)])

    def at(self, price: float) -> tuple[int, int]:
        """(bins copied, bins replicated) at a price: all that gain as much per byte, and more than nothing."""
        while len(self.enter) < len(self.rows) and (not len(self.enter) or self.enter[-1] >= price):
            self._look()
        return _reaching(self.enter, price), _reaching(self.top, price)

    def totals(self, copied: int, replicated: int) -> tuple[float, float]:
        """(gain, bytes) of so many bins in the two tiers."""
        own = self._sums[replicated, Tier.REPLICATED] + self._sums[copied, Tier.NODE]
        gain, memory = own - self._sums[replicated, Tier.NODE]
        return float(gain), float(memory)

    def next(self) -> float:
        """The highest price at which something more is taken; 0 where nothing is."""
        if not len(self.enter):
            self._look()
        found = [each[k] for each, k in ((self.enter, self.copied), (self.top, self.replicated)) if k < len(each)]
        while self.copied == len(self.enter) and len(self.enter) < len(self.rows):
            self._look()
            found.append(self.enter[self.copied])
        return max([0.0, *(float(price) for price in found)])

    def steps(self, copied: int, replicated: int) -> Floats:
        """[steps, 6], between where it stands and there: price, bin, from, to, gain and bytes of one row."""
        straight = np.arange(max(self.copied, self.replicated), max(self.copied, self.replicated, replicated))
        straight = straight[self.enter[straight] == self.top[straight]]
        up, into = np.arange(self.replicated, replicated), np.arange(self.copied, copied)
        found = []
        for bins, prices, below, above in (
            (np.setdiff1d(into, straight), self.enter, Tier.GLOBAL, Tier.NODE),
            (np.setdiff1d(up, straight), self.top, Tier.NODE, Tier.REPLICATED),
            (straight, self.top, Tier.GLOBAL, Tier.REPLICATED),
        ):
            gain = self._gain[bins, above] - self._gain[bins, below]
            memory = self._memory[bins, above] - self._memory[bins, below]
            tiers = [np.full(len(bins), tier) for tier in (below, above)]
            found.append(np.stack([prices[bins], bins, *tiers, gain, memory], axis=1))
        return np.concatenate(found)


def _thresholds(gain: Floats, memory: Floats, tiers: Sequence[Tier]) -> tuple[Floats, Floats]:
    """[bins] twice: from which price downwards a row of the bin has copies at all, and is replicated. It is the upper hull of the
    tiers' (bytes, gain): a tier that lies below the line between the others is never the best."""

    def ratio(gains: Floats, amounts: Floats) -> Floats:
        with np.errstate(divide="ignore", invalid="ignore"):
            found: Floats = np.where(
                gains > 0, np.where(amounts > 0, gains / amounts, np.inf), gains / np.maximum(amounts, 1)
            )
        return found

    none = np.full(len(gain), -np.inf)
    node = ratio(gain[:, Tier.NODE], memory[:, Tier.NODE]) if Tier.NODE in tiers else none
    straight = ratio(gain[:, Tier.REPLICATED], memory[:, Tier.REPLICATED]) if Tier.REPLICATED in tiers else none
    more = gain[:, Tier.REPLICATED] - gain[:, Tier.NODE], memory[:, Tier.REPLICATED] - memory[:, Tier.NODE]
    further = ratio(*more) if Tier.REPLICATED in tiers else none
    over = straight > node
    return np.where(over, straight, node), np.where(over, straight, further)


def _reaching(falling: Floats, price: float) -> int:
    """How many of the first are at least so much, and more than nothing."""
    least = max(price, np.nextafter(0.0, 1.0))
    return int(len(falling) - np.searchsorted(falling[::-1], least, side="left"))


def solve(
    tables: Sequence[Candidates], memory: float, tiers: Sequence[Tier] = (Tier.NODE, Tier.REPLICATED)
) -> Allocation:
    """The cuts of every table with the least cost in all that fit into so many bytes. `tiers`: those that there are."""
    ladders = [_Ladder(table, tiers) for table in tables]
    used, left = np.zeros(2), max(0.0, memory)
    partial: dict[int, _Partial] = {}
    price = 0.0
    waiting = [(-ladder.next(), k) for k, ladder in enumerate(ladders)]
    heapq.heapify(waiting)
    while waiting and waiting[0][0] < 0:
        price = -waiting[0][0] * (FALL if np.isfinite(waiting[0][0]) else 1.0)
        reached = []
        while waiting and -waiting[0][0] >= price:
            reached.append(heapq.heappop(waiting)[1])
        goals = {k: ladders[k].at(price) for k in reached}
        more = np.zeros(2)
        for k, goal in goals.items():
            ladder = ladders[k]
            more += np.subtract(ladder.totals(*goal), ladder.totals(ladder.copied, ladder.replicated))
        if used[1] + more[1] > left * (1 + EXACT):
            price, used = _fill(ladders, goals, used, left, partial)
            break
        used, price = used + more, 0.0
        for k, goal in goals.items():
            ladders[k].copied, ladders[k].replicated = goal
            heapq.heappush(waiting, (-ladders[k].next(), k))
    found = [_cuts(ladder, partial.get(k)) for k, ladder in enumerate(ladders)]
    return Allocation(found, price, float(used[0]), float(used[1]))


def _fill(
    ladders: Sequence[_Ladder],
    goals: dict[int, tuple[int, int]],
    used: Floats,
    left: float,
    partial: dict[int, _Partial],
) -> tuple[float, Floats]:
    """Takes single steps in falling order of their price until one does not fit, and of that as many rows as do."""
    parts = [(k, ladders[k].steps(*goal)) for k, goal in goals.items()]
    tables = np.concatenate([np.full(len(part), k) for k, part in parts])
    prices, bins, below, above, gains, bytes_ = np.concatenate([part for _, part in parts]).T
    rows = np.concatenate([ladders[k].rows[part[:, 1].astype(np.int64)] for k, part in parts])
    order = np.lexsort((above, bins, tables, -prices))
    taken = used[1] + np.cumsum((rows * bytes_)[order])
    over = taken > left * (1 + EXACT)
    count = int(over.argmax()) if over.any() else len(order)
    whole = order[:count]
    used = used + np.array([float((rows * gains)[whole].sum()), float((rows * bytes_)[whole].sum())])
    reached = np.array([(ladder.copied, ladder.replicated) for ladder in ladders]).T
    for position, moves in enumerate((below == Tier.GLOBAL, above == Tier.REPLICATED)):
        mine = whole[moves[whole]]
        np.maximum.at(reached[position], tables[mine], bins[mine].astype(np.int64) + 1)
    for ladder, (copied, replicated) in zip(ladders, reached.T):
        ladder.copied, ladder.replicated = int(copied), int(replicated)
    if count == len(order):  # they all fit but for rounding
        return float(prices[order[-1]]), used
    step = order[count]
    fitting = float(np.floor((left * (1 + EXACT) - used[1]) / bytes_[step] + EXACT))
    if fitting > 0:
        partial[int(tables[step])] = (int(below[step]), int(above[step])), fitting
        used = used + fitting * np.array([gains[step], bytes_[step]])
    return float(prices[step]), used


def _cuts(ladder: _Ladder, partial: _Partial | None) -> Cuts:
    ends = np.concatenate([[0.0], np.cumsum(ladder.rows)])
    copied, replicated = ends[ladder.copied], ends[ladder.replicated]
    into = up = 0.0
    if partial is not None:
        move, rows = partial
        into, up = rows * (move[0] == Tier.GLOBAL), rows * (move[1] == Tier.REPLICATED)

    def cut(count: float, bins: int, prices: Floats, split: bool) -> Cut:
        before = prices[bins] if split else prices[bins - 1] if bins else None
        behind = float(prices[bins]) if bins < len(prices) else None
        # Sums of fractions of rows, as sketches give them, are rounded down: a row is copied whole.
        whole = int(count + 1e-6)
        return Cut(rows=whole, last=None if before is None or not whole else float(before), next=behind)

    at_end = ladder.copied == len(ladder.rows)
    return Cuts(
        replicated=cut(replicated + up, ladder.replicated, ladder.top, up > 0),
        copied=cut(copied + into, ladder.copied, ladder.enter, into > 0),
        limited=ladder.limited and at_end,
    )
