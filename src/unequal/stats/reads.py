"""How often each id is read, in bounded memory: exact while all ids fit; beyond that the most-read ids and a sample of all.

The most-read ids are kept as Misra and Gries do it, many at a time: where more ids are held than there is room for, the least
read go, and `error` notes the most that one of them can have been read. It is never more than reads / (room + 1), and merged
counts obey the same bound. Every id that is held also knows its `slack`, how often it can have been read while it was not held:
of ids that were there from the start it is 0, and their counts are exact.

The sample holds the ids with the smallest hashes and their exact counts: an id that is among them at the end was so at every
moment before. As a hash has nothing to do with popularity, it is a fair sample of all ids, rare ones included; it says how many
ids there are and how often those that are not held are read. It depends on the reads alone, not on their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ..data.strings import mix64_array
from ..errors import UserError

Ints = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]
Counts = npt.NDArray[Any]
"""int64, or float64 once they have faded"""
MEMORY = 64 << 20
LEAST_MEMORY = 1 << 10
EXACT_BYTES, HELD_BYTES, SAMPLED_BYTES = 16, 32, 64
"""of the memory per id: while all are counted; of the most read; of the sample. Beyond exactness ¾ and ¼ of it are used."""
BATCH = 1 << 18
"""ids that are sorted at once, at least"""
FORGOTTEN = 1 / 64
"""reads to which an id must fade to be forgotten"""
EVERYTHING = 1 << 64
DENSE = 4
"""Ids that span at most so many times their number are counted in place rather than sorted."""


def hashed(ids: Ints) -> Hashes:
    """A number per id that is as good as random, and another one for every id."""
    return mix64_array(ids.view(np.uint64) + np.uint64(0x9E3779B97F4A7C15))


def count_ids(ids: Ints) -> tuple[Ints, Ints]:
    """The different ids in order, and how often each is there."""
    if not len(ids):
        return ids, ids
    low, high = int(ids.min()), int(ids.max())
    if high - low < DENSE * len(ids):
        counts = np.bincount(ids - low)
        found = np.flatnonzero(counts)
        return found + low, counts[found]
    ordered = np.sort(ids)
    first = starts(ordered)
    return ordered[first], np.diff(np.append(first, len(ordered)))


def starts(ordered: npt.NDArray[Any]) -> Ints:
    """Where the runs of equal values begin."""
    new = np.empty(len(ordered), bool)
    new[:1] = True
    np.not_equal(ordered[1:], ordered[:-1], out=new[1:])
    return np.flatnonzero(new)


Columns = tuple[npt.NDArray[Any], ...]
"""keys in ascending order, each once, and numbers that belong to them"""


def _joined(one: Columns, other: Columns) -> Columns:
    """Both lists as one; where both have a key, its numbers are summed. Needs little memory beside the result's."""
    if len(one[0]) < len(other[0]):
        one, other = other, one
    (mine, *_), (theirs, *_) = one, other
    if not len(theirs):
        return one
    at = np.searchsorted(mine, theirs)
    fresh = mine.take(at, mode="clip") != theirs
    before = np.cumsum(fresh)
    shared = at[~fresh] + before[~fresh]
    places = at[fresh] + before[fresh] - 1
    old = np.ones(len(mine) + len(places), bool)
    old[places] = False
    result = []
    for number, (left, right) in enumerate(zip(one, other, strict=True)):
        out = np.empty(len(old), np.result_type(left, right))
        out[old] = left
        out[places] = right[fresh]
        if number:
            out[shared] += right[~fresh]
        result.append(out)
    return tuple(result)


def _all_joined(parts: list[Columns]) -> Columns:
    """Neighbours first, so that lists of about the same length are joined."""
    while len(parts) > 1:
        parts = [_joined(a, b) for a, b in zip(parts[::2], parts[1::2])] + (parts[-1:] if len(parts) % 2 else [])
    return parts[0]


