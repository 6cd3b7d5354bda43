"""The two workloads of the embedding benchmarks, drawn from a seed, so that every implementation reads the same ids.

P (pooled): 26 tables with cardinalities spread like Criteo's, 10 M rows in all, one id a sample, 20 in three features.
S (sequence): 4 tables of 2 M rows, 50 to 150 ids a sample, one vector per id.
Ids follow a Zipf law whose popular rows are scattered over the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ZIPF = 1.05
DIM = 64
CRITEO_CARDINALITIES = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)

Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Tables and batches. Feature f reads table f; ids lie feature by feature, within a feature sample by sample."""

    name: str
    pooled: bool
    rows: list[int]
    dim: int
    size: int
    """samples in a batch"""
    ids: list[Integers]
    """one array per batch"""
    lengths: list[Integers]
    """one array [features × size] per batch"""

    @property
    def features(self) -> list[str]:
        return [f"f{index}" for index in range(len(self.rows))]

    def counts(self, batch: int) -> list[int]:
        """How many ids each feature has in a batch."""
        return [int(n) for n in self.lengths[batch].reshape(len(self.rows), self.size).sum(1)]

    def output_shape(self, batch: int) -> tuple[int, int]:
        if self.pooled:
            return self.size, len(self.rows) * self.dim
        return len(self.ids[batch]), self.dim

    def gradient(self) -> NDArray[np.float32]:
        """The fixed upstream gradient, large enough for every batch: a batch takes its first rows."""
        shape = max((self.output_shape(batch) for batch in range(len(self.ids))), key=lambda shape: shape[0])
        return np.random.default_rng(1).standard_normal(shape, dtype=np.float32) * np.float32(1e-3)

    def initial_weights(self) -> list[NDArray[np.float32]]:
        """Equal weights for every implementation; meant for the small workloads of the correctness gate."""
        draw = np.random.default_rng(2)
        return [draw.standard_normal((rows, self.dim), dtype=np.float32) * np.float32(0.05) for rows in self.rows]

    def save(self, path: Path) -> None:
        arrays = {f"ids{k}": part for k, part in enumerate(self.ids)}
        arrays |= {f"lengths{k}": part for k, part in enumerate(self.lengths)}
        numbers = np.array([self.pooled, self.dim, self.size], dtype=np.int64)
        np.savez(path, name=np.array(self.name), numbers=numbers, rows=np.array(self.rows, dtype=np.int64), **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: Path) -> Workload:
        with np.load(path, allow_pickle=False) as file:
            pooled, dim, size = (int(x) for x in file["numbers"])
            batches = sum(name.startswith("ids") for name in file.files)
            return cls(
                name=str(file["name"]),
                pooled=bool(pooled),
                rows=[int(x) for x in file["rows"]],
                dim=dim,
                size=size,
                ids=[file[f"ids{k}"] for k in range(batches)],
                lengths=[file[f"lengths{k}"] for k in range(batches)],
            )


def table_sizes(total: int, largest: int) -> list[int]:
    """Criteo's cardinalities times one factor, 3 to `largest` each, so that they add up to about `total`."""
    sizes = np.array(CRITEO_CARDINALITIES, dtype=np.float64)
    low, high = 0.0, total / sizes.min()
    for _ in range(100):
        factor = (low + high) / 2
        if np.clip(sizes * factor, 3, largest).sum() < total:
            low = factor
        else:
            high = factor
    return [int(n) for n in np.clip(sizes * low, 3, largest)]


class Zipf:
    """Draws ids in [0, rows) so that the r-th most popular has a probability in proportion to r**-ZIPF."""

    def __init__(self, rows: int, seed: int) -> None:
        self.cumulative = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -ZIPF)
        self.cumulative /= self.cumulative[-1]
        self.generator = np.random.default_rng(seed)
        self.id_of_rank = self.generator.permutation(rows)

    def draw(self, count: int) -> Integers:
        rank = np.searchsorted(self.cumulative, self.generator.random(count))
        return self.id_of_rank[np.minimum(rank, len(self.id_of_rank) - 1)].astype(np.int64)


def pooled(*, total: int = 10_000_000, largest: int = 2_000_000, size: int = 4096, batches: int = 8) -> Workload:
    rows = table_sizes(total, largest)
    by_size = np.argsort(rows, kind="stable")[::-1]
    per_sample = np.ones(len(rows), dtype=np.int64)
    per_sample[by_size[[1, 3, 5]]] = 20
    sources = [Zipf(n, seed=100 + table) for table, n in enumerate(rows)]
    return Workload(
        name="P",
        pooled=True,
        rows=rows,
        dim=DIM,
        size=size,
        ids=[np.concatenate([s.draw(size * int(n)) for s, n in zip(sources, per_sample)]) for _ in range(batches)],
        lengths=[np.repeat(per_sample, size) for _ in range(batches)],
    )


def sequence(*, tables: int = 4, rows: int = 2_000_000, size: int = 512, mean: int = 100, batches: int = 8) -> Workload:
    generator = np.random.default_rng(0)
    sources = [Zipf(rows, seed=200 + table) for table in range(tables)]
    lengths = [generator.integers(mean // 2, mean * 3 // 2 + 1, (tables, size)) for _ in range(batches)]
    return Workload(
        name="S",
        pooled=False,
        rows=[rows] * tables,
        dim=DIM,
        size=size,
        ids=[np.concatenate([s.draw(int(n)) for s, n in zip(sources, part.sum(1))]) for part in lengths],
        lengths=[part.reshape(-1).astype(np.int64) for part in lengths],
    )


FULL: dict[str, Callable[..., Workload]] = {"P": pooled, "S": sequence}


def small(name: str) -> Workload:
    """A workload of the same shape that takes a moment: for the correctness gate and for `--quick`."""
    if name == "P":
        return pooled(total=20_000, largest=4_000, size=64, batches=3)
    return sequence(rows=4_000, size=32, mean=20, batches=3)
