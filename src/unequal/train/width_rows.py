"""A share of the values of tables with unbounded ids: of how many ids? Of those that the training part has, which are counted."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from ..data.dataset import Dataset
from ..stats.collect import profile_dataset
from .build import build_tables
from .config import Recipe
from .processes import Ranks
from .profiling import gather


def with_rows(recipe: Recipe, data: Dataset, ranks: Ranks, say: Callable[[str], None]) -> Recipe:
    """The recipe with what its budgets need to know of unbounded ids. All ranks call it."""
    if recipe.width is None:
        return recipe
    features = build_tables(recipe)
    expected = recipe.expected_rows()
    unknown = recipe.width.unknown({feature.table.name: feature.table for feature in features.values()})
    rows = {name: expected[name] for name in unknown if name in expected}
    missing = [name for name in unknown if name not in expected]
    if missing:
        start = time.perf_counter()
        wanted = {name: feature for name, feature in features.items() if feature.table.name in missing}
        own = profile_dataset(data, wanted, rank=ranks.rank, world=ranks.world, workers=max(1, recipe.run.workers))
        merged = gather(own, ranks.mesh)
        found: dict[str, int] = ranks.first(
            lambda: {} if merged is None else {name: int(merged.tables[name].rows_seen) for name in missing}
        )
        rows |= {name: max(1, count) for name, count in found.items()}
        counts = ", ".join(f"{rows[name]:,} of '{name}'" for name in missing)
        seconds = time.perf_counter() - start
        say(
            f"a share of the values is to be kept, so ids were counted: {counts} ({seconds:.1f} s; width.rows spares that)"
        )
    return replace(recipe, width=replace(recipe.width, rows={**recipe.width.rows, **rows})) if rows else recipe
