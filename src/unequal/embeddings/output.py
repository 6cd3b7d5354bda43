"""What a lookup gives: pooled features side by side, and lists of vectors, by the feature's name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ..batch import Batch, Jagged
from ..errors import UserError, nearest
from ..kernels.request import FeatureSpec


class Output(Mapping[str, Tensor | Jagged]):
    """What a lookup gives: a tensor [size, dim] per pooled feature, a Jagged of vectors per unpooled one."""

    def __init__(
        self, specs: dict[str, FeatureSpec], batch: Batch, pooled: Tensor | None, sequences: list[Tensor]
    ) -> None:
        self._specs, self._batch, self._sequences = specs, batch, sequences
        self._pooled = pooled
        self._parts: dict[str, Tensor] | None = None

    @property
    def pooled(self) -> Tensor:
        """All pooled features side by side, in the module's order: [size, sum of their dims]."""
        if self._pooled is None:
            raise UserError("this module has no pooled feature, so no pooled output")
        return self._pooled

    def __getitem__(self, feature: str) -> Tensor | Jagged:
        spec = self._specs.get(feature)
        if spec is None:
            raise UserError(f"the output has no feature '{feature}'; {nearest(feature, self._specs)}")
        if spec.pooling is None:
            ids = self._batch[feature]
            return Jagged(self._sequences[spec.place], ids.lengths, ids.weights)
        if self._parts is None:
            # One split for all features: its backward joins their gradients in one copy.
            pooled = {name: spec for name, spec in self._specs.items() if spec.pooling is not None}
            self._parts = dict(zip(pooled, torch.split(self.pooled, [spec.dim for spec in pooled.values()], dim=1)))
        return self._parts[feature]

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)