@dataclass(slots=True)
class Sample:
    """The ids whose hash is below a limit, with their exact counts. The limit falls as needed to hold `room` of them."""

    room: int
    hashes: Hashes
    counts: Counts
    limit: int = EVERYTHING

    @property
    def share(self) -> float:
        """of all ids"""
        return self.limit / EVERYTHING

    def add(self, hashes: Hashes, counts: Counts, limit: int = EVERYTHING) -> None:
        """Counts of different ids, all of those with hashes below `limit`."""
        self.limit = min(self.limit, limit)
        if len(hashes) > self.room:
            self.limit = min(self.limit, int(np.partition(hashes, self.room)[self.room]))
        if self.limit < EVERYTHING:
            inside = hashes < np.uint64(self.limit)
            hashes, counts = hashes[inside], counts[inside]
            mine = int(np.searchsorted(self.hashes, np.uint64(self.limit)))
            self.hashes, self.counts = self.hashes[:mine], self.counts[:mine]
        order = np.argsort(hashes)
        self.hashes, self.counts = _joined((self.hashes, self.counts), (hashes[order], counts[order]))
        if len(self.hashes) > self.room:
            self.limit = int(self.hashes[self.room])
            self.hashes, self.counts = self.hashes[: self.room].copy(), self.counts[: self.room].copy()

    def find(self, hashes: Hashes) -> tuple[npt.NDArray[np.bool_], Ints]:
        """Which of them are in the sample, and where."""
        at = np.searchsorted(self.hashes, hashes)
        at[at == len(self.hashes)] = 0
        return self.hashes[at] == hashes if len(self.hashes) else np.zeros(len(hashes), bool), at


