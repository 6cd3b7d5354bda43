"""How many different ids there are in n samples: as a curve, and counted over all stretches of n samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Curve:
    """How many different ones there are in n samples. Between the points it is straight on a logarithmic scale; beyond the last
    it goes on by doublings, each of which adds less by the factor by which the last one added less than the one before."""

    samples: tuple[int, ...]
    counts: tuple[float, ...]
    limit: float = float("inf")

    def __call__(self, samples: float) -> float:
        if samples <= 0 or not self.counts or not self.counts[-1]:
            return 0.0
        known = dict(zip(self.samples, self.counts))
        if samples in known:
            return min(self.limit, known[samples])  # type: ignore[index]
        points = [(n, c) for n, c in known.items() if c > 0]
        first, last = points[0], points[-1]
        if samples <= first[0]:
            return min(self.limit, first[1] * samples / first[0])
        if samples <= last[0]:
            x, y = np.log([n for n, _ in points]), np.log([c for _, c in points])
            return min(self.limit, float(np.exp(np.interp(np.log(samples), x, y))))
        slopes = [np.log(b[1] / a[1]) / np.log(b[0] / a[0]) for a, b in pairwise(points)]
        slope = float(slopes[-1]) if slopes else 1.0
        decay = min(1.0, slope / float(slopes[-2])) if len(slopes) > 1 and slopes[-2] > 0 else 1.0
        count, ahead = last[1], float(np.log2(samples / last[0]))
        while ahead > 0 and count < self.limit:
            slope *= decay
            count *= 2 ** (slope * min(1.0, ahead))
            ahead -= 1
        return min(self.limit, count)


class Stretches:
    """Every read of a table in order of its id, and of one id in order of the samples."""

    def __init__(self, columns: Sequence[tuple[Ints, Ints]]) -> None:
        ids = np.concatenate([ids for ids, _ in columns])
        samples = np.concatenate(
            [np.repeat(np.arange(len(offsets) - 1, dtype=np.int32), np.diff(offsets)) for _, offsets in columns]
        )
        order = np.lexsort((samples, ids)) if len(columns) > 1 else np.argsort(ids, kind="stable")
        self.count, self.ids, self.samples = len(ids), ids[order], samples[order]

    def _before(self, times: int) -> npt.NDArray[np.int32]:
        """Of every read the sample in which its id was read so many times before; -1 where it was not."""
        if not times:
            return self.samples
        found = np.full(self.count, -1, np.int32)
        same = self.ids[times:] == self.ids[:-times]
        found[times:] = np.where(same, self.samples[:-times], -1)
        return found

    def reaching(self, times: int, size: int, seen: int) -> float:
        """How many ids are read at least so often in so many samples, on average over all such stretches of the sample."""
        stretches = seen // size
        start = self.samples // size * size
        reached = (self._before(times - 1) >= start) & (self._before(times) < start)
        return float((reached & (self.samples < stretches * size)).sum()) / stretches
