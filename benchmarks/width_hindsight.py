"""How well could the best few rows do, if one knew them? What policies that choose rows can be measured against, where little
is kept.

One model is trained in which every row has one value, which is 1/16 of all. Then it is seen what each row saves: by how much
the loss of some samples would be higher without it. The rows that save most, as many as the budget holds, are all that a new
model has, from its first step to its last. Chosen by training data that is hindsight; chosen by the test data itself it is
more than any policy may know. No bound in the strict sense: rows are chosen all at once. Masks stand for tables, as in
width_masks, so it is quality alone.

    python -m benchmarks --only width_hindsight
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .width_data import Ints, Study, prepared
from .width_masks import INIT, Batch, Model, Models, Score, chosen, train
from .width_summary import BARS
from .width_training import DIM
from .width_training import KEPT as SHARES

if TYPE_CHECKING:
    from rich.table import Table

DATA = ("frappe", "ml1m_random", "ml1m_time")
KEPT = 0.02
RATES = {"frappe": (0.2, 0.4), "ml1m_random": (0.4,), "ml1m_time": (0.4,)}
"""learning rates that are tried, those that water-filling's tuning chooses among"""
SEEDS = 2


class Fixed(Models):
    """Models whose rows have one value each, or none, for good."""

    def __init__(self, study: Study, models: Sequence[Model], device: str, live: Tensor) -> None:
        """`live`: [rows, models], which rows have one."""
        super().__init__(study, models, device)
        drawn = {
            seed: torch.randn(study.rows, DIM, generator=torch.Generator().manual_seed(seed)) * INIT
            for seed in {model.seed for model in models}
        }
        self.widths = live.to(device, torch.int16)
        self.values = torch.stack([drawn[model.seed] for model in models], 1).to(device) * self._mask(self.widths)

    def _round(self) -> None:
        """None of them changes."""

    def saved(self, samples: Ints) -> Tensor:
        """[rows, models]: by how much the loss over these samples would be higher without a row, to second order."""
        size, total = self.study.batch_size, torch.zeros_like(self.norms)
        for first in range(0, len(samples) - size + 1, size):
            batch = Batch(self.study, samples[first : first + size], self.device)
            vectors = (batch.means @ self.values.flatten(1)).view(batch.lines, -1, DIM).requires_grad_()
            logits = self.logits(vectors, batch.size)
            labels = batch.labels.expand_as(logits)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
            (gradient,) = torch.autograd.grad(loss.mean(1).sum(), vectors)
            products = (self.values * (batch.backwards @ gradient.flatten(1)).view_as(self.values)).sum(2)
            total += size / 2 * products.square() - products
        return total


def means(scores: Sequence[Score]) -> dict[str, Any]:
    """Of the seeds of the learning rate that is best on validation data."""
    best = chosen(scores)
    found = {name: round(statistics.fmean(getattr(s, name) for s in best), 5) for name in ("validation", "test")}
    return {**found, "rate": best[0].model.rate, "seeds": [round(score.test, 5) for score in best]}


def measure(study: Study, seeds: int, epochs: int | None, device: str = "cpu") -> dict[str, Any]:
    rates, rows = RATES[study.name], int(KEPT * study.rows * DIM)
    models = [Model("norms", 1 / DIM, rates[0], seed) for seed in range(seeds)]
    whole = Fixed(study, models, device, torch.ones(study.rows, seeds))
    found = {"one value for every row": means(train(study, models, device, epochs, whole))}
    for part, samples in (("training", study.train), ("test", study.test)):
        order = whole.saved(samples).argsort(0, descending=True)
        live = torch.zeros(study.rows, seeds).scatter_(0, order[:rows].cpu(), 1.0)
        few = [Model("norms", KEPT, rate, seed) for rate in rates for seed in range(seeds)]
        fixed = Fixed(study, few, device, torch.cat([live] * len(rates), 1))
        found[f"the best rows by {part} data"] = means(train(study, few, device, epochs, fixed))
    return {"rows": study.rows, "kept_rows": rows, "cells": found}


def run(quick: bool = False) -> dict[str, Any]:
    found = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name in DATA[:1] if quick else DATA:
            found[name] = measure(prepared(name, Path(temporary)), 1 if quick else SEEDS, 1 if quick else None)
    aims = {name: BARS[name][SHARES.index(KEPT)] for name in DATA}  # losses of AUC against the full model
    return {"kept": KEPT, "aims": aims, "data": found}


def table(result: dict[str, Any]) -> Table:
    from rich.table import Table

    view = Table(title=f"the best rows in hindsight, {100 * result['kept']:g}% of the values: test AUC")
    for name in ("data", "rows", "AUC", "on validation data"):
        view.add_column(name, justify="left" if name in ("data", "rows") else "right")
    for data, found in result["data"].items():
        for what, cell in found["cells"].items():
            view.add_row(data, what, f"{cell['test']:.4f}", f"{cell['validation']:.4f}")
    return view
