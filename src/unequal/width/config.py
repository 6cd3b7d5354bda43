"""uq.Width: the budget, and how it is spent."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import RecipeError, nearest
from ..tables import Table
from .policy import POLICIES, policy_of

UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30}
THRESHOLDS = ("one", "table", "column")
INHERITED = 0.2
"""share of the largest sum of squares of a row's values with which new ones begin: they have seen less, not nothing"""
MOST_CHUNKS, ASKED_CHUNKS = 32, 63
"""of a vector, and where more are asked for: beyond the first classes are too many for too few rows each"""


@dataclass(frozen=True, slots=True)
class Budget:
    """A share of the values that all rows at full width have, or bytes of everything that the tables take."""

    share: float | None = None
    size: int | None = None

    @classmethod
    def parse(cls, text: object, where: str) -> Budget:
        expected = "a share like '10%' or a size like '2 GB'"
        if isinstance(text, Budget):
            return text
        if isinstance(text, int | float) and not isinstance(text, bool) and 0 < text <= 1:
            return cls(share=float(text))
        found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(%|[kmgt]?i?b)\s*", str(text).lower())
        if found is None:
            raise RecipeError(where, expected, text)
        number, unit = float(found[1]), found[2]
        if unit == "%":
            if not 0 < number <= 100:
                raise RecipeError(where, "more than 0% and at most 100%", text)
            return cls(share=number / 100)
        if number <= 0:
            raise RecipeError(where, expected, text)
        return cls(size=int(number * UNITS[unit]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Width:
    """How wide rows may be, all tables together, and by which policy the budget is spent on them."""

    budget: str | float | Budget = "10%"
    """a share of all values, like "10%"; or bytes of all that the tables take, like "2 GB" """
    policy: str = "water-filling"
    tables: Mapping[str, str | float | Budget] = field(default_factory=dict)
    """budgets of single tables, which then do not share the common one"""
    rows: Mapping[str, int] = field(default_factory=dict)
    """how many ids tables with unbounded ids have, about: of their values a budget may then be a share, too, and one in bytes
    says how wide new rows may be. Of tables with a fixed number of rows, how many of them are read, about: where that is far
    fewer, all of these may be whole in a small share"""
    chunk: int | None = None
    """values that come and go together; without it each table has about 16 chunks"""
    every: int = 1000
    """steps between rounds in the long run; at the start they are closer together, see Intervals"""
    decay: float = 0.999
    """of what a row is worth, per step"""
    hysteresis: float = 0.1
    """by how much the threshold must be passed before a row changes"""
    most: float = 0.5
    """share of the budget that may move in one round"""
    thresholds: str = "one"
    """what rows of different tables are measured by. "one": the same for all, so that the table whose gradients are larger gets
    more. "table": the mean of the rows of each table, so that each has a threshold of its own, and all meet the budget together.
    "column": the mean of each chunk of each table, for policies that follow chunks. AdaEmbed has its own measure"""
    adapt: bool = True
    """whether rounds are as close together as the first ones again when popularity shifts: many ids have no row then"""
    start: str = "small"
    """"small": inside the budget from the first step on; "full": new rows are whole, and shrink in the first rounds"""
    ramp: int = 2000
    """steps in which they do"""
    state: str | None = None
    """what the optimizer knows of chunks that a row gets beside those it has. "fresh": nothing, so that they learn as fast as new
    rows do, and in their first step move by the whole learning rate. "row": squares of gradients (AdaGrad, Adam) begin as a fifth
    of the largest of the row's others; one number for the row, an average, counts them with a fifth of itself, where otherwise it
    stays. Without it as the policy does: "row" with water-filling"""
    rate: float | None = None
    """what the tables' learning rates are multiplied by. Without it by 1 / √(share of the values that is kept), at most 4, with
    AdaGrad and Adam, row-wise or not: their steps are as long whatever the gradients are, so that what rows say to each other
    grows the slower the fewer values they have. By 1 with other optimizers, and where the share is not known"""
    gradients: str = "norms"
    """what owners on other ranks are told of the gradients of chunks that a row lacks. "norms": their norm alone, so that
    messages are as narrow as the rows, and a row that several ranks read is worth up to the sum of what it is to each. "whole":
    all of it, so that a row is worth what it is in one process"""

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", Budget.parse(self.budget, "width budget"))
        own = {name: Budget.parse(text, f"width budget of table '{name}'") for name, text in self.tables.items()}
        object.__setattr__(self, "tables", own)
        if self.policy not in POLICIES:
            raise RecipeError(
                "width policy", f"one of {', '.join(POLICIES)}; {nearest(self.policy, POLICIES)}", self.policy
            )
        for name, rows in self.rows.items():
            if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
                raise RecipeError(f"width rows of table '{name}'", "how many ids it has, 1 or more", rows)
        if self.chunk is not None and self.chunk < 1:
            raise RecipeError("width chunk", "1 or more values", self.chunk)
        if self.every < 1:
            raise RecipeError("width every", "1 or more steps", self.every)
        if not 0 < self.decay <= 1:
            raise RecipeError("width decay", "more than 0, at most 1", self.decay)
        if not 0 <= self.hysteresis < 10:
            raise RecipeError("width hysteresis", "0 or more, below 10", self.hysteresis)
        if not 0 < self.most <= 1:
            raise RecipeError("width most", "more than 0, at most 1", self.most)
        if self.thresholds not in THRESHOLDS:
            raise RecipeError("width thresholds", "'one', 'table' or 'column'", self.thresholds)
        if self.thresholds == "column" and not policy_of(self.policy).by_chunk:
            able = ", ".join(name for name in POLICIES if policy_of(name).by_chunk)
            raise RecipeError(
                "width thresholds",
                f"'one' or 'table' with policy '{self.policy}', which follows rows; chunks are followed by {able}",
                self.thresholds,
            )
        if not isinstance(self.adapt, bool):
            raise RecipeError("width adapt", "true or false", self.adapt)
        if self.start not in ("small", "full"):
            raise RecipeError("width start", "'small' or 'full'", self.start)
        if self.state not in (None, "fresh", "row"):
            raise RecipeError("width state", "'fresh' or 'row'", self.state)
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise RecipeError("width rate", "a number above 0", self.rate)
        if self.gradients not in ("whole", "norms"):
            raise RecipeError("width gradients", "'whole' or 'norms'", self.gradients)
        if self.ramp < 1:
            raise RecipeError("width ramp", "1 or more steps", self.ramp)

    def budget_of(self, table: str) -> Budget | None:
        """A budget that is the table's alone."""
        found = self.tables.get(table)
        assert found is None or isinstance(found, Budget)
        return found

    def rows_of(self, table: Table) -> int | None:
        """How many there can be, or are about; None where nobody knows."""
        return self.rows.get(table.name) if table.rows is None else table.rows

    def read_of(self, table: Table) -> int | None:
        """How many of these training reads, about."""
        rows = self.rows_of(table)
        return rows if rows is None else min(rows, self.rows.get(table.name, rows))

    @property
    def inherit(self) -> float:
        """With how much of what the optimizer knows of a row its new chunks begin."""
        inherits = policy_of(self.policy).inherits if self.state is None else self.state == "row"
        return INHERITED if inherits else 0.0

    @property
    def common(self) -> Budget:
        assert isinstance(self.budget, Budget)
        return self.budget

    def chunk_of(self, table: Table) -> int:
        """Values of a chunk of this table."""
        if self.chunk is not None:
            able = [c for c in range(1, table.dim + 1) if table.dim % c == 0 and table.dim // c <= ASKED_CHUNKS]
            if self.chunk not in able:
                raise RecipeError(
                    f"width chunk for table '{table.name}'",
                    f"a divisor of its dim {table.dim} that makes at most {ASKED_CHUNKS} chunks: one of {able}",
                    self.chunk,
                )
            return self.chunk
        counts = [c for c in range(1, MOST_CHUNKS + 1) if table.dim % c == 0]
        return table.dim // min(counts, key=lambda count: (abs(count - 16), count))
