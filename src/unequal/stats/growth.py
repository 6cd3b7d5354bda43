"""How the number of different ids grows with the samples that are read: observed on stretches of samples in the order in which
they come, as ids of one sample or session repeat together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from .curve import Curve
from .reads import EVERYTHING, Hashes, Ints, hashed, starts

KEPT_HASHES = 1 << 16
"""of a set: more ids are estimated from the smallest hashes, with an error of 0.4%"""
PER_OCTAVE = 2
"""points of the curve between n and 2n samples"""


@dataclass(slots=True)
class Growth:
    """Sizes of stretches, in samples → how many were seen, and how many different ids they had in sum."""

    seen: dict[int, tuple[float, float]] = field(default_factory=dict)

    def note(self, samples: int, different: float, stretches: float = 1) -> None:
        """So many stretches of so many samples had so many different ids on average."""
        if samples > 0 and stretches > 0:
            count, total = self.seen.get(samples, (0.0, 0.0))
            self.seen[samples] = (count + stretches, total + different * stretches)

    def merge(self, other: Growth) -> None:
        for samples, (count, total) in other.seen.items():
            self.note(samples, total / count, count)
        self._thin()

    def _thin(self) -> None:
        """Powers of two stay; of other sizes those that lie close together are taken as one."""
        bins: dict[int, list[int]] = {}
        for samples in self.seen:
            if samples & (samples - 1):
                bins.setdefault(int(np.log2(samples) * PER_OCTAVE), []).append(samples)
        for close in bins.values():
            if len(close) > 1:
                counts, totals = zip(*(self.seen.pop(samples) for samples in sorted(close)))
                middle = round(float(np.exp(np.average(np.log(sorted(close)), weights=counts))))
                means = np.array(totals) / counts
                different = float(np.exp(np.average(np.log(np.maximum(means, 1e-300)), weights=counts)))
                self.note(middle, different, sum(counts))

    def curve(self, samples: int, different: float, limit: float = float("inf")) -> Curve:
        """Through what was observed up to `samples`, which have so many different ids."""
        points = {size: total / count for size, (count, total) in sorted(self.seen.items()) if size < samples}
        points[samples] = different
        # Stretches of different sizes are different ones, so that a mean may be a little below that of a shorter size.
        rising = np.minimum(np.maximum.accumulate(list(points.values())), different)
        return Curve(tuple(points), tuple(rising.tolist()), limit)

    @classmethod
    def of(cls, points: Mapping[int, tuple[float, float]] | Iterable[tuple[int, tuple[float, float]]]) -> Growth:
        return cls(dict(points))


class Doubling:
    """Unites the ids of neighbouring stretches, two by two, as a counter in binary carries: stretches of 1, 2, 4 … times as many
    samples. Of large sets the smallest hashes are kept, from which their size is estimated."""

    def __init__(self, growth: Growth, samples: int) -> None:
        """`samples`: of one stretch."""
        self.growth, self.samples = growth, samples
        self._held: list[tuple[Hashes, int] | None] = []

    def add(self, ids: Ints) -> None:
        """The different ids of the next stretch."""
        self.growth.note(self.samples, len(ids))
        merged = _smallest(np.sort(hashed(ids)), EVERYTHING)
        level = 0
        while level < len(self._held) and (held := self._held[level]) is not None:
            self._held[level] = None
            merged = _united(held, merged)
            level += 1
            self.growth.note(self.samples << level, size_of(merged))
        if level == len(self._held):
            self._held.append(None)
        self._held[level] = merged


def size_of(kept: tuple[Hashes, int]) -> float:
    """How many ids a set has."""
    hashes, limit = kept
    return len(hashes) * (EVERYTHING / limit)


def _smallest(hashes: Hashes, limit: int) -> tuple[Hashes, int]:
    if len(hashes) <= KEPT_HASHES:
        return hashes, limit
    return hashes[:KEPT_HASHES].copy(), int(hashes[KEPT_HASHES])


def _united(one: tuple[Hashes, int], other: tuple[Hashes, int]) -> tuple[Hashes, int]:
    limit = min(one[1], other[1])
    every = np.sort(np.concatenate([one[0], other[0]]))
    every = every[starts(every)]
    if limit < EVERYTHING:
        every = every[: np.searchsorted(every, np.uint64(limit))]
    return _smallest(every, limit)
