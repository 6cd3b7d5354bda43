"""Jagged and Batch: all features' ids and lengths packed in a few contiguous tensors (the combined format).

Ids lie feature by feature, within a feature sample by sample; `lengths[f * size + b]` ids belong to feature f of sample b.
This is also how TorchRec's KeyedJaggedTensor lies in memory, so conversion copies nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .errors import DataError, nearest

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


Ints = npt.NDArray[np.int64]


def offsets_of(lengths: Tensor) -> Tensor:
    """Where each list starts, and at the end where the last one stops: int64, one longer than `lengths`."""
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


@dataclass(slots=True)
class Jagged:
    """One list per sample: `values` of all lists end to end (ids [n] or vectors [n, dim]) and each list's length."""

    values: Tensor
    lengths: Tensor
    weights: Tensor | None = None
    _offsets: Tensor | None = field(default=None, repr=False)

    @classmethod
    def from_lists(cls, lists: Sequence[Sequence[int]], weights: Sequence[Sequence[float]] | None = None) -> Jagged:
        return cls(
            torch.tensor([value for row in lists for value in row], dtype=torch.int64),
            torch.tensor([len(row) for row in lists], dtype=torch.int64),
            None if weights is None else torch.tensor([w for row in weights for w in row], dtype=torch.float32),
        )

    @property
    def offsets(self) -> Tensor:
        if self._offsets is None:
            self._offsets = offsets_of(self.lengths)
        return self._offsets

    def to_padded(self, length: int | None = None, fill: float = 0.0) -> Tensor:
        """[samples, length, …]: each list cut or filled to one length (by default the longest list's)."""
        if length is None:
            length = int(self.lengths.max()) if self.lengths.numel() else 0
        # Not torch's jagged_to_padded_dense: it has no gradient. Here the gradient is a gather, the same on every run.
        count, samples, values = self.values.shape[0], self.lengths.numel(), self.values
        owner = torch.repeat_interleave(self.lengths, output_size=count)
        place = torch.arange(count, device=values.device) - self.offsets.index_select(0, owner)
        kept = (place < length).nonzero().squeeze(1)
        if kept.numel() < count:
            values, owner, place = (part.index_select(0, kept) for part in (values, owner, place))
        padded = torch.full((samples * length, *values.shape[1:]), fill, dtype=values.dtype, device=values.device)
        return padded.index_copy(0, owner * length + place, values).view(samples, length, *values.shape[1:])

    def mask(self, length: int | None = None) -> Tensor:
        """[samples, length]: true where `to_padded` holds a value of the list."""
        if length is None:
            length = int(self.lengths.max()) if self.lengths.numel() else 0
        return torch.arange(length, device=self.lengths.device) < self.lengths.unsqueeze(1)

    def to_lists(self) -> list[Any]:
        return [part.tolist() for part in torch.split(self.values, self.lengths.tolist())]


