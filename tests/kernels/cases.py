"""Builds requests for the kernels from plain lists, and says which backends there are."""

import copy

import numpy as np
import pytest
import torch

from unequal.batch import Batch, Jagged
from unequal.kernels import native, reference
from unequal.kernels.request import FeatureSpec, FeatureSpecs, Request, TableRows, slab_rows
from unequal.optim import RowWiseAdagrad

FAST = []
if native.library() is not None:
    from unequal.kernels import cpu

    FAST.append(pytest.param(cpu, id="cpu"))
BACKENDS = [pytest.param(reference, id="reference"), *FAST]


def make_rows(rows, dim, *, dtype=torch.float32, optimizer=None, slab_log2=-1, seed=0, strict=True):
    """A table of `rows` random rows with random non-negative state, in one slab or in several."""
    optimizer = optimizer or RowWiseAdagrad()
    generator = torch.Generator().manual_seed(seed)
    sizes = [rows]
    if slab_log2 >= 0:
        sizes = []
        while sum(sizes) < rows:
            sizes.append(slab_rows(slab_log2, len(sizes)))
    weights = [torch.randn(size, dim, generator=generator).mul_(0.1).to(dtype) for size in sizes]
    states = [
        [torch.rand((size,) if per == "row" else (size, dim), generator=generator) for size in sizes]
        for _, per in optimizer.state
    ]
    return TableRows(weights, states, rows, optimizer, slab_log2=slab_log2, strict=strict, key=seed + 7)


def make_request(tables, features, weights=False, seed=0):
    """features: (table number, pooling, list of id lists). The numbers are both ids and slots, whichever a table reads."""
    names = [f"f{i}" for i in range(len(features))]
    generator = torch.Generator().manual_seed(seed)
    batch = Batch.from_jagged({name: Jagged.from_lists(lists) for name, (_, _, lists) in zip(names, features)})
    specs, column, sequence = [], 0, 0
    for name, (table, pooling, _) in zip(names, features):
        dim = tables[table].dim
        specs.append(FeatureSpec(name, table, pooling, dim, sequence if pooling is None else column))
        column, sequence = column + dim * (pooling is not None), sequence + (pooling is None)
    index = np.arange(len(features))
    bounds = batch.offsets.numpy()
    return Request(
        tables,
        FeatureSpecs(specs),
        batch.size,
        index,
        bounds[index * batch.size],
        bounds[(index + 1) * batch.size],
        batch.ids,
        batch.ids.clone(),
        batch.offsets,
        torch.randint(1, 9, (batch.ids.numel(),), generator=generator) / 8 if weights else None,
    )


def outputs_for(request, fill=float("nan")):
    columns = sum(spec.dim for spec in request.features if spec.pooling is not None)
    pooled = torch.full((request.size, columns), fill) if columns else None
    sequences = [
        torch.full((int(count), spec.dim), fill)
        for spec, count in zip(request.features, request.counts())
        if spec.pooling is None
    ]
    return pooled, sequences


def random_gradients(request, seed=0):
    """Multiples of 1/16: float32 sums of thousands of them are exact, so that kernels may be compared closely even where
    large gradients cancel."""
    generator = torch.Generator().manual_seed(seed)
    pooled, sequences = outputs_for(request, 0.0)
    draw = lambda part: torch.randn(part.shape, generator=generator).mul_(16).round_().div_(16)  # noqa: E731
    return None if pooled is None else draw(pooled), [draw(part) for part in sequences]


def clone_tables(tables):
    return copy.deepcopy(tables)
