"""The reader: Parquet files in, batches in the combined format out, in an order that repeats and can be resumed."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..batch import Batch
from ..errors import DataError, RecipeError
from .columns import Conversion, Values
from .config import PARTS, DataConfig
from .dataset import Dataset
from .loader import Loader, Window
from .statistics import Statistics, training_statistics
from .windows import Plan, plan

Part = Literal["train", "validation", "test", "all"]
_STATE_VERSION = 1


@dataclass(frozen=True, slots=True)
class _Position:
    """Where the next batch begins. Windows, not batches, are counted from: dropped rows make batches unpredictable."""

    epoch: int = 0
    batch: int = 0
    window: int = 0
    row: int = 0
    """Within the window."""


class Bookmark(NamedTuple):
    """A place between two batches."""

    position: _Position
    dropped: dict[str, int]


class Reader:
    """Batches of one part of a data set, epoch after epoch.

    Iterating yields the rest of the current epoch and then moves on to the next one. The order of the rows depends on
    `seed` and the epoch alone. With `world` ranks each takes its contiguous share of every batch of `batch_size` rows, which
    may be none of them: all ranks together read what one rank alone would. Batches share the tensors of lengths and offsets
    that are the same for all: read only.
    """

    def __init__(
        self,
        config: DataConfig | Dataset,
        *,
        part: Part,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = False,
        workers: int = 0,
        root: Path | str = ".",
        id_limits: dict[str, int] | None = None,
        drop_last: bool = False,
        rank: int = 0,
        world: int = 1,
        statistics: Statistics | None = None,
    ) -> None:
        """`config` may be a `Dataset` that is opened already; `root` and `id_limits` are then its own.

        `statistics`: what 'standardize' uses instead of the training part's mean and deviation.
        """
        if part not in (*PARTS, "all"):
            raise RecipeError("part", "one of train, validation, test, all", part)
        for name, value, low in (("batch_size", batch_size, 1), ("seed", seed, 0), ("workers", workers, 0)):
            if value < low:
                raise RecipeError(name, f"{low} or more", value)
        if not 0 <= rank < world:
            raise RecipeError("rank", f"0 to {world - 1}", rank)
        self.dataset = config if isinstance(config, Dataset) else Dataset(config, root, id_limits=id_limits)
        self.config = self.dataset.config
        self.part, self.batch_size, self.seed, self.shuffle = part, batch_size, seed, shuffle
        self.workers, self.drop_last, self.rank, self.world = workers, drop_last, rank, world
        self.features = self.config.features
        self.dropped: dict[str, int] = {}
        """Rows of the current epoch that were left out, by column and cause."""
        self._position = _Position()
        if statistics is not None:
            absent = [name for name in self.config.dense if name not in statistics]
            if absent and self.config.dense_transform == "standardize":
                raise DataError("no mean and deviation was given for the column", column=absent[0])
            self.statistics = statistics
        self._ones: dict[int, tuple[Tensor, Tensor]] = {}

    @cached_property
    def statistics(self) -> Statistics:
        """Mean and deviation of every dense column in the training part; empty unless 'standardize' is chosen."""
        if self.config.dense_transform != "standardize":
            return {}
        return training_statistics(self.dataset, self.dataset.split)

    @cached_property
    def rows(self) -> int:
        """Rows of the part, bad ones included."""
        return self.dataset.rows if self.part == "all" else self.dataset.split.rows(self.part)

    @property
    def batches_per_epoch(self) -> int:
        """Exact where no row is dropped, else the most there can be."""
        size = self.batch_size
        return self.rows // size if self.drop_last else -(-self.rows // size)

    @property
    def epoch(self) -> int:
        return self._position.epoch

    def bookmark(self) -> Bookmark:
        """Where the reader is now, for `state` to be taken later: a moment's work."""
        return Bookmark(self._position, self.dropped)

    def state(self, bookmark: Bookmark | None = None) -> dict[str, Any]:
        """Where the reader is, or was at a bookmark, as plain values: after `restore` a reader goes on with the very batch that
        was next there."""
        at, dropped = self.bookmark() if bookmark is None else bookmark
        return {
            "version": _STATE_VERSION,
            "epoch": at.epoch,
            "batch": at.batch,
            "window": at.window,
            "row": at.row,
            "dropped": dict(dropped),
            "statistics": {name: list(pair) for name, pair in self.statistics.items()},
            **self._identity(),
        }

    def _identity(self) -> dict[str, Any]:
        """What a state must agree in with the reader that it is restored to."""
        return {
            "part": self.part,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "global_batch": self.batch_size,
            "fingerprint": self.dataset.fingerprint,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken; refuses a state of other data or another order."""
        if state.get("version") != _STATE_VERSION:
            raise DataError(f"expected a reader state of version {_STATE_VERSION}, got {state.get('version')!r}")
        for name, value in self._identity().items():
            if state.get(name) != value:
                what = "files or data settings" if name == "fingerprint" else name.replace("_", " ")
                problem = (
                    f"the saved reader position belongs to other {what}: expected {value!r}, got {state.get(name)!r}"
                )
                raise DataError(problem, remedy="resume with the data and settings of the run, or start a new run")
        self._position = _Position(state["epoch"], state["batch"], state["window"], state["row"])
        self.dropped = dict(state["dropped"])
        if self.config.dense_transform == "standardize":
            self.statistics = {name: (mean, deviation) for name, (mean, deviation) in state["statistics"].items()}

    def __iter__(self) -> Iterator[Batch]:
        at = self._position
        if not self.rows:
            self._position = _Position(at.epoch + 1)
            return
        order = (self.seed, at.epoch) if self.shuffle else None
        plans = self._plan(order)
        split = None if self.part == "all" else self.dataset.split
        conversion = Conversion(self.config, self.statistics)
        loader = Loader(self.dataset, split, self.part, conversion, order=order, workers=self.workers)
        windows = loader.windows(plans[at.window :])
        try:
            yield from self._batches(windows, at)
        finally:
            windows.close()
        self._position = _Position(at.epoch + 1)

    def _plan(self, order: tuple[int, int] | None) -> list[Plan]:
        groups = self.dataset.row_groups
        if self.part == "all":
            chosen = np.arange(len(groups))
        else:
            chosen = np.flatnonzero(self.dataset.split.counts[PARTS.index(self.part)])
        return plan(groups, chosen, self.config.window, None if order is None else np.random.default_rng([*order, 0]))

    def _batches(self, windows: Iterator[Window], at: _Position) -> Iterator[Batch]:
        size = self.batch_size
        held: list[Window] = []
        held_rows = 0
        number, batch, first = at.window, at.batch, at.row
        if batch == 0:
            self.dropped = {}
        for window in windows:
            if first == 0:
                # A new dictionary: a bookmark may hold the old one.
                self.dropped = {
                    cause: self.dropped.get(cause, 0) + window.dropped.get(cause, 0)
                    for cause in dict.fromkeys([*self.dropped, *window.dropped])
                }
            while window.rows - first >= size - held_rows:
                last = first + size - held_rows
                segments = [*held, window.slice(first, last)]
                held, held_rows, first, batch = [], 0, last, batch + 1
                self._position = (
                    _Position(at.epoch, batch, number, last)
                    if last < window.rows
                    else _Position(at.epoch, batch, number + 1, 0)
                )
                yield self._assemble(segments)
            if first < window.rows:
                held.append(window.slice(first, window.rows).copy())  # a copy, so that the window can be freed
                held_rows += window.rows - first
            first, number = 0, number + 1
        if held_rows and not self.drop_last:
            self._position = _Position(at.epoch, batch + 1, number, 0)
            yield self._assemble(held)

    def _assemble(self, segments: list[Window]) -> Batch:
        rows = sum(segment.rows for segment in segments)
        if self.world > 1:
            segments = _share(segments, rows * self.rank // self.world, rows * (self.rank + 1) // self.world)
            rows = sum(segment.rows for segment in segments)

        def flat(role: str, names: tuple[str, ...]) -> Tensor:
            parts = [segment.columns[role, name].values for name in names for segment in segments]  # type: ignore[index]
            return torch.from_numpy(np.concatenate(parts))

        config = self.config
        features = [segment.columns["ids", name] for name in self.features for segment in segments]
        lengths, offsets = self._lengths(features, rows)
        weights = None
        if config.id_weights:
            weights = torch.from_numpy(np.concatenate(self._weights(segments)))
        return Batch(
            self.features,
            flat("ids", self.features) if self.features else torch.empty(0, dtype=torch.int64),
            lengths,
            weights,
            flat("dense", config.dense).view(len(config.dense), rows).T.contiguous() if config.dense else None,
            flat("label", config.labels).view(len(config.labels), rows).T.contiguous(),
            flat("sample_weight", (config.sample_weight,)) if config.sample_weight is not None else None,
            offsets,
        )

    def _lengths(self, features: list[Values], rows: int) -> tuple[Tensor, Tensor | None]:
        if any(values.offsets is not None for values in features):
            return torch.from_numpy(np.concatenate([values.lengths for values in features])), None
        if rows not in self._ones:
            if len(self._ones) > 4:
                self._ones.clear()
            count = rows * len(self.features)
            self._ones[rows] = (torch.ones(count, dtype=torch.int64), torch.arange(count + 1))
        return self._ones[rows]

    def _weights(self, segments: list[Window]) -> list[np.ndarray[Any, Any]]:
        """One weight per id: 1 where the column has none."""
        return [
            segment.columns["id_weights", name].values
            if name in self.config.id_weights
            else np.ones(len(segment.columns["ids", name].values), np.float32)
            for name in self.features
            for segment in segments
        ]


def _share(segments: list[Window], first: int, last: int) -> list[Window]:
    """The rows [first, last) of segments that lie end to end; at least one segment, which may be empty."""
    result, start = [], 0
    for segment in segments:
        low, high = max(first - start, 0), min(last - start, segment.rows)
        if low < high:
            result.append(segment.slice(low, high))
        start += segment.rows
    return result or [segments[0].slice(0, 0)]
