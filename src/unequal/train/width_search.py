"""budget = "auto": the smallest budget whose validation loss stays near that of whole tables, found by trying."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, RecipeError, UserError
from .build import check_width
from .config import Recipe
from .run import RECIPE

SEARCH = "width_search.json"
SHARES = (0.5, 0.25, 0.125, 0.0625, 0.03, 0.015)
MISSES = 2
"""budgets in a row that do not hold, after which no smaller one is tried"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of a training that tried a budget."""

    loss: float
    """on the validation part"""
    bytes: int
    """of the tables at its end"""


@dataclass(frozen=True, slots=True)
class Tried:
    budget: str
    loss: float
    change: float
    """of the loss against that of whole tables, as a share of it"""
    bytes: int
    holds: bool


@dataclass(frozen=True, slots=True)
class Found:
    recipe: Recipe
    """with the budget that was found, or without [width] where none holds"""
    tried: list[Tried]

    def to_json(self) -> dict[str, Any]:
        budget = None if self.recipe.width is None else self.recipe.width.budget
        return {"budget": budget, "tried": [asdict(entry) for entry in self.tried]}


def search_budget(recipe: Recipe, attempt: Callable[[Recipe], Outcome], say: Callable[[str], None]) -> Found:
    """`attempt` trains a recipe and scores it on the validation part; the first one has no budget.

    Budgets are halved as long as they hold, and once more: a loss is never the same twice, so one that is just above the line
    does not end the search. Where ids are unbounded a budget is that share of the bytes that the whole tables came to."""
    config = recipe.width
    assert config is not None and config.searches
    run = replace(recipe.run, steps=config.auto_steps) if config.auto_steps else recipe.run
    shares = ", ".join(f"{share:.3g}%" for share in (100 * share for share in SHARES))
    how_long = f"{config.auto_steps:,} steps" if config.auto_steps else "as long as the run"
    say(
        f'width.budget = "auto": training without a budget, then inside {shares} of it, each {how_long}; kept is the smallest '
        f"whose validation loss is at most {config.tolerance:.2%} higher"
    )
    whole = attempt(replace(recipe, width=None, run=run))
    say(_line("whole tables", whole))
    tried = [Tried("none", whole.loss, 0.0, whole.bytes, True)]
    chosen: str | None = None
    misses = 0
    for share in SHARES:
        budget = _budget(recipe, share, whole.bytes)
        narrow = replace(recipe, run=run, width=replace(config, budget=budget))
        try:
            check_width(narrow)
        except UserError as error:
            if chosen is None and not misses:
                raise
            say(f"{budget}: not tried, too small ({error})")
            break
        outcome = attempt(narrow)
        change = outcome.loss / whole.loss - 1
        holds = change <= config.tolerance
        tried.append(Tried(budget, outcome.loss, change, outcome.bytes, holds))
        say(f"{_line(budget, outcome)}, {change:+.2%}: {'holds' if holds else 'too much'}")
        chosen, misses = (budget, 0) if holds else (chosen, misses + 1)
        if misses == MISSES:
            break
    if chosen is None:
        say(f"no budget that was tried keeps the loss within {config.tolerance:.2%}: all rows stay whole")
        return Found(replace(recipe, width=None), tried)
    say(f'found width.budget = "{chosen}"; now the run itself')
    return Found(replace(recipe, width=replace(config, budget=chosen)), tried)


def _line(name: str, outcome: Outcome) -> str:
    return f"  {name:>12}: validation loss {outcome.loss:.5f}, tables of {outcome.bytes:,} bytes"


def _budget(recipe: Recipe, share: float, whole: int) -> str:
    tables = recipe.tables.named
    bounded = all(name in tables and tables[name].rows is not None for name in recipe.table_of().values())
    return f"{100 * share:.4g}%" if bounded else f"{round(share * whole)} B"


def found_before(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe with the budget that the run in this folder has found."""
    path = folder / RECIPE
    try:
        width = tomllib.loads(path.read_text(encoding="utf-8")).get("width")
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise CheckpointError(f"{path}: cannot read the budget that was found: {error}; start a new run") from error
    if recipe.width is None or width is None:
        return replace(recipe, width=None)
    if not isinstance(width, dict) or "budget" not in width:
        raise RecipeError("width.budget", f"the budget that was found, in {path}", width)
    return replace(recipe, width=replace(recipe.width, budget=width["budget"]))
