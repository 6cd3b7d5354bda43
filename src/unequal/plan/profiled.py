"""The load of every table from a profile, in place of a sample of batches."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..errors import UserError, nearest
from ..optim import Optimizer
from ..stats.curve import Curve
from ..stats.profile import Floats, Profile, TableProfile
from ..tables import Feature, Table
from .extrapolate import extended
from .workload import FeatureLoad, TableLoad, readers_of, sharding_of

HALVINGS = 6
"""of the samples, from which it is seen how the number of rows that are read often grows"""


def loads_from_profile(
    profile: Profile,
    features: Mapping[str, Feature],
    optimizer: Optimizer,
    *,
    total_samples: int | None = None,
    epochs: int = 1,
    expected_rows: Mapping[str, int] | None = None,
    sharding: Mapping[str, str] | None = None,
) -> dict[str, TableLoad]:
    """What `measure` says of batches, from a profile of the whole data or of a part of it.

    `total_samples`: of one epoch, by default what the profile knows; `expected_rows`: live rows of tables, where the user knows
    better."""
    expected, asked = expected_rows or {}, sharding or {}
    total = max(profile.samples, total_samples or profile.total_samples)
    loads = {}
    for name, columns in readers_of(features).items():
        seen = _table(profile, name, columns)
        own = features[columns[0]].table
        distinct = _distinct(seen, own, total)
        rows, entries = own.rows, 0
        if rows is None:
            entries = expected.get(name) or round(distinct(total))
            admitted = min(entries, round(_admitted(seen, own, epochs, total)) + (own.admit_after > 1))
            rows = expected.get(name) or (entries if own.admit_after == 1 else admitted)
        loads[name] = TableLoad(
            table=own,
            optimizer=own.optimizer or optimizer,
            features={
                column: FeatureLoad(seen.feature_ids[column], features[column].pooling is not None)
                for column in columns
            },
            distinct=distinct,
            rows=max(1, rows),
            entries=entries,
            sharding=sharding_of(asked, name),
            source=f"profile of {profile.samples:,} samples",
        )
    return loads


def _table(profile: Profile, name: str, columns: list[str]) -> TableProfile:
    if name not in profile.tables:
        raise UserError(
            f"the profile lacks the table '{name}'; {nearest(name, profile.tables)}; make it again with `unequal profile`"
        )
    table = profile.tables[name]
    if set(table.features) != set(columns):
        raise UserError(
            f"the profile of the table '{name}' is of the columns {sorted(table.features)}, but {sorted(columns)} read it; "
            "make it again with `unequal profile`"
        )
    return table


def _distinct(seen: TableProfile, table: Table, total: int) -> Curve:
    """The profile's curve, and beyond its samples by Zipf's law."""
    limit = float("inf") if table.rows is None else float(table.rows)
    curve = Curve(seen.distinct.samples, seen.distinct.counts, limit)
    if table.rows is not None:
        return curve
    points = extended(curve.samples, curve.counts, seen.reads_per_sample, total)
    if not points:
        return curve
    more, counts = zip(*((size, min(count, curve(size))) for size, count in points))
    return Curve(curve.samples + more, curve.counts + counts, limit)


def _admitted(seen: TableProfile, table: Table, epochs: int, total: int) -> float:
    """Rows that training reads often enough to give them a place of their own."""
    often = -(-table.admit_after // max(1, epochs))
    rows, reads = seen.histogram()
    sizes = sorted({max(1, seen.samples >> k) for k in range(HALVINGS)})
    counts = [float((rows * _reaching(reads, size / seen.samples, often)).sum()) for size in sizes]
    return Curve(tuple(sizes), tuple(counts))(total)


def _reaching(reads: Floats, part: float, often: int) -> Floats:
    """The chance that a row which is read so often in all samples is read at least `often` times in a random part of them."""
    if part == 1:
        return (reads > often - 0.5).astype(np.float64)
    missed = term = (1 - part) ** reads
    for times in range(often - 1):
        term = term * np.maximum(0, reads - times) / (times + 1) * (part / (1 - part))
        missed = missed + term
    reached: Floats = 1 - np.minimum(1, missed)
    return reached
