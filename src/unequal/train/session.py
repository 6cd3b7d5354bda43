"""What training and evaluation share: the data's readers and the model of a recipe, and how a part is scored."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..batch import Batch
from ..data.config import GenerateConfig
from ..data.dataset import Dataset
from ..data.reader import Part, Reader
from ..data.statistics import Statistics
from ..embeddings import Embeddings, shard
from ..errors import DataError
from ..exchange.mesh import Mesh
from ..models import build_model
from ..plan.placement import Placement
from ..schedule import Schedule
from . import checkpoint
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


def open_data(recipe: Recipe, mesh: Mesh, say: Callable[[str], None] = lambda line: None) -> Dataset:
    """The recipe's files, opened and checked; generated data is made on first use, by one rank of every node."""
    rows = {name: feature.table.rows for name, feature in build_tables(recipe).items()}
    if recipe.data.generate is not None:
        if mesh.local == 0:
            _make_generated(recipe.data.generate, say)
        mesh.barrier()
    data = Dataset(recipe.data, recipe.root, id_limits={name: limit for name, limit in rows.items() if limit})
    for rank, fingerprint in enumerate(mesh.gather(data.fingerprint)):
        if fingerprint != data.fingerprint:
            raise DataError(
                f"rank {mesh.rank} and rank {rank} see different files", remedy="give all ranks the same data"
            )
    return data


def _make_generated(config: GenerateConfig, say: Callable[[str], None]) -> None:
    """Makes the data before it is opened, and says so if it is not in the cache yet."""
    from ..data.generate import generated

    said: list[int] = []

    def announce(done: int, total: int) -> None:
        if not said:
            say(f"generating {total:,} rows, which are kept for the next time")
        said.append(done)

    generated(config, announce)


def training_reader(recipe: Recipe, data: Dataset, mesh: Mesh) -> Reader:
    """Reads this rank's share of every batch. What must be known of the whole training part, one rank finds out for all."""
    run = recipe.run
    reader = Reader(
        data, part="train", batch_size=run.batch_size, seed=run.seed, shuffle=True, workers=run.workers, rank=mesh.rank,
        world=mesh.world,
    )  # fmt: skip
    if mesh.world > 1 and recipe.data.dense_transform == "standardize":
        found = mesh.share(reader.statistics if mesh.rank == 0 else None)
        reader.statistics = {name: (mean, deviation) for name, (mean, deviation) in found.items()}
    return reader


def scoring_reader(recipe: Recipe, data: Dataset, part: Part, statistics: Statistics, mesh: Mesh) -> Reader:
    """Reads a part in the files' order, with dense columns scaled as in training."""
    run = recipe.run
    return Reader(
        data, part=part, batch_size=run.evaluation_batch_size, workers=run.workers, statistics=statistics, rank=mesh.rank,
        world=mesh.world,
    )  # fmt: skip


def make_model(
    recipe: Recipe,
    device: torch.device,
    mesh: Mesh,
    placement: Placement | None = None,
    schedule: Schedule | None = None,
) -> tuple[nn.Module, Embeddings]:
    """The recipe's model with fresh weights, which depend on the recipe and its seed alone.

    The dense part is made on the CPU and moved, the tables are made where they stay: they may be too large for both. With
    several ranks each makes its shards only, and the dense part is the same on all.
    """
    torch.manual_seed(recipe.run.seed)
    embeddings = build_embeddings(recipe, schedule, device if mesh.world == 1 else "meta")
    if mesh.world > 1:
        embeddings = shard(embeddings, placement, mesh, device=device, drift=recipe.tiers.build())
    data = recipe.data
    model = build_model(recipe.model, embeddings, dense_features=len(data.dense), tasks=len(data.labels))
    return model.to(device), embeddings


def load_weights(model: nn.Module, embeddings: Embeddings, path: Path, mesh: Mesh) -> Checkpoint:
    """Gives the model a checkpoint's weights, whatever ranks or plan it was saved by. All ranks call it."""
    saved = checkpoint.load(path, embeddings=embeddings, mesh=mesh)
    checkpoint.load_dense_state(model, embeddings, saved.model_state)
    return saved


@torch.no_grad()
def score(
    model: nn.Module, embeddings: Embeddings, reader: Reader, tasks: tuple[str, ...], device: Device, mesh: Mesh
) -> Score:
    """Metrics of all the reader's samples. The model is left in the mode it was in; nothing in it changes.

    With several ranks each computes its share of every batch; rank 0 gathers them, batch by batch in the order of one rank
    alone, and all get the same numbers.
    """
    training, metrics, samples, started = model.training, Metrics(tasks), 0, time.perf_counter()
    ahead = BATCHES_AHEAD if device.deferred else 0
    on_their_way: deque[tuple[Callable[[], Tensor], Batch]] = deque()

    def count_oldest() -> None:
        nonlocal samples
        logits, batch = on_their_way.popleft()
        assert batch.labels is not None
        counted = _gather(mesh, logits(), batch.labels, batch.sample_weights)
        samples += counted[0].shape[0]
        if mesh.rank == 0:
            metrics.update(*counted)

    model.eval()
    for batch in reader:
        on_their_way.append((device.fetch(model(device.move(batch))), batch))
        if len(on_their_way) > ahead:
            count_oldest()
    while on_their_way:
        count_oldest()
    model.train(training)
    embeddings.check()
    found = mesh.share([metrics.compute(), samples] if mesh.rank == 0 else None) if mesh.world > 1 else None
    computed, samples = found or (metrics.compute(), samples)
    return Score(computed, samples, time.perf_counter() - started)


def _gather(mesh: Mesh, logits: Tensor, labels: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """On rank 0 all ranks' samples of a batch in their order; on the others nothing."""
    if mesh.world == 1:
        return logits, labels, weights
    tasks = labels.shape[1]
    parts = [logits.float(), labels] + ([] if weights is None else [weights[:, None]])
    mine = torch.cat(parts, 1)
    sent = np.zeros(mesh.world, np.int64)
    sent[0] = len(mine)
    received = mesh.everyone.all_to_all_counts(sent[:, None])[:, 0]
    whole = mesh.everyone.all_to_all(mine, sent, received)
    return whole[:, :tasks], whole[:, tasks : 2 * tasks], None if weights is None else whole[:, 2 * tasks]
