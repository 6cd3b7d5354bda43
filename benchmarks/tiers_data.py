"""Workloads for the cluster benchmark: generated sequences, and those of real people."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .quality import DATA
from .workloads import DIM, Integers, Workload, sequence

LONGEST = 200
"""of a real sequence its last so many ids are read"""
ORDER = {"gowalla_lightgcn": None, "sessions_diginetica": "position", "ml1m": "timestamp"}
"""The column by which a sequence is in order; None: as it lies in the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """What is measured, and what the profile was made of."""

    measured: Workload
    profiled: Workload


def generated(*, rows: int, size: int, mean: int, batches: int, profiled: int) -> Study:
    """Two tables. The profile sees other samples than those that are measured."""
    whole = sequence(tables=2, rows=rows, size=size, mean=mean, batches=batches + profiled)
    return Study(measured=part(whole, 0, batches), profiled=part(whole, batches, batches + profiled))


def part(workload: Workload, first: int, last: int) -> Workload:
    return Workload(
        name=workload.name,
        pooled=workload.pooled,
        rows=workload.rows,
        dim=workload.dim,
        size=workload.size,
        ids=workload.ids[first:last],
        lengths=workload.lengths[first:last],
    )


def real(name: str, *, size: int, batches: int) -> Study:
    """All sequences of a data set once, in random order, are profiled; the first batches of the next such pass are measured."""
    sequences = read(name)
    rows = max(int(ids.max()) for ids in sequences) + 1
    draw = np.random.default_rng(0)
    order = draw.permutation(len(sequences))
    profiled = [order[k : k + size] for k in range(0, len(order) - size + 1, size)]
    again = np.concatenate([draw.permutation(len(sequences)) for _ in range(-(-batches * size // len(sequences)))])
    measured = [again[k * size : (k + 1) * size] for k in range(batches)]

    def workload(chosen: list[Integers]) -> Workload:
        return Workload(
            name=name,
            pooled=False,
            rows=[rows],
            dim=DIM,
            size=size,
            ids=[np.concatenate([sequences[k] for k in batch]) for batch in chosen],
            lengths=[np.array([len(sequences[k]) for k in batch], np.int64) for batch in chosen],
        )

    return Study(measured=workload(measured), profiled=workload(profiled))


def read(name: str) -> list[Integers]:
    """The sequence of every person or session."""
    import pyarrow.parquet as parquet

    order = ORDER[name]
    columns = ["user_id", "item_id", *([] if order is None else [order])]
    table = parquet.read_table(DATA / name / "events.parquet", columns=columns)
    users, items = (table[column].to_numpy().astype(np.int64) for column in columns[:2])
    keys = (users,) if order is None else (table[order].to_numpy(), users)
    sorted_by = np.lexsort(keys)
    users, items = users[sorted_by], items[sorted_by]
    cuts = np.flatnonzero(np.diff(users)) + 1
    return [ids[-LONGEST:] for ids in np.split(items, cuts)]
