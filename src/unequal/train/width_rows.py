"""How many ids tables with unbounded ids have: with a budget it says of what a share is to be kept, how wide new rows may be, and
how much is saved in the end. And of which tables with a fixed number of rows far fewer are read: they may all be whole in a small
share. They are counted in the training part."""

from __future__ import annotations

import math
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
FEWER = 2_000_000
"""the same where all tables have a fixed number of rows"""
FAR_FEWER = 0.5
"""of a table's rows: where it is estimated that no more are read, the budget is told"""


def with_rows(recipe: Recipe, data: Dataset, ranks: Ranks, say: Callable[[str], None]) -> Recipe:
    """The recipe with what its budget needs to know of ids. All ranks call it."""
    if recipe.width is None:
        return recipe
    features = build_tables(recipe)
    tables = {feature.table.name: feature.table for feature in features.values()}
    rows = {name: count for name, count in recipe.expected_rows().items() if name in tables} | dict(recipe.width.rows)
    wanted = {name: feature for name, feature in features.items() if feature.table.name not in rows}
    if wanted:
        start = time.perf_counter()
        unbounded = any(feature.table.rows is None for feature in wanted.values())
        own = profile_dataset(
            data, wanted, samples=SAMPLES if unbounded else FEWER, rank=ranks.rank, world=ranks.world,
            workers=max(1, recipe.run.workers),
        )  # fmt: skip
        merged = gather(own, ranks.mesh)

        def counted() -> dict[str, int]:
            assert merged is not None
            loads = loads_from_profile(merged, wanted, recipe.optimizer.build_tables())
            total = max(merged.samples, merged.total_samples)
            return {
                name: max(1, round(load.distinct(total)) if merged.sampled else int(merged.tables[name].rows_seen))
                for name, load in loads.items()
            }

        found = ranks.first(counted)
        told = {name: count for name, count in found.items() if count <= FAR_FEWER * (tables[name].rows or math.inf)}
        rows |= told
        if told:
            counts = ", ".join(
                f"{count:,} of '{name}'" + (f" ({whole:,} rows)" if (whole := tables[name].rows) is not None else "")
                for name, count in told.items()
            )
            seconds = time.perf_counter() - start
            say(f"ids were counted: {counts} ({seconds:.1f} s; [width.rows] in the recipe spares that)")
    return replace(recipe, width=replace(recipe.width, rows=rows)) if rows else recipe
