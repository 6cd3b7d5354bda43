"""The workloads of the GPU benchmarks, drawn on the device from a seed. Rows of 128 values.

P (pooled): 26 tables with cardinalities like Criteo's, up to 5 M rows, batch 16,384, one id a sample, 20 in three features.
S (sequence): 4 tables of 10 M rows, batch 4,096, 50 to 150 ids a sample, one vector per id.
U (uniform): 10 tables of 5 M rows, batch 8,192, 20 ids a sample, all rows equally likely.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import unequal as uq

from .workloads import CRITEO_CARDINALITIES, ZIPF

DIM = 128
NAMES = ("P", "S", "U")


@dataclass(frozen=True, slots=True)
class GpuWorkload:
    name: str
    rows: list[int]
    size: int
    lengths: list[int | tuple[int, int]]
    """ids per sample of each feature: a number, or the least and the most"""
    uniform: bool = False

    @property
    def pooled(self) -> bool:
        return self.name != "S"

    @property
    def features(self) -> tuple[str, ...]:
        return tuple(f"f{t}" for t in range(len(self.rows)))

    def embeddings(self, dtype: torch.dtype, optimizer: uq.Optimizer | None = None) -> uq.Embeddings:
        pooling = "sum" if self.pooled else None
        tables = [uq.Table(f"t{t}", rows=rows, dim=DIM, dtype=dtype) for t, rows in enumerate(self.rows)]
        return uq.Embeddings(
            {name: uq.Feature(table, pooling) for name, table in zip(self.features, tables)},
            optimizer=optimizer or uq.RowWiseAdagrad(lr=0.01),
            device="cuda",
            output_dtype=dtype,
        )

    def batch(self, seed: int) -> uq.Batch:
        generator = torch.Generator("cuda").manual_seed(seed)
        lengths, ids = [], []
        for rows, length in zip(self.rows, self.lengths):
            least, most = (length, length) if isinstance(length, int) else length
            own = torch.randint(least, most + 1, (self.size,), device="cuda", generator=generator)
            lengths.append(own)
            ids.append(self._draw(rows, int(own.sum()), generator))
        batch = uq.Batch(self.features, torch.cat(ids), torch.cat(lengths))
        assert (
            batch.offsets is not None and batch.bounds is not None
        )  # made now, as a batch that comes from the host has them
        return batch

    def _draw(self, rows: int, count: int, generator: torch.Generator) -> Tensor:
        if self.uniform:
            return torch.randint(0, rows, (count,), device="cuda", generator=generator)
        # Ranks by inverting the continuous distribution; then scattered over the table.
        u = torch.rand(count, device="cuda", dtype=torch.float64, generator=generator)
        rank = ((1 - u * (1 - float(rows) ** (1 - ZIPF))) ** (1 / (1 - ZIPF))).long().clamp_(1, rows) - 1
        return (rank * 2654435761) % rows if rows > 64 else rank


def workload(name: str) -> GpuWorkload:
    if name == "P":
        rows = [min(count, 5_000_000) for count in CRITEO_CARDINALITIES]
        return GpuWorkload(name, rows, 16_384, [20 if t in (2, 11, 20) else 1 for t in range(len(rows))])
    if name == "S":
        return GpuWorkload(name, [10_000_000] * 4, 4_096, [(50, 150)] * 4)
    return GpuWorkload(name, [5_000_000] * 10, 8_192, [20] * 10, uniform=True)
