"""Which rows should be wide? Many models at once, with masks instead of narrow tables: quality alone, and no memory saved.

For finding policies. All models see the same batches, so that a GPU trains some hundred of them in half a minute; their rows
have first columns as in water-filling, by a measure that is one of those below. What holds here can then be built, and measured
by width_quality.

    python -m benchmarks.width_masks --data FOLDER --only frappe --kept 0.02 0.125 --ways norms signed --rates 0.1 0.2 --seeds 3

FOLDER: see width_quality --prepare. Prints a line for each way and share: AUC on validation and on test data, the learning rate
and the epoch chosen on validation data.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from unequal.width.config import INHERITED
from unequal.width.intervals import Intervals
from unequal.width.policy import WaterFilling

from .report import ROOT
from .width_data import STUDIES, Ints, Study, prepared
from .width_training import DIM, EVALUATED, PATIENCE

HIDDEN = (128, 64)
INIT, DECAY, HYSTERESIS, WEIGHT_DECAY = 0.05, 0.999, 0.1, 1e-5
THETA = 0.5
"""of the priorities 1 / (k − theta) that values have beside what rows are worth, here alone and not learnt"""
HALVINGS = 40
"""of the range in which the threshold is looked for"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """How widths are chosen."""

    measure: str = "norms"
    """what a row is worth. "norms": of its gradients, added up. "weights": the same × how large the row is over the mean of live
    rows; a row that does not live by norms. "signed": the same, and a row that does not live by its gradient in the first column,
    added up with its sign: what nobody agrees on cancels. "loss": what the loss would rise by without it, from the signed sum
    over all columns and the squares"""
    power: float = 1.0
    """of the measure, beside water-filling's own"""
    nothing: float = 0.0
    """share of the least rows that get nothing"""
    theta: float = THETA
    rate: float = 0.0
    """the learning rate of a row falls with its width to this power, and is as given at 4 values"""
    known: float = 0.0
    """with how much of the squares of its gradients so far a new row begins"""


WAYS = {
    "norms": Way(),
    "weights": Way(measure="weights", power=0.6),
    "signed": Way(measure="signed", power=0.6),
    "loss": Way(measure="loss", power=0.5),
    "nothing": Way(nothing=0.3),
    "theta": Way(theta=0.2),
    "rate": Way(rate=0.25),
    "known": Way(known=1.0),
}


class Model(NamedTuple):
    way: str
    keep: float
    rate: float
    seed: int


@dataclass(frozen=True, slots=True)
class Score:
    model: Model
    validation: float
    test: float
    epoch: int
    live: float


class Batch:
    """Samples as a matrix: [features × samples, rows of all tables], in which each line averages a feature's ids."""

    def __init__(self, study: Study, samples: Ints, device: str) -> None:
        batch = study.batch(samples)
        starts = dict(zip(study.tables, itertools.accumulate(study.tables.values(), initial=0)))
        per_feature = batch.lengths.view(len(batch.features), -1).sum(1)
        first = torch.tensor([starts[study.features[name]] for name in batch.features])
        ids, lengths = (batch.ids + first.repeat_interleave(per_feature)).to(device), batch.lengths.to(device)
        line = torch.arange(lengths.numel(), device=device).repeat_interleave(lengths)
        share, by_row = (1.0 / lengths)[line], ids.argsort(stable=True)
        self.size, self.lines = len(samples), lengths.numel()
        self.means = torch.sparse_csr_tensor(_ends(lengths), ids, share, (self.lines, study.rows))
        self.reads = torch.bincount(ids, minlength=study.rows)
        self.backwards = torch.sparse_csr_tensor(
            _ends(self.reads), line[by_row], share[by_row], (study.rows, self.lines)
        )
        assert batch.labels is not None
        self.labels = batch.labels[:, 0].to(device)


