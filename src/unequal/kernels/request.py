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
WAYS = 8
"""candidates of a bucket: ids without a row that are followed"""
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
class Records:
    """Rows of different width as the kernels see them. A slot is place · 2^class_bits + chunks; csrc/narrow.h says more."""

    dim: int
    dtype: torch.dtype
    chunk: int
    """values; a row has the first of its vector's chunks, or those that its mask names"""
    masked: bool
    utilities: int
    """numbers that are followed for each row: 1, or one per chunk; none where all rows are equally wide"""
    kind: int
    """what they add up: 1 gradient norms, 2 reads, 3 their product, 0 nothing"""
    slab_log2: int
    """every slab has 2^slab_log2 rows, but the last of a class may have fewer"""
    layout: Ints
    """[classes, 6]: values of a row, then in words of 4 bytes where its states, utility and mask begin, and its size"""
    slabs: list[list[Tensor]]
    """by class: [rows, words] float32 each. Class 0: one, the candidates' utilities"""
    gain: float = 1.0
    """by which utilities are multiplied before they are added: it grows, so that older ones fade"""

    @classmethod
    def make(
        cls, dim: int, dtype: torch.dtype, optimizer: Optimizer, *, chunk: int, masked: bool, by_chunk: bool, kind: int,
        slab_log2: int, uniform: bool = False,
    ) -> "Records":  # fmt: skip
        chunks = dim // chunk
        utilities = 0 if uniform else chunks if by_chunk else 1
        layout = np.zeros((chunks + 1, 6), np.int64)
        layout[0, 5] = utilities
        for k in range(1, chunks + 1):
            width, states = k * chunk, []
            word = -(-width * dtype.itemsize // 4)
            for _, per in optimizer.state:
                states.append(word)
                word += 1 if per == "row" else width
            states += [word] * (2 - len(states))
            layout[k] = (width, *states, word, word + utilities, word + utilities + 2 * masked)
        return cls(dim, dtype, chunk, masked, utilities, kind, slab_log2, layout, [[] for _ in range(chunks + 1)])

    @property
    def chunks(self) -> int:
        return self.dim // self.chunk

    @property
    def class_bits(self) -> int:
        return self.chunks.bit_length()

    @property
    def bound(self) -> int:
        """More than any slot there is."""
        places = [len(slabs) << self.slab_log2 for slabs in self.slabs[1:]]
        places.append(self.slabs[0][0].shape[0] if self.slabs[0] else 0)
        return max(places) << self.class_bits


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
    records: Records | None = None
    """of a table whose rows differ in width; it has no other slabs"""
    cached: Any = field(default=None, repr=False)
    """what a backend derived from the slabs; cleared when they change"""

    def __deepcopy__(self, memo: dict[int, Any]) -> "TableRows":
        parts = {name: deepcopy(getattr(self, name), memo) for name in ("weights", "states", "records")}
        copied = replace(self, **parts, cached=None)
        memo[id(self)] = copied
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        """Without what is cached: it points into this process's memory."""
        kept = (
            self.weights,
            self.states,
            self.rows,
            self.optimizer,
            self.slab_log2,
            self.strict,
            self.key,
            self.records,
        )
        return TableRows, kept

    @property
    def dim(self) -> int:
        return self.weights[0].shape[1] if self.records is None else self.records.dim

    @property
    def dtype(self) -> torch.dtype:
        return self.weights[0].dtype if self.records is None else self.records.dtype

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
    generation: int = 0
    """of the slots: they mean nothing once rows have been laid out anew"""
    resolved: Tensor | None = None
    """where the rows of the slots lie, for the lookup that comes next, where what found the slots has found that, too"""
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
