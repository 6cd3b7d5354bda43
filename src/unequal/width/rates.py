"""How fast tables inside a budget learn.

Where a value's step is about as long whatever the gradient is, a product of two rows with a tenth of the values grows a tenth as
fast. With 1 / √kept times the rate it grows as that of whole ones does; in short trainings rows would otherwise never begin to
learn what they have in common (docs/log.md). What is kept is a share of the rows that training reads: of a table that is declared
to have many more than that, all of them may be whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from ..optim import Optimizer
from ..storage.narrow import NarrowStorage
from ..tables import Table
from .config import Width
from .measures import Totals

FASTEST = 4.0
"""by how much more tables may learn in a step than whole ones"""
CROWDED = 0.5
"""of the places for ids that are followed by hashing: where more are taken, some ids found none, and are not known"""


def faster(kept: float | None) -> float:
    """What a learning rate is multiplied by where so much of all values is kept; 1 where that is not known."""
    return 1.0 if kept is None else min(FASTEST, 1 / math.sqrt(kept))


def expected_over_known(
    expected: Mapping[str, int | None], tables: Mapping[str, Table], storages: Mapping[str, NarrowStorage],
    known: Mapping[str, tuple[int, int]], totals: Totals,
) -> float:  # fmt: skip
    """How many times more values rows would have that are expected to be read, by table, than those that have been read so far,
    all of them whole. `known`: of tables that this rank has a part of, how many ids have a row, and how many without one are
    followed. Where there may be more than those, it is taken that all have been read that are expected."""
    numbers = np.zeros((2, len(expected)))
    for number, name in enumerate(expected):
        if name in known:
            live, followed = known[name]
            how = storages[name].how
            numbers[:, number] = live + followed, not how.by_id and followed > CROWDED * how.candidates
    rows, crowded = totals(numbers.ravel()).reshape(2, -1).tolist()
    whole = so_far = 0.0
    for name, seen, lacking in zip(expected, rows, crowded):
        values = float(expected[name] or 0) * tables[name].dim
        whole += values
        so_far += values if lacking else seen * tables[name].dim
    return whole / so_far if so_far else 1.0


@dataclass(slots=True)
class Rates:
    """What the learning rates of a module's tables are multiplied by. `optimizers`: as they are for whole rows."""

    width: Width
    optimizers: Mapping[str, Optimizer]
    now: dict[str, float] = field(default_factory=dict)
    """by table"""

    def follow(self, kept: Mapping[str, float | None], storages: Mapping[str, NarrowStorage]) -> None:
        """Tables keep such a share of what training reads of them."""
        found = {name: faster(share) if self.optimizers[name].measured else 1.0 for name, share in kept.items()}
        self.load(found, storages)

    def load(self, rates: Mapping[str, float], storages: Mapping[str, NarrowStorage]) -> None:
        """These, unless the recipe has others."""
        for name, rate in rates.items():
            self.now[name] = rate if self.width.rate is None else self.width.rate
            own = self.optimizers[name]
            optimizer = replace(own, lr=own.lr * self.now[name])
            if name in storages and storages[name].optimizer != optimizer:
                storages[name].learn_by(optimizer)
