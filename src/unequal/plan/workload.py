"""What a step asks of every table: how many ids, how many distinct ones, and how many rows will be live. Measured from batches of
the user's data, or assumed and said so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..batch import Batch
from ..errors import RecipeError, UserError, nearest
from ..optim import LAMB, LARS, Optimizer
from ..stats.curve import Curve as Curve
from ..stats.curve import Stretches
from ..tables import Feature, Table
from .extrapolate import extended
from .placement import KINDS, Kind
from .popularity import Popularity

Ints = npt.NDArray[np.int64]
Sharding = Kind | Literal["auto", "tiers"]
ASSUMED_IDS = {True: 1.0, False: 50.0}
"""ids per sample of a pooled feature and of a sequence, where nothing is known"""
ASSUMED_SKEW = 1.05
ASSUMED_ROWS = 1_000_000
"""of a table with unbounded ids"""


@dataclass(frozen=True, slots=True)
class FeatureLoad:
    """One feature that reads a table."""

    ids: float
    """per sample, on average"""
    pooled: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class TableLoad:
    """What a plan must know of one table."""

    table: Table
    optimizer: Optimizer
    features: Mapping[str, FeatureLoad]
    distinct: Curve
    """different ids of all its features together"""
    rows: int
    """that will be live: the table's own, or an estimate"""
    entries: int = 0
    """of the directory: ids that were seen, of a table with unbounded ids"""
    sharding: Sharding = "auto"
    source: str = "assumed"
    """where the numbers come from"""
    popularity: Popularity | None = None
    """how often single rows are read, where a profile says it"""
    whole_rows: bool = False
    """whether a row must stay in one piece with one owner: rows that differ in width do"""

    @property
    def ids(self) -> float:
        """per sample"""
        return sum(feature.ids for feature in self.features.values())

    @property
    def pooled(self) -> int:
        """how many of its features are pooled"""
        return sum(feature.pooled for feature in self.features.values())

    @property
    def may_sum(self) -> bool:
        """Whether owners can pool: every feature is."""
        return self.pooled == len(self.features)

    @property
    def output_rows(self) -> float:
        """rows of outputs per sample: one of each pooled feature, one of each id of the others"""
        return sum(1.0 if feature.pooled else feature.ids for feature in self.features.values())

    @property
    def statistics(self) -> int:
        """Numbers per row that the optimizer takes over all its columns: those of pieces must be brought together."""
        if isinstance(self.optimizer, LAMB | LARS):
            return 2
        return int(any(per == "row" for _, per in self.optimizer.state))


def check_sharding(value: str, where: str) -> None:
    valid = ("auto", *KINDS, "tiers")
    if value not in valid:
        raise RecipeError(where, "one of " + ", ".join(valid), value, nearest(value, valid))


def measure(
    features: Mapping[str, Feature],
    optimizer: Optimizer,
    batches: Iterable[Batch],
    *,
    total_samples: int | None = None,
    epochs: int = 1,
    expected_rows: Mapping[str, int] | None = None,
    sharding: Mapping[str, str] | None = None,
) -> dict[str, TableLoad]:
    """The load of every table, from a sample of batches in the order in which training reads them.

    `total_samples`: of one epoch, from which the live rows of unbounded tables are estimated; by default the sample is all.
    `expected_rows`: live rows of tables, where the user knows better."""
    sample = list(batches)
    seen = sum(batch.size for batch in sample)
    if not seen:
        raise UserError(
            "a workload: expected at least one sample to measure, got none; give batches of the training data"
        )
    expected, asked, total = expected_rows or {}, sharding or {}, max(seen, total_samples or seen)
    loads = {}
    for table, names in readers_of(features).items():
        columns = [_column(sample, name) for name in names]
        own = features[names[0]].table
        distinct, admitted = _curves(columns, seen, own, epochs, total if own.rows is None else seen)
        rows, entries = own.rows, 0
        if rows is None:
            entries = expected.get(table) or round(distinct(total))
            rows = expected.get(table) or min(entries, round(admitted(total)) + (own.admit_after > 1))
        loads[table] = TableLoad(
            table=own,
            optimizer=own.optimizer or optimizer,
            features={
                name: FeatureLoad(len(ids) / seen, features[name].pooling is not None)
                for name, (ids, _) in zip(names, columns)
            },
            distinct=distinct,
            rows=max(1, rows),
            entries=entries,
            sharding=sharding_of(asked, table),
            source=f"measured on {seen:,} samples",
        )
    return loads


