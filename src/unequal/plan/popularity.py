"""How often the rows of a table are read: bins of rows in falling popularity, and what a step reads of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import UserError

Floats = npt.NDArray[np.float64]
LOOKUPS, RANK, NODE, ALL = range(4)
"""Columns of what is read in a step: ids that a rank reads; the chance that a rank, a node, anyone reads the row."""
SINGLE, GROWTH = 4096, 1.01
"""rows that are a bin each, and how much larger than the one before each further bin is"""
CLOSE = 1e-4
"""relative difference from the measured number of distinct ids that is left as it is"""
MOST = 60.0
"""Beyond so many reads a row is read for sure."""


@dataclass(frozen=True, eq=False, slots=True)
class Popularity:
    """Bins of rows, most read first."""

    rows: Floats
    """of each bin"""
    reads: Floats
    """of each row of the bin, per sample"""
    named: int | None = None
    """so many of the most read rows are known by their ids; None: all"""

    def __post_init__(self) -> None:
        if self.rows.ndim != 1 or self.rows.shape != self.reads.shape or not len(self.rows):
            raise UserError(f"popularity: expected two lists of one length, got {self.rows.shape}, {self.reads.shape}")
        if (self.rows < 0).any() or (self.reads < 0).any() or (np.diff(self.reads) > 0).any():
            raise UserError("popularity: expected rows and reads of 0 or more, reads falling")

    @classmethod
    def zipf(cls, rows: int, skew: float, ids: float) -> Popularity:
        """So many ids per sample from so many rows, the k-th read in proportion to k^−skew."""
        edges = bin_edges(rows)
        widths = np.diff(edges).astype(np.float64)
        # The middle of a bin whose rows lie between k−½ and k+½: exact to a fraction of a percent at this growth.
        middles = np.sqrt(edges[:-1] * (edges[1:] - 1.0))
        weights = middles**-skew
        return cls(widths, weights * (ids / (weights * widths).sum()))

    @property
    def total(self) -> float:
        """reads per sample of all rows"""
        return float(self.rows @ self.reads)

    def chances(self, samples: float, distinct: float | None = None) -> Floats:
        """[bins]: the chance that a row is read in so many samples. Where it is known how many rows are, the chances add up to
        that: ids of a sample repeat together, or never do, and independent reads would miss it."""
        expected = np.minimum(self.reads * samples, MOST)
        chances: Floats = -np.expm1(-expected)
        if distinct is None or not distinct or not chances.any():
            return chances
        target = min(distinct, float(self.rows[self.reads > 0].sum()))

        def error(scale: float) -> float:
            return float(self.rows @ -np.expm1(-np.minimum(expected * scale, MOST))) / target - 1

        if abs(error(1.0)) < CLOSE:
            return chances
        found: Floats = -np.expm1(-np.minimum(expected * _root(error), MOST))
        return found


def bin_edges(rows: int) -> npt.NDArray[np.int64]:
    """Where bins of so many ranked rows begin, from rank 1: single rows, then ever larger bins."""
    edges = np.arange(1, min(rows, SINGLE) + 2, dtype=np.int64)
    if rows > SINGLE:
        count = int(np.ceil(np.log((rows + 1) / (SINGLE + 1)) / np.log(GROWTH))) + 1
        further = np.round(np.geomspace(SINGLE + 1, rows + 1, max(count, 2))).astype(np.int64)
        edges = np.unique(np.concatenate([edges, further]))
    return edges


def _root(error: Callable[[float], float]) -> float:
    """Where a rising function of a scale is zero, by halving on a logarithmic scale."""
    low, high, middle = 1e-6, 1e6, 1.0
    for _ in range(60):
        off = error(middle)
        if abs(off) < CLOSE / 10:
            break
        low, high = (middle, high) if off < 0 else (low, middle)
        middle = float(np.sqrt(low * high))
    return middle


class StepReads:
    """What one step reads of each row of a table, for given machines; and sums over the most read rows."""

    def __init__(self, popularity: Popularity, each: Floats) -> None:
        """`each`: [bins, 4], of one row of the bin: LOOKUPS, RANK, NODE, ALL."""
        self.popularity, self.each = popularity, each
        self.rows = popularity.rows
        self._rows = np.concatenate([[0.0], np.cumsum(self.rows)])
        self._sums = np.concatenate([np.zeros((1, 4)), np.cumsum(self.rows[:, None] * each, axis=0)])

    @classmethod
    def of(
        cls, popularity: Popularity, ids: float, distinct: Callable[[float], float] | None, samples: tuple[float, ...]
    ) -> StepReads:
        """`ids`: per sample; `samples`: of a rank, a node, all; `distinct`: how many rows that many samples read."""
        total = popularity.total
        if not total > 0:
            raise UserError("popularity: expected rows that are read, got none; make the profile again")
        each = np.empty((len(popularity.rows), 4))
        each[:, LOOKUPS] = popularity.reads * (ids / total) * samples[0]
        for column, count in zip((RANK, NODE, ALL), samples):
            each[:, column] = popularity.chances(count, None if distinct is None else distinct(count))
        return cls(popularity, each)

    def first(self, rows: float) -> Floats:
        """[4]: of the so many most read rows together."""
        rows = min(rows, float(self._rows[-1]))
        bin = int(np.searchsorted(self._rows, rows, side="right")) - 1
        found: Floats = self._sums[bin].copy()
        if bin < len(self.each):
            found += (rows - self._rows[bin]) * self.each[bin]
        return found

    @property
    def total(self) -> Floats:
        """[4]: of all rows"""
        found: Floats = self._sums[-1]
        return found
