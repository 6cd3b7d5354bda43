"""Windows: the pieces of row groups that are read, shuffled and held in memory at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from .columns import Ints
from .dataset import Dataset, RowGroup, reading

_OPEN_GROUPS = 4
"""Row groups too large for a window are read side by side, this many, so that a window mixes several places."""
_OPEN_FILES = 64
_STREAM_BUFFER = 2**18


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [start, stop) of a row group."""

    group: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The pieces of one window."""

    number: int
    pieces: tuple[Piece, ...]


def plan(groups: Sequence[RowGroup], chosen: Ints, budget: int, order: np.random.Generator | None) -> list[Plan]:
    """Divides the chosen row groups into windows of about `budget` values, at random with `order`, else in order."""
    numbers = chosen if order is None else order.permutation(chosen)
    windows: list[Plan] = []
    at = 0
    while at < len(numbers):
        taken, values, files = [int(numbers[at])], groups[numbers[at]].values, {groups[numbers[at]].file}
        at += 1
        while at < len(numbers) and len(files) < _OPEN_FILES:
            following = groups[numbers[at]]
            together = order is not None and len(taken) < _OPEN_GROUPS
            if values + following.values > budget and not together:
                break
            taken.append(int(numbers[at]))
            values, at = values + following.values, at + 1
            files.add(following.file)
        taken.sort()  # a window's rows are shuffled anyway, and neighbours of a file are read in one go
        slices = max(1, -(-values // budget))
        sizes = [-(-groups[number].rows // slices) for number in taken]
        for k in range(slices):
            spans = [(n, k * size, min(groups[n].rows, (k + 1) * size)) for n, size in zip(taken, sizes)]
            pieces = tuple(Piece(*span) for span in spans if span[1] < span[2])
            if pieces:
                windows.append(Plan(len(windows), pieces))
    return windows


class _Stream:
    """A row group too large to be read at once, read from front to back."""

    def __init__(self, dataset: Dataset, group: RowGroup, columns: list[str], size: int) -> None:
        self.position = 0
        self._batches = dataset.open(group.file, _STREAM_BUFFER).iter_batches(
            size, row_groups=[group.index], columns=columns, use_threads=False
        )
        self._rest: Any = None

    def read(self, start: int, stop: int) -> list[Any]:
        """The record batches of the rows [start, stop); rows before are passed over."""
        parts = []
        while self.position < stop:
            batch = self._rest if self._rest is not None else next(self._batches)
            first, last = self.position, self.position + batch.num_rows
            cut = min(stop, last)
            if cut > start:
                parts.append(batch.slice(max(start - first, 0), cut - max(first, start)))
            self._rest = batch.slice(cut - first) if cut < last else None
            self.position = cut
        return parts


class Source:
    """Arrow arrays of some columns, window after window. Belongs to one thread."""

    def __init__(self, dataset: Dataset, columns: Sequence[str]) -> None:
        self.dataset, self.columns = dataset, list(dict.fromkeys(columns))
        self._handles: dict[int, Any] = {}
        self._streams: dict[int, _Stream] = {}
        self._slices: dict[int, list[Any]] = {}

    def prepare(self, pieces: Sequence[Piece]) -> None:
        """Opens what these pieces need and closes what they do not."""
        partial = [piece for piece in pieces if self._is_partial(piece)]
        files = {self.dataset.row_groups[piece.group].file for piece in pieces if not self._is_partial(piece)}
        self._handles = {file: self._handles.get(file) or self.dataset.open(file) for file in sorted(files)}
        wanted = {piece.group for piece in partial}
        self._streams = {group: stream for group, stream in self._streams.items() if group in wanted}
        self._slices = {piece.group: self._advance(piece) for piece in partial}

    def release(self) -> None:
        """Frees the values that were prepared; files stay open for the next window."""
        self._slices = {}

    def read(self, column: str, pieces: Sequence[Piece]) -> list[Any]:
        """The column's arrays, in the order of the pieces, which were prepared."""
        chunks: list[Any] = []
        groups = self.dataset.row_groups
        for (file, partial), run in groupby(pieces, lambda p: (groups[p.group].file, self._is_partial(p))):
            if partial:
                chunks += [batch.column(column) for piece in run for batch in self._slices[piece.group]]
                continue
            indices = [groups[piece.group].index for piece in run]
            # Lists of a dictionary type, as some writers note them, can only be read one row group at a time.
            reads = [[index] for index in indices] if self.dataset.is_text_list(column) else [indices]
            with reading(self.dataset.files[file], column):
                for read in reads:
                    table = self._handles[file].read_row_groups(read, columns=[column], use_threads=False)
                    chunks += table.column(column).chunks
        return chunks

    def _is_partial(self, piece: Piece) -> bool:
        return piece.stop - piece.start < self.dataset.row_groups[piece.group].rows

    def _advance(self, piece: Piece) -> list[Any]:
        group = self.dataset.row_groups[piece.group]
        with reading(self.dataset.files[group.file]):
            stream = self._streams.get(piece.group)
            if stream is None or stream.position > piece.start:
                stream = _Stream(self.dataset, group, self.columns, piece.stop - piece.start)
                self._streams[piece.group] = stream
            return stream.read(piece.start, piece.stop)
