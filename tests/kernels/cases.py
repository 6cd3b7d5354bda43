"""Builds requests for the kernels from plain lists, and says which backends there are."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import settings

from unequal.batch import Batch, Jagged
from unequal.kernels import native, reference
from unequal.kernels.request import FeatureSpec, FeatureSpecs, Request, TableRows, slab_rows
from unequal.optim import RowWiseAdagrad

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def moved(rows, device):
    to = lambda slabs: [slab.to(device) for slab in slabs]  # noqa: E731
    return dataclasses.replace(rows, weights=to(rows.weights), states=[to(slabs) for slabs in rows.states], cached=None)


class TritonBackend:
    """The Triton kernels behind the same calls on tensors of the host: on a GPU they are taken there and the results back;
    without one the kernels run in Triton's interpreter."""

    def __init__(self):
        from unequal.kernels import triton

        self._kernels = triton
        self.unique = self._on_device(triton.unique)
        self.round_rows = self._on_device(triton.round_rows)

    def _on_device(self, function):
        def call(*arguments):
            arguments = [a.to(DEVICE) if isinstance(a, torch.Tensor) else a for a in arguments]
            result = function(*arguments)
            return result.cpu() if isinstance(result, torch.Tensor) else tuple(part.cpu() for part in result)

        return call

    def _request(self, request):
        parts = {name: getattr(request, name) for name in ("ids", "slots", "offsets", "weights")}
        return dataclasses.replace(
            request,
            tables=[moved(rows, DEVICE) for rows in request.tables],
            features=FeatureSpecs(request.features),
            **{name: None if part is None else part.to(DEVICE) for name, part in parts.items()},
        )

    def lookup(self, request, pooled, sequences):
        there = None if pooled is None else pooled.to(DEVICE), [part.to(DEVICE) for part in sequences]
        wrong = self._kernels.lookup(self._request(request), *there)
        for part, result in zip((pooled, *sequences), (there[0], *there[1])):
            if part is not None:
                part.copy_(result)
        return wrong

    def update(self, request, pooled, sequences, *, lr_factor, step):
        there = self._request(request)
        self._kernels.update(
            there,
            None if pooled is None else pooled.to(DEVICE),
            [None if part is None else part.to(DEVICE) for part in sequences],
            lr_factor=lr_factor,
            step=step,
        )
        for rows, result in zip(request.tables, there.tables):
            copy_back(rows, result)

    def initialize(self, rows, ids, first, count, std):
        there = moved(rows, DEVICE)
        self._kernels.initialize(there, None if ids is None else ids.to(DEVICE), first, count, std)
        copy_back(rows, there)

    def route(self, ids, directory, *way):
        there = None if directory is None else directory._directory
        return tuple(part.cpu() for part in self._kernels.route(ids.to(DEVICE), there, *way))

    def HashDirectory(self, *arguments, **named):
        return HostDirectory(self._kernels.HashDirectory(*arguments, **named, device=DEVICE))


class HostDirectory:
    """A directory on the device that is given and gives tensors of the host."""

    def __init__(self, directory):
        self._directory = directory

    def __getattr__(self, name):
        part = getattr(self._directory, name)
        if not callable(part):
            return part

        def call(*arguments, **named):
            arguments = [a.to(DEVICE) if isinstance(a, torch.Tensor) else a for a in arguments]
            result = part(*arguments, **named)
            if isinstance(result, tuple):
                return tuple(value.cpu() for value in result)
            return result.cpu() if isinstance(result, torch.Tensor) else result

        return call


def copy_back(rows, result):
    for slabs, results in zip((rows.weights, *rows.states), (result.weights, *result.states)):
        for slab, new in zip(slabs, results):
            slab.copy_(new)


THREADED = []
if native.library() is not None:
    from unequal.kernels import cpu

    THREADED.append(pytest.param(cpu, id="cpu"))
TRITON = [pytest.param(TritonBackend(), id="triton")]
FAST = [*THREADED, *TRITON]
BACKENDS = [pytest.param(reference, id="reference"), *FAST]


def sized(backend, full, small):
    """How much work a test does: Triton's interpreter takes about a millisecond per operation of a program."""
    return small if isinstance(backend, TritonBackend) and DEVICE == "cpu" else full


FEW = settings(max_examples=25, deadline=None)
"""for property tests of the Triton kernels: a GPU compiles each new row width and optimizer first, the interpreter is slow"""


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
    return Request(
        tables,
        FeatureSpecs(specs),
        batch.size,
        index,
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
