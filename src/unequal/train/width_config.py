"""[width] in a recipe: the budget of the tables and how it is spent, and how the smallest budget that will do is looked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ..errors import RecipeError, UserError, nearest
from ..optim import Optimizer
from ..tables import Table
from ..width import POLICIES, Rounds, Width

AUTO = "auto"
SEARCH = ("tolerance", "auto_steps")
"""fields that say how a budget is looked for; all others are those of uq.Width"""
UNKNOWN = 1 << 20
"""rows that stand for as many as there will be"""


def _default(name: str) -> Any:
    return next(f.default for f in fields(Width) if f.name == name)


@dataclass(frozen=True, kw_only=True, slots=True)
class WidthConfig:
    """Rows as wide as they deserve, inside a budget. The fields are those of uq.Width."""

    budget: str | float = "10%"
    """A share of all values ("10%"), bytes of all that the tables take ("2 GB"), or "auto": the smallest share that holds."""
    policy: str = _default("policy")
    tables: dict[str, str | float] = field(default_factory=dict)
    """Budgets of single tables, which then do not share the common one."""
    rows: dict[str, int] = field(default_factory=dict)
    """How many ids tables with unbounded ids have, about. Left out, `unequal train` counts them."""
    chunk: int | None = None
    """Values that come and go together; left out, each table has about 16 chunks."""
    every: int = _default("every")
    """Steps between rounds; the first ones are closer together."""
    decay: float = _default("decay")
    """Of what a row is worth, per step."""
    hysteresis: float = _default("hysteresis")
    """By how much the threshold must be passed before a row changes."""
    most: float = _default("most")
    """Share of the budget that may move in one round."""
    thresholds: str = _default("thresholds")
    """What rows of different tables are measured by: "one" measure, each "table" by its mean, or each "column" of it."""
    adapt: bool = _default("adapt")
    """Whether rounds are as close together as the first ones again when popularity shifts."""
    start: str = _default("start")
    """"small": inside the budget from the first step on; "full": new rows are whole, and shrink in the first rounds."""
    ramp: int = _default("ramp")
    """Steps in which they do; in a short training half of its steps."""
    state: str | None = None
    """What the optimizer knows of chunks that a row gets beside those it has: nothing ("fresh"), or some of what it knows of the
    others ("row"). Left out: "row" with water-filling, otherwise "fresh"."""
    rate: float | None = None
    """What the tables' learning rates are multiplied by: those of whole tables are too low for narrow ones. Left out: 1 / √(the
    share of the values that is kept), at most 4, with AdaGrad and Adam; 1 with other optimizers."""
    gradients: str = _default("gradients")
    """Several ranks: gradients travel to the owners of narrow rows as narrow as these, with one number for the rest ("norms"), or
    "whole"."""
    tolerance: float = 0.001
    """With budget = "auto": by how much the validation loss may be above that of whole tables, as a share of it."""
    auto_steps: int = 0
    """With budget = "auto": steps of each training that tries a budget; 0 is as many as the run's own."""

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise RecipeError(
                "width.policy", "one of " + ", ".join(POLICIES), self.policy, nearest(self.policy, POLICIES)
            )
        if self.tolerance < 0:
            raise RecipeError("width.tolerance", "a share of the loss, 0 or more", self.tolerance)
        if self.auto_steps < 0:
            raise RecipeError("width.auto_steps", "0 or more", self.auto_steps)
        for name, budget in self.tables.items():
            if budget == AUTO:
                raise RecipeError(
                    f"width.tables.{name}", "a share like '10%' or a size like '2 GB'", budget,
                    'only the common budget may be "auto"',
                )  # fmt: skip
        if isinstance(self.budget, str) and self.budget != AUTO and not any(c.isdigit() for c in self.budget):
            raise RecipeError("width.budget", "a share like '10%', a size like '2 GB', or 'auto'", self.budget)
        with _named_as_in_a_recipe():
            self._width(self.budget if self.budget != AUTO else "100%")

    @property
    def searches(self) -> bool:
        """Whether the budget is still to be found."""
        return self.budget == AUTO

    def as_found(self) -> WidthConfig:
        """The same, with no word of how the budget was looked for."""
        return replace(self, tolerance=type(self)().tolerance, auto_steps=0)

    def for_steps(self, steps: int) -> WidthConfig:
        """The same for a training of so many: one that ends before rows have shrunk would end over its budget."""
        return replace(self, ramp=max(1, min(self.ramp, steps // 2))) if self.start == "full" else self

    def build(self) -> Width:
        if self.searches:
            raise UserError('width.budget: "auto" is found by training; start from `unequal train`, or give a budget')
        return self._width(self.budget)

    def _width(self, budget: str | float) -> Width:
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in (*SEARCH, "budget")}
        return Width(budget=budget, **given)

    def check(self, tables: dict[str, Table], optimizer: Optimizer) -> None:
        """Refuses what does not fit the tables: unknown names, chunks that do not divide a dim, a budget that holds nothing."""
        for name in self.tables:
            if name not in tables:
                raise RecipeError(f"width.tables.{name}", "a table of the recipe", name, nearest(name, tables))
        for table in tables.values():
            if table.admit_after > 1:
                raise RecipeError(
                    "width", f"no such section where table '{table.name}' has admit_after = {table.admit_after}",
                    "a budget", "leave out admit_after: inside a budget, rare ids get no row by themselves",
                )  # fmt: skip
        bounded = all(table.rows is not None for table in tables.values())
        budget = self.budget if not self.searches else "100%" if bounded else "1 TB"
        with _named_as_in_a_recipe():
            width = replace(self._width(budget), rows={**dict.fromkeys(self.unknown(tables), UNKNOWN), **self.rows})
            Rounds(width, tables, {name: table.optimizer or optimizer for name, table in tables.items()})

    def unknown(self, tables: Mapping[str, Table]) -> list[str]:
        """Tables with unbounded ids of which nobody has said how many there are about."""
        return [] if self.searches else [n for n, t in tables.items() if t.rows is None and n not in self.rows]


@contextmanager
def _named_as_in_a_recipe() -> Iterator[None]:
    """Errors of uq.Width name its arguments; a recipe's user knows them as fields of [width]."""
    try:
        yield
    except RecipeError as error:
        raise UserError(str(error).replace("width ", "width.", 1)) from error
