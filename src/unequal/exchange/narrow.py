"""How rows of different width travel: of every row which chunks it has, then the values of these alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..plan.placement import Codec
from .codecs import SCALE_BYTES, decode, encode
from .mesh import Ints, Link


class Run(NamedTuple):
    """Rows of one table in a message."""

    rows: int
    width: int
    chunk: int

    @property
    def chunks(self) -> int:
        return self.width // self.chunk


Runs = Sequence[Run]


def joined(runs: Runs) -> list[Run]:
    """Neighbours that are alike are taken together."""
    found: list[Run] = []
    for run in runs:
        if found and found[-1][1:] == run[1:]:
            found[-1] = Run(found[-1].rows + run.rows, run.width, run.chunk)
        elif run.rows:
            found.append(run)
    return found


def chunks_with_values(rows: Tensor, runs: Runs) -> Tensor:
    """Bits of the chunks that are not all zero, of rows at full width, one after the other: no others need to travel."""
    parts = []
    for block, run in zip(torch.split(rows, [run.rows * run.width for run in runs]), runs):
        used = (block.view(run.rows, run.chunks, run.chunk) != 0).any(2)
        parts.append((used.to(torch.int64) << torch.arange(run.chunks, device=rows.device)).sum(1))
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=rows.device)


def fold(gradients: Tensor, live: Tensor, chunk: int) -> None:
    """Puts the norm of the gradient of all chunks that a row lacks in place of their first value, and zeros in place of the rest.
    Sums of such gradients are sums of norms, and no less than the norm of the sum."""
    count, width = gradients.shape
    chunks = width // chunk
    beyond = torch.arange(chunks, device=live.device) >= live[:, None]
    squares = gradients.square().view(count, chunks, chunk).sum(2)
    norms = (squares * beyond).sum(1).sqrt()
    gradients.view(count, chunks, chunk).masked_fill_(beyond[:, :, None], 0.0)
    places = _first_missing(live, [Run(count, width, chunk)])
    gradients.view(-1)[places] = norms[live < chunks]


def _first_missing(live: Tensor, runs: Runs) -> Tensor:
    """Of every row that is not whole, the place of its first missing value among all values of all rows."""
    parts, start = [live.new_empty(0, dtype=torch.int64)], 0
    for own, run in _by_run(live, runs):
        first = torch.arange(run.rows, device=live.device) * run.width + own.to(torch.int64) * run.chunk
        parts.append(first[own < run.chunks] + start)
        start += run.rows * run.width
    return torch.cat(parts)


class Kept(NamedTuple):
    """Which elements of rows on the wire travel: `unit` of them side by side."""

    unit: int
    places: Tensor
    """of all rows one after the other, the numbers of those units"""
    sizes: Tensor
    """[rows]: how many elements of each"""

    def pick(self, wire: Tensor) -> Tensor:
        """From rows at full width, flat."""
        return wire.view(-1, self.unit).index_select(0, self.places).view(-1) if self.unit > 1 else wire[self.places]

    def spread(self, picked: Tensor, run: Run, extra: int) -> Tensor:
        """Back to full width; elsewhere are zeros."""
        whole = picked.new_zeros(run.rows * (run.width + extra))
        if self.unit > 1:
            whole.view(-1, self.unit).index_copy_(0, self.places, picked.view(-1, self.unit))
        else:
            whole.index_copy_(0, self.places, picked)
        return whole


def keep(live: Tensor, run: Run, masked: bool, extra: int) -> Kept:
    """`live`: how many chunks rows have, or which ones (`masked`), as bits. `extra`: elements that go before the values; a row
    without any value has none of them, either."""
    unit = math.gcd(run.chunk, extra)
    units = torch.arange((run.width + extra) // unit, device=live.device)
    if masked:
        bits = (live[:, None] >> torch.arange(run.chunks, device=live.device)) & 1 > 0
        sizes = bits.sum(1) * run.chunk
        chosen = bits.repeat_interleave(run.chunk // unit, 1)
        if extra:
            chosen = torch.cat([(sizes > 0)[:, None].expand(-1, extra // unit), chosen], 1)
            sizes = torch.where(sizes > 0, sizes + extra, 0)
    else:
        sizes = live.to(torch.int64) * run.chunk
        if extra:
            sizes = torch.where(sizes > 0, sizes + extra, 0)
        chosen = units < (sizes // unit)[:, None]
    return Kept(unit, chosen.view(-1).nonzero()[:, 0], sizes)


class NarrowWire:
    """Messages of such rows over a link. `masked`: any chunks may live, named by bits; otherwise the first ones, by number."""

    def __init__(self, link: Link, masked: bool) -> None:
        self.link, self.masked = link, masked

    def swap(
        self, rows: Tensor, live: Tensor, sent: Sequence[Runs], received: Sequence[Runs], codec: Codec, norms: bool,
        known: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """`rows`: float32, flat, at full width, by rank; `live`: which chunks each of them has. `sent`, `received`: by rank.
        `norms`: one more value of every row that is not whole, as `fold` gives it. `known`: which chunks the rows that come
        have, where that need not be told. Gives what came, likewise."""
        ours, theirs = (joined([run for part in side for run in part]) for side in (sent, received))
        came = known
        if came is None:
            sizes = self._head_sizes(sent), self._head_sizes(received)
            came = self._live(self.link.all_to_all(self._heads(live, ours), *sizes), theirs)
        extra = SCALE_BYTES if codec == "int8" else 0
        own = [keep(part, run, self.masked, extra) for part, run in _by_run(live, ours)]
        other = [keep(part, run, self.masked, extra) for part, run in _by_run(came, theirs)]
        folded = rows[:0]
        if norms:
            places = _first_missing(live, ours)
            folded = rows[places]
            rows[places] = 0.0  # no value of the row, so that it does not count for its scale
        wire = encode(rows, [run[:2] for run in ours], codec)
        blocks = torch.split(wire, [run.rows * (run.width + extra) for run in ours])
        values = torch.cat([wire[:0], *(part.pick(block) for part, block in zip(own, blocks))])
        sizes = _sizes(own, sent), _sizes(other, received)
        if not norms:
            landed = self.link.all_to_all(values, *sizes)
        else:
            landed, folded = self._swap_both(values, folded, sizes, live, came, sent, received)
        parts = torch.split(landed, [part.places.numel() * part.unit for part in other])
        whole = [part.spread(values, run, extra) for part, values, run in zip(other, parts, theirs)]
        found = decode(torch.cat([landed[:0], *whole]), [run[:2] for run in theirs], codec)
        if norms:
            found[_first_missing(came, theirs)] = folded
        return found, came

    def _swap_both(
        self, values: Tensor, folded: Tensor, sizes: tuple[Ints, Ints], live: Tensor, came: Tensor, sent: Sequence[Runs],
        received: Sequence[Runs],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Values, and one number of every row that is not whole, with all its bits, in one message."""
        bits = folded.view(values.dtype)
        each = folded.element_size() // values.element_size()
        more = _narrow_rows(live, sent) * each, _narrow_rows(came, received) * each
        cut = torch.split(values, sizes[0].tolist()), torch.split(bits, more[0].tolist())
        message = torch.cat([part for both in zip(*cut) for part in both])
        landed = self.link.all_to_all(message, sizes[0] + more[0], sizes[1] + more[1])
        pieces = torch.split(landed, [n for both in zip(sizes[1].tolist(), more[1].tolist()) for n in both])
        return torch.cat(pieces[::2]), torch.cat(pieces[1::2]).view(folded.dtype)

    def _head_bytes(self, run: Run) -> int:
        return -(-run.chunks // 8) if self.masked else 1

    def _head_sizes(self, side: Sequence[Runs]) -> Ints:
        return np.array([sum(run.rows * self._head_bytes(run) for run in part) for part in side], np.int64)

    def _heads(self, live: Tensor, runs: Runs) -> Tensor:
        if not self.masked:
            return live.to(torch.uint8)
        parts = [part.view(torch.uint8).view(-1, 8)[:, : self._head_bytes(run)] for part, run in _by_run(live, runs)]
        return torch.cat([part.reshape(-1) for part in parts]) if parts else live.new_empty(0, dtype=torch.uint8)

    def _live(self, heads: Tensor, runs: Runs) -> Tensor:
        if not self.masked:
            return heads
        parts = []
        for part, run in zip(torch.split(heads, [run.rows * self._head_bytes(run) for run in runs]), runs):
            whole = torch.zeros(run.rows, 8, dtype=torch.uint8, device=heads.device)
            whole[:, : self._head_bytes(run)] = part.view(run.rows, -1)
            parts.append(whole.view(torch.int64)[:, 0])
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=heads.device)


def _by_run(live: Tensor, runs: Runs) -> list[tuple[Tensor, Run]]:
    return list(zip(torch.split(live, [run.rows for run in runs]), runs)) if runs else []


def _narrow_rows(live: Tensor, side: Sequence[Runs]) -> Ints:
    """Rows for each rank that are not whole."""
    runs = [run for part in side for run in part]
    parts = [int((own < run.chunks).sum()) for own, run in _by_run(live, runs)]
    ends = np.cumsum([len(part) for part in side])[:-1]
    return np.array([sum(part) for part in np.split(np.array(parts, np.int64), ends)], np.int64)


def _sizes(kept: Sequence[Kept], side: Sequence[Runs]) -> Ints:
    """Elements for each rank."""
    if not kept:
        return np.zeros(len(side), np.int64)
    each = torch.cat([part.sizes for part in kept])
    by_rank = torch.split(each, [sum(run.rows for run in part) for part in side])
    return torch.stack([part.sum() for part in by_rank]).cpu().numpy()
