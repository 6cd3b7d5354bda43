"""Loads windows, in this thread or ahead in others: selects the part's rows, shuffles them, converts the columns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ..errors import DataError
from .columns import Bad, Conversion, Ints, Values, join
from .config import PARTS
from .dataset import Column, Dataset, Role
from .split import Split
from .windows import Piece, Plan, Source

Key = tuple[Role, str]


@dataclass(slots=True)
class Selection:
    """Which rows of a window belong to the part, in the order they are given out."""

    order: Ints | None
    """Positions in the window as read; None: all of them as they come."""
    read: int
    """Rows in the window as read."""
    bad: list[Bad] = field(default_factory=list)

    def keep(self, bad: Bad) -> Bad | None:
        """What is bad among the selected rows."""
        if self.order is None:
            return bad
        chosen = np.zeros(self.read, bool)
        chosen[self.order] = True
        kept = np.flatnonzero(chosen[bad.positions])
        describe = bad.describe
        if not len(kept):
            return None
        return Bad(bad.column, bad.cause, bad.positions[kept], bad.remedy, lambda n: describe(int(kept[n])))


@dataclass(slots=True)
class Window:
    """The rows of a window, column by column, in the order they are given out."""

    columns: dict[Key, Values]
    rows: int
    dropped: dict[str, int] = field(default_factory=dict)

    def slice(self, first: int, last: int) -> Window:
        return Window({key: values.rows(first, last) for key, values in self.columns.items()}, last - first)

    def copy(self) -> Window:
        return Window({key: values.copy() for key, values in self.columns.items()}, self.rows)


class Loader:
    """Loads the windows of one epoch. `workers` threads deal the columns out among them; 0 loads in this thread."""

    def __init__(
        self,
        dataset: Dataset,
        split: Split | None,
        part: str,
        conversion: Conversion,
        *,
        order: tuple[int, int] | None,
        workers: int,
    ) -> None:
        """`split`: None where every row is taken. `order`: seed and epoch of the shuffle, None for the files' order."""
        self.dataset, self.split, self.part, self.conversion, self.order = dataset, split, part, conversion, order
        self._shards = [
            (columns, Source(dataset, [column.name for column in columns])) for columns in self._deal(max(1, workers))
        ]
        self._selecting = Source(dataset, [split.column] if split is not None and split.column is not None else [])
        self._threads = [ThreadPoolExecutor(1, "unequal-reader") for _ in self._shards] if workers else []

    def _deal(self, count: int) -> list[list[Column]]:
        """Lists, which take longest, are dealt out first; id weights stay with their ids."""
        columns = self.dataset.columns
        owned = {column.owner: column for column in columns if column.owner is not None}
        units = [
            [column, owned[column.name]] if column.role == "ids" and column.name in owned else [column]
            for column in columns
            if column.role != "id_weights"
        ]
        units.sort(key=lambda unit: not self.dataset.lists.get(unit[0].name, False))
        shards: list[list[Column]] = [[] for _ in range(min(count, len(units)))]
        for number, unit in enumerate(units):
            shards[number % len(shards)] += unit
        return shards

    def windows(self, plans: Sequence[Plan]) -> Generator[Window]:
        """The windows in the order of the plans. Closing the iterator ends the threads."""
        ahead = 1 if self._threads else 0
        pending: deque[Callable[[], Window]] = deque()
        try:
            for window in plans:
                pending.append(self._start(window))
                if len(pending) > ahead:
                    yield pending.popleft()()
            while pending:
                yield pending.popleft()()
        finally:
            for thread in self._threads:
                thread.shutdown(wait=True, cancel_futures=True)

    def _start(self, window: Plan) -> Callable[[], Window]:
        if not self._threads:
            return partial(self._load, window)
        selection = self._threads[0].submit(self._select, window)
        shards = range(len(self._shards))
        loaded = [
            self._threads[shard].submit(lambda n: self._columns(n, window, selection.result()), shard)
            for shard in shards
        ]
        return lambda: self._finish(window, selection.result(), [future.result() for future in loaded])

    def _load(self, window: Plan) -> Window:
        selection = self._select(window)
        loaded = [self._columns(shard, window, selection) for shard in range(len(self._shards))]
        return self._finish(window, selection, loaded)

    def _select(self, window: Plan) -> Selection:
        split = self.split
        positions, bad = [], []
        rows = 0
        unclear = [] if split is None else [p for p in window.pieces if not split.whole(p.group, self.part)]
        self._selecting.prepare(unclear if self._selecting.columns else [])
        for piece in window.pieces:
            chosen = np.arange(piece.stop - piece.start)
            if split is not None and not split.whole(piece.group, self.part):
                chosen, missing = self._choose(split, piece)
                bad += [missing + rows] if len(missing) else []
            positions.append(chosen + rows)
            rows += piece.stop - piece.start
        order: Ints | None = join(positions) if unclear else None
        if self.order is not None:
            random = np.random.default_rng([*self.order, window.number + 1])
            order = random.permutation(rows if order is None else order)
        selection = Selection(order, rows)
        if bad and split is not None and split.column is not None:
            selection.bad.append(Bad(split.column, "no time to split by", join(bad), "fill it", lambda n: "got null"))
        return selection

    def _choose(self, split: Split, piece: Piece) -> tuple[Ints, Ints]:
        """The part's rows within the piece, and those among them that have no time."""
        column = self._selecting.read(split.column, [piece]) if split.column is not None else None
        codes, missing = split.codes(self.dataset.row_groups[piece.group], piece.start, piece.stop, column)
        chosen = codes == PARTS.index(self.part)
        return np.flatnonzero(chosen), np.flatnonzero(chosen & missing)

    def _columns(self, shard: int, window: Plan, selection: Selection) -> dict[Key, Values]:
        columns, source = self._shards[shard]
        source.prepare(window.pieces)
        result: dict[Key, Values] = {}
        before: tuple[str, list[object]] = ("", [])
        for column in columns:
            chunks = source.read(column.name, window.pieces)
            ids = before[1] if column.owner == before[0] else []
            values = self.conversion.convert(column, chunks, selection.order, ids)
            values.bad = [kept for bad in values.bad if (kept := selection.keep(bad)) is not None]
            result[column.role, column.owner or column.name] = values
            before = (column.name, chunks)
        source.release()
        return result

    def _finish(self, window: Plan, selection: Selection, shards: list[dict[Key, Values]]) -> Window:
        columns = {key: values for shard in shards for key, values in shard.items()}
        keys: list[Key] = [(column.role, column.owner or column.name) for column in self.dataset.columns]
        columns = {key: columns[key] for key in keys}
        rows = selection.read if selection.order is None else len(selection.order)
        bad = selection.bad + [bad for key in keys for bad in columns[key].bad]
        if not bad:
            return Window(columns, rows)
        if self.dataset.config.bad_rows == "error":
            raise self._error(window, bad[0])
        out = np.zeros(selection.read, bool)
        dropped: dict[str, int] = {}
        for each in bad:
            fresh = int(np.count_nonzero(~out[each.positions]))
            out[each.positions] = True
            if fresh:
                cause = f"{each.column}: {each.cause}"
                dropped[cause] = dropped.get(cause, 0) + fresh
        kept = np.flatnonzero(~out if selection.order is None else ~out[selection.order])
        return Window({key: values.take(kept) for key, values in columns.items()}, len(kept), dropped)

    def _error(self, window: Plan, bad: Bad) -> DataError:
        position = int(bad.positions[0])
        for piece in window.pieces:
            if position < piece.stop - piece.start:
                break
            position -= piece.stop - piece.start
        group = self.dataset.row_groups[piece.group]
        return DataError(
            f"{bad.cause}, {bad.describe(0)} (rows count from 0)",
            file=self.dataset.files[group.file],
            column=bad.column,
            row=group.first + piece.start + position,
            remedy=bad.remedy,
        )
