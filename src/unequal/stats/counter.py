"""Counts the reads of tables, sample by sample in the order in which training could read them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from ..tables import Feature
from .curve import Stretches
from .growth import Doubling, Growth
from .profile import FeatureReads, TableProfile
from .reads import MEMORY, Ints, Reads, count_ids

Column = tuple[Ints, Ints | None]
"""ids of a feature in some samples, and where each sample's begin; without these every sample has one"""
STRETCH_IDS = 1 << 17
"""ids that are counted at once"""
LONGEST_STRETCH = 1 << 20
SPARSER = 1.25
"""Within stretches number 1, 2, 3, 4, 5, 7, 9, 12 … all shorter ones are looked at: fewer and fewer, by this factor."""


class TableCounter:
    """Counts one table's reads. Samples come in the order in which training could read them."""

    def __init__(self, name: str, features: Mapping[str, Feature], memory: int = MEMORY) -> None:
        self.name, self.samples = name, 0
        self.features = {key: FeatureReads(0, feature.pooling is not None) for key, feature in features.items()}
        self.rows = next(iter(features.values())).table.rows
        self.reads, self.growth = Reads(memory), Growth()
        self._doubling: Doubling | None = None
        self._held: list[tuple[list[Column], int]] = []
        self._held_rows = 0
        self._stretches, self._next_measured = 0, 1

    def add(self, columns: Sequence[Column], rows: int) -> None:
        """The next samples: the ids of each feature."""
        if not rows:
            return
        for feature, (ids, _) in zip(self.features.values(), columns, strict=True):
            feature.ids += len(ids)
        self.samples += rows
        self._held.append((list(columns), rows))
        self._held_rows += rows
        if self._doubling is None:
            per_sample = max(sum(len(ids) for ids, _ in columns) / rows, STRETCH_IDS / LONGEST_STRETCH)
            self._doubling = Doubling(self.growth, 1 << max(0, int(np.log2(STRETCH_IDS / per_sample))))
        size = self._doubling.samples
        if self._held_rows < size:
            self._held[-1] = ([(ids.copy(), offsets) for ids, offsets in columns], rows)  # the window can be freed
            return
        joined, rows = self._joined()
        whole = rows // size * size
        for first in range(0, whole, size):
            self._stretch([_cut(column, first, first + size) for column in joined], size)
        rest = [_cut(column, whole, rows) for column in joined]
        self._held = [([(ids.copy(), offsets) for ids, offsets in rest], rows - whole)] if whole < rows else []
        self._held_rows = rows - whole

    def _joined(self) -> tuple[list[Column], int]:
        if len(self._held) == 1:
            return self._held[0]
        columns = [_concatenated(parts) for parts in zip(*(part for part, _ in self._held))]
        return columns, self._held_rows

    def _stretch(self, columns: Sequence[Column], size: int) -> None:
        assert self._doubling is not None
        ids = np.concatenate([ids for ids, _ in columns])
        self.reads.add(ids)
        self._doubling.add(count_ids(ids)[0])
        self._stretches += 1
        if self._stretches >= self._next_measured:
            self._next_measured = math.ceil(SPARSER * self._stretches)
            self._measure(columns, size)

    def _measure(self, columns: Sequence[Column], rows: int) -> None:
        """Different ids in all stretches within these samples that are shorter than they are."""
        listed = [(ids, np.arange(rows + 1) if offsets is None else offsets) for ids, offsets in columns]
        stretches = Stretches(listed)
        for power in range((rows - 1).bit_length()):
            size = 1 << power
            self.growth.note(size, stretches.reaching(1, size, rows), rows // size)

    def finish(self) -> TableProfile:
        if self._held_rows:
            columns, rows = self._joined()
            self.reads.add(np.concatenate([ids for ids, _ in columns]))
            if not self._stretches:
                self._measure(columns, rows)
        self.reads.settle()
        return TableProfile(
            name=self.name,
            samples=self.samples,
            features=self.features,
            reads=self.reads,
            growth=self.growth,
            rows=self.rows,
        )


def _cut(column: Column, first: int, last: int) -> Column:
    ids, offsets = column
    if offsets is None:
        return ids[first:last], None
    return ids[offsets[first] : offsets[last]], offsets[first : last + 1] - offsets[first]


def _concatenated(parts: Sequence[Column]) -> Column:
    ids = np.concatenate([ids for ids, _ in parts])
    if all(offsets is None for _, offsets in parts):
        return ids, None
    lengths = [np.ones(len(ids), np.int64) if offsets is None else np.diff(offsets) for ids, offsets in parts]
    return ids, np.concatenate([[0], np.cumsum(np.concatenate(lengths))])


@dataclass(slots=True)
class Counting:
    """The counters of all tables."""

    features: Mapping[str, Feature]
    memory: int = MEMORY
    threads: int = 1
    counters: dict[str, TableCounter] = field(init=False)

    def __post_init__(self) -> None:
        readers: dict[str, dict[str, Feature]] = {}
        for name, feature in self.features.items():
            readers.setdefault(feature.table.name, {})[name] = feature
        self.counters = {name: TableCounter(name, own, self.memory) for name, own in readers.items()}

    def run(self, parts: Iterable[tuple[Mapping[str, Column], int]]) -> dict[str, TableProfile]:
        """Counts samples part by part: the ids of every feature, and how many samples they are of."""
        with ThreadPoolExecutor(self.threads, "unequal-profile") as pool:
            for columns, rows in parts:
                done = [
                    pool.submit(counter.add, [columns[name] for name in counter.features], rows)
                    for counter in self.counters.values()
                ]
                for future in done:
                    future.result()
            finished = {name: pool.submit(counter.finish) for name, counter in self.counters.items()}
            return {name: future.result() for name, future in finished.items()}