def assume(
    features: Mapping[str, Feature],
    optimizer: Optimizer,
    *,
    ids: Mapping[str, float] | None = None,
    skew: float = ASSUMED_SKEW,
    expected_rows: Mapping[str, int] | None = None,
    sharding: Mapping[str, str] | None = None,
) -> dict[str, TableLoad]:
    """Without data: so many ids per sample of every feature, drawn from the table's rows by Zipf's law with this exponent."""
    given, expected, asked = ids or {}, expected_rows or {}, sharding or {}
    for name in given:
        if name not in features:
            raise UserError(f"a workload names the feature '{name}', which the module lacks; {nearest(name, features)}")
    loads = {}
    for table, names in readers_of(features).items():
        own = features[names[0]].table
        rows = own.rows or expected.get(table, ASSUMED_ROWS)
        read = {}
        for name in names:
            pooled = features[name].pooling is not None
            read[name] = FeatureLoad(given.get(name, ASSUMED_IDS[pooled]), pooled)
        loads[table] = TableLoad(
            table=own,
            optimizer=own.optimizer or optimizer,
            features=read,
            distinct=zipf_curve(rows, sum(feature.ids for feature in read.values()), skew),
            rows=rows,
            entries=0 if own.rows else rows,
            sharding=sharding_of(asked, table),
            source=f"assumed: Zipf {skew:g}",
        )
    return loads


def zipf_curve(rows: int, ids: float, skew: float) -> Curve:
    """The expected number of different ids in n samples of so many draws each. Rows of similar rank are taken together."""
    edges = np.unique(np.round(np.geomspace(1, rows + 1, 600)).astype(np.int64))
    widths, middles = np.diff(edges), np.sqrt(edges[:-1] * (edges[1:] - 1.0))
    weights = middles**-skew
    share = weights / (weights * widths).sum()
    samples = [2**k for k in range(31)]
    draws = np.array(samples)[:, None] * ids
    counts = (widths * -np.expm1(draws * np.log1p(-np.minimum(share, 1 - 1e-12)))).sum(1)
    return Curve(tuple(samples), tuple(float(count) for count in counts), float(rows))


def sharding_of(asked: Mapping[str, str], table: str) -> Any:
    value = asked.get(table, "auto")
    check_sharding(value, f"tables.{table}.sharding")
    return value


def readers_of(features: Mapping[str, Feature]) -> dict[str, list[str]]:
    """Table → the features that read it."""
    readers: dict[str, list[str]] = {}
    for name, feature in features.items():
        readers.setdefault(feature.table.name, []).append(name)
    return readers


def _column(sample: Sequence[Batch], feature: str) -> tuple[Ints, Ints]:
    """Ids of a feature in all samples, and where each sample's begin."""
    parts = [batch[feature] for batch in sample]
    ids = np.concatenate([part.values.cpu().numpy() for part in parts])
    lengths = np.concatenate([part.lengths.cpu().numpy() for part in parts])
    return ids, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _curves(
    columns: Sequence[tuple[Ints, Ints]], seen: int, table: Table, epochs: int, total: int
) -> tuple[Curve, Curve]:
    """Different ids in n samples, up to `total`, and those that training sees often enough to give them a row."""
    sizes = sorted({max(1, seen >> k) for k in range(seen.bit_length())})
    often = -(-table.admit_after // max(1, epochs))
    reads = Stretches(columns)
    limit = float(table.rows) if table.rows is not None else float("inf")
    distinct = [reads.reaching(1, size, seen) for size in sizes]
    curve = Curve(tuple(sizes), tuple(distinct), limit)
    admitted = curve if often == 1 else Curve(tuple(sizes), tuple(reads.reaching(often, n, seen) for n in sizes), limit)
    further = [(size, min(count, curve(size))) for size, count in extended(sizes, distinct, reads.count / seen, total)]
    if further:
        more, counts = zip(*further)
        longer = Curve(curve.samples + more, curve.counts + counts, limit)
        admitted = longer if admitted is curve else admitted
        curve = longer
    return curve, admitted
