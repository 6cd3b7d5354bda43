"""Of a checkpoint's tables whose rows differ in width: how their shards lie in the files, and reading rows of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .saved import OpenFiles, SavedShard, SavedTable


@dataclass(frozen=True, slots=True)
class SavedRows:
    """How the rows of a shard lie where they differ in width: all of one chunk, then all of two, and so on, and their values one
    after the other."""

    counts: list[int]
    """rows of 1, 2, … chunks"""
    candidates: int
    """ids without a row that are followed"""
    places: int
    """that candidates could have"""
    gain: float
    """by which utilities are too large"""
    purse: float
    """values that new rows could still take up"""

    def classes(self, chunk: int) -> Iterator[SavedClass]:
        """Those that have rows."""
        row = value = 0
        for k, count in enumerate(self.counts, 1):
            if count:
                yield SavedClass(k * chunk, row, row + count, value)
            row, value = row + count, value + count * k * chunk

    def values(self, chunk: int) -> int:
        return sum(k * chunk * count for k, count in enumerate(self.counts, 1))


class SavedClass(NamedTuple):
    """Rows [first, last) of a shard, all so many values wide, of which the first lies at `start`."""

    width: int
    first: int
    last: int
    start: int


@dataclass(frozen=True, slots=True)
class SavedWidth:
    """How the rows of a table differ in width."""

    chunk: int
    masked: bool
    """whether any chunks may be live, or only the first ones"""
    utilities: int
    """per row: one, or one for each chunk"""
    kind: int
    """what they count"""
    budget: str = ""
    """of the table, or of all that share one"""


class NarrowReader:
    """Reads rows of a shard that differ in width."""

    def __init__(self, saved: SavedTable, shard: SavedShard, files: OpenFiles) -> None:
        assert saved.width is not None and shard.width is not None
        self.saved, self.shard, self.how, self.file = saved, shard, saved.width, files[shard.file]
        self.classes = list(shard.width.classes(saved.width.chunk))
        self.chunks = saved.dim // saved.width.chunk

    def values(self, name: str, of: SavedClass, first: int, last: int) -> Tensor:
        """[rows, width]: what rows [first, last) of the class have for each of their values."""
        begin, end = (of.start + (row - of.first) * of.width for row in (first, last))
        return self.file.read(self.shard.tensors[name], begin, end).view(last - first, of.width)

    def rows(self, numbers: Tensor) -> dict[str, Tensor]:
        """As if all were whole; the numbers ascend."""
        count, dim = numbers.numel(), self.saved.dim
        out = {
            "weight": torch.zeros(count, dim, dtype=self.saved.dtype),
            "width": torch.zeros(count, dtype=torch.int64),
        }
        for name, per in self.saved.state.items():
            if per == "row":
                out[name] = self.file.gather(self.shard.tensors[name], numbers)
            else:
                out[name] = torch.zeros(count, dim)
        live = None
        if self.how.masked:
            live = spread_masks(self.file.gather(self.shard.tensors["masks"], numbers), self.chunks, self.how.chunk)
        for of in self.classes:
            which = ((numbers >= of.first) & (numbers < of.last)).nonzero().flatten()
            if not which.numel():
                continue
            out["width"][which] = of.width
            for name in ("weight", *(name for name, per in self.saved.state.items() if per == "value")):
                values = self.file.gather(self.shard.tensors[name], numbers[which] - of.first, of.start, of.width)
                if live is None:
                    out[name][which, : of.width] = values
                else:
                    rows = out[name][which]
                    rows[live[which]] = values.flatten()
                    out[name][which] = rows
        return out


def spread_masks(masks: Tensor, chunks: int, chunk: int) -> Tensor:
    """[rows, values] of masks, a bit for every chunk: whether a row has the value."""
    return ((masks[:, None] >> torch.arange(chunks)) & 1 > 0).repeat_interleave(chunk, 1)
