"""Pooled and unpooled lookup."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..request import Request
from .narrow import read_vectors
from .rows import read


def bags_of(offsets: Tensor) -> Tensor:
    """The bag of every lookup."""
    return torch.repeat_interleave(torch.arange(offsets.numel() - 1), offsets.diff())


def scales_of(request: Request, f: int) -> Tensor:
    """The factor of every lookup's row: its weight, divided by the bag's length for a mean."""
    weights = request.weights_of(f)
    scales = torch.ones(int(request.counts()[f])) if weights is None else weights.float()
    if request.features[f].pooling == "mean":
        lengths = request.offsets_of(f).diff()
        scales = scales * (1.0 / lengths.clamp(min=1).float())[bags_of(request.offsets_of(f))]
    return scales


def lookup(request: Request, pooled: Tensor | None, sequences: Sequence[Tensor]) -> int:
    """Fills the outputs. Gives the first position (features one after the other) that a strict table does not hold, or -1."""
    wrong, first = -1, 0
    for f, feature in enumerate(request.features):
        rows, slots = request.tables[feature.table], request.slots_of(f)
        inside = (slots >= 0) & (slots < rows.rows)
        if rows.strict and wrong < 0 and not bool(inside.all()):
            wrong = first + int((~inside).nonzero()[0, 0])
        first += slots.numel()
        vectors = torch.zeros(slots.numel(), feature.dim)
        if rows.records is None:
            vectors[inside] = read(rows, rows.weights, slots[inside]).float()
        else:
            vectors[inside] = read_vectors(rows.records, slots[inside])
        if feature.pooling is None:
            sequences[feature.place].copy_(vectors)
        else:
            assert pooled is not None
            sums = torch.zeros(request.size, feature.dim, dtype=torch.float64)
            sums.index_add_(
                0, bags_of(request.offsets_of(f)), vectors.double() * scales_of(request, f).double()[:, None]
            )
            pooled[:, feature.place : feature.place + feature.dim] = sums.float()
    return wrong
