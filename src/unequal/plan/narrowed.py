"""What a plan must know of tables with a budget: they hold less, and rows of different width stay in one piece."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from ..width import Rounds, Width
from .workload import TableLoad


def within_budget(loads: Mapping[str, TableLoad], width: Width | None) -> dict[str, TableLoad]:
    """The loads with as many rows as could be whole inside the budget, and a directory of those that live or are followed."""
    if width is None:
        return dict(loads)
    tables = {name: load.table for name, load in loads.items()}
    # How many ids there are is not known before training; the loads say about how many.
    unknown = {name: max(1, load.rows) for name, load in loads.items() if width.rows_of(load.table) is None}
    width = replace(width, rows={**width.rows, **unknown})
    how = Rounds(width, tables, {name: load.optimizer for name, load in loads.items()}).how
    narrow = {}
    for name, load in loads.items():
        own = how[name]
        rows = min(load.rows, math.ceil(own.rows * own.start * own.chunk / load.table.dim))
        narrow[name] = replace(load, rows=rows, entries=math.ceil(own.rows) + own.candidates, whole_rows=True)
    return narrow
