"""What training and evaluation share: the data's readers and the model of a recipe, and how a part is scored."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..batch import Batch
from ..data.config import GenerateConfig
from ..data.dataset import Dataset
from ..data.reader import Part, Reader
from ..data.statistics import Statistics
from ..embeddings import Embeddings
from ..errors import CheckpointError
from ..models import build_model
from ..schedule import Schedule
from .build import build_embeddings, build_tables
from .checkpoint import Checkpoint
from .config import Recipe
from .device import Device
from .metrics import Metrics

BATCHES_AHEAD = 8
"""How far a GPU may be ahead of the metrics, which are computed on the CPU."""


@dataclass(frozen=True, slots=True)
class Score:
    """Metrics of one part of the data."""

    metrics: dict[str, Any]
    samples: int
    seconds: float

    @property
    def value(self) -> float:
        """What a better evaluation has more of: mean AUC of the tasks, or less log loss where AUC is undefined."""
        areas = [task["auc"] for task in self.metrics["tasks"].values()]
        if any(area is None for area in areas):
            return -float(self.metrics["log_loss"])
        return float(sum(areas) / len(areas))


def open_data(recipe: Recipe, say: Callable[[str], None] = lambda line: None) -> Dataset:
    """The recipe's files, opened and checked; generated data is made on first use."""
    rows = {name: feature.table.rows for name, feature in build_tables(recipe).items()}
    if recipe.data.generate is not None:
        _make_generated(recipe.data.generate, say)
    return Dataset(recipe.data, recipe.root, id_limits={name: limit for name, limit in rows.items() if limit})


def _make_generated(config: GenerateConfig, say: Callable[[str], None]) -> None:
    """Makes the data before it is opened, and says so if it is not in the cache yet."""
    from ..data.generate import generated

    said: list[int] = []

    def announce(done: int, total: int) -> None:
        if not said:
            say(f"generating {total:,} rows, which are kept for the next time")
        said.append(done)

    generated(config, announce)


def training_reader(recipe: Recipe, data: Dataset) -> Reader:
    run = recipe.run
    return Reader(data, part="train", batch_size=run.batch_size, seed=run.seed, shuffle=True, workers=run.workers)


def scoring_reader(recipe: Recipe, data: Dataset, part: Part, statistics: Statistics) -> Reader:
    """Reads a part in the files' order, with dense columns scaled as in training."""
    run = recipe.run
    return Reader(data, part=part, batch_size=run.evaluation_batch_size, workers=run.workers, statistics=statistics)


def make_model(recipe: Recipe, device: torch.device, schedule: Schedule | None = None) -> tuple[nn.Module, Embeddings]:
    """The recipe's model with fresh weights, which depend on the recipe and its seed alone.

    The dense part is made on the CPU and moved, the tables are made where they stay: they may be too large for both.
    """
    torch.manual_seed(recipe.run.seed)
    embeddings = build_embeddings(recipe, schedule, device)
    data = recipe.data
    model = build_model(recipe.model, embeddings, dense_features=len(data.dense), tasks=len(data.labels))
    return model.to(device), embeddings


def load_weights(model: nn.Module, saved: Checkpoint) -> None:
    try:
        model.load_state_dict(saved.model_state)
    except RuntimeError as error:
        what = " ".join(str(error).split())
        raise CheckpointError(f"{saved.path}: holds another model than the recipe describes: {what}") from error


@torch.no_grad()
def score(model: nn.Module, reader: Reader, tasks: tuple[str, ...], device: Device) -> Score:
    """Metrics of all the reader's samples. The model is left in the mode it was in; nothing in it changes."""
    training, metrics, samples, started = model.training, Metrics(tasks), 0, time.perf_counter()
    ahead = BATCHES_AHEAD if device.deferred else 0
    on_their_way: deque[tuple[Callable[[], Tensor], Batch]] = deque()

    def count_oldest() -> None:
        logits, batch = on_their_way.popleft()
        assert batch.labels is not None
        metrics.update(logits(), batch.labels, batch.sample_weights)

    model.eval()
    for batch in reader:
        on_their_way.append((device.fetch(model(device.move(batch))), batch))
        samples += batch.size
        if len(on_their_way) > ahead:
            count_oldest()
    while on_their_way:
        count_oldest()
    model.train(training)
    for module in model.modules():
        if isinstance(module, Embeddings):
            module.check()
    return Score(metrics.compute(), samples, time.perf_counter() - started)