class Reads:
    """Counts ids as they come. It holds about `memory` bytes, and up to five times as many for moments, while it sorts. Cheap
    where it is fed a part of what is read."""

    def __init__(self, memory: int = MEMORY) -> None:
        if memory < LEAST_MEMORY:
            raise UserError(f"memory to count ids: expected {LEAST_MEMORY:,} bytes or more, got {memory:,}")
        self.memory = memory
        self.total: float = 0
        """reads"""
        self.error: float = 0
        """The most that an id that is not held can have been read."""
        self.ids: Ints = np.empty(0, np.int64)
        """those that are held, in ascending order"""
        self.counts: Counts = np.empty(0, np.int64)
        """reads of each since it is held"""
        self.slack: Counts | None = None
        """how often each can have been read before; None while all are exact"""
        self.sample: Sample | None = None
        """none while all are exact"""
        self._raw: list[Ints] = []
        self._raw_size = 0
        self._pending: list[tuple[Ints, Counts]] = []
        self._waiting = 0

    @property
    def sampled_ids(self) -> int:
        """Room of the sample."""
        return self.memory // SAMPLED_BYTES

    @property
    def exact(self) -> bool:
        """Whether every id is held with its exact count."""
        self.settle()
        return self.sample is None

    def add(self, ids: Ints | Tensor, counts: Counts | None = None) -> None:
        """Ids that were read, each once, or as often as `counts` says; these are then different ids in ascending order."""
        values = ids.detach().cpu().numpy() if isinstance(ids, Tensor) else ids
        values = values.reshape(-1).astype(np.int64, copy=False)
        if not len(values):
            return
        if counts is not None:
            self.total += counts.sum().item()
            self._wait(values, counts)
            return
        self.total += len(values)
        if not self._raw and len(values) >= self._batch:
            self._wait(*count_ids(values))
            return
        self._raw.append(values.copy())
        self._raw_size += len(values)
        if self._raw_size >= self._batch:
            self._count_raw()

    @property
    def _batch(self) -> int:
        """Ids that are sorted together: that is much faster than to join what was sorted apart."""
        return max(BATCH, self.memory // SAMPLED_BYTES)

    def _count_raw(self) -> None:
        if self._raw:
            raw, self._raw, self._raw_size = np.concatenate(self._raw), [], 0
            self._wait(*count_ids(raw))

    def _wait(self, ids: Ints, counts: Counts) -> None:
        self._pending.append((ids, counts))
        self._waiting += len(ids)
        # In parts that are not small beside what is held: then every id is moved but a few times.
        if self._waiting >= max(min(BATCH, self.memory // HELD_BYTES), len(self.ids) // 2):
            self._join_pending()

    def settle(self) -> None:
        """Counts what has come but waits to be counted together with more."""
        self._count_raw()
        if self._pending:
            self._join_pending()

    def _join_pending(self) -> None:
        pending: list[Columns] = [*self._pending]
        self._pending, self._waiting = [], 0
        ids, counts = _all_joined(pending)
        del pending
        if self.sample is not None:
            self.sample.add(hashed(ids), counts)
        self._hold(ids, counts, None, 0)

    def _hold(self, ids: Ints, counts: Counts, slack: Counts | None, error: float) -> None:
        """Holds further ids, of a count with this error: the slack there of an id that is not among them."""
        if self.slack is None:
            self.ids, self.counts = _joined((self.ids, self.counts), (ids, counts))
        else:
            # From the errors downwards: then what an id lacks on one side is 0.
            theirs = np.zeros_like(counts) if slack is None else slack - error
            mine = (self.ids, self.counts, self.slack - self.error)
            self.ids, self.counts, below = _joined(mine, (ids, counts, theirs))
            self.slack = below + (self.error + error)
        self.error += error
        self._fit()

    def _fit(self) -> None:
        if self.slack is None:
            if len(self.ids) <= self.memory // EXACT_BYTES:
                return
            self._sample_all()
        room = self.memory // HELD_BYTES
        if len(self.ids) > room:
            assert self.slack is not None
            most = self.counts + self.slack
            dropped = np.partition(most, len(most) - room - 1)[len(most) - room - 1].item()
            self._keep(most > dropped)
            self.error = max(self.error, dropped)

    def _keep(self, mask: npt.NDArray[np.bool_]) -> None:
        self.ids, self.counts = self.ids[mask], self.counts[mask]
        if self.slack is not None:
            self.slack = self.slack[mask]

    def _sample_all(self) -> None:
        """Leaves exactness: all ids are known until now, so the sample is exact."""
        self.slack = np.zeros_like(self.counts)
        self.sample = Sample(self.sampled_ids, np.empty(0, np.uint64), self.counts[:0])
        self.sample.add(hashed(self.ids), self.counts)

    def merge(self, other: Reads) -> None:
        """Adds what another has counted. The other one is left as it is."""
        self.settle()
        other.settle()
        if self.sample is None and other.sample is not None:
            self._sample_all()
        if self.sample is not None:
            theirs = other.sample
            if theirs is None:
                self.sample.add(hashed(other.ids), other.counts)
            else:
                self.sample.add(theirs.hashes, theirs.counts, theirs.limit)
        self.total += other.total
        self._hold(other.ids, other.counts, other.slack, other.error)

    def decay(self, factor: float) -> None:
        """Lets all reads so far count less. An id that has faded to almost nothing is forgotten."""
        if not 0 <= factor <= 1:
            raise UserError(f"decay of counts: expected a factor from 0 to 1, got {factor}")
        self.settle()
        self.total, self.error, self.counts = self.total * factor, self.error * factor, self.counts * factor
        most = self.counts
        if self.slack is not None:
            self.slack = self.slack * factor
            most = self.counts + self.slack
        self._keep(most >= FORGOTTEN)
        if self.sample is not None:
            sample = self.sample
            faded = sample.counts * factor
            alive = faded >= FORGOTTEN
            sample.hashes, sample.counts = sample.hashes[alive], faded[alive]

    def ranked(self) -> tuple[Ints, Counts]:
        """Ids that can be named and how often they were read, most read first, equal ones by id. Beyond exactness these are ids
        that were surely read at least as often as any that is not held; their counts are estimates between the bounds."""
        self.settle()
        ids, counts, slack = self.ids, self.counts, self.slack
        if slack is not None:
            sure = counts >= self.error
            ids = ids[sure]
            counts = self._likely(ids, counts[sure], slack[sure])
        order = np.lexsort((ids, -counts))
        return ids[order], counts[order]

    def _likely(self, ids: Ints, counts: Counts, slack: Counts) -> Counts:
        """Exact where it is known; elsewhere as large a part of the slack as in the ids of which it is known."""
        assert self.sample is not None
        unsure = np.flatnonzero(slack > 0)
        if not len(unsure):
            return counts
        known, at = self.sample.find(hashed(ids[unsure]))
        exact = self.sample.counts[at[known]]
        missed = (exact - counts[unsure[known]]).sum() / slack[unsure[known]].sum() if known.any() else 0.5
        likely = counts.astype(np.float64)
        likely[unsure] += missed * slack[unsure]
        likely[unsure[known]] = exact
        return likely

    def top(self, n: int) -> Ints:
        """Ids of the n most-read rows, most read first, equal ones by id; fewer where fewer can be named."""
        return self.ranked()[0][:n]

    def others(self, named: Ints) -> tuple[float, Counts]:
        """How many ids each one of a sample of the other ids stands for, and how often these were read."""
        self.settle()
        if self.sample is None:
            return 1.0, np.empty(0, np.int64)
        rest = np.ones(len(self.sample.hashes), bool)
        known, at = self.sample.find(hashed(named))
        rest[at[known]] = False
        return 1 / self.sample.share, self.sample.counts[rest]
