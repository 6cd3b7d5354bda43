"""Tables whose rows differ in width, beside reading and updating them (csrc/narrow.cpp, csrc/narrow_rounds.cpp)."""

import ctypes
import math
import mmap
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..request import WAYS, Ints, TableRows
from .describe import (
    describe_table,
    native_library,
    pointer,
    thread_count,
)

# Mirrors of the structs in csrc/narrow.cpp.
_TABLE = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("kind", "memory", "capacity", "rows", "first", "last"),
            *("keys", "utilities", "stamps", "buckets", "each", "class_bits", "step"),
        )
    ]
)
_FEATURE = np.dtype([(name, np.int64) for name in ("table", "first", "count", "missing", "wrong")])

OWN_PAGES = 64 << 10
"""bytes from which a directory is worth pages of its own"""


def _words(count: int) -> Tensor:
    """Where there are many on pages of their own: a directory stays when all else that a round has made is gone, and in the midst
    of that it would keep the C library from giving the memory back."""
    if count * 4 < OWN_PAGES:
        return torch.empty(count, dtype=torch.int32)
    area = mmap.mmap(-1, count * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.from_numpy(np.frombuffer(area, np.int32))


class NarrowDirectory:
    """Id → slot for live rows alone. Where ids are below a bound that makes it worth while: an array of slots. Otherwise by open
    addressing: 8 or 12 bytes an entry, so many that 3/4 are in use after it was made."""

    ARRAY, SHORT, LONG = 0, 1, 2
    FULL = 0.85
    """share in use at which it grows"""
    GROWN = 16
    """of what is in use then, such a part more: budgets in bytes hold between rounds, too"""

    def __init__(self, bound: int | None, rows: int = 0) -> None:
        self.bound, self.used, self.version = bound, 0, 0
        self._make(rows)

    def _sized(self, rows: int) -> tuple[int, int, int]:
        """Of one that is made for so many: its kind, its capacity, its words."""
        entries = (max(64, rows * 4 // 3 + 1) + 7) // 8 * 8
        size = 8 if self.bound is not None and self.bound <= 2**32 else 12
        if self.bound is not None and self.bound * 4 <= entries * size:
            return self.ARRAY, self.bound, self.bound
        return (self.SHORT if size == 8 else self.LONG), entries, entries * size // 4

    def _make(self, rows: int) -> None:
        self.kind, self.capacity, words = self._sized(rows)
        self.memory = _words(words).fill_(-1)
        self.version += 1

    def bytes_for(self, rows: int) -> int:
        """What one that is made for so many takes."""
        return 4 * self._sized(rows)[2]

    def _place(self) -> tuple[ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64]:
        return ctypes.c_int64(self.kind), pointer(self.memory), ctypes.c_int64(self.capacity)

    def find(self, ids: Tensor) -> Tensor:
        """The slot of every id, -1 where it has none."""
        ids = ids.contiguous()
        slots = torch.empty_like(ids)
        self.find_into(ids, slots)
        return slots

    def find_into(self, ids: Tensor, slots: Tensor) -> int:
        """The same into contiguous memory that is there; gives how many have none."""
        count, threads = ctypes.c_int64(ids.numel()), thread_count(ids.numel())
        return int(native_library().uq_narrow_find(*self._place(), pointer(ids), count, pointer(slots), threads))

    def insert(self, ids: Tensor, slots: Tensor) -> None:
        """Of ids that it does not hold yet, but for those with a slot of -1."""
        rows = self.used + int((slots >= 0).sum())
        if self.kind != self.ARRAY and rows > self.FULL * self.capacity:
            held = self.entries()
            self._make(rows + rows // self.GROWN)
            self._put(*held)
        self._put(ids, slots)
        self.used = rows

    def _put(self, ids: Tensor, slots: Tensor) -> None:
        ids, slots = ids.contiguous(), slots.contiguous()
        native_library().uq_narrow_put(*self._place(), pointer(ids), pointer(slots), ctypes.c_int64(ids.numel()))

    def entries(self) -> tuple[Tensor, Tensor]:
        return self._entries(0)

    def _entries(self, spare: int) -> tuple[Tensor, Tensor]:
        """With room for so many after them."""
        ids, slots = (torch.empty(self.used + spare, dtype=torch.int64) for _ in range(2))
        native_library().uq_narrow_entries(*self._place(), ctypes.c_int64(self.used), pointer(ids), pointer(slots))
        return ids, slots

    def entries_then(self, more: Tensor, slots_of_more: Tensor) -> tuple[Tensor, Tensor]:
        """Its entries by id, then these, in one piece from the start."""
        ids, slots = self._entries(more.numel())
        if not self.in_order:
            own = ids[: self.used], slots[: self.used]
            for part, ordered in zip(own, order_by_id(*own)):
                if ordered.data_ptr() != part.data_ptr():
                    part.copy_(ordered)
        ids[self.used :], slots[self.used :] = more, slots_of_more
        return ids, slots

    @property
    def in_order(self) -> bool:
        """Whether entries come by id."""
        return self.kind == self.ARRAY

    @property
    def bytes(self) -> int:
        return self.memory.nbytes


class FollowedDirectory(NarrowDirectory):
    """See the reference: a word for each id, of which all are followed."""

    FOLLOWED = 4
    bytes = 0
    """its memory is that of what is followed"""
    in_order = True

    def __init__(self, bound: int, part: int, of: int, worth: Tensor) -> None:
        self.bound, self.worth, self.memory = bound, worth, worth.view(torch.int32).view(-1)
        self.kind, self.capacity = self.FOLLOWED | part << 8 | of << 32, self.memory.numel()
        self.used = self.version = 0

    def bytes_for(self, rows: int) -> int:
        return 0

    def insert(self, ids: Tensor, slots: Tensor) -> None:
        self._put(ids, slots)
        self.used += int((slots >= 0).sum())


class Finder:
    """Directories and candidates of all tables of a module, so that a batch takes one call. It holds for as long as they do.

    tables: of each its directory, the keys, utilities and stamps of its candidates (no keys: every id has the candidate of its
    own number), and the slots' class bits; readers: which features read it. Features are numbered as the module has them, and lie
    here table by table."""

    def __init__(
        self, tables: Sequence[tuple[NarrowDirectory, Tensor, Tensor, Tensor, int]], readers: Sequence[Sequence[int]]
    ) -> None:
        self._held = tables
        self._tables = np.zeros(len(tables), _TABLE)
        self.order = np.array([f for features in readers for f in features], np.int64)
        self._features = np.zeros(len(self.order), _FEATURE)
        self._missing = np.empty((0, 2), np.int64)
        """ids without a row, as `find` lists them for `follow`, and their places; touched only where there are any"""
        first = 0
        for t, ((directory, keys, utilities, stamps, class_bits), features) in enumerate(zip(tables, readers)):
            self._features["table"][first : first + len(features)] = t
            self._tables[t] = (
                *(directory.kind, directory.memory.data_ptr(), directory.capacity),
                *(-1 if directory.bound is None else directory.bound, first, first + len(features)),
                *(keys.data_ptr(), utilities.data_ptr(), stamps.data_ptr()),
                *(keys.numel() // WAYS, utilities.shape[1], class_bits, 0),
            )
            first += len(features)

    def find(self, ids: Tensor, slots: Tensor, starts: Ints, ends: Ints) -> tuple[Ints, Ints]:
        """Fills in the slots of the features' ids, -1 where there is none. Gives, in this object's order of features, how many
        have none and where the first wrong id is, or -1."""
        self._features["first"] = starts[self.order]
        self._features["count"] = (ends - starts)[self.order]
        if len(self._missing) < ids.numel():
            self._missing = np.empty((ids.numel() + ids.numel() // 8, 2), np.int64)
        native_library().uq_narrow_find_all(
            pointer(self._tables),
            pointer(self._features),
            ctypes.c_int64(len(self._features)),
            pointer(ids),
            pointer(slots),
            pointer(self._missing),
            thread_count(ids.numel()),
        )
        return self._features["missing"], self._features["wrong"]

    def follow(self, slots: Tensor, steps: Sequence[int]) -> None:
        """Gives ids that `find` found no row for, and that have none since, the slots of their candidates. steps: of every table
        its own."""
        self._tables["step"] = steps
        failed = native_library().uq_narrow_follow_all(
            pointer(self._tables),
            ctypes.c_int64(len(self._tables)),
            pointer(self._features),
            pointer(self._missing),
            pointer(slots),
            thread_count(slots.numel()),
        )
        if failed:
            raise MemoryError(f"no memory to follow {int(self._features['missing'].sum()):,} ids without a row")


def bucket_of(ids: Tensor, buckets: int) -> Tensor:
    ids, out = ids.contiguous(), torch.empty_like(ids)
    count = ctypes.c_int64(ids.numel())
    native_library().uq_narrow_buckets(pointer(ids), count, ctypes.c_int64(buckets), pointer(out))
    return out


def order_by_id(ids: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Takes both over."""
    if native_library().uq_narrow_order(pointer(ids), pointer(slots), ctypes.c_int64(ids.numel())):
        return ids, slots
    ids, order = ids.sort()
    return ids, slots[order]


def lay_out(slots: Tensor, chunks: Tensor, counts: Tensor, class_bits: int) -> Tensor:
    chunks, out = chunks.to(torch.int16).contiguous(), torch.empty_like(slots)
    failed = native_library().uq_narrow_lay_out(
        pointer(slots),
        pointer(chunks),
        ctypes.c_int64(slots.numel()),
        pointer(counts),
        ctypes.c_int64(counts.numel()),
        ctypes.c_int64(class_bits),
        pointer(out),
    )
    if failed:
        raise MemoryError(f"no memory to lay out {slots.numel():,} rows")
    return out


def follow(
    keys: Tensor, utilities: Tensor, stamps: Tensor, step: int, class_bits: int, ids: Tensor, slots: Tensor
) -> None:
    failed = native_library().uq_narrow_follow(
        pointer(keys),
        pointer(utilities),
        pointer(stamps),
        ctypes.c_int64(keys.numel() // WAYS),
        ctypes.c_int64(utilities.shape[1]),
        ctypes.c_int32(step),
        ctypes.c_int64(class_bits),
        pointer(ids),
        ctypes.c_int64(ids.numel()),
        pointer(slots),
    )
    if failed:
        raise MemoryError(f"no memory to follow {ids.numel():,} ids without a row")


def moved(old: Tensor, slots: Tensor) -> Tensor:
    out = torch.empty_like(slots)
    count = native_library().uq_narrow_moved(pointer(old), pointer(slots), ctypes.c_int64(slots.numel()), pointer(out))
    return out[:count]


def best_of_buckets(ids: Tensor, worth: Tensor, buckets: int) -> tuple[Tensor, Tensor]:
    """Takes no memory worth the name: a round asks for it when all else has changed."""
    ids, worth = ids.contiguous(), worth.contiguous()
    found, most = torch.full((buckets * WAYS,), -1, dtype=torch.int64), torch.empty(buckets * WAYS)
    native_library().uq_narrow_best(
        pointer(ids),
        pointer(worth),
        ctypes.c_int64(ids.numel()),
        ctypes.c_int64(buckets),
        pointer(most),
        pointer(found),
    )
    places = (found >= 0).nonzero()[:, 0]
    return places, found[places]


def rebuild(
    rows: TableRows, ids: Tensor, old: Tensor, slots: Tensor, masks: Tensor | None, std: float, inherit: float = 0.0
) -> tuple[Tensor, Tensor]:
    assert rows.records is not None
    words = torch.from_numpy(rows.records.layout[:, 5])[slots & ((1 << rows.records.class_bits) - 1)]
    starts = words.cumsum(0) - words
    made = torch.empty(int(words.sum()))
    parts = [part.contiguous() for part in (ids, old, slots)]
    native_library().uq_narrow_rebuild(
        pointer(describe_table(rows)),
        *(pointer(part) for part in parts),
        None if masks is None else pointer(masks),
        ctypes.c_float(inherit),
        ctypes.c_int64(ids.numel()),
        ctypes.c_float(2 * math.sqrt(3) * std),
        pointer(made),
        pointer(starts),
        thread_count(ids.numel()),
    )
    return made, starts


def place(rows: TableRows, slots: Tensor, made: Tensor, starts: Tensor) -> None:
    slots = slots.contiguous()
    native_library().uq_narrow_place(
        pointer(describe_table(rows)),
        pointer(slots),
        ctypes.c_int64(slots.numel()),
        pointer(made),
        pointer(starts),
    )


def worth(rows: TableRows, slots: Tensor) -> tuple[Tensor, Tensor | None]:
    assert rows.records is not None
    slots = slots.contiguous()
    utilities = torch.empty(slots.numel(), rows.records.utilities)
    masks = torch.empty_like(slots) if rows.records.masked else None
    native_library().uq_narrow_worth(
        pointer(describe_table(rows)),
        pointer(slots),
        ctypes.c_int64(slots.numel()),
        pointer(utilities),
        None if masks is None else pointer(masks),
        thread_count(slots.numel()),
    )
    return utilities, masks


def fade(rows: TableRows, gain: float) -> None:
    assert rows.records is not None
    counts = np.array([sum(slab.shape[0] for slab in slabs) for slabs in rows.records.slabs], np.int64)
    native_library().uq_narrow_fade(
        pointer(describe_table(rows)), pointer(counts), ctypes.c_float(gain), thread_count(int(counts.sum()))
    )


def count_savings(
    values: Tensor, gradient: Tensor, dims: Sequence[int], factor: float, square_factor: float, sums: Tensor
) -> None:
    values, gradient = values.float().contiguous(), gradient.float()
    gradient = gradient if gradient.stride(1) == 1 else gradient.contiguous()
    failed = native_library().uq_count_savings(
        pointer(values),
        pointer(gradient),
        ctypes.c_int64(gradient.stride(0)),
        ctypes.c_int64(values.shape[0]),
        (ctypes.c_int64 * len(dims))(*dims),
        ctypes.c_int64(len(dims)),
        ctypes.c_double(factor),
        ctypes.c_double(square_factor),
        pointer(sums),
    )
    if failed:
        raise MemoryError(f"no memory to count what {values.shape[1]:,} columns save")
