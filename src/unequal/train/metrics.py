"""Exact metrics of click models: area under the ROC curve, normalized entropy, log loss, calibration.

Sums are kept in double precision; the area is computed by sorting all scores, with ties counted half and samples by
their weight. A label may be a fraction: the sample then counts as that much positive and the rest negative.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ..errors import DataError, UserError

Value = float | None


class Metrics:
    """Collects predictions, labels and sample weights batch by batch; `compute` gives what JSON can hold.

    A metric that the data leave undefined is None: the area where only one class was seen, normalized entropy there
    too, calibration where no label is above 0, and everything where no sample with a weight above 0 was seen.
    """

    def __init__(self, tasks: Sequence[str], predictions: Literal["logits", "probabilities"] = "logits") -> None:
        if not tasks or len(set(tasks)) != len(tasks):
            raise UserError(f"metrics need at least one task and no name twice, got {list(tasks)}")
        self.tasks = tuple(tasks)
        self.predictions = predictions
        self._seen: list[tuple[Tensor, Tensor, Tensor | None]] = []
        self._sums = torch.zeros(4, len(self.tasks), dtype=torch.float64)

    @torch.no_grad()
    def update(self, predictions: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        """Adds samples: predictions and labels [size, tasks] ([size] for one task), weights [size]."""
        scores, labels = self._columns(predictions), self._columns(labels)
        if scores.shape != labels.shape:
            raise DataError(f"predictions have shape {list(scores.shape)}, labels {list(labels.shape)}")
        if weights is not None:
            if weights.numel() != scores.shape[0]:
                raise DataError(f"{weights.numel()} sample weights for {scores.shape[0]} samples")
            weights = weights.detach().cpu().reshape(-1, 1).clone()
        self._check(scores, labels, weights)
        weight = torch.ones(len(scores), 1).double() if weights is None else weights.double()
        probability, loss = self._probability_and_loss(scores, labels.double())
        parts = (weight.expand_as(loss), weight * loss, weight * probability, weight * labels.double())
        self._sums += torch.stack([part.sum(0) for part in parts])
        self._seen.append((scores, labels, weights))

    def compute(self) -> dict[str, Value | int | dict[str, dict[str, Value]]]:
        """The first task's metrics, the number of samples, and under "tasks" the metrics of each."""
        tasks = {name: self._of_task(number) for number, name in enumerate(self.tasks)}
        return {**tasks[self.tasks[0]], "samples": sum(len(scores) for scores, _, _ in self._seen), "tasks": tasks}

    def _columns(self, values: Tensor) -> Tensor:
        values = values.detach().cpu()
        if values.dim() == 1:
            values = values.unsqueeze(1)
        if values.dim() != 2 or values.shape[1] != len(self.tasks):
            raise DataError(f"expected values for {len(self.tasks)} tasks per sample, got shape {list(values.shape)}")
        return values.clone() if values.dtype in (torch.float32, torch.float64) else values.float()

    def _check(self, scores: Tensor, labels: Tensor, weights: Tensor | None) -> None:
        """Refuses what would make every later number meaningless, NaN first."""
        if not scores.isfinite().all():
            row, task = (~scores.isfinite()).nonzero()[0].tolist()
            raise UserError(
                f"a prediction for '{self.tasks[task]}' is {float(scores[row, task])}: training has diverged; "
                "lower the learning rates, or go back to an earlier checkpoint"
            )
        if self.predictions == "probabilities" and not ((scores >= 0) & (scores <= 1)).all():
            raise DataError("a prediction is outside [0, 1]: expected probabilities; pass logits as logits")
        wrong = ~((labels >= 0) & (labels <= 1))
        if wrong.any():
            row, task = wrong.nonzero()[0].tolist()
            raise DataError(f"expected labels in [0, 1], got {float(labels[row, task])}", column=self.tasks[task])
        if weights is not None and not (weights.isfinite() & (weights >= 0)).all():
            raise DataError("expected sample weights of 0 or more, got a negative, infinite or undefined one")

    def _probability_and_loss(self, scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        score = scores.double()
        if self.predictions == "logits":
            # log(1 + exp(s)) − y·s, without overflow
            return torch.sigmoid(score), score.clamp(min=0) - labels * score + (-score.abs()).exp().log1p()
        smallest = torch.finfo(scores.dtype).eps  # a rounded 0 or 1 is not certainty
        inside = score.clamp(smallest, 1 - smallest)
        return score, -(labels * inside.log() + (1 - labels) * (1 - inside).log())

    def _of_task(self, task: int) -> dict[str, Value]:
        weight, loss, predicted, positive = self._sums[:, task].tolist()
        log_loss, entropy = (loss / weight, _entropy(positive / weight)) if weight else (None, 0.0)
        return {
            "auc": self._area(task) if weight else None,
            "normalized_entropy": log_loss / entropy if log_loss is not None and entropy else None,
            "log_loss": log_loss,
            "calibration": predicted / positive if positive else None,
        }

    def _area(self, task: int) -> Value:
        scores = torch.cat([scores[:, task] for scores, _, _ in self._seen])
        labels = torch.cat([labels[:, task] for _, labels, _ in self._seen])
        weights = None
        if any(part is not None for _, _, part in self._seen):
            weights = torch.cat([torch.ones(len(s)) if part is None else part.squeeze(1) for s, _, part in self._seen])
        return area_under_curve(scores, labels, weights)


def area_under_curve(scores: Tensor, labels: Tensor, weights: Tensor | None = None) -> Value:
    """Share of pairs of a positive and a negative that the scores order rightly; equal scores count half."""
    scores, order = scores.sort()
    labels = labels.double()[order]
    weights = torch.ones_like(labels) if weights is None else weights.double()[order]
    positive, negative = (weights * labels).cumsum(0), (weights * (1 - labels)).cumsum(0)
    if not len(scores) or positive[-1] <= 0 or negative[-1] <= 0:
        return None
    last_of_ties = torch.cat([scores[1:] != scores[:-1], torch.ones(1, dtype=torch.bool)])
    positive, negative = positive[last_of_ties], negative[last_of_ties]
    below = torch.nn.functional.pad(negative[:-1], (1, 0))
    gained = torch.diff(positive, prepend=positive.new_zeros(1))
    return float((gained * (below + negative) / 2).sum() / (positive[-1] * negative[-1]))


def _entropy(rate: float) -> float:
    """Of a coin that shows 1 at this rate, in nats; 0 where it always shows the same."""
    return -rate * math.log(rate) - (1 - rate) * math.log1p(-rate) if 0 < rate < 1 else 0.0
