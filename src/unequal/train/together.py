"""Batches of many ranks, step by step together: ranks that run out first go on with empty batches until all are done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from ..batch import Batch
from ..errors import DataError
from ..exchange.mesh import Mesh

WEIGHT, SAMPLES, THERE, FLAG = range(4)


@dataclass(slots=True)
class Turn:
    """One step: this rank's batch, and what all ranks have together."""

    batch: Batch
    weight: float
    """Of all ranks' samples: their number, or the sum of their weights."""
    samples: int
    note: Any = None
    flag: bool = False


def together(
    batches: Iterable[Batch],
    mesh: Mesh,
    *,
    note: Callable[[], Any] = lambda: None,
    flag: Callable[[], bool] = lambda: False,
) -> Iterator[Turn]:
    """Turns until no rank has a batch left. All ranks iterate together; they may have different numbers of batches.

    What the ranks say to each other about a turn is under way while the turn before it is computed, so that none waits; a
    batch is taken one turn ahead. `note` is called when a batch was taken, and comes with its turn. `flag` is asked once a
    turn; rank 0's answer comes with every rank's turn.
    """
    if mesh.world == 1:
        for own in batches:
            yield Turn(own, weight_of(own), own.size, note(), flag())
        return
    source = iter(batches)
    batch: Batch | None = next(source, None)
    empty = _empty_batch(batch, mesh)
    if empty is None:
        return
    coming = _Announcement(mesh, batch, note(), flag())
    while True:
        current, said = coming, coming.wait()
        if not said[:, THERE].any():
            return
        batch = next(source, None) if current.batch is not None else None
        coming = _Announcement(mesh, batch, note(), flag())
        yield Turn(
            empty if current.batch is None else current.batch,
            float(said[:, WEIGHT].sum()),
            int(said[:, SAMPLES].sum()),
            current.note,
            bool(said[0, FLAG]),
        )


def part_of_loss(logits: Tensor, batch: Batch, weight: float) -> Tensor:
    """This rank's part of the loss of a turn: binary cross-entropy, averaged over tasks and, by their weights, over the samples
    of all ranks, whose weight is given. The parts add up; as gradients are averaged over ranks, scale by their number."""
    assert batch.labels is not None
    each = functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none").mean(1)
    if batch.sample_weights is not None:
        each = each * batch.sample_weights
    return each.sum() / max(weight, torch.finfo(torch.float32).tiny)


def weight_of(batch: Batch) -> float:
    weights = batch.sample_weights
    return float(batch.size) if weights is None else float(weights.sum(dtype=torch.float64))


class _Announcement:
    """A rank's next batch, on its way to being known to all."""

    def __init__(self, mesh: Mesh, batch: Batch | None, note: Any, flag: bool) -> None:
        self.batch, self.note = batch, note
        there = batch is not None
        content = [weight_of(batch), float(batch.size)] if batch is not None else [0.0, 0.0]
        group = mesh.everyone.group
        device = "cpu" if "gloo" in dist.get_backend(group) else "cuda"
        mine = torch.tensor([*content, float(there), float(flag)], dtype=torch.float64, device=device)
        self._all = [torch.zeros_like(mine) for _ in range(mesh.world)]
        self._work = dist.all_gather(self._all, mine, group=group, async_op=True)

    def wait(self) -> Tensor:
        assert self._work is not None
        self._work.wait()
        return torch.stack(self._all).cpu()


def _empty_batch(batch: Batch | None, mesh: Mesh) -> Batch | None:
    """A batch without samples, of the shape that the ranks' batches have; None where no rank has any."""
    shapes = mesh.gather(None if batch is None else _shape(batch))
    known = [(rank, shape) for rank, shape in enumerate(shapes) if shape is not None]
    if not known:
        return None
    first, shape = known[0]
    for rank, other in known:
        if other != shape:
            raise DataError(
                f"rank {first} and rank {rank} have different batches, {shape} and {other}; give all ranks the same columns"
            )
    return Batch(
        tuple(shape["features"]),
        torch.empty(0, dtype=torch.int64),
        torch.empty(0, dtype=torch.int64),
        torch.empty(0) if shape["weights"] else None,
        None if shape["dense"] is None else torch.empty(0, shape["dense"]),
        None if shape["labels"] is None else torch.empty(0, shape["labels"]),
        torch.empty(0) if shape["sample_weights"] else None,
    )


def _shape(batch: Batch) -> dict[str, Any]:
    return {
        "features": list(batch.features),
        "weights": batch.weights is not None,
        "dense": None if batch.dense is None else batch.dense.shape[1],
        "labels": None if batch.labels is None else batch.labels.shape[1],
        "sample_weights": batch.sample_weights is not None,
    }
