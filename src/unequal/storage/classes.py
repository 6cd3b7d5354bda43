"""Rows of different width as files hold them: all rows of one chunk, then all of two, and so on, each class in the order of its
places. Put back in that order, rows lie where they lay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ..errors import CheckpointError
from .narrow import NarrowStorage
from .narrow_rows import INDEX_BITS
from .records import joined


def listed(storage: NarrowStorage) -> Tensor:
    """Ids of all live rows."""
    ids, slots = storage.directory.entries()
    bits = storage.records.class_bits
    found: Tensor = ids[(((slots & ((1 << bits) - 1)) << 32) | (slots >> bits)).argsort()]
    return found


def pieces(storage: NarrowStorage, part: str) -> Iterator[Tensor]:
    """One part of the state of all rows, slab by slab: values one after the other, the rest row by row."""
    records = storage.records
    for k in range(1, records.chunks + 1):
        left = storage.counts[k]
        for slab in records.slabs[k]:
            if not left:
                break
            yield _take(storage, k, slab[:left], part)
            left -= min(left, slab.shape[0])


def _take(storage: NarrowStorage, k: int, rows: Tensor, part: str) -> Tensor:
    records, dtype = storage.records, storage.table.dtype
    width, *begins = records.layout[k].tolist()
    if part == "weight":
        words = -(-width * dtype.itemsize // 4)
        return _copied(rows[:, :words]).view(dtype)[:, :width].flatten()
    if part == "utilities":
        return _copied(rows[:, begins[2] : begins[2] + records.utilities])
    if part == "masks":
        return _copied(rows[:, begins[3] : begins[3] + 2]).flatten().view(torch.int64)
    number = [name for name, _ in storage.optimizer.state].index(part)
    size = 1 if storage.optimizer.state[number][1] == "row" else width
    return _copied(rows[:, begins[number] : begins[number] + size]).flatten()


def _copied(words: Tensor) -> Tensor:
    """Always: a single row counts as contiguous wherever it lies, and words of two can be seen as one at even places only."""
    return words.clone(memory_format=torch.contiguous_format)


def candidates(storage: NarrowStorage) -> tuple[Tensor, Tensor, Tensor]:
    """Ids that are followed without a row, their places in the table of candidates, and their utilities."""
    places, ids = storage.candidates()
    return ids, places, storage.records.slabs[0][0][places, : storage.records.utilities]


class Filling:
    """Takes the place of everything that a storage holds, a few rows at a time."""

    def __init__(self, storage: NarrowStorage, counts: list[int]) -> None:
        """`counts`: rows there will be of 0, 1, 2, … chunks."""
        room = 1 << INDEX_BITS - storage.records.class_bits
        if max(counts) >= room:
            raise CheckpointError(
                f"table '{storage.table.name}': {max(counts):,} rows of {counts.index(max(counts))} chunks, there is room for "
                f"{room:,}; load it on more ranks, or with larger chunks, of which there are fewer"
            )
        self.storage = storage
        storage._start()
        if storage.how.uniform and counts != storage.counts:
            raise storage.otherwise_saved()
        for k in range(1, len(counts)):
            storage._grow(k, counts[k], spare=False)
        self._counts = [0] * len(counts)
        self._directory = storage._directory(sum(counts))

    def add(self, k: int, ids: Tensor, parts: Mapping[str, Tensor]) -> None:
        """Rows of k chunks: by name what `pieces` gives, values and their states as [rows, values]."""
        storage, records = self.storage, self.storage.records
        device, first, count = storage.device, self._counts[k], ids.numel()
        rows = joined(records, storage.optimizer, k, {name: part.to(device) for name, part in parts.items()})
        if storage.how.uniform:
            slots = self._directory.find(ids.to(device))
            starts = torch.arange(count, device=device) * rows.shape[1]
            storage.kernels.place(storage.rows, slots, rows.flatten(), starts)
            self._counts[k] += count
            return
        size = 1 << records.slab_log2
        at = 0
        while at < count:
            number, within = divmod(first + at, size)
            part = rows[at : at + size - within]
            records.slabs[k][number][within : within + part.shape[0]] = part
            at += part.shape[0]
        places = torch.arange(first, first + count, device=device)
        self._directory.insert(ids.to(device), (places << records.class_bits) | k)
        self._counts[k] += count

    def finish(self, ids: Tensor, places: Tensor | None, utilities: Tensor, gain: float) -> None:
        """With these candidates, at their places where those are known. `gain`: in which measure all utilities are."""
        storage, device = self.storage, self.storage.device
        storage.counts = self._counts
        storage._find_by(self._directory)
        ids, utilities = ids.to(device), utilities.to(device)
        if places is None:
            unknown = storage.directory.find(ids) < 0  # some have got a row since they were followed
            storage._follow_instead((ids[unknown], utilities[unknown]))
        else:
            storage.put_candidates(places.to(device), ids, utilities)
        storage.records.gain = gain
        storage.generation += 1
        storage._changed()
