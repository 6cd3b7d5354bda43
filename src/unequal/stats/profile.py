"""A profile: who is read how often in a data set's training part, and how many different rows a number of samples reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..batch import Batch
from ..errors import UserError
from ..tables import Feature
from .curve import Curve
from .growth import Growth
from .reads import MEMORY, Ints, Reads

Floats = npt.NDArray[np.float64]
SINGLE_ROWS = 4096
"""most-read rows that are a bin of their own"""
BINS_PER_OCTAVE = 16


@dataclass(slots=True)
class FeatureReads:
    """One feature that reads a table."""

    ids: int
    """in all samples"""
    pooled: bool


@dataclass(kw_only=True, eq=False)
class TableProfile:
    """Of one table, over all features that read it. Counts are those of the samples that were looked at: ids that were not seen
    there are not in them, and the counts of ids that were seen once or twice are mostly chance."""

    name: str
    samples: int
    features: dict[str, FeatureReads]
    reads: Reads
    growth: Growth
    rows: int | None = None
    """of the table, where its ids are dense"""

    @property
    def exact(self) -> bool:
        """Whether every id was counted; else the most-read ones, and the rest is known from a sample of all ids."""
        return self.reads.exact

    @property
    def reads_per_sample(self) -> float:
        """of all features"""
        return self.reads.total / self.samples if self.samples else 0.0

    @property
    def feature_ids(self) -> dict[str, float]:
        """ids per sample of each feature"""
        return {name: feature.ids / self.samples if self.samples else 0.0 for name, feature in self.features.items()}

    @cached_property
    def _ranked(self) -> tuple[Ints, Floats]:
        ids, counts = self.reads.ranked()
        return ids, counts.astype(np.float64)

    @cached_property
    def _others(self) -> tuple[float, Floats]:
        """Ids that cannot be named: how many each one of a sample of them stands for, and their counts, made to fit the total."""
        each, counts = self.reads.others(self._ranked[0])
        if len(counts):
            each = round(each * len(counts)) / len(counts)
        left = max(0.0, self.reads.total - float(self._ranked[1].sum()))
        found = each * float(counts.sum())
        return each, counts * (left / found if found else 1.0)

    @property
    def kept(self) -> int:
        """How many ids can be named, most read first."""
        return len(self._ranked[0])

    @property
    def rows_seen(self) -> int:
        """different ids; estimated where not all are counted"""
        each, counts = self._others
        return self.kept + round(each * len(counts))

    @property
    def rows_seen_error(self) -> float:
        """standard error of `rows_seen`, as a part of it; 0 where all are counted"""
        each, counts = self._others
        return each * float(np.sqrt(len(counts))) / max(1, self.rows_seen)

    @property
    def count_error(self) -> float:
        """The most reads that an id which cannot be named can have had."""
        return float(self.reads.error)

    def top(self, n: int) -> Ints:
        """Ids of the n most-read rows, most read first, equal ones by id."""
        if not 0 <= n <= self.kept:
            more = "" if self.exact else "; profile again with more --sketch-bytes to know more of them"
            raise UserError(
                f"table '{self.name}': expected 0 to {self.kept:,} of its most-read rows, as many as the profile can name, "
                f"got {n:,}{more}"
            )
        return self._ranked[0][:n]

    def top_reads(self, n: int) -> Floats:
        """How often each of `top(n)` is read per sample."""
        return self._ranked[1][: len(self.top(n))] / max(1, self.samples)

    def histogram(self) -> tuple[Floats, Floats]:
        """How many rows were read so often: rows, and reads in all samples, rarest first."""
        each, others = self.reads.others(self._ranked[0])
        reads, group = np.unique(np.concatenate([self._ranked[1], others]), return_inverse=True)
        weights = np.concatenate([np.ones(self.kept), np.full(len(others), each)])
        return np.bincount(group, weights, minlength=len(reads)).astype(np.float64), reads

    def popularity(self) -> tuple[Floats, Floats]:
        """Rows of each bin, and how often each such row is read per sample, by falling popularity. The first 4,096 rows are a bin
        each; then bins grow with the rank."""
        return self._popularity

    @cached_property
    def _popularity(self) -> tuple[Floats, Floats]:
        each, others = self._others
        rows = np.concatenate([np.ones(self.kept), np.full(len(others), each)])
        reads = np.concatenate([self._ranked[1], others])
        order = np.argsort(-reads, kind="stable")
        rows, reads = rows[order], reads[order] * rows[order] / max(1, self.samples)
        ranks = np.cumsum(rows)
        octaves = np.log2(max(1.0, (ranks[-1] if len(ranks) else 0.0) / SINGLE_ROWS))
        edges = SINGLE_ROWS * 2 ** (np.arange(int(octaves * BINS_PER_OCTAVE) + 1) / BINS_PER_OCTAVE)
        begins = np.unique([*range(min(SINGLE_ROWS, len(rows))), *np.searchsorted(ranks, edges + 0.5).tolist()])
        begins = begins[begins < len(rows)]
        if not len(begins):
            return rows, reads
        binned = np.add.reduceat(rows, begins)
        return binned, np.add.reduceat(reads, begins) / binned

    @cached_property
    def distinct(self) -> Curve:
        """Different ids of all its features in n samples, in the order in which training could read them."""
        limit = float("inf") if self.rows is None else float(self.rows)
        return self.growth.curve(self.samples, float(self.rows_seen), limit)

    def merged(self, other: TableProfile) -> TableProfile:
        """This table's reads and those of another part of the data. Both are left as they are."""
        reads = Reads(max(self.reads.memory, other.reads.memory))
        reads.merge(self.reads)
        reads.merge(other.reads)
        growth = Growth()
        for part in (self, other):
            growth.merge(part.growth)
            growth.note(part.samples, part.rows_seen)
        features = {
            name: FeatureReads(feature.ids + other.features[name].ids, feature.pooled)
            for name, feature in self.features.items()
        }
        return TableProfile(
            name=self.name,
            samples=self.samples + other.samples,
            features=features,
            reads=reads,
            growth=growth,
            rows=self.rows,
        )