@dataclass(slots=True)
class Batch:
    """One step's input. Only `features`, `ids` and `lengths` are needed for the embeddings."""

    features: tuple[str, ...]
    ids: Tensor
    """int64 [ids of all features], feature by feature"""
    lengths: Tensor
    """integers [features × size]"""
    weights: Tensor | None = None
    """float32, one per id"""
    dense: Tensor | None = None
    """float32 [size, dense features]"""
    labels: Tensor | None = None
    """float32 [size, tasks]"""
    sample_weights: Tensor | None = None
    """float32 [size]: how much each sample counts in the loss and the metrics"""
    _offsets: Tensor | None = field(default=None, repr=False)
    _bounds: Ints | None = field(default=None, repr=False, init=False)

    @classmethod
    def from_jagged(cls, features: Mapping[str, Jagged | Tensor], **rest: Tensor | None) -> Batch:
        """From one Jagged (or one id per sample as a plain tensor) per feature."""
        if not features:
            raise DataError("a batch needs at least one feature")
        parts = {
            name: part if isinstance(part, Jagged) else Jagged(part, torch.ones_like(part))
            for name, part in features.items()
        }
        sizes = {name: part.lengths.numel() for name, part in parts.items()}
        if len(set(sizes.values())) > 1:
            raise DataError(f"features differ in their number of samples: {sizes}")
        weights = None
        if any(part.weights is not None for part in parts.values()):
            weights = torch.cat(
                [
                    torch.ones(p.values.numel(), device=p.values.device) if p.weights is None else p.weights
                    for p in parts.values()
                ]
            )
        batch = cls(
            tuple(parts),
            torch.cat([part.values for part in parts.values()]),
            torch.cat([part.lengths for part in parts.values()]),
            weights,
            **rest,
        )
        batch._bounds = np.cumsum([0, *(part.values.numel() for part in parts.values())])
        return batch

    @classmethod
    def from_torchrec(cls, features: KeyedJaggedTensor, **rest: Tensor | None) -> Batch:
        """Shares the memory of a TorchRec KeyedJaggedTensor."""
        return cls(tuple(features.keys()), features.values(), features.lengths(), features.weights_or_none(), **rest)

    def to_torchrec(self) -> KeyedJaggedTensor:
        """A TorchRec KeyedJaggedTensor over the same memory."""
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        return KeyedJaggedTensor(
            keys=list(self.features), values=self.ids, lengths=self.lengths, weights=self.weights, offsets=self.offsets
        )

    @property
    def size(self) -> int:
        return self.lengths.numel() // len(self.features) if self.features else self._rows_of_the_rest()

    def _rows_of_the_rest(self) -> int:
        return next((t.shape[0] for t in (self.dense, self.labels, self.sample_weights) if t is not None), 0)

    @property
    def offsets(self) -> Tensor:
        """int64 [features × size + 1]"""
        if self._offsets is None:
            self._offsets = offsets_of(self.lengths)
        return self._offsets

    @property
    def bounds(self) -> Ints:
        """On the host: where each feature's ids begin, and where the last one's end. A batch that was moved to a GPU brings
        them along; for one that was made there, the first use waits for the device."""
        if self._bounds is None:
            count = len(self.features)
            self._bounds = self.offsets[:: self.size].cpu().numpy() if self.size else np.zeros(count + 1, np.int64)
        return self._bounds

    def __getitem__(self, feature: str) -> Jagged:
        if feature not in self.features:
            raise DataError(f"the batch has no feature '{feature}'; {nearest(feature, self.features)}")
        index, size = self.features.index(feature), self.size
        first, last = int(self.bounds[index]), int(self.bounds[index + 1])
        span = slice(first, last)
        return Jagged(
            self.ids[span],
            self.lengths[index * size : (index + 1) * size],
            None if self.weights is None else self.weights[span],
        )

    def check(self) -> Batch:
        """Raises a DataError where sizes do not add up; gives the batch back."""
        if self.ids.dtype != torch.int64:
            raise DataError(f"ids must be int64, got {self.ids.dtype}")
        if len(set(self.features)) != len(self.features):
            raise DataError(f"a feature is named twice: {self.features}")
        if self.features and self.lengths.numel() % len(self.features):
            raise DataError(f"{self.lengths.numel()} lengths do not divide into {len(self.features)} features")
        if self.lengths.numel() and int(self.lengths.min()) < 0:
            raise DataError(f"a negative length: {int(self.lengths.min())}")
        if int(self.offsets[-1]) != self.ids.numel():
            raise DataError(f"lengths add up to {int(self.offsets[-1])}, but there are {self.ids.numel()} ids")
        if self.weights is not None and self.weights.numel() != self.ids.numel():
            raise DataError(f"{self.weights.numel()} weights for {self.ids.numel()} ids")
        for name in ("dense", "labels", "sample_weights"):
            part = getattr(self, name)
            if part is not None and part.shape[0] != self.size:
                raise DataError(f"{name} has {part.shape[0]} samples, the ids have {self.size}")
        return self

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """On another device. From the CPU it is checked first: there a GPU's kernels can no longer say what is wrong with it."""
        if self.ids.device.type == "cpu":
            self.check()

        def move(part: Tensor | None) -> Tensor | None:
            return None if part is None else part.to(device, non_blocking=non_blocking)

        moved = {
            name: move(getattr(self, name)) for name in ("weights", "dense", "labels", "sample_weights", "_offsets")
        }
        ids, lengths = (part.to(device, non_blocking=non_blocking) for part in (self.ids, self.lengths))
        batch = Batch(self.features, ids, lengths, **moved)
        batch._bounds = self.bounds
        return batch
