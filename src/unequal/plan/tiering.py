"""Tiers in a plan: tables that are read row by row are tried with copies of their hot rows, and keep them where the step is
faster for it and the memory no more than it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..errors import RecipeError
from ..stats.profile import Profile
from .allocate import (
    Naming,
    Objective,
    TierChoice,
    allocate,
    counted,
    describe,
    repeated_ids_memory,
    row_wise,
    row_wise_memory,
    why_not,
)
from .candidates import Candidate
from .choose import Chooser, Solution
from .popularity import Popularity
from .tiers import Allocation
from .workload import TableLoad

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Copying:
    """How rows may be copied."""

    naming: Naming
    objective: Objective = "seconds"
    """What cuts are chosen for: the time of a step, or bytes over the network alone."""
    budget: float | None = None
    """Bytes of each rank in all, the fixed part included, that a plan with copies may use at its peak. None: what row-wise
    sharding of these tables uses where ids travel as often as they are read. Infinite: the machines' memory alone."""

    @classmethod
    def of(cls, profile: Profile, objective: Objective = "seconds", budget: float | None = None) -> Copying:
        """With the ids that a profile names."""
        return cls(naming=lambda table, rows: profile.tables[table].top(rows), objective=objective, budget=budget)


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyBudget:
    """The memory that copies were given, and what a plan without them would be."""

    objective: Objective
    budget: float
    """bytes of each rank in all"""
    repeated_ids_memory: float
    """what row-wise sharding of these tables uses where ids travel as often as they are read"""
    row_wise_memory: float
    """and with the plan's own exchange"""
    price: float
    """what one more byte would gain: seconds, or bytes over the network; 0 where there is no use for it"""
    step_seconds: float
    """of the best plan without copies"""


@dataclass(frozen=True, slots=True)
class Tiered:
    """A solution with tiers, and what it says of them."""

    chooser: Chooser
    solution: Solution
    choices: dict[str, TierChoice]
    budget: CopyBudget


def with_popularity(loads: dict[str, TableLoad], profile: Profile) -> dict[str, TableLoad]:
    """Loads that know how often single rows are read."""
    return {name: replace(load, popularity=_popularity(profile, name)) for name, load in loads.items()}


def _popularity(profile: Profile, name: str) -> Popularity | None:
    table = profile.tables[name]
    rows, reads = table.popularity()
    if not len(rows) or not table.reads_per_sample:
        return None
    return Popularity(rows, np.minimum.accumulate(reads), table.kept)


def check_asked(loads: Sequence[TableLoad], copying: Copying | None, world: int) -> None:
    """Refuses tables that are asked for with tiers and cannot have them."""
    for load in loads:
        if load.sharding != "tiers" or world == 1:
            continue
        where, table = f"tables.{load.table.name}.sharding", load.table
        if copying is None:
            remedy = "make one with `unequal profile`, a plan with `unequal plan --profile`, and train with --plan"
            raise RecipeError(where, "tiers with a profile of the data, which says what rows are hot", "none", remedy)
        if table.admit_after > 1:
            remedy = "leave sharding or admit_after out"
            raise RecipeError(
                where, "tiers of a table that gives every id a row", f"admit_after {table.admit_after}", remedy
            )


class Tiering:
    """From a solution without copies to one with them."""

    def __init__(
        self, chooser: Chooser, solution: Solution, copying: Copying, choose: Callable[[Chooser], Solution]
    ) -> None:
        self.chooser, self.solution, self.copying, self._choose = chooser, solution, copying, choose
        self.pricer, self.loads = chooser.pricer, chooser.loads
        setting = self.pricer.setting
        self.fixed = float(sum(setting.fixed.values()))
        self.repeated = repeated_ids_memory(self.loads, setting)
        asked = self.repeated if copying.budget is None else copying.budget
        self.budget = min(float(setting.topology.usable_memory), asked)

    def run(self) -> Tiered | None:
        """None where no copy is worth making, or the step would not be faster for them all."""
        world = self.chooser.topology.world
        eligible = [
            k for k, load in enumerate(self.loads) if load.sharding in ("auto", "tiers") and why_not(load) is None
        ]
        if not eligible or world == 1:
            return None
        first = self._allocate(self.solution, eligible)
        options = self._options(eligible, first)
        chooser = self._chooser(options)
        solution = self._choose(chooser)
        chosen = [k for k in eligible if solution.candidates[k].tiers is not None]
        if not chosen:
            return None
        # What tables that went another way do not use of the memory is for the others.
        second = self._allocate(solution, chosen)
        options = self._options(chosen, second)
        chooser = self._chooser(options)
        candidates = list(solution.candidates)
        for k in chosen:
            candidates[k] = next((one for one in options[k] if one.tiers is not None), Candidate("row_wise"))
        solution = chooser.balance(candidates)
        forced = any(self.loads[k].sharding == "tiers" for k in chosen)
        if not forced and not solution.score < self.solution.score:
            return None
        return Tiered(chooser, solution, self._describe(chosen, second, solution), self._summary(second))

    def _allocate(self, solution: Solution, numbers: Sequence[int]) -> Allocation:
        """Cuts for these tables, with what the others, where they are, leave of the budget."""
        held = solution.total.copy()
        for k in numbers:
            held += self._plain(k) - solution.costs[k]
        left = self.budget - self.fixed - float(self.pricer.memory(held).max())
        return allocate(self.pricer, self.chooser.numbers, numbers, left, self.copying.objective)

    def _plain(self, k: int) -> Floats:
        """Row-wise, without copies."""
        placement = row_wise(self.loads[k], self.chooser.topology)
        return self.pricer.price_many(self.chooser.each[k], 1, placement)[:, 0]

    def _options(self, numbers: Sequence[int], found: Allocation) -> list[list[Candidate]]:
        """The tables' candidates, and of these the one with copies, last; alone, where it was asked for."""
        options = [[one.candidate for one in each] for each in self.chooser.options]
        for k, cuts in zip(numbers, found.tables):
            if cuts.copied.rows:
                tiered = Candidate("row_wise", tiers=counted(cuts.replicated.rows, cuts.node_rows))
                options[k] = [tiered] if self.loads[k].sharding == "tiers" else [*options[k], tiered]
        return options

    def _chooser(self, options: Sequence[Sequence[Candidate]]) -> Chooser:
        return Chooser(self.loads, options, self.pricer, self.chooser.balancers)

    def _describe(self, chosen: Sequence[int], found: Allocation, solution: Solution) -> dict[str, TierChoice]:
        return {
            self.loads[k].table.name: describe(
                self.pricer, self.loads[k], cuts, found.price, self._plain(k), solution.costs[k]
            )
            for k, cuts in zip(chosen, found.tables)
            if solution.candidates[k].tiers is not None
        }

    def _summary(self, found: Allocation) -> CopyBudget:
        return CopyBudget(
            objective=self.copying.objective,
            budget=self.budget,
            repeated_ids_memory=self.repeated,
            row_wise_memory=row_wise_memory(self.loads, self.pricer.setting),
            price=found.price,
            step_seconds=float(self.solution.seconds.max()),
        )
