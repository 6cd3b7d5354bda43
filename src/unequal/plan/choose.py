"""Choice: a candidate for every table and the ranks it goes to, so that the slowest rank is fast and every rank has the memory.

First the cheapest of each, balanced; then what makes the fullest rank full is changed, one table at a time, while that helps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product

import numpy as np
import numpy.typing as npt

from .balance import Bins, Item, differencing, greedy
from .candidates import Candidate
from .cost import MEMORY, Part, Pricer
from .placement import TablePlacement
from .workload import TableLoad

Floats = npt.NDArray[np.float64]
Balancer = Callable[[Sequence[Item], Bins], list[int]]
BALANCERS: dict[str, Balancer] = {"greedy": greedy, "differencing": differencing}
BETTER = 1e-4
"""Relative gain below which a change is not worth making."""
LOOKED_AT = 6
"""The dearest tables of the fullest rank that a round of improvement tries to change."""
ROUNDS = 100
ALTERNATIVES, MANY = 4, 250
"""Other candidates of a table that are tried; of many tables, two of each."""
SWEPT = 1000
"""Tables that are looked at in sweeps over all of them, at most as many sweeps as that makes."""
PLACED_ANEW = 100_000
"""Tables × ranks × tries of placing all tables anew around one that has changed: few tries where there are many tables."""
STEEP = 32
TOGETHER = 256
"""Tables that are priced at a time."""
MEMORY_WEIGHTS = (0.0, 0.1, 1.0, 10.0)
EVENNESS = (0.01, 0.1, 1.0)
"""How much what a table makes its owners busier than the others is held against it."""


@dataclass(slots=True)
class Priced:
    """A candidate with what it costs where all ranks are empty."""

    candidate: Candidate
    seconds: float
    """mean over the ranks"""
    peak_seconds: float
    memory: float
    peak_memory: float


@dataclass(slots=True)
class Solution:
    """A placement of every table, and what it comes to."""

    candidates: list[Candidate]
    placements: list[TablePlacement]
    costs: Floats
    """[tables, parts, ranks]"""
    total: Floats
    seconds: Floats
    memory: Floats
    limit: float
    balanced: dict[str, float | None] = field(default_factory=dict)
    """the slowest rank's seconds by each method, before improvement; None where a rank's memory would not do"""

    @property
    def short(self) -> float:
        """bytes that are missing, over all ranks"""
        return float(np.maximum(self.memory - self.limit, 0).sum())

    @property
    def score(self) -> tuple[float, float]:
        """Less is better: bytes that are short, then time, of which the slowest ranks count most. Not the slowest alone: where
        several are equally slow, no single change would help."""
        slowest = float(self.seconds.max())
        return (
            self.short,
            slowest * float(((self.seconds / slowest) ** STEEP).mean()) ** (1 / STEEP) if slowest else 0.0,
        )


class Chooser:
    """Tables, their candidates, and the way to a good solution."""

    def __init__(
        self,
        loads: Sequence[TableLoad],
        options: Sequence[Sequence[Candidate]],
        pricer: Pricer,
        balancers: Mapping[str, Balancer] = BALANCERS,
    ) -> None:
        self.balancers = balancers
        self.loads, self.pricer, self.topology = list(loads), pricer, pricer.topology
        self.limit = float(pricer.setting.limit)
        self.empty = np.zeros(self.topology.world)
        self._begun: dict[tuple[Candidate, int], TablePlacement] = {}
        self._known: list[dict[TablePlacement, Floats]] = [{} for _ in loads]
        self.numbers = pricer.numbers(self.loads)
        self.each = [self.numbers.take([k]) for k in range(len(self.loads))]
        self.options = self._price_all(options)

    def _price_all(self, options: Sequence[Sequence[Candidate]]) -> list[list[Priced]]:
        """Every candidate of every table on empty ranks: those of one dim and one candidate at a time."""
        alike: dict[tuple[int, Candidate], list[int]] = {}
        for k, each in enumerate(options):
            for one in each:
                alike.setdefault((self.loads[k].table.dim, one), []).append(k)
        priced: list[dict[Candidate, Priced]] = [{} for _ in options]
        for (dim, one), tables in alike.items():
            placement = self._begun[one, dim] = one.put(dim, self.topology, self.empty)
            for first in range(0, len(tables), TOGETHER):
                group = tables[first : first + TOGETHER]
                cost = self.pricer.price_many(self.numbers.take(group), len(group), placement)
                seconds, memory = self.pricer.own_seconds(cost), self.pricer.memory(cost)
                found = zip(group, seconds.mean(1), seconds.max(1), memory.mean(1), memory.max(1))
                for k, *values in found:
                    priced[k][one] = Priced(one, *(float(value) for value in values))
        return [[priced[k][one] for one in each] for k, each in enumerate(options)]

    def choose(self) -> Solution:
        """The best of several beginnings, improved. Beginnings are compared by one method of balance, the best is given both."""
        for weight in MEMORY_WEIGHTS:
            ways = [(sums, replicas, 0.0) for sums in (True, False) for replicas in (True, False)]
            found = self._begin(weight, ways)
            way = min(ways, key=lambda way: found[way].score)
            found |= self._begin(weight, [(*way[:2], evenness) for evenness in EVENNESS])
            method = next(iter(self.balancers.values()))
            alike = [self.place(self._all_of(kind, way[0]), method) for kind in ("table_wise", "row_wise")]
            best = self.balance(min([*found.values(), *alike], key=lambda solution: solution.score).candidates)
            if not best.short:
                break
        return self._improve_further(self.improve(best))

    def _improve_further(self, solution: Solution) -> Solution:
        """Changes one dear table of the fullest rank, places the others anew and improves that, while it helps. Of tables that
        fill a rank one can be dealt out only if others move to make up for it."""
        tries = PLACED_ANEW // (len(self.loads) * self.topology.world)
        while tries > 0:
            fullest = int(solution.seconds.argmax())
            own = self.pricer.own_seconds(solution.costs[:, :, fullest].T)
            changes = (
                [*solution.candidates[:k], candidate, *solution.candidates[k + 1 :]]
                for k in np.argsort(-own, kind="stable")[:LOOKED_AT].tolist()
                for candidate in self.alternatives(solution, k)
            )
            ways = product(changes, self.balancers.values())
            found = [self.place(chosen, method) for chosen, method in islice(ways, tries)]
            tries -= len(found)
            if not found:
                break
            better = self.improve(min(found, key=lambda one: one.score))
            if not _better(better.score, solution.score):
                break
            better.balanced, solution = solution.balanced, better
        return solution

    def _begin(
        self, weight: float, ways: Sequence[tuple[bool, bool, float]]
    ) -> dict[tuple[bool, bool, float], Solution]:
        method = next(iter(self.balancers.values()))
        known: dict[tuple[Candidate, ...], Solution] = {}
        found = {}
        for way in ways:
            chosen = tuple(self.pick(weight, *way))
            if chosen not in known:
                known[chosen] = self.place(chosen, method)
            found[way] = known[chosen]
        return found

    def _all_of(self, kind: str, sums: bool) -> list[Candidate]:
        """Every table in one kind, where it can be. Two tables that fill a rank each are no beginning otherwise: one alone looks
        uneven."""
        chosen = []
        for each in self.options:
            allowed = [one for one in each if one.candidate.kind == kind and (sums or not one.candidate.sums)] or each
            chosen.append(min(allowed, key=lambda one: one.seconds).candidate)
        return chosen

    def pick(self, memory_weight: float, sums: bool, replicas: bool, evenness: float) -> list[Candidate]:
        """Each table's cheapest candidate: by its mean time, and by what it makes single ranks busier or fuller."""
        target = sum(min(one.seconds for one in each) for each in self.options)
        by_memory = target / max(self.limit, 1.0) * memory_weight

        def score(one: Priced) -> float:
            above = one.peak_seconds - one.seconds
            return one.seconds + evenness * above + max(0.0, one.peak_seconds - target) + by_memory * one.peak_memory

        chosen = []
        for each in self.options:
            allowed = [
                one for one in each
                if (sums or not one.candidate.sums) and (replicas or one.candidate.kind != "data_parallel")
            ] or each  # fmt: skip
            least = min(one.peak_memory for one in allowed)
            chosen.append(
                min((one for one in allowed if one.peak_memory <= max(self.limit, least)), key=score).candidate
            )
        return chosen

    def balance(self, chosen: Sequence[Candidate]) -> Solution:
        """The candidates placed by each method; the better one."""
        best: Solution | None = None
        balanced: dict[str, float | None] = {}
        for name, method in self.balancers.items():
            solution = self.place(chosen, method)
            balanced[name] = None if solution.short else float(solution.seconds.max())
            if best is None or solution.score < best.score:
                best = solution
        assert best is not None
        best.balanced = balanced
        return best

    def place(self, chosen: Sequence[Candidate], method: Balancer) -> Solution:
        """Fixed ones are where they are. Then what goes to nodes, over the nodes; then what goes to ranks, over the ranks."""
        size, nodes, world = self.topology.ranks_per_node, self.topology.nodes, self.topology.world
        placements: list[TablePlacement | None] = [None] * len(chosen)
        costs = np.zeros((len(chosen), len(Part), world))
        total = np.zeros((len(Part), world))

        def settle(k: int, placement: TablePlacement) -> None:
            placements[k] = placement
            costs[k] = self._cost(k, placement)
            np.add(total, costs[k], out=total)

        for k, candidate in enumerate(chosen):
            if candidate.fixed:
                settle(k, self._begun[candidate, self.loads[k].table.dim])
        free = [k for k, candidate in enumerate(chosen) if not candidate.fixed]
        hierarchical = [k for k in free if chosen[k].kind not in ("table_wise", "column_wise")]
        if hierarchical:
            seconds, memory = self._now(total)
            bins = Bins(seconds.reshape(nodes, size).mean(1), memory.reshape(nodes, size).mean(1), self.limit)
            for k, where in self._spread(chosen, hierarchical, bins, method, size):
                settle(k, self._on_nodes(chosen[k], self.loads[k].table.dim, where, self._now(total)[0]))
        flat = [k for k in free if chosen[k].kind in ("table_wise", "column_wise")]
        if flat:
            seconds, memory = self._now(total)
            for k, where in self._spread(chosen, flat, Bins(seconds, memory, self.limit), method, 1):
                ranks: list[list[tuple[int, ...]]] = [[(rank,)] for rank in sorted(where)]
                settle(k, chosen[k].pieces(self.loads[k].table.dim, ranks))
        return self._solution(chosen, placements, costs, total)  # type: ignore[arg-type]

    def _cost(self, k: int, placement: TablePlacement) -> Floats:
        """The beginnings have most placements in common."""
        found = self._known[k].get(placement)
        if found is None:
            found = self._known[k][placement] = self.pricer.price_many(self.each[k], 1, placement)[:, 0]
        return found

    def _now(self, total: Floats) -> tuple[Floats, Floats]:
        return self.pricer.seconds(total), self.pricer.memory(total)

    def _spread(
        self, chosen: Sequence[Candidate], numbers: Sequence[int], bins: Bins, method: Balancer, size: int
    ) -> list[tuple[int, list[int]]]:
        """(table, the bin of each of its groups of columns)."""
        items, owners = [], []
        for k in numbers:
            priced = next(one for one in self.options[k] if one.candidate == chosen[k])
            groups = chosen[k].groups
            # What the owner has more than the others: they all ask the same, wherever it is.
            above, more = priced.peak_seconds - priced.seconds, priced.peak_memory - priced.memory
            world = self.topology.world
            holders = groups * (size if size > 1 else 1)
            scale = world / max(1, world - holders) if holders < world else 1.0
            for _ in range(groups):
                items.append(Item(above * scale, more * scale, k))
                owners.append(k)
        found: dict[int, list[int]] = {k: [] for k in numbers}
        for k, where in zip(owners, method(items, bins)):
            found[k].append(where)
        return list(found.items())

    def _on_nodes(self, candidate: Candidate, dim: int, where: list[int], seconds: Floats) -> TablePlacement:
        size = self.topology.ranks_per_node
        ranks: list[list[tuple[int, ...]]] = []
        for node in where:
            own = list(range(node * size, (node + 1) * size))
            if candidate.kind in ("table_row_wise", "column_row_wise"):
                ranks.append([tuple(own)])
            else:
                order = np.argsort(seconds[own], kind="stable")
                ranks.append([(own[int(order[j % size])],) for j in range(candidate.inner)])
        return candidate.pieces(dim, ranks)

    def _solution(
        self, chosen: Sequence[Candidate], placements: list[TablePlacement], costs: Floats, total: Floats
    ) -> Solution:
        seconds, memory = self._now(total)
        return Solution(list(chosen), placements, costs, total, seconds, memory, self.limit)

    def instead(self, solution: Solution, k: int, candidate: Candidate) -> tuple[TablePlacement, Floats, Solution]:
        """Table k as another candidate, where that is best, with all others as they are."""
        rest = solution.total - solution.costs[k]
        seconds, memory = self._now(rest)
        pressed = np.where(memory > self.limit, 1 + memory / max(self.limit, 1.0), 0.0)
        placement = candidate.put(self.loads[k].table.dim, self.topology, seconds + pressed)
        cost = self._cost(k, placement)
        total = rest + cost
        seconds, memory = self._now(total)
        changed = Solution([], [], cost[None], total, seconds, memory, self.limit)
        return placement, cost, changed

    def improve(self, solution: Solution) -> Solution:
        """Changes one table at a time: first what helps most of the dearest ones of the fullest rank, then whatever helps."""
        for _ in range(ROUNDS):
            if not self._improve_once(solution):
                break
        for _ in range(max(1, SWEPT // len(self.loads))):
            if not self._sweep(solution):
                break
        solution.total = solution.costs.sum(0)
        solution.seconds, solution.memory = self._now(solution.total)
        return solution

    def alternatives(self, solution: Solution, k: int) -> list[Candidate]:
        """Other candidates of a table that are worth a try: the cheapest of each kind first."""
        others = sorted((one for one in self.options[k] if one.candidate != solution.candidates[k]), key=_seconds)
        kinds = {one.candidate.kind: one for one in reversed(others)}
        first = sorted(kinds.values(), key=_seconds)
        return list(dict.fromkeys(one.candidate for one in [*first, *others]))[
            : ALTERNATIVES if len(self.loads) <= MANY else 2
        ]

    def _sweep(self, solution: Solution) -> bool:
        """Every table once: whatever makes the slowest rank faster."""
        changes = 0
        for k in range(len(self.loads)):
            for candidate in self.alternatives(solution, k):
                placement, cost, changed = self.instead(solution, k, candidate)
                before = (solution.short, float(solution.seconds.max()))
                if _better((changed.short, float(changed.seconds.max())), before):
                    self._apply(solution, k, candidate, placement, cost, changed)
                    changes += 1
        return changes > 0

    @staticmethod
    def _apply(
        solution: Solution, k: int, candidate: Candidate, placement: TablePlacement, cost: Floats, changed: Solution
    ) -> None:
        solution.candidates[k], solution.placements[k], solution.costs[k] = candidate, placement, cost
        solution.total, solution.seconds, solution.memory = changed.total, changed.seconds, changed.memory

    def _improve_once(self, solution: Solution) -> bool:
        before = solution.score
        over = solution.memory - solution.limit
        fullest = int(over.argmax()) if before[0] else int(solution.seconds.argmax())
        there = solution.costs[:, :, fullest].T
        own = there[MEMORY].sum(0) if before[0] else self.pricer.own_seconds(there)
        best: tuple[tuple[float, float], int, Candidate, TablePlacement, Floats, Solution] | None = None
        for k in (int(k) for k in np.argsort(-own, kind="stable")[:LOOKED_AT]):
            for one in self.options[k]:
                placement, cost, changed = self.instead(solution, k, one.candidate)
                if placement != solution.placements[k] and (best is None or changed.score < best[0]):
                    best = (changed.score, k, one.candidate, placement, cost, changed)
        if best is None or not _better(best[0], before):
            return False
        self._apply(solution, *best[1:])
        return True


def _seconds(one: Priced) -> float:
    return one.seconds


def _better(after: tuple[float, float], before: tuple[float, float]) -> bool:
    """By enough to be worth it, in the first number that differs by enough."""
    for new, old in zip(after, before):
        if new < old * (1 - BETTER):
            return True
        if new > old * (1 + BETTER):
            return False
    return False