def _ends(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


class Models:
    """Values, squares and what is followed are [rows, models, …]; layers [models, …]."""

    def __init__(self, study: Study, models: Sequence[Model], device: str) -> None:
        self.study, self.models, self.device, self.steps = study, models, device, 0
        self.intervals = Intervals.towards(study.every)
        self.ways = [WAYS[model.way] for model in models]
        rows, count, features = study.rows, len(models), len(study.features)
        self.keep, self.rate = (self._each(getattr(m, name) for m in models) for name in ("keep", "rate"))
        self.power = self._each(way.power * WaterFilling().power(m.keep) for way, m in zip(self.ways, models))
        self.theta, self.nothing, self.falls, self.known = (
            self._each(getattr(way, name) for way in self.ways) for name in ("theta", "nothing", "rate", "known")
        )
        self.columns = torch.arange(DIM, device=device)
        first, second = torch.triu_indices(features, features, 1)
        self.pairs = first.to(device), second.to(device)
        sizes = [*itertools.pairwise((len(first), *HIDDEN, 1))]
        drawn: dict[int, list[Tensor]] = {}
        for seed in {model.seed for model in models}:
            draw = torch.Generator().manual_seed(seed)
            layers = [
                (torch.rand(size, generator=draw) * 2 - 1) / into**0.5
                for into, out in sizes for size in ((into, out), (1, out))
            ]  # fmt: skip
            drawn[seed] = [torch.randn(rows, DIM, generator=draw) * INIT, torch.rand(rows, generator=draw), *layers]
        self.values, chance = (torch.stack([drawn[m.seed][k] for m in models], 1).to(device) for k in (0, 1))
        self.layers = [
            torch.stack([drawn[m.seed][k] for m in models]).to(device).requires_grad_()
            for k in range(2, 2 + 2 * len(sizes))
        ]
        self.optimizer = torch.optim.Adam(self.layers, lr=1e-3)
        # Inside the budget from the start: as many rows as it is enough for, equally wide.
        start = (self.keep * DIM).floor().clamp(min=1)
        count_of = (self.keep * rows * DIM / start).long()
        self.widths = torch.where(chance.argsort(0).argsort(0) < count_of, start, 0).to(torch.int16)
        self.values *= self._mask(self.widths)
        self.squares, self.signed = torch.zeros_like(self.values), torch.zeros_like(self.values)
        self.norms, self.square_norms = (torch.zeros(rows, count, device=device) for _ in range(2))

    def _each(self, numbers: Iterable[float]) -> Tensor:
        return torch.tensor(list(numbers), device=self.device)

    def _mask(self, widths: Tensor) -> Tensor:
        return self.columns < widths[:, :, None]

    def logits(self, vectors: Tensor, size: int) -> Tensor:
        """[models, samples], from [features × samples, models, DIM]."""
        x = vectors.view(-1, size, len(self.models), DIM).permute(2, 1, 0, 3)
        x = (x @ x.transpose(2, 3))[:, :, self.pairs[0], self.pairs[1]]
        for weight, bias in zip(self.layers[:-2:2], self.layers[1:-2:2]):
            x = torch.relu(torch.baddbmm(bias, x, weight))
        return torch.baddbmm(self.layers[-1], x, self.layers[-2]).squeeze(2)

    def step(self, batch: Batch) -> None:
        vectors = (batch.means @ self.values.flatten(1)).view(batch.lines, -1, DIM).requires_grad_()
        logits = self.logits(vectors, batch.size)
        losses = torch.nn.functional.binary_cross_entropy_with_logits(
            logits, batch.labels.expand_as(logits), reduction="none"
        )
        self.optimizer.zero_grad()
        losses.mean(1).sum().backward()
        self.optimizer.step()
        assert vectors.grad is not None
        self._update((batch.backwards @ vectors.grad.flatten(1)).view_as(self.values), batch.reads > 0)
        self.steps += 1
        if self.intervals.is_round(self.steps):
            self._round()

    def _update(self, gradient: Tensor, read: Tensor) -> None:
        """Follows gradients, whatever of a row lives, and takes a step of AdaGrad with what does."""
        square = gradient.square().sum(2)
        self.norms.mul_(DECAY).add_(square.sqrt())
        self.square_norms.mul_(DECAY).add_(square)
        self.signed.mul_(DECAY).add_(gradient)
        lives = self._mask(self.widths) & read[:, None, None]
        gradient = torch.where(lives, gradient + WEIGHT_DECAY * self.values, 0)
        self.squares += gradient * gradient
        rate = self.rate * (4 / self.widths.clamp(min=1)) ** self.falls
        self.values -= rate[:, :, None] * gradient / (self.squares.sqrt() + 1e-8)

    def _worth(self) -> Tensor:
        lives, size = self.widths > 0, self.values.square().sum(2).sqrt()
        by_size = self.norms * size / ((size * lives).sum(0) / lives.sum(0).clamp(min=1)).clamp(min=1e-30)
        without = self.signed - self.study.batch_size * self.square_norms[:, :, None] * self.values
        measures = {
            "norms": self.norms,
            "weights": torch.where(lives, by_size, self.norms),
            "signed": torch.where(lives, by_size, self.signed[:, :, 0].abs()),
            "loss": without.square().sum(2) / self.square_norms.clamp(min=1e-30),
        }
        worth = torch.stack([measures[way.measure][:, k] for k, way in enumerate(self.ways)], 1).nan_to_num()
        least = worth.sort(0).values.gather(0, (self.nothing * (self.study.rows - 1)).long()[None])
        worth = torch.where((self.nothing > 0) & (worth <= least), 0, worth)
        return (worth / worth.mean(0).clamp(min=1e-30)) ** self.power

    def _round(self) -> None:
        worth, budget = self._worth(), self.keep * self.study.rows * DIM

        def widths_at(threshold: Tensor) -> Tensor:
            return (worth / threshold + self.theta).floor().clamp(max=DIM)

        low, high = (torch.full_like(self.keep, end) for end in (-20.0, 20.0))
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            over = widths_at(middle.exp()).sum(0) > budget
            low, high = torch.where(over, middle, low), torch.where(over, high, middle)
        chosen = widths_at(high.exp())
        steady = self.widths.maximum(widths_at(high.exp() * (1 + HYSTERESIS)))
        steady = steady.minimum(widths_at(high.exp() / (1 + HYSTERESIS)))
        chosen = torch.where(steady.sum(0) <= budget, steady, chosen).to(torch.int16)
        fresh = self._mask(chosen) & ~self._mask(self.widths)
        inherited = INHERITED * self.squares.amax(2)
        begin = torch.where(self.widths > 0, inherited, self.known * self.square_norms)
        drawn = torch.randn(self.study.rows, 1, DIM, device=self.device) * INIT
        self.widths, lives = chosen, self._mask(chosen)
        self.values = torch.where(fresh, drawn, self.values) * lives
        self.squares = torch.where(fresh, begin[:, :, None], self.squares) * lives

    @torch.no_grad()
    def areas(self, batches: Iterable[Batch]) -> list[float]:
        """Under the curve, of each model."""
        from unequal.train.metrics import area_under_curve

        scores, labels = [], []
        for batch in batches:
            vectors = batch.means @ self.values.flatten(1)
            scores.append(self.logits(vectors.view(batch.lines, -1, DIM), batch.size).cpu())
            labels.append(batch.labels.cpu())
        found = [area_under_curve(own.nan_to_num(), torch.cat(labels)) for own in torch.cat(scores, 1)]
        return [0.5 if area is None else area for area in found]


def train(
    study: Study, models: Sequence[Model], device: str, epochs: int | None = None, all_of_them: Models | None = None
) -> list[Score]:
    """Until each has been no better on validation data for as many epochs as width_quality allows. `all_of_them`: these models,
    where they begin otherwise."""
    all_of_them, draw = all_of_them or Models(study, models, device), np.random.default_rng(0)
    best = [Score(model, 0.0, 0.0, 0, 0.0) for model in models]
    done: set[int] = set()
    for epoch in range(epochs or study.epochs):
        order = draw.permutation(study.train) if study.shuffle else study.train
        for first in range(0, len(order) - study.batch_size + 1, study.batch_size):
            all_of_them.step(Batch(study, order[first : first + study.batch_size], device))
        parts = [
            all_of_them.areas(Batch(study, part[k : k + EVALUATED], device) for k in range(0, len(part), EVALUATED))
            for part in (study.validation, study.test)
        ]
        live = (all_of_them.widths > 0).float().mean(0).tolist()
        for k, (validation, test) in enumerate(zip(*parts)):
            if k in done:
                continue
            if validation > best[k].validation:
                best[k] = Score(models[k], validation, test, epoch + 1, live[k])
            elif epoch + 1 - best[k].epoch >= PATIENCE:
                done.add(k)
        if len(done) == len(models):
            break
    return best


def chosen(scores: Sequence[Score]) -> list[Score]:
    """Of one way and share, the seeds of the learning rate that is best on validation data."""
    rates = {rate: [s for s in scores if s.model.rate == rate] for rate in {s.model.rate for s in scores}}
    return max(rates.values(), key=lambda part: statistics.fmean(score.validation for score in part))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.width_masks", description=(__doc__ or "").split("\n")[0]
    )
    real = [name for name in STUDIES if not name.startswith("generated")]
    parser.add_argument(
        "--data", type=Path, default=ROOT / "runs/width_quality", metavar="FOLDER", help="prepared data"
    )
    parser.add_argument("--only", nargs="+", choices=real, default=real, metavar="DATA")
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=tuple(WAYS), metavar="WAY")
    parser.add_argument("--kept", nargs="+", type=float, default=(0.25, 0.125, 0.0625, 0.02))
    parser.add_argument("--rates", nargs="+", type=float, default=(0.1, 0.2, 0.4))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, help="at the most; by default what width_quality takes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    for name in given.only:
        models = [Model(*m) for m in itertools.product(given.ways, given.kept, given.rates, range(given.seeds))]
        scores = train(prepared(name, given.data), models, given.device, given.epochs)
        for way, keep in itertools.product(given.ways, given.kept):
            part = chosen([s for s in scores if s.model[:2] == (way, keep)])
            means = [statistics.fmean(getattr(s, n) for s in part) for n in ("validation", "test", "live", "epoch")]
            print(
                f"{name:12} {way:8} {100 * keep:6g}% kept: validation {means[0]:.4f} test {means[1]:.4f}, learning rate "
                f"{part[0].model.rate:g}, {100 * means[2]:.0f}% of the rows live, epoch {means[3]:.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