@dataclass(kw_only=True, eq=False)
class Profile:
    """What a pass over the training part of a data set found, table by table."""

    tables: dict[str, TableProfile]
    samples: int
    """that were counted"""
    total_samples: int
    """of the training part"""
    recipe: str = ""
    """its name"""
    source: dict[str, Any] = field(default_factory=dict)
    """what the data was, to tell a profile of other data; see `source.py`"""
    dropped: dict[str, int] = field(default_factory=dict)
    """bad rows that were left out, by cause"""

    @property
    def sampled(self) -> bool:
        """Whether a part of the samples was counted."""
        return self.samples + sum(self.dropped.values()) < self.total_samples

    @classmethod
    def load(cls, path: Path | str) -> Profile:
        from .profilefile import load

        return load(Path(path))

    def save(self, path: Path | str) -> None:
        """Writes the file in one piece: a reader sees the old one or the new one."""
        from .profilefile import save

        save(self, Path(path))

    @classmethod
    def of(
        cls,
        features: Mapping[str, Feature],
        batches: Iterable[Batch],
        *,
        memory: int = MEMORY,
        total_samples: int | None = None,
    ) -> Profile:
        """Of batches in the order in which training reads them. `memory`: bytes per table; `total_samples`: of one epoch, by
        default those of the batches."""
        from .collect import profile_batches

        return profile_batches(features, batches, memory=memory, total_samples=total_samples)

    def merge(self, other: Profile) -> Profile:
        """A profile of both parts of the data, which have no sample in common. Both are left as they are."""
        from .source import join_sources

        source = join_sources(self.source, other.source)
        mine, theirs = ({name: sorted(table.features) for name, table in one.tables.items()} for one in (self, other))
        if mine != theirs:
            raise UserError(f"profiles of different tables, {mine} and {theirs}; merge those of one recipe")
        samples = self.samples + other.samples
        # Parts of one data set know of all its samples; parts of several, each of its own.
        same = self.source.get("files") == other.source.get("files") and bool(self.source)
        total = max(self.total_samples, other.total_samples) if same else self.total_samples + other.total_samples
        if same and samples > total:
            raise UserError(
                f"profiles of {self.samples:,} and {other.samples:,} samples of the same {total:,}: expected parts that have "
                "none in common; merge profiles of different files, or of the ranks of one pass"
            )
        dropped = {
            cause: self.dropped.get(cause, 0) + other.dropped.get(cause, 0)
            for cause in dict.fromkeys([*self.dropped, *other.dropped])
        }
        return Profile(
            tables={name: table.merged(other.tables[name]) for name, table in self.tables.items()},
            samples=samples,
            total_samples=total,
            recipe=self.recipe,
            source=source,
            dropped=dropped,
        )

    def check(self, source: Mapping[str, Any], where: str = "the recipe") -> None:
        """Refuses a profile of other data than `source` describes, and says what differs."""
        from .source import difference

        found = difference(self.source, source)
        if found is not None:
            raise UserError(f"the profile is of other data than {where}: {found}; make it again with `unequal profile`")
