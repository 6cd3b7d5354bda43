"""Rounds: what rows are worth is counted, the threshold at which the budget is spent is found, and rows change their width."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from ..errors import RecipeError
from ..kernels.request import WAYS
from ..optim import Optimizer
from ..storage.memory import give_back_freed
from ..storage.narrow import Narrowing, NarrowStorage, Purse
from ..tables import Table
from .config import Budget, Width
from .measures import Totals, alone_in_all, means, percentiles
from .parts import Part, changes_of, choose_all, listed, samples_of
from .policy import Policy, policy_of
from .shift import Shifts
from .threshold import Sum, threshold_of

MARGIN = 0.05
"""by which growth is cut more than it must be: which rows grow is decided by draw"""
CUTS = 8
"""tries to find how much of it fits, where that is not enough: some rows grow by more than others"""
FOLLOWED = 8192
"""ids without a row that are followed at least, where there are so many"""
FOLLOWING = 0.1
"""of a budget in bytes, for candidates that are found by hashing"""
FOLLOWING_ALL = 0.25
"""of such a budget, where every id of a small table has its own place"""
OVERHEAD = 24
"""bytes beside values and optimizer state that a live row takes, about: its place in the directory, and its utility"""

SPARE = 0.005
"""of a budget in bytes, for the room that slabs have to spare while rows are added between rounds"""
SMALL = 4 * FOLLOWED
"""rows of a table that can be followed wholly for what FOLLOWED candidates take that are found by hashing"""
FOLLOWED_ROW = 12
"""bytes beside values and optimizer state that a row of a small table takes: directory, candidate, utility"""
PAYS = 0.7
"""share of bytes for these above which rows that are all equally wide do better (docs/width.md)"""

Made = TypeVar("Made")


def alone(value: float) -> float:
    """The sum over all ranks, where there is one."""
    return value


@dataclass(frozen=True, slots=True)
class RoundReport:
    """What a round did."""

    step: int
    rows: int
    """live"""
    values: int
    full: float
    """values of all rows at full width, where that is known; otherwise 0"""
    pruned: int
    """values that went"""
    regained: int
    failed: str = ""
    shifted: bool = False
    """whether it came because popularity has shifted"""

    @property
    def kept(self) -> float:
        return self.values / self.full if self.full else float("nan")


@dataclass(slots=True)
class Group:
    """Tables that share a budget."""

    name: str
    budget: Budget
    tables: list[str]
    full: float
    """values of all rows at full width; 0 where ids are unbounded"""
    purse: Purse = field(default_factory=Purse)
    uniform: dict[str, int] = field(default_factory=dict)
    """of tables whose rows are all equally wide: their chunks. All of the group, or none"""

    def values(self, storages: Mapping[str, NarrowStorage], total: Sum = alone) -> float:
        """The budget in values, given how the live rows are: a size in bytes covers all that they take."""
        if self.budget.share is not None:
            return self.budget.share * self.full
        assert self.budget.size is not None
        parts = [storages[name] for name in self.tables if name in storages]
        held = total(float(sum(sum(storage.memory().values()) for storage in parts)))
        values = total(float(sum(storage.values for storage in parts)))
        return self.budget.size * (1 - SPARE) * values / held if values else 0.0


class Rounds:
    """The widths of a module's tables. `total`: sums a number over all ranks, which all call it as often; `ranks`: how many there
    are; `shares`: by table which part of its rows this one has, by default an equal one; `totals`: sums many numbers. All ranks'
    purses are one: what is taken from it on any of them is taken on all."""

    def __init__(
        self,
        width: Width,
        tables: Mapping[str, Table],
        optimizers: Mapping[str, Optimizer],
        total: Sum = alone,
        ranks: int = 1,
        shares: Mapping[str, float] | None = None,
        totals: Totals = alone_in_all,
    ) -> None:
        self.width, self.tables, self.total, self.ranks = width, dict(tables), total, ranks
        self.totals, self.optimizers = totals, dict(optimizers)
        self.shares = dict.fromkeys(tables, 1 / ranks) if shares is None else dict(shares)
        self.policy: Policy = policy_of(width.policy)
        unknown = [name for name in width.tables if name not in tables]
        if unknown:
            raise RecipeError("width tables", f"tables of the model: {', '.join(tables)}", unknown[0])
        self.groups = self._group()
        self.reports: list[RoundReport] = []
        self.storages: dict[str, NarrowStorage] = {}
        self._warned = False
        self.how = {name: self._narrowing(name, optimizers[name]) for name in self.tables}
        settled = max(width.every, width.ramp if width.start == "full" else 0)
        names = [f"{group.name}: {group.budget.share or group.budget.size}" for group in self.groups]
        tallies = [[self.how[name].tally for name in group.tables] for group in self.groups]
        self.shifts = Shifts(width.every, settled, dict(zip(names, tallies)))

    def _group(self) -> list[Group]:
        groups = []
        own = {name: budget for name in self.tables if (budget := self.width.budget_of(name)) is not None}
        shared = [name for name in self.tables if name not in own]
        for name, budget, members in [
            *((name, budget, [name]) for name, budget in own.items()),
            *([("all tables", self.width.common, shared)] if shared else []),
        ]:
            rows = [self.tables[member].rows for member in members]
            full = 0.0 if None in rows else float(sum(n * self.tables[m].dim for n, m in zip(rows, members) if n))
            if budget.share is not None and not full:
                unbounded = next(member for member in members if self.tables[member].rows is None)
                raise RecipeError(
                    "width budget",
                    f"a size like '2 GB': table '{unbounded}' has unbounded ids, so a share of its rows is not known",
                    f"{budget.share:.4g} of them",
                )
            groups.append(Group(name, budget, members, full, uniform=self._uniform(budget, members)))
        return groups

    def _uniform(self, budget: Budget, members: list[str]) -> dict[str, int]:
        """Chunks of all rows, where following them would take so much of the bytes that they are better spent on values: as many
        for all as there is room for, then more in small tables first."""
        rows = {name: self.tables[name].rows or 0 for name in members}
        if budget.size is None or not self._may_be_uniform(members):
            return {}
        if FOLLOWED_ROW * sum(rows.values()) <= PAYS * budget.size and budget.size >= self._least(members) / self.ranks:
            return {}
        most = {name: self.tables[name].dim // self.width.chunk_of(self.tables[name]) for name in members}
        fits = [
            chunks
            for level in range(1, max(most.values()) + 1)
            if self._bytes(chunks := {name: min(level, most[name]) for name in members}) <= budget.size
        ]
        if not fits:
            return {}
        chosen = fits[-1]
        for name in sorted(members, key=lambda name: rows[name]):
            while chosen[name] < most[name] and self._bytes(chosen | {name: chosen[name] + 1}) <= budget.size:
                chosen[name] += 1
        return chosen

    def _may_be_uniform(self, members: list[str]) -> bool:
        small = all(0 < (self.tables[name].rows or 0) <= SMALL for name in members)
        return small and self.policy.levels and self.width.start != "full"

    def _bytes(self, chunks: Mapping[str, int]) -> int:
        """Of tables whose rows all have so many."""
        total = 0
        for name, count in chunks.items():
            table, values = self.tables[name], count * self.width.chunk_of(self.tables[name])
            words = -(-values * table.dtype.itemsize // 4)
            total += (table.rows or 0) * (4 * words + self.optimizers[name].state_bytes_per_row(values))
        return total

    def _narrowing(self, name: str, optimizer: Optimizer) -> Narrowing:
        table, group = self.tables[name], next(group for group in self.groups if name in group.tables)
        chunk = self.width.chunk_of(table)
        chunks = table.dim // chunk
        item = table.dtype.itemsize
        if name in group.uniform:
            assert table.rows is not None
            return Narrowing(
                chunk=chunk, masked=False, by_chunk=False, kind=0, start=group.uniform[name], rows=table.rows * self.shares[name],
                candidates=0, uniform=True, decay=1.0, purse=group.purse,
            )  # fmt: skip
        if group.budget.share is not None:
            keep = group.budget.share
        else:
            assert group.budget.size is not None
            dims = sum(self.tables[member].dim for member in group.tables)
            per_row = table.dim * item + optimizer.state_bytes_per_row(table.dim) + OVERHEAD
            rows = group.budget.size * table.dim / dims / per_row
            keep = min(1.0, rows / table.rows) if table.rows is not None else 1.0 / chunks
        full = self.policy.whole or self.width.start == "full"
        start = chunks if full else max(1, int(keep * chunks))
        if group.budget.size is not None and table.rows is None:
            width_bytes = start * chunk * item + optimizer.state_bytes_per_row(start * chunk) + OVERHEAD
            expected = group.budget.size / width_bytes
        else:
            assert table.rows is not None
            expected = min(float(table.rows), keep * table.rows * chunks / start)
        expected *= self.shares[name]
        self._check_minimum(group, table, chunk)
        candidates, by_id = self._candidates(group, table, keep)
        return Narrowing(
            chunk=chunk, masked=self.policy.masked, by_chunk=self.policy.by_chunk, kind=self.policy.kind, start=start,
            rows=expected, candidates=candidates, by_id=by_id, decay=self.width.decay if self.policy.fades else 1.0,
            purse=group.purse, inherit=self.width.inherit,
        )  # fmt: skip

    def _candidates(self, group: Group, table: Table, keep: float) -> tuple[int, bool]:
        """How many, and whether all ids are, each at its own place: where that takes no more than as many that are hashed. These
        are half as many as rows that could be whole; small tables are followed wholly, and a little more: buckets fill unevenly.
        Of a budget in bytes they take a tenth at most, all ids of small tables a quarter."""
        if not self.policy.kind:
            return WAYS, False
        share = self.shares[table.name]
        rows = (table.rows if table.rows is not None else 1 << 20) * share
        most = min(int(1.25 * rows) + 8, 1 << 22)
        own = 4 * (table.dim // self.width.chunk_of(table) if self.policy.by_chunk else 1)
        each = 12 + own
        all_of_them, payable = math.ceil(rows), False
        if group.budget.size is not None:
            dims = sum(self.tables[name].dim for name in group.tables)
            most = min(most, int(group.budget.size * FOLLOWING * share * table.dim / dims / each))
            total = sum(self.tables[name].rows or math.inf for name in group.tables)
            payable = (table.rows or math.inf) <= SMALL and total * own <= FOLLOWING_ALL * group.budget.size
        places = max(WAYS, min(most, int(max(FOLLOWED * share, keep * rows / 2))))
        if table.rows is not None and (payable or all_of_them * own <= places * each):
            return all_of_them, True
        return places, False

    def _check_minimum(self, group: Group, table: Table, chunk: int) -> None:
        """The least that can be kept: one chunk of one row in every table."""
        least = sum(self.width.chunk_of(self.tables[name]) for name in group.tables) * self.ranks
        if group.budget.share is not None and group.budget.share * group.full < least:
            raise RecipeError(
                "width budget",
                f"at least {least / group.full:.2g} of all values, one chunk for a row in each of {len(group.tables)} tables"
                + (f" on each of {self.ranks} ranks" if self.ranks > 1 else ""),
                f"{group.budget.share:.2g} of them",
            )
        size = self._least(group.tables)
        if group.budget.size is not None and group.budget.size < size:
            what = f"{len(group.tables)} tables with a row, its place and the candidates for more"
            every = self._bytes(dict.fromkeys(group.tables, 1)) if self._may_be_uniform(group.tables) else size
            if group.budget.size < every < size:
                size, what = every, f"{len(group.tables)} tables with a chunk of every row"
            raise RecipeError("width budget", f"at least {size:,} bytes: {what}", f"{group.budget.size:,}")

    def _least(self, members: list[str]) -> int:
        """Bytes of tables that are followed, with a chunk of one row on each rank."""
        each = [(self.width.chunk_of(self.tables[name]), self.tables[name].dtype.itemsize) for name in members]
        return sum(WAYS * 16 + 64 * 12 + chunk * item for chunk, item in each) * self.ranks

    def attach(
        self, storages: Mapping[str, NarrowStorage], step: int = 0, watched: Mapping[str, Any] | None = None
    ) -> None:
        """The tables as they are, before the first step or after they were loaded. `watched`: what was saved with them."""
        self.storages = dict(storages)
        self.shifts.load(watched)
        self._fill_purses(step)

    def _fill_purses(self, step: int) -> None:
        for group in self.groups:
            if group.uniform:
                continue
            live = self.total(float(sum(storage.live for storage in self._of(group))))
            if group.budget.size is not None and not live:
                starts = [(name, self.how[name].start * self.how[name].chunk) for name in group.tables]
                each = sum(
                    values * self.tables[name].dtype.itemsize
                    + self.optimizers[name].state_bytes_per_row(values)
                    + OVERHEAD
                    for name, values in starts
                ) / sum(values for _, values in starts)
                budget = group.budget.size / each
            else:
                budget = self._budget(group, step)
            held = self.total(float(sum(storage.values for storage in self._of(group))))
            group.purse.left = max(0.0, budget - held)

    def _of(self, group: Group) -> list[NarrowStorage]:
        """The group's tables, as far as this rank has a part of them."""
        return [self.storages[name] for name in group.tables if name in self.storages]

    def _budget(self, group: Group, step: int) -> float:
        """In values, after so many steps."""
        end = group.values(self.storages, self.total)
        if self.width.start == "full" and step < self.width.ramp and group.full:
            return end + (group.full - end) * (1 - step / self.width.ramp) ** 3
        return end

    def after_step(self, step: int) -> RoundReport | None:
        """`step`: how many there have been. All ranks call it."""
        if not self.policy.kind:
            return None
        if self.width.adapt and self.shifts.ends_window(step):
            self.shifts.look(step, self.total, self._is_spent)
        since = self.shifts.since if self.width.adapt else None
        shifted = since is not None and self.width.is_early(step - since)
        return self.round(step, shifted) if shifted or self.width.is_round(step) else None

    def _is_spent(self, number: int) -> bool:
        """Whether some table of a group has to refuse new rows."""
        group = self.groups[number]
        return group.purse.left < max(self.how[name].start * self.how[name].chunk for name in group.tables)

    def round(self, step: int, shifted: bool = False) -> RoundReport:
        pruned = regained = 0
        failed = ""
        for group in self.groups:
            if group.uniform:
                continue
            try:
                went, came = self._round_of(group, step)
            except MemoryError as error:
                failed = f"{group.name}: {error or 'no memory'}"
                if not self._warned:
                    self._warned = True
                    warnings.warn(
                        f"a round of widths at step {step} found no memory ({failed}); rows keep the width they have",
                        stacklevel=2,
                    )
                continue
            pruned, regained = pruned + went, regained + came
        self._fill_purses(step)
        if any(storage.device.type == "cpu" for storage in self.storages.values()):
            give_back_freed()
        report = RoundReport(
            step,
            int(self.total(float(sum(storage.live for storage in self.storages.values())))),
            int(self.total(float(sum(storage.values for storage in self.storages.values())))),
            sum(group.full for group in self.groups) if all(group.full for group in self.groups) else 0.0,
            int(self.total(float(pruned))),
            int(self.total(float(regained))),
            failed,
            shifted,
        )
        self.reports.append(report)
        return report

    def _round_of(self, group: Group, step: int) -> tuple[int, int]:
        budget = self._budget(group, step)
        parts = self._parts(group, budget)
        threshold = threshold_of(samples_of(parts), budget, self.width.hysteresis, self.total)
        choose_all(parts, threshold, self.width.hysteresis)
        held = self.total(float(sum(part.storage.values for part in parts)))
        shrinks, grows = self._sums(changes_of(parts, net=True), 2)
        if shrinks + grows > self.width.most * budget:
            allowed = self.width.most * budget / (shrinks + grows)
            # What is over the budget goes at once: it is smaller than it was, or shrinks.
            for part in parts:
                if held > budget:
                    part.grow_less(part.draw(step), allowed)
                else:
                    part.hold_back(part.draw(step), allowed)
            shrinks, grows = self._sums(changes_of(parts, net=True), 2)
        over = held + grows - shrinks - budget
        if over > 0:
            self._cut_growth(parts, over, step)
        changes: list[list[int]] = []

        def prepared() -> list[Callable[[], None]]:
            changes.extend(changes_of(parts))
            counts = iter(listed(part.class_counts() for part, change in zip(parts, changes) if any(change)))
            return [part.prepare(next(counts) if any(change) else None) for part, change in zip(parts, changes)]

        # All tables of a group on all ranks or none: the budget is theirs together.
        puts = self._together(prepared)
        while puts:
            puts.pop(0)()  # what it holds goes with it
        return sum(went for went, _ in changes), sum(came for _, came in changes)

    def _sums(self, numbers: Iterable[Iterable[int]], count: int) -> list[float]:
        """Of so many numbers of all tables on all ranks; some may have no table."""
        return [self.total(float(sum(part))) for part in zip(*numbers, [0] * count)]

    def _cut_growth(self, parts: list[Part], over: float, step: int) -> None:
        """So many values less: rows that would grow wait, by draw, all of them at the worst."""
        draws = [part.draw(step) for part in parts]

        def growth(share: float) -> float:
            return self._sums(listed(part.growth(drawn, share)[None] for part, drawn in zip(parts, draws)), 1)[0]

        grown = growth(1.0)
        low, high = 0.0, 1.0
        share = 1 - (1 + MARGIN) * over / max(1.0, grown)
        for _ in range(CUTS):
            if share <= 0:
                break
            if growth(share) <= grown - over:
                low = share
                if high == 1 or high - low < 0.1 * high:
                    break
            else:
                high = share
            share = (low + high) / 2
        for part, drawn in zip(parts, draws):
            part.grow_less(drawn, low)

    def _parts(self, group: Group, budget: float) -> list[Part]:
        """The group's tables, with what their rows are worth as it is compared."""
        parts = self._together(lambda: [Part(storage, self.policy) for storage in self._of(group)])
        # Of unbounded ids those count that are known: rows, and what is followed.
        full = group.full or self.total(float(sum(len(part.old) * part.storage.table.dim for part in parts)))
        share = min(1.0, budget / max(1.0, full))
        names = [name for name in group.tables if name in self.storages]
        units = self._units(group, {name: part.census.utilities for name, part in zip(names, parts)})
        return self._together(lambda: [part.measure(share, units.get(name)) for name, part in zip(names, parts)])

    def _units(self, group: Group, utilities: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the worth of rows of each table is measured by; nothing where all are compared as they are."""
        if self.policy.percentile is not None:
            return percentiles(group.tables, utilities, self.policy.percentile, self.totals)
        if self.width.thresholds == "one":
            return {}
        by_column = self.width.thresholds == "column"
        columns = {name: self.tables[name].dim // self.how[name].chunk if by_column else 1 for name in group.tables}
        return means(columns, utilities, self.totals)

    def _together(self, work: Callable[[], list[Made]]) -> list[Made]:
        """What it gives, unless some rank has no memory for it: then all have none."""
        made: list[Made] = []
        missing: MemoryError | None = None
        try:
            made = work()
        except MemoryError as error:
            missing = error
        if self.total(float(missing is not None)):
            raise missing if missing is not None else MemoryError("no memory on another rank")
        return made
