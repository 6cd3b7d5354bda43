"""What every backend is called with: the rows of each table, and one step's lookups over all features."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..optim import Optimizer
from ..tables import Pooling

Ints = npt.NDArray[np.int64]
MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
POOLINGS: dict[Pooling, int] = {None: 0, "sum": 1, "mean": 2}


def mix64(x: int) -> int:
    """The generator's bijection of 64-bit words; the same as in csrc/common.h."""
    x &= MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def slab_rows(slab_log2: int, slab: int) -> int:
    """Rows in the slab of that number, where slabs grow geometrically."""
    return 1 << (slab_log2 + slab)


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured, in which nothing can wait for the device."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@dataclass(slots=True)
class TableRows:
    """A table as the kernels see it: slabs of weights, parallel slabs of state, and slots in [0, rows)."""

    weights: list[Tensor]
    """[rows of the slab, dim] each"""
    states: list[list[Tensor]]
    """per state of the optimizer the parallel slabs: [rows of the slab] or [rows of the slab, dim], float32"""
    rows: int
    optimizer: Optimizer
    slab_log2: int = -1
    """-1: one slab holds all rows, at their own number; else slab k holds 2^(slab_log2 + k) rows"""
    strict: bool = True
    """whether a slot outside [0, rows) is an error; otherwise it reads as zeros"""
    key: int = 0
    """seed of the table, for fresh rows and stochastic rounding"""
    cached: Any = field(default=None, repr=False)
    """what a backend derived from the slabs; cleared when they change"""

    def __deepcopy__(self, memo: dict[int, Any]) -> "TableRows":
        copied = replace(self, weights=deepcopy(self.weights, memo), states=deepcopy(self.states, memo), cached=None)
        memo[id(self)] = copied
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        """Without what is cached: it points into this process's memory."""
        return TableRows, (self.weights, self.states, self.rows, self.optimizer, self.slab_log2, self.strict, self.key)

    @property
    def dim(self) -> int:
        return self.weights[0].shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.weights[0].dtype

    def rounding_key(self, step: int) -> int:
        return mix64(self.key + (step + 1) * GOLDEN)


@dataclass(slots=True)
class FeatureSpec:
    """A feature's fixed part: which table it reads, how, and where its output lies."""

    name: str
    table: int
    pooling: Pooling
    dim: int
    place: int
    """pooled: first column in the pooled output; unpooled: number of the sequence output"""


class FeatureSpecs(tuple[FeatureSpec, ...]):
    """All features of a module, in its order. `cached` is what a backend derived from them."""

    cached: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Without what is cached, which holds compiled kernels and addresses; copies are made this way, too."""
        return FeatureSpecs, (tuple(self),)


@dataclass(slots=True)
class Request:
    """One step's lookups. Feature f reads positions [starts[f], ends[f]) and the offsets of place index[f] in the batch."""

    tables: Sequence[TableRows]
    features: FeatureSpecs
    size: int
    index: Ints
    ids: Tensor
    slots: Tensor | None
    """like ids, but for the features of tables whose slots are not their ids"""
    offsets: Tensor
    weights: Tensor | None = None
    bounds: Ints | None = None
    """where each of the batch's features begins and the last one ends; read from the offsets where it is not given"""
    _spans: tuple[Ints, Ints] | None = field(default=None, init=False, repr=False)

    @property
    def batch_features(self) -> int:
        """How many features the batch has; the module may read only some of them."""
        return (self.offsets.numel() - 1) // self.size if self.size else int(self.index.max(initial=0)) + 1

    @property
    def starts(self) -> Ints:
        return self._find_spans()[0]

    @property
    def ends(self) -> Ints:
        return self._find_spans()[1]

    def _find_spans(self) -> tuple[Ints, Ints]:
        """On a GPU this waits for the device where the bounds were not given."""
        if self._spans is None:
            if self.bounds is None:
                self.bounds = (
                    self.offsets[:: self.size].cpu().numpy()
                    if self.size
                    else np.zeros(self.batch_features + 1, np.int64)
                )
            self._spans = self.bounds[self.index], self.bounds[self.index + 1]
        return self._spans

    def slots_of(self, f: int) -> Tensor:
        source = self.ids if self.slots is None or self.tables[self.features[f].table].strict else self.slots
        return source[int(self.starts[f]) : int(self.ends[f])]

    def offsets_of(self, f: int) -> Tensor:
        """[size + 1], from 0"""
        first = int(self.index[f]) * self.size
        offsets = self.offsets[first : first + self.size + 1]
        return offsets - offsets[0]

    def weights_of(self, f: int) -> Tensor | None:
        return None if self.weights is None else self.weights[int(self.starts[f]) : int(self.ends[f])]

    def counts(self) -> Ints:
        return self.ends - self.starts
