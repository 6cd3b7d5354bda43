"""How well could few values do, if what is known of ids without values cost nothing? What water-filling can be measured against.

Any values of a row may live, not the first ones. A fifth of them go in each round, those that matter least: |value| × the root of
the squares of its gradients. As many come, one by one wherever the gradient, added up with its sign over steps, is largest. That
takes a number for each value of each row, whether it lives or not, as much memory as all the values: no policy for tables, as a
table inside a budget has 4 bytes a row for all of this. Masks stand for tables, as in width_masks, so it is quality alone.

    python -m benchmarks --only width_columns
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unequal.width.config import INHERITED

from .report import ROOT
from .width_data import Study, prepared
from .width_hindsight import DATA, means
from .width_masks import DECAY, INIT, Model, Models, train
from .width_summary import BARS
from .width_training import DIM
from .width_training import KEPT as SHARES

if TYPE_CHECKING:
    from rich.table import Table

KEPT = (0.125, 0.02)
RATES = {"frappe": (0.1, 0.2), "ml1m_random": (0.2,), "ml1m_time": (0.2,)}
SEEDS = 3
MOVED = 0.2
"""of the values, in a round"""
EVERY = 20
"""steps"""


class Columns(Models):
    """Models of which any values live."""

    def __init__(self, study: Study, models: Sequence[Model], device: str) -> None:
        super().__init__(study, models, device)
        drawn = {}
        for seed in {model.seed for model in models}:
            draw = torch.Generator().manual_seed(seed)
            drawn[seed] = (
                torch.randn(study.rows, DIM, generator=draw) * INIT,
                torch.rand(study.rows, DIM, generator=draw),
            )
        values, chance = (torch.stack([drawn[model.seed][k] for model in models], 1).to(device) for k in (0, 1))
        self.budget = (self.keep * study.rows * DIM).long()
        self.live = _largest(chance, self.budget)
        self.values, self.value_squares = values * self.live, torch.zeros_like(values)

    def _mask(self, widths: Tensor) -> Tensor:
        return self.live if hasattr(self, "live") else super()._mask(widths)

    def _update(self, gradient: Tensor, read: Tensor) -> None:
        self.value_squares.mul_(DECAY).addcmul_(gradient, gradient)
        super()._update(gradient, read)

    def step(self, batch: Any) -> None:
        super().step(batch)
        if self.steps % EVERY == 0:
            self._move()

    def _round(self) -> None:
        """Widths are not what is chosen."""

    def _move(self) -> None:
        matters = torch.where(self.live, self.values.abs() * self.value_squares.sqrt(), -1)
        stay = _largest(matters, ((1 - MOVED) * self.budget).long()) & self.live
        wanted = torch.where(stay, -1, self.signed.abs())
        come = _largest(wanted, self.budget - stay.sum((0, 2))) & (wanted > 0)
        fresh, self.live = come & ~self.live, stay | come
        drawn = torch.randn(self.study.rows, 1, DIM, device=self.device) * INIT
        begin = INHERITED * self.squares.amax(2, keepdim=True)
        self.values = torch.where(fresh, drawn, self.values) * self.live
        self.squares = torch.where(fresh, begin, self.squares) * self.live
        self.widths = self.live.sum(2).to(torch.int16)


def _largest(numbers: Tensor, counts: Tensor) -> Tensor:
    """Of each model as many of [rows, models, DIM]."""
    flat = numbers.transpose(0, 1).flatten(1)
    order = flat.argsort(1, descending=True)
    places = torch.empty_like(order).scatter_(
        1, order, torch.arange(flat.shape[1], device=flat.device).expand_as(order)
    )
    return (places < counts[:, None]).view(-1, numbers.shape[0], DIM).transpose(0, 1)


def measure(study: Study, seeds: int, epochs: int | None, device: str) -> list[dict[str, Any]]:
    rates = RATES[study.name]
    models = [Model("norms", *m) for m in itertools.product(KEPT, rates, range(seeds))]
    found = {
        "first values, by norms of gradients": train(study, models, device, epochs),
        "any values, by signed sums of their gradients": train(
            study, models, device, epochs, Columns(study, models, device)
        ),
    }
    return [
        {"kept": keep, "values": what, **means([score for score in scores if score.model.keep == keep])}
        for keep in KEPT
        for what, scores in found.items()
    ]


def run(quick: bool = False) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    seeds, epochs = (1, 1) if quick else (SEEDS, None)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if quick else ROOT / "runs/width_quality"
        studies = [prepared(name, folder) for name in (DATA[:1] if quick else DATA)]
    found = {study.name: measure(study, seeds, epochs, device) for study in studies}
    aims = {name: [BARS[name][SHARES.index(keep)] for keep in KEPT] for name in DATA}
    return {"kept": KEPT, "aims": aims, "data": found}


def table(result: dict[str, Any]) -> Table:
    from rich.table import Table

    view = Table(title="any values, with all that could be known of them: test AUC")
    for name in ("data", "kept", "values", "AUC", "on validation data"):
        view.add_column(name, justify="left" if name in ("data", "values") else "right")
    for data, cells in result["data"].items():
        for cell in cells:
            view.add_row(
                data, f"{100 * cell['kept']:g}%", cell["values"], f"{cell['test']:.4f}", f"{cell['validation']:.4f}"
            )
    return view
