"""How many ids tables with unbounded ids have: with a budget it says of what a share is to be kept, how wide new rows may be, and
how much is saved in the end. They are counted in the training part."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from ..data.dataset import Dataset
from ..plan.profiled import loads_from_profile
from ..stats.collect import profile_dataset
from .build import build_tables
from .config import Recipe
from .processes import Ranks
from .profiling import gather

SAMPLES = 20_000_000
"""that are looked at; of more it is estimated how many ids they have"""


def with_rows(recipe: Recipe, data: Dataset, ranks: Ranks, say: Callable[[str], None]) -> Recipe:
    """The recipe with what its budget needs to know of unbounded ids. All ranks call it."""
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
        own = profile_dataset(
            data, wanted, samples=SAMPLES, rank=ranks.rank, world=ranks.world, workers=max(1, recipe.run.workers)
        )
        merged = gather(own, ranks.mesh)

        def counted() -> dict[str, int]:
            assert merged is not None
            loads = loads_from_profile(merged, wanted, recipe.optimizer.build_tables())
            return {
                name: max(1, loads[name].rows if merged.sampled else int(merged.tables[name].rows_seen))
                for name in missing
            }

        rows |= ranks.first(counted)
        counts = ", ".join(f"{rows[name]:,} of '{name}'" for name in missing)
        seconds = time.perf_counter() - start
        say(
            f"ids of tables without rows were counted: {counts} ({seconds:.1f} s; [width.rows] in the recipe spares that)"
        )
    return replace(recipe, width=replace(recipe.width, rows={**recipe.width.rows, **rows})) if rows else recipe
