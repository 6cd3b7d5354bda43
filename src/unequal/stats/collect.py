"""A profile in one pass over data: window after window of Parquet files, or batch after batch."""

from __future__ import annotations

import copy
import heapq
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..batch import Batch
from ..errors import UserError
from ..tables import Feature
from .counter import Column, Counting
from .profile import Profile
from .reads import MEMORY, Ints
from .source import source_of

if TYPE_CHECKING:
    from ..data.dataset import Dataset, RowGroup
    from ..data.loader import Window
    from ..data.windows import Plan

ORDER = (0, 0)
"""Seed and epoch of the order in which rows are read: a profile does not depend on the seed of a run."""


def profile_batches(
    features: Mapping[str, Feature],
    batches: Iterable[Batch],
    *,
    memory: int = MEMORY,
    total_samples: int | None = None,
) -> Profile:
    """See `Profile.of`."""
    samples = 0

    def parts() -> Iterator[tuple[Mapping[str, Column], int]]:
        nonlocal samples
        for batch in batches:
            samples += batch.size
            lists = {name: batch[name] for name in features}
            yield (
                {
                    name: (one.values.cpu().numpy().astype(np.int64, copy=False), one.offsets.cpu().numpy())
                    for name, one in lists.items()
                },
                batch.size,
            )

    tables = Counting(features, memory).run(parts())
    _some(samples)
    return Profile(tables=tables, samples=samples, total_samples=max(samples, total_samples or samples))


def profile_dataset(
    dataset: Dataset,
    features: Mapping[str, Feature],
    *,
    memory: int = MEMORY,
    samples: int | None = None,
    rank: int = 0,
    world: int = 1,
    threads: int | None = None,
    workers: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Profile:
    """Of the training part, or of so many of its samples, from windows all over it.

    With several ranks each reads row groups of its own, and their profiles are to be merged. `progress` is told how many samples
    are counted, of how many of this rank."""
    share = _Share(dataset, samples, rank, world)
    done = 0

    def parts() -> Iterator[tuple[Mapping[str, Column], int]]:
        nonlocal done
        for window, rows in share.windows(workers):
            done += rows
            yield {name: _column(window, name, rows) for name in features}, rows
            progress(done, share.quota)

    progress(0, share.quota)
    tables = Counting(features, memory, threads or _threads()).run(parts())
    return Profile(
        tables=tables,
        samples=done,
        total_samples=share.total,
        source=source_of(dataset.config, features, dataset),
        dropped=share.dropped,
    )


def _column(window: Window, name: str, rows: int) -> Column:
    values = window.columns["ids", name]
    if rows < window.rows:
        values = values.rows(0, rows)
    return values.values, values.offsets


def _threads() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _some(samples: int) -> None:
    if not samples:
        raise UserError(
            "a profile: expected samples to count, got none; check data.files, data.split and data.bad_rows"
        )


class _Share:
    """What one rank reads of the training part."""

    def __init__(self, dataset: Dataset, samples: int | None, rank: int, world: int) -> None:
        from ..data.config import PARTS

        self.dataset, self.split = dataset, dataset.split
        self.rows = self.split.counts[PARTS.index("train")]
        """of the part, in every row group"""
        self.total = int(self.rows.sum())
        _some(self.total)
        dealt = deal(dataset.row_groups, np.flatnonzero(self.rows), world)
        self.mine = dealt[rank]
        wanted = self.total if samples is None else min(samples, self.total)
        before = [int(self.rows[groups].sum()) for groups in dealt]
        ends = np.cumsum([0, *before]) * wanted // self.total
        self.quota = int(ends[rank + 1] - ends[rank])
        """samples of this rank"""
        self.dropped: dict[str, int] = {}

    def windows(self, workers: int) -> Iterator[tuple[Window, int]]:
        """Windows, and how many of the rows of each are to be counted: they are mixed, so that the first ones are any."""
        from ..data.columns import Conversion
        from ..data.loader import Loader

        view = copy.copy(self.dataset)
        if view.config.bad_rows == "error":  # where bad rows are left out, any column can make one
            view.columns = [column for column in view.columns if column.role == "ids"]
        plain = dict.fromkeys(view.config.dense, (0.0, 1.0))
        loader = Loader(view, self.split, "train", Conversion(view.config, plain), order=ORDER, workers=workers)
        chosen, expected = self._chosen()
        loaded = loader.windows(chosen)
        everything = self.quota == int(self.rows[self.mine].sum())
        left, ahead = self.quota, sum(expected)
        try:
            for window, rows in zip(loaded, expected):
                for cause, count in window.dropped.items():
                    self.dropped[cause] = self.dropped.get(cause, 0) + count
                taken = window.rows if everything else min(window.rows, -(-left * rows // ahead))
                left, ahead = left - taken, ahead - rows
                if taken:
                    yield window, taken
        finally:
            loaded.close()

    def _chosen(self) -> tuple[list[Plan], list[int]]:
        """The windows to read, in the order of the files where there is a choice, and about how many rows each has."""
        from ..data.windows import plan

        if not self.quota:
            return [], []
        groups = self.dataset.row_groups
        random = np.random.default_rng([*ORDER, 0])
        plans = plan(groups, self.mine, self.dataset.config.window, random)
        rows = [self._rows_of(window) for window in plans]
        if self.quota >= sum(rows):
            return plans, rows
        order = np.random.default_rng([*ORDER, 1]).permutation(len(plans))
        # How many rows of a part are in a piece of a row group is known but roughly.
        whole = all(piece.stop - piece.start == groups[piece.group].rows for one in plans for piece in one.pieces)
        enough = self.quota + (0 if whole else 3 * self.quota**0.5)
        count = int(np.searchsorted(np.cumsum([rows[number] for number in order]), enough)) + 1
        taken = sorted(order[:count].tolist())
        return [plans[number] for number in taken], [rows[number] for number in taken]

    def _rows_of(self, window: Plan) -> int:
        groups = self.dataset.row_groups
        found = 0.0
        for piece in window.pieces:
            found += self.rows[piece.group] * (piece.stop - piece.start) / groups[piece.group].rows
        return max(1, round(found))


def deal(groups: Sequence[RowGroup], chosen: Ints, world: int) -> list[Ints]:
    """Row groups dealt out over ranks, the largest first, each to the rank with least to read."""
    loads = [(0, rank) for rank in range(world)]
    dealt: list[list[int]] = [[] for _ in range(world)]
    for number in sorted(chosen.tolist(), key=lambda number: -groups[number].values):
        load, rank = heapq.heappop(loads)
        dealt[rank].append(number)
        heapq.heappush(loads, (load + groups[number].values, rank))
    return [np.array(sorted(numbers), np.int64) for numbers in dealt]
