"""Rounds: what rows are worth is counted, the threshold at which the budget is spent is found, and rows change their width."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..optim import Optimizer
from ..storage.memory import give_back_freed
from ..storage.narrow import NarrowStorage
from ..tables import Feature, Table
from .config import Width
from .evidence import Reads, doubts
from .intervals import Intervals
from .measures import Floats, Totals, alone_in_all, means, percentiles, rounded
from .parts import Part, Sample, changes_of, choose_all, listed, samples_of
from .policy import Policy, policy_of
from .rates import Rates, expected_over_known
from .savings import Savings
from .settling import SPARE, Group, Settling, alone
from .shift import Shifts
from .threshold import Sum, threshold_of

MARGIN = 0.05
"""by which growth is cut more than it must be: which rows grow is decided by draw"""
CUTS = 8
"""tries to find how much of it fits, where that is not enough: some rows grow by more than others"""
FITS, FITTING = 4, 0.01
"""tries to find the values that take a budget in bytes, and what part of it may be left over; as many again not to exceed it"""
ENTRY, PADDING = 26, 8
"""bytes of a directory for a row, at the most, and between records"""
FORGET = 0.3
"""of what rows were worth, when popularity has shifted: what they are worth since then is soon more than that"""
FEW = 10
"""reads of a row on average before which it is not known what share of ids usually has none"""
MUCH = 1 << 24
"""bytes of tables on the host from which what a round needed goes back to the system. It takes what steps have freed along, which
they must ask for again: of smaller tables a round would cost a multiple of what it does"""

Made = TypeVar("Made")


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
        features: Mapping[str, Feature] | None = None,
    ) -> None:
        """`features`: of the module, in its order; without them it is not known what values save."""
        self.width, self.tables, self.total = width, dict(tables), total
        self.totals, self.optimizers = totals, dict(optimizers)
        self.policy: Policy = policy_of(width.policy)
        settling = Settling(width, tables, optimizers, ranks, shares)
        self.groups, self.how, self.read = settling.groups, settling.how, settling.read
        self.rates = Rates(width, self.optimizers)
        self.intervals = Intervals.towards(width.every)
        self.reports: list[RoundReport] = []
        self.storages: dict[str, NarrowStorage] = {}
        self._warned = False
        settled = max(width.every, width.ramp if width.start == "full" else 0)
        names = [f"{group.name}: {group.budget.share or group.budget.size}" for group in self.groups]
        tallies = [[self.how[name].tally for name in group.tables] for group in self.groups]
        self.shifts = Shifts(width.every, settled, dict(zip(names, tallies)))
        self.reads = Reads({name: self.how[name].tally for name in tables})
        chunks = {name: table.dim // self.how[name].chunk for name, table in tables.items()}
        self.savings = Savings(chunks, features or {}, ranks) if self.policy.saves else None

    def attach(
        self, storages: Mapping[str, NarrowStorage], step: int = 0, watched: Mapping[str, Any] | None = None,
        shown: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """The tables as they are, before the first step or after they were loaded. `watched`: what was saved with them; `shown`:
        this rank's part of what training had shown of them."""
        self.storages = dict(storages)
        self.shifts.load(watched)
        shown = shown or {}
        fresh = not step and not shown
        self.reads.load(dict.fromkeys(self.tables, 0.0) if fresh else shown.get("reads"))
        if self.savings is not None:
            self.savings.load(shown.get("savings"), held=0.0 if fresh else -1.0)
        self._fill_purses(step)
        self._begin_rates(shown.get("rates"), step)

    def shown(self) -> dict[str, Any]:
        """This rank's part of what training has shown of the tables."""
        savings = None if self.savings is None else self.savings.state()
        return {"reads": self.reads.counted(), "savings": savings, "rates": dict(self.rates.now)}

    def _begin_rates(self, known: Mapping[str, float] | None, step: int) -> None:
        """`known`: by table, where they were saved."""
        for group in self.groups:
            kept = self._kept(group, step)
            rates = dict.fromkeys(group.tables, kept)
            if group.purse.early and self.policy.kind and not group.uniform and kept is not None:
                rates = {name: max(kept, self.how[name].takes / self.tables[name].dim) for name in group.tables}
            self.rates.follow(rates, self.storages)
        if known is not None and known.keys() == self.tables.keys():
            self.rates.load(known, self.storages)

    def _kept(self, group: Group, step: int, over: float = 1.0) -> float | None:
        """What share of the values of rows that are read the budget is after so many steps, about; None where that is not known.
        `over`: how many times more are expected to be read than have been."""
        if group.kept is None:
            return None
        kept = min(1.0, over * group.kept)
        return max(kept, self._budget(group, step) / group.full) if self._is_ramp(group, step) else kept

    def _fill_purses(self, step: int) -> None:
        for group in self.groups:
            if group.uniform:
                continue
            group.purse.early = not self.intervals.has_begun(step)
            held = self.total(float(sum(storage.values for storage in self._of(group))))
            size = self._size(group, step)
            if size is None:
                group.purse.left = max(0.0, self._budget(group, step) - held)
                continue
            left = size - self.total(float(sum(sum(s.memory().values()) + s.to_spare for s in self._of(group))))
            first = 0 if held else sum(self.how[name].takes for name in group.tables)
            group.purse.left = max(left / self._new_value(group), float(first))

    def _new_value(self, group: Group) -> float:
        """Bytes that a value of a new row takes at the most, with its share of the row, whichever table it is of."""
        return max(self._new_row(name) / self.how[name].takes for name in group.tables)

    def _new_row(self, name: str) -> int:
        how, table = self.how[name], self.tables[name]
        utilities = table.dim // how.chunk if how.by_chunk else 1
        beside = 4 * utilities + 8 * how.masked + PADDING + (0 if how.in_directory else ENTRY)
        return how.takes * table.dtype.itemsize + self.optimizers[name].state_bytes_per_row(how.takes) + beside

    def _of(self, group: Group) -> list[NarrowStorage]:
        """The group's tables, as far as this rank has a part of them."""
        return [self.storages[name] for name in group.tables if name in self.storages]

    def _budget(self, group: Group, step: int) -> float:
        """In values, after so many steps; where it is given in bytes, about."""
        end = group.values(self.storages, self.total)
        if not end and group.budget.size is not None:
            end = group.budget.size / self._new_value(group)
        if self._is_ramp(group, step):
            return end + (group.full - end) * (1 - step / self.width.ramp) ** 3
        return end

    def _is_ramp(self, group: Group, step: int) -> bool:
        return bool(self.width.start == "full" and step < self.width.ramp and group.full)

    def is_over(self) -> bool:
        """Whether the tables hold more than they may in the end: rows that began whole still shrink. All ranks call it."""
        over = False
        for group in self.groups:
            share, size, parts = group.budget.share, group.budget.size, self._of(group)
            if share is not None:
                over |= self.total(float(sum(part.values for part in parts))) > share * group.full + 0.5
            elif size is not None:
                over |= self.total(float(sum(sum(part.memory().values()) for part in parts))) > size
        return over

    def _size(self, group: Group, step: int) -> int | None:
        """The budget in bytes after so many steps, where it is given in bytes."""
        return None if self._is_ramp(group, step) else group.budget.size

    def after_step(self, step: int) -> RoundReport | None:
        """`step`: how many there have been. All ranks call it."""
        if not self.policy.kind:
            if self.is_round(step):  # what new rows really took is known
                self._fill_purses(step)
            return None
        looks = self.width.adapt and self.shifts.ends_window(step)
        if looks and self.shifts.look(step, self.total, lambda n: self._is_spent(n) and self._is_settled(n)):
            self._forget()
        since = self.shifts.since if self.width.adapt else None
        shifted = since is not None and self.intervals.is_round_after_shift(step - since)
        return self.round(step, shifted) if shifted or self.is_round(step) else None

    def _forget(self) -> None:
        """Who was popular is not any more: most of what rows seem to be worth is that of other times."""
        for storage in self.storages.values():
            storage.forget(FORGET)
        if self.savings is not None and self.width.decay < 1:  # as rows do
            self.savings.forget(FORGET)

    def is_round(self, step: int) -> bool:
        """After so many, whether or not anything is followed. All ranks call it."""
        return self.intervals.is_round(step, self._live)

    def _live(self) -> float:
        """Rows on all ranks."""
        return self.total(float(sum(storage.live for storage in self.storages.values())))

    def _is_spent(self, number: int) -> bool:
        """Whether some table of a group has to refuse new rows."""
        group = self.groups[number]
        return group.purse.left < max(self.how[name].takes for name in group.tables)

    def _is_settled(self, number: int) -> bool:
        """Whether rows that live have been read a few times each. Before that rounds find out who they should be, and ids without
        a row are others after each of them."""
        group, counted = self.groups[number], self.reads.counted()
        if not self.policy.enough or counted is None:
            return True
        reads = self.total(sum(counted[name] for name in group.tables))
        return reads >= FEW * self.total(float(sum(storage.live for storage in self._of(group))))

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
        if self.savings is not None:
            self.savings.end()
        self.shifts.after_round()
        self._fill_purses(step)
        if (
            sum(sum(storage.memory().values()) for storage in self.storages.values() if storage.device.type == "cpu")
            >= MUCH
        ):
            give_back_freed()
        report = RoundReport(
            step,
            int(self._live()),
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
        known = {part.storage.table.name: part.known for part in parts}
        samples, size = samples_of(parts), self._size(group, step)
        self._choose(parts, samples, budget)
        if size is not None:
            budget = self._fitted(parts, samples, budget, size * (1 - SPARE))
        held = self.total(float(sum(part.storage.values for part in parts)))
        shrinks, grows = self._sums(self._together(lambda: changes_of(parts, net=True)), 2)
        if shrinks + grows > self.width.most * budget:
            allowed = self.width.most * budget / (shrinks + grows)
            # What is over the budget goes at once: it is smaller than it was, or shrinks.
            for part in parts:
                if held > budget:
                    part.grow_less(part.draw(step), allowed)
                else:
                    part.hold_back(part.draw(step), allowed)
            shrinks, grows = self._sums(self._together(lambda: changes_of(parts, net=True)), 2)
        over = held + grows - shrinks - budget
        if over > 0:
            self._cut_growth(parts, over, step)
        if size is not None:
            self._cut_bytes(parts, size, step)
        changes: list[list[int]] = []
        worth = self._worth(
            group, self._together(lambda: [part.worth_then() for part in parts] if self.savings else [])
        )

        def prepared() -> list[Callable[[], None]]:
            changes.extend(changes_of(parts))
            counts = iter(listed(part.class_counts() for part, change in zip(parts, changes) if any(change)))
            return [part.prepare(next(counts) if any(change) else None) for part, change in zip(parts, changes)]

        # All tables of a group on all ranks or none: the budget is theirs together.
        puts = self._together(prepared)
        while puts:
            puts.pop(0)()  # what it holds goes with it
        if self.savings is not None:
            self.savings.settle(group.tables, worth, self.totals)
        expected = {name: self.read[name] for name in group.tables}
        over = expected_over_known(expected, self.tables, self.storages, known, self.totals)
        self.rates.follow(dict.fromkeys(group.tables, self._kept(group, step, over)), self.storages)
        return sum(went for went, _ in changes), sum(came for _, came in changes)

    def _choose(self, parts: list[Part], samples: list[Sample], budget: float) -> None:
        threshold = threshold_of(samples, budget, self.width.hysteresis, self.total)
        self._together(lambda: choose_all(parts, threshold, self.width.hysteresis))

    def _fitted(self, parts: list[Part], samples: list[Sample], budget: float, size: float) -> float:
        """The budget in values with which the tables take so many bytes, and rows chosen by it: how many bytes a value takes
        depends on how many rows share them."""
        fixed = self.total(float(sum(part.storage.bytes_with([0]) for part in parts)))
        for tried in range(2 * FITS):
            taken = self._bytes(parts)
            enough = tried >= FITS or taken >= (1 - FITTING) * size
            if taken <= fixed or (taken <= size and enough):
                break
            change = max(0.5, (size * (1 - FITTING / 2) - fixed) / (taken - fixed))
            budget *= min(change, 1 - FITTING) if enough else change
            self._choose(parts, samples, budget)
        return budget

    def _bytes(self, parts: list[Part]) -> float:
        """That all tables take when rows have changed."""
        counts = self._together(lambda: listed(part.class_counts() for part in parts))
        return self.total(float(sum(part.storage.bytes_with(rows) for part, rows in zip(parts, counts))))

    def _cut_bytes(self, parts: list[Part], size: float, step: int) -> None:
        """Rows that were held back are others than those that the budget was fitted to: growth waits until all of them fit."""
        draws = [part.draw(step) for part in parts]
        for share in (0.75, 0.5, 0.25, 0.0):
            if self._bytes(parts) <= size:
                break
            for part, drawn in zip(parts, draws):
                part.grow_less(drawn, share)

    def _sums(self, numbers: list[list[int]], count: int) -> list[float]:
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

    def _worth(self, group: Group, sums: list[Tensor]) -> dict[str, Floats]:
        """By table of which this rank has a part; a GPU is waited for once."""
        numbers = torch.split(torch.cat(sums).cpu(), [len(part) for part in sums]) if sums else ()
        names = [name for name in group.tables if name in self.storages]
        return {name: part.numpy() for name, part in zip(names, numbers)}

    def _parts(self, group: Group, budget: float) -> list[Part]:
        """The group's tables, with what their rows are worth as it is compared."""
        parts = self._together(lambda: [Part(storage, self.policy) for storage in self._of(group)])
        # Of unbounded ids those count that are known: rows, and what is followed.
        full = group.full or self.total(float(sum(len(part.old) * part.storage.table.dim for part in parts)))
        share = min(1.0, budget / max(1.0, full))
        names = [name for name in group.tables if name in self.storages]
        utilities = {name: part.census.utilities for name, part in zip(names, parts)}
        units, doubt = self._units(group, utilities), self._doubts(group, utilities)
        priorities = {} if self.savings is None else self._priorities(group, parts)
        return self._together(
            lambda: [
                part.measure(share, units.get(name), doubt.get(name, 0.0), priorities.get(name))
                for name, part in zip(names, parts)
            ]
        )

    def _priorities(self, group: Group, parts: list[Part]) -> dict[str, Tensor]:
        """Of the chunks of each table."""
        assert self.savings is not None
        names = [name for name in group.tables if name in self.storages]
        worth = self._worth(group, self._together(lambda: [part.worth_now() for part in parts]))
        sums = [part.census.utilities.sum(dtype=torch.float64) for part in parts]
        all_of_it = dict(zip(names, torch.stack(sums).tolist() if sums else ()))
        found = self.savings.learn(group.tables, worth, all_of_it, self.width.decay, self.totals)
        if self.width.thresholds == "table":  # each is measured by itself
            found = {name: own / own[0] for name, own in found.items()}
        return {
            name: torch.tensor([rounded(value) for value in found[name].tolist()], dtype=torch.float64).to(
                part.old.device
            )
            for name, part in zip(names, parts)
        }

    def _doubts(self, group: Group, utilities: Mapping[str, Tensor]) -> dict[str, float]:
        """What rows of each table must seem to be worth to count with half of it; nothing where all is believed."""
        enough, whole = self.policy.enough, {name for name in utilities if self.how[name].by_id}
        return doubts(group.tables, self.reads, enough, utilities, whole, self.totals) if enough else {}

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
        """What it gives, unless some rank has no memory for it, on the host or on its GPU: then all have none."""
        made: list[Made] = []
        missing: MemoryError | None = None
        try:
            made = work()
        except MemoryError as error:
            missing = error
        except torch.OutOfMemoryError as error:  # a GPU says it in its own way
            missing = MemoryError(str(error).split(". ")[0])
        if self.total(float(missing is not None)):
            raise missing if missing is not None else MemoryError("no memory on another rank")
        return made
