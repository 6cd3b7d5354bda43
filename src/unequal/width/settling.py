"""What is settled before the first step: which tables share a budget, and how the rows of each are kept and followed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import RecipeError
from ..kernels.request import WAYS
from ..optim import Adagrad, Optimizer
from ..storage.narrow import Narrowing, NarrowStorage, Purse
from ..tables import Table
from .config import Budget, Width
from .policy import Policy, policy_of
from .threshold import Sum

FOLLOWED = 8192
"""ids without a row that are followed at least, where there are so many"""
FOLLOWING = 0.1
"""of a budget in bytes, for candidates that are found by hashing"""
FOLLOWING_ALL = 0.25
"""of such a budget, where every id of a small table has its own place; twice as much where that is its place in the directory"""
OVERHEAD = 24
"""bytes beside values and optimizer state that a live row takes, about: its place in the directory, and its utility"""
SPARE = 0.005
"""of a budget in bytes, for the room that slabs have to spare while rows are added between rounds"""
SMALL = 4 * FOLLOWED
"""rows of a table that can be followed wholly for what FOLLOWED candidates take that are found by hashing"""
FOLLOWED_ROW = 8
"""bytes beside values and optimizer state that a row of a small table takes: its word in the directory, and its utility"""
WHOLE_FROM = 0.2
"""share of the values that is kept from which rows are whole before the first round, where that helps (see _early)"""
PAYS = 0.7
"""share of bytes for these above which rows that are all equally wide do better (docs/width.md)"""


def rounded_up(number: float) -> str:
    """To two digits: one that may be given back."""
    digits = 1 - math.floor(math.log10(number))
    return f"{math.ceil(number * 10**digits) / 10**digits:.2g}"


def alone(value: float) -> float:
    """The sum over all ranks, where there is one."""
    return value


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
    kept: float | None = None
    """what share of the values of all rows that are read the budget is, about; None where it is not known how many there are"""

    def values(self, storages: Mapping[str, NarrowStorage], total: Sum = alone) -> float:
        """The budget in values, given how the live rows are: a size in bytes covers all that they take."""
        if self.budget.share is not None:
            return self.budget.share * self.full
        assert self.budget.size is not None
        parts = [storages[name] for name in self.tables if name in storages]
        # Without what slabs have to spare, of which a resumed run knows nothing.
        held = total(float(sum(storage.bytes_with(storage.counts) for storage in parts)))
        values = total(float(sum(storage.values for storage in parts)))
        return self.budget.size * (1 - SPARE) * values / held if values else 0.0


class Settling:
    """`ranks`: how many there are; `shares`: by table which part of its rows this one has, by default an equal one."""

    def __init__(
        self,
        width: Width,
        tables: Mapping[str, Table],
        optimizers: Mapping[str, Optimizer],
        ranks: int = 1,
        shares: Mapping[str, float] | None = None,
    ) -> None:
        for part, named in (("tables", width.tables), ("rows", width.rows)):
            unknown = [name for name in named if name not in tables]
            if unknown:
                raise RecipeError(f"width {part}", f"tables of the model: {', '.join(tables)}", unknown[0])
        self.width, self.tables, self.optimizers, self.ranks = width, tables, optimizers, ranks
        self.shares = dict.fromkeys(tables, 1 / ranks) if shares is None else shares
        self.policy: Policy = policy_of(width.policy)
        self.rows = {name: width.rows_of(table) for name, table in tables.items()}
        self.read = {name: width.read_of(table) for name, table in tables.items()}
        self.groups = self._group()
        for group in self.groups:
            group.kept = self._kept(group)
        self.how = {name: self._narrowing(name) for name in tables}

    def _group(self) -> list[Group]:
        groups = []
        own = {name: budget for name in self.tables if (budget := self.width.budget_of(name)) is not None}
        shared = [name for name in self.tables if name not in own]
        for name, budget, members in [
            *((name, budget, [name]) for name, budget in own.items()),
            *([("all tables", self.width.common, shared)] if shared else []),
        ]:
            rows = [self.rows[member] for member in members]
            full = 0.0 if None in rows else float(sum(n * self.tables[m].dim for n, m in zip(rows, members) if n))
            if budget.share is not None and not full:
                unbounded = next(member for member in members if self.rows[member] is None)
                raise RecipeError(
                    "width budget",
                    f"a size like '2 GB', or width.rows: table '{unbounded}' has unbounded ids, and of how many rows a share is "
                    "to be kept is not known",
                    f"{budget.share:.4g} of them",
                )
            groups.append(Group(name, budget, members, full, uniform=self._uniform(budget, members)))
        return groups

    def _kept(self, group: Group) -> float | None:
        read = {name: self.read[name] or 0 for name in group.tables}
        if not all(read.values()):
            return None
        if group.budget.share is not None:
            kept = group.budget.share * group.full / sum(count * self.tables[name].dim for name, count in read.items())
        elif group.uniform:
            held = (
                n * self.width.chunk_of(self.tables[name]) * (self.rows[name] or 0) for name, n in group.uniform.items()
            )
            kept = sum(held) / group.full
        else:
            assert group.budget.size is not None
            kept = group.budget.size / sum(count * self._whole_row(name) for name, count in read.items())
        return min(1.0, kept)

    def _whole_row(self, name: str) -> int:
        """Bytes that it takes, about."""
        table = self.tables[name]
        return table.dim * table.dtype.itemsize + self.optimizers[name].state_bytes_per_row(table.dim) + OVERHEAD

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

    def _narrowing(self, name: str) -> Narrowing:
        table, group = self.tables[name], next(group for group in self.groups if name in group.tables)
        optimizer = self.optimizers[name]
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
            assert group.kept is not None
            keep = group.kept
        else:
            assert group.budget.size is not None
            dims = sum(self.tables[member].dim for member in group.tables)
            whole = group.budget.size * table.dim / dims / self._whole_row(name)
            known = self.read[name]
            keep = min(1.0, whole / known) if known is not None else 1.0 / chunks
        full = self.policy.whole or self.width.start == "full"
        start = chunks if full else max(1, int(keep * chunks))
        if group.budget.size is not None and table.rows is None:
            width_bytes = start * chunk * item + optimizer.state_bytes_per_row(start * chunk) + OVERHEAD
            expected = group.budget.size / width_bytes
        else:
            rows = self.read[name]
            assert rows is not None
            expected = min(float(rows), keep * rows * chunks / start)
        expected *= self.shares[name]
        self._check_minimum(group, table, chunk)
        candidates, by_id = self._candidates(group, table, keep)
        return Narrowing(
            chunk=chunk, masked=self.policy.masked, by_chunk=self.policy.by_chunk, kind=self.policy.kind, start=start,
            rows=expected, candidates=candidates, by_id=by_id, decay=self.width.decay if self.policy.fades else 1.0,
            purse=group.purse, inherit=self.width.inherit, early=self._early(table, keep),
        )  # fmt: skip

    def _early(self, table: Table, keep: float) -> int:
        """Chunks of a row that is new before the first round. Where a row has one number for all its values, by which they learn
        the slower the more has come, values that it gets later stay behind those that it began with: so it begins whole, as long
        as the budget lasts. With such a number for each value (AdaGrad) it does, too, where the rate follows widths: its first
        steps are then those of whole rows. With one that forgets (Adam) rows would learn nothing (docs/log.md)."""
        own = self.optimizers[table.name]
        by_row = any(per == "row" for _, per in own.state)
        helps = by_row or (isinstance(own, Adagrad) and self.width.rate is None)
        chunks = table.dim // self.width.chunk_of(table)
        return chunks if helps and keep >= WHOLE_FROM and self.policy.saves else 0

    def _candidates(self, group: Group, table: Table, keep: float) -> tuple[int, bool]:
        """How many, and whether all ids are, each at its own place: where that takes no more than as many that are hashed. These
        are half as many as rows that could be whole; small tables are followed wholly, and a little more: buckets fill unevenly.
        Of a budget in bytes they take a tenth at most, all ids of small tables a quarter."""
        if not self.policy.kind:
            return WAYS, False
        share = self.shares[table.name]
        rows = (self.read[table.name] or 1 << 20) * share
        most = min(int(1.25 * rows) + 8, 1 << 22)
        own = 4 * (table.dim // self.width.chunk_of(table) if self.policy.by_chunk else 1)
        each = 12 + own
        all_of_them, payable = math.ceil((table.rows or 0) * share), False
        if group.budget.size is not None:
            dims = sum(self.tables[name].dim for name in group.tables)
            most = min(most, int(group.budget.size * FOLLOWING * share * table.dim / dims / each))
            total = sum(self.tables[name].rows or math.inf for name in group.tables)
            share_of_it = FOLLOWING_ALL if self.policy.by_chunk else 2 * FOLLOWING_ALL
            payable = (table.rows or math.inf) <= SMALL and total * own <= share_of_it * group.budget.size
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
                f"at least {rounded_up(100 * least / group.full)}% of all values, one chunk for a row in each of "
                f"{len(group.tables)} tables" + (f" on each of {self.ranks} ranks" if self.ranks > 1 else ""),
                f"{100 * group.budget.share:.3g}%",
            )
        size = self._least(group.tables)
        if group.budget.size is not None and group.budget.size < size:
            what = f"{len(group.tables)} tables with a row, its place and the candidates for more"
            every = self._bytes(dict.fromkeys(group.tables, 1)) if self._may_be_uniform(group.tables) else size
            if group.budget.size < every < size:
                size, what = every, f"{len(group.tables)} tables with a chunk of every row"
            raise RecipeError("width budget", f"at least {size:,} bytes: {what}", f"{group.budget.size:,}")

    def _least(self, members: list[str]) -> int:
        """Bytes of tables that are followed, with a slab of narrow rows and the smallest directory on each rank."""
        tables = [self.tables[name] for name in members]
        directories = sum(min(64 * 12, 4 * (table.rows or 64 * 12)) for table in tables)
        rows = sum(16 * (self.width.chunk_of(table) * table.dtype.itemsize + 16) for table in tables)
        return (len(tables) * WAYS * 16 + directories + rows) * self.ranks
