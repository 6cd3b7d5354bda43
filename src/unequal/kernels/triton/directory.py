# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Where rows of different width are found: the directory of live rows, and the candidates that are followed without a row."""

from itertools import count as numbers

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..request import WAYS
from .hash import block_of
from .launch import ceil_div
from .random import GOLDEN, mix64

ARRAY: tl.constexpr = tl.constexpr(0)
SHORT: tl.constexpr = tl.constexpr(1)
LONG: tl.constexpr = tl.constexpr(2)
NUMBERED: tl.constexpr = tl.constexpr(3)
FOLLOWED: tl.constexpr = tl.constexpr(4)
SIGN: tl.constexpr = tl.constexpr(-(2**31))
NOT_ONE: tl.constexpr = tl.constexpr(2**63 - 1)
"""newcomer of a bucket that has none; no smaller id comes with this one where it is an id"""
_VERSIONS = numbers()
"""of all directories: tells when one's memory has moved"""


@triton.jit
def spread_over(ids, places):
    """One of so many places for each id; below 2^32."""
    high = mix64(ids.to(tl.uint64) * GOLDEN + GOLDEN) >> 32
    return (high * places.to(tl.uint64) >> 32).to(tl.int64)


@triton.jit
def _any(which):
    return tl.max(which.to(tl.int32), 0) > 0


@triton.jit
def _next(at, capacity):
    return tl.where(at + 1 == capacity, 0, at + 1)


@triton.jit
def slots_in_array(memory, bound, ids, wanted):
    inside = wanted & (ids >= 0) & (ids < bound)
    return tl.load(memory.to(tl.pointer_type(tl.int32)) + ids, mask=inside, other=-1).to(tl.int64)


@triton.jit
def slots_of_short(memory, capacity, ids, wanted):
    """Entries of 8 bytes: the id in the high half, the slot in the low one; -1 where there is none."""
    entries = memory.to(tl.pointer_type(tl.int64))
    at = spread_over(ids, capacity)
    entry = tl.load(entries + at, mask=wanted, other=-1)
    pending = (entry != -1) & (((entry >> 32) & 0xFFFFFFFF) != ids)
    while _any(pending):
        # Two at a time: one of them is hardly ever enough for all ids of a warp.
        at = _next(at, capacity)
        first = tl.load(entries + at, mask=pending, other=-1)
        at = _next(at, capacity)
        second = tl.load(entries + at, mask=pending, other=-1)
        entry = tl.where(pending, first, entry)
        pending = (entry != -1) & (((entry >> 32) & 0xFFFFFFFF) != ids)
        entry = tl.where(pending, second, entry)
        pending = (entry != -1) & (((entry >> 32) & 0xFFFFFFFF) != ids)
    return tl.where(entry == -1, -1, entry & 0xFFFFFFFF)


@triton.jit
def slots_of_long(memory, capacity, ids, wanted):
    """All ids, then all slots, of which -1 says that there is no entry."""
    keys, slots = memory.to(tl.pointer_type(tl.int64)), (memory + capacity * 8).to(tl.pointer_type(tl.int32))
    at = spread_over(ids, capacity)
    slot = tl.load(slots + at, mask=wanted, other=-1)
    pending = (slot >= 0) & (tl.load(keys + at, mask=wanted, other=0) != ids)
    while _any(pending):
        at = _next(at, capacity)
        slot = tl.where(pending, tl.load(slots + at, mask=pending, other=-1), slot)
        pending = pending & (slot >= 0) & (tl.load(keys + at, mask=pending, other=0) != ids)
    return slot.to(tl.int64)


@triton.jit
def slots_by_number(kind, bound, ids, wanted):
    """Of rows that are all there and equally wide. Higher bits of `kind`: class_bits from 8 on, chunks from 16, parts from 32."""
    class_bits, chunks, parts = (kind >> 8) & 255, (kind >> 16) & 0xFFFF, kind >> 32
    return tl.where(wanted & (ids >= 0) & (ids < bound), (ids // parts << class_bits) | chunks, -1)


@triton.jit
def slots_of_followed(kind, memory, capacity, ids, wanted):
    """A word for each id: a negative one is a slot, but for its sign. `kind`: of how many parts this is one from bit 32 on."""
    numbers = ids // (kind >> 32)
    inside = wanted & (ids >= 0) & (numbers < capacity)
    words = tl.load(memory.to(tl.pointer_type(tl.int32)) + numbers, mask=inside, other=0).to(tl.int64)
    return tl.where(words < 0, words - SIGN, -1)


@triton.jit
def live_slots(kind, memory, capacity, ids, wanted):
    """The slot of each id's row, or -1. `memory`: an address."""
    slots = tl.full(ids.shape, -1, tl.int64)
    if (kind & 255) == NUMBERED:
        slots = slots_by_number(kind, capacity, ids, wanted)
    elif (kind & 255) == FOLLOWED:
        slots = slots_of_followed(kind, memory, capacity, ids, wanted)
    elif kind == ARRAY:
        slots = slots_in_array(memory, capacity, ids, wanted)
    elif kind == SHORT:
        slots = slots_of_short(memory, capacity, ids, wanted)
    else:
        slots = slots_of_long(memory, capacity, ids, wanted)
    return slots


@triton.jit(do_not_specialize=["kind", "memory", "capacity", "count"])
def _find(kind, memory, capacity, ids, count, out, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    slots = live_slots(kind, memory, capacity.to(tl.int64), tl.load(ids + i, mask=inside, other=0), inside)
    tl.store(out + i, slots, mask=inside)


@triton.jit
def put_in_array(memory, ids, slots, wanted):
    tl.store(memory.to(tl.pointer_type(tl.int32)) + ids, slots.to(tl.int32), mask=wanted)


@triton.jit
def enter(memory, capacity, ids, slots, pending, KIND: tl.constexpr):
    """Of ids that differ and are not there yet, so that the first free entry is as good as any."""
    at = spread_over(ids, capacity)
    if KIND == SHORT:
        entries = memory.to(tl.pointer_type(tl.int64))
        mine = (ids << 32) | slots
        free = tl.full(ids.shape, -1, tl.int64)
    else:
        entries = (memory + capacity * 8).to(tl.pointer_type(tl.int32))
        mine = slots.to(tl.int32)
        free = tl.full(ids.shape, -1, tl.int32)
    while _any(pending):
        # A swap takes no mask: the others put -1 in the place of -1.
        held = tl.atomic_cas(entries + at, free, tl.where(pending, mine, free), sem="relaxed")
        settled = pending & (held == -1)
        if KIND == LONG:
            tl.store(memory.to(tl.pointer_type(tl.int64)) + at, ids, mask=settled)
        pending = pending & (settled == 0)
        at = tl.where(pending, _next(at, capacity), at)


@triton.jit(do_not_specialize=["memory", "capacity", "count"])
def _put(memory, capacity, ids, slots, count, KIND: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    id_ = tl.load(ids + i, mask=inside, other=0)
    slot = tl.load(slots + i, mask=inside, other=-1)
    if KIND == ARRAY:
        put_in_array(memory, id_, slot, inside)
    else:
        enter(memory, capacity.to(tl.int64), id_, slot, inside, KIND)


class NarrowDirectory:
    """Id → slot for live rows alone, on the device. Where ids are below a bound that makes it worth while: an array of slots.
    Otherwise by open addressing: 8 or 12 bytes an entry, half of them in use after it was made: on a GPU all ids of a warp wait
    for the one that is searched for longest."""

    FULL = 0.8
    """share in use at which it grows"""
    GROWN = 16
    """of what is in use then, such a part more: budgets in bytes hold between rounds, too"""

    def __init__(self, bound: int | None, rows: int = 0, device: torch.device | str | None = None) -> None:
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.bound, self.used = bound, 0
        self._make(rows)

    def _sized(self, rows: int) -> tuple[int, int, int]:
        """Of one that is made for so many: its kind, its capacity, its words."""
        entries = max(64, 2 * rows)
        size = 8 if self.bound is not None and self.bound <= 2**32 else 12
        if self.bound is not None and self.bound * 4 <= entries * size:
            return ARRAY.value, self.bound, self.bound
        entries += entries % 2  # slots of long ids, and a second half of short ones, then begin on 8 bytes' borders
        return (SHORT if size == 8 else LONG).value, entries, entries * size // 4

    def bytes_for(self, rows: int) -> int:
        """What one that is made for so many takes."""
        return 4 * self._sized(rows)[2]

    def _make(self, rows: int) -> None:
        self.kind, self.capacity, words = self._sized(rows)
        self.memory = torch.full((words,), -1, dtype=torch.int32, device=self.device)
        self.version = next(_VERSIONS)

    def find(self, ids: Tensor) -> Tensor:
        """The slot of every id, -1 where it has none."""
        ids, out, block = ids.contiguous(), torch.empty_like(ids), block_of(ids)
        if ids.numel():
            _find[ceil_div(ids.numel(), block),](
                self.kind, self.memory.data_ptr(), self.capacity, ids, ids.numel(), out, BLOCK=block
            )
        return out

    def find_into(self, ids: Tensor, slots: Tensor) -> int:
        """The same into memory that is there; gives how many have none, and waits for the device."""
        slots.copy_(self.find(ids))
        return int((slots < 0).sum())

    def insert(self, ids: Tensor, slots: Tensor) -> None:
        """Of ids that it does not hold yet, but for those with a slot of -1."""
        known = (slots >= 0).nonzero()[:, 0]
        ids, slots = ids[known], slots[known]
        self.make_room(ids.numel())
        self._put(ids, slots)
        self.used += ids.numel()

    def make_room(self, count: int) -> None:
        """For so many more."""
        rows = self.used + count
        if self.kind != ARRAY.value and rows > self.FULL * self.capacity:
            held = self.entries()
            self._make(rows + rows // self.GROWN)
            self._put(*held)

    def _put(self, ids: Tensor, slots: Tensor) -> None:
        ids, slots, block = ids.contiguous(), slots.contiguous(), block_of(ids)
        if ids.numel():
            _put[ceil_div(ids.numel(), block),](
                self.memory.data_ptr(), self.capacity, ids, slots, ids.numel(), KIND=self.kind, BLOCK=block
            )

    def entries(self) -> tuple[Tensor, Tensor]:
        """All ids and their slots, in no order."""
        if self.kind == ARRAY.value:
            ids = (self.memory >= 0).nonzero()[:, 0]
            return ids, self.memory[ids].long()
        if self.kind == SHORT.value:
            entries = self.memory.view(torch.int64)
            entries = entries[entries != -1]
            return (entries >> 32) & 0xFFFFFFFF, entries & 0xFFFFFFFF
        keys, slots = self.memory[: 2 * self.capacity].view(torch.int64), self.memory[2 * self.capacity :]
        return keys[slots >= 0], slots[slots >= 0].long()

    @property
    def in_order(self) -> bool:
        """Whether entries come by id."""
        return bool(self.kind == ARRAY.value)

    @property
    def bytes(self) -> int:
        return self.memory.nbytes


@triton.jit
def known_candidates(
    keys, utilities, stamps, newcomers, buckets, each, step, class_bits, ids, missing, WAYS: tl.constexpr
):
    """The slots of candidates, which are stamped; -1 of others, of which each bucket notes the smallest id."""
    tl.static_assert(WAYS <= 8)
    bucket = spread_over(ids, buckets)
    slots = tl.full(ids.shape, -1, tl.int64)
    # All ids of a bucket are read at once. A place that is free may have kept the id of who was there.
    alike = tl.zeros(ids.shape, tl.int32)
    for way in tl.static_range(WAYS):
        same = tl.load(keys + bucket * WAYS + way, mask=missing, other=0) == ids
        alike = alike | tl.where(missing & same, 1 << way, 0)
    while _any(alike):
        lowest = alike & -alike
        place = bucket * WAYS + tl.where((lowest & 0xAA) != 0, 1, 0)
        place += tl.where((lowest & 0xCC) != 0, 2, 0) + tl.where((lowest & 0xF0) != 0, 4, 0)
        found = (alike != 0) & (tl.load(utilities + place * each, mask=alike != 0, other=-1.0) >= 0)
        slots = tl.where(found, place << class_bits, slots)
        alike = tl.where(found, 0, alike ^ lowest)
    tl.store(stamps + (slots >> class_bits), tl.zeros_like(ids).to(tl.int32) + step, mask=slots >= 0)
    tl.atomic_min(newcomers + bucket, ids, mask=missing & (slots < 0), sem="relaxed")
    return slots


@triton.jit
def place_of_newcomer(
    keys, utilities, stamps, newcomers, buckets, each, most, step, class_bits, ids, missing, WAYS: tl.constexpr
):
    """The slots of the newcomers that are taken up: each in the place of the least useful candidate that was not read now. What
    tells about a table may be one number for all ids, or one for each; `most`: the largest of `each`."""
    bucket = spread_over(ids, buckets)
    mine = missing & (tl.load(newcomers + bucket, mask=missing, other=0) == ids)
    best = tl.full(ids.shape, -1, tl.int64)
    least = tl.zeros(ids.shape, tl.float32)
    each = each + tl.zeros_like(ids)
    if _any(mine):
        for way in tl.static_range(WAYS):
            place = bucket * WAYS + way
            utility = tl.zeros(ids.shape, tl.float32)
            for k in range(most):
                utility += tl.load(utilities + place * each + k, mask=mine & (k < each), other=0.0)
            free = mine & (tl.load(stamps + place, mask=mine, other=0) != step)
            better = free & ((best < 0) | (utility < least))
            best = tl.where(better, place, best)
            least = tl.where(better, utility, least)
    return tl.where(best >= 0, best << class_bits, -1)


@triton.jit
def enter_newcomer(
    keys, utilities, stamps, newcomers, buckets, each, most, step, class_bits, ids, slots, here, WAYS: tl.constexpr
):
    """Writes them down. An id that comes twice does so twice, the same. Buckets forget their newcomers."""
    each = each + tl.zeros_like(ids)
    candidate = here & ((slots < 0) | ((slots & ((1 << class_bits) - 1)) == 0))
    if _any(candidate):
        bucket = spread_over(ids, buckets)
        done = candidate & (tl.load(newcomers + bucket, mask=candidate, other=0) == ids)
        tl.store(newcomers + bucket, tl.full(ids.shape, NOT_ONE, tl.int64), mask=done)
        place = tl.maximum(slots, 0) >> class_bits
        new = candidate & (slots >= 0)
        new = new & (
            (tl.load(keys + place, mask=new, other=0) != ids)
            | (tl.load(utilities + place * each, mask=new, other=0.0) < 0)
        )
        tl.store(keys + place, ids, mask=new)
        tl.store(stamps + place, tl.zeros_like(ids).to(tl.int32) + step, mask=new)
        for k in range(most):
            tl.store(utilities + place * each + k, tl.zeros(ids.shape, tl.float32), mask=new & (k < each))


@triton.jit(do_not_specialize=["buckets", "each", "step", "class_bits", "count"])
def _follow(
    keys, utilities, stamps, newcomers, buckets, each, step, class_bits, ids, slots, count,
    PHASE: tl.constexpr, WAYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = i < count
    id_, slot = tl.load(ids + i, mask=here, other=0), tl.load(slots + i, mask=here, other=0)
    missing = here & (slot < 0)
    if PHASE == 0:
        found = known_candidates(
            keys, utilities, stamps, newcomers, buckets, each, step, class_bits, id_, missing, WAYS
        )  # fmt: skip
        tl.store(slots + i, found, mask=missing)
    elif PHASE == 1:
        found = place_of_newcomer(
            keys, utilities, stamps, newcomers, buckets, each, each, step, class_bits, id_, missing, WAYS
        )  # fmt: skip
        tl.store(slots + i, found, mask=missing)
    else:
        enter_newcomer(keys, utilities, stamps, newcomers, buckets, each, each, step, class_bits, id_, slot, here, WAYS)


def follow(
    keys: Tensor, utilities: Tensor, stamps: Tensor, step: int, class_bits: int, ids: Tensor, slots: Tensor
) -> None:
    """Gives ids without a row (slot -1) the slot of their candidate. Buckets have WAYS candidates; in one step each takes up at
    most one newcomer, the smallest id, in place of its least useful candidate that was not read now. Waits for nothing."""
    buckets, block = keys.numel() // WAYS, block_of(ids)
    newcomers = torch.full((buckets,), NOT_ONE.value, dtype=torch.int64, device=keys.device)
    for phase in range(3):
        _follow[max(1, ceil_div(ids.numel(), block)),](
            keys, utilities, stamps, newcomers, buckets, utilities.shape[1], step, class_bits, ids, slots, ids.numel(),
            PHASE=phase, WAYS=WAYS, BLOCK=block,
        )  # fmt: skip


@triton.jit(do_not_specialize=["count", "buckets"])
def _bucket_of(ids, out, count, buckets, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, spread_over(tl.load(ids + i, mask=i < count, other=0), buckets), mask=i < count)


def bucket_of(ids: Tensor, buckets: int) -> Tensor:
    ids, out, block = ids.contiguous(), torch.empty_like(ids), block_of(ids)
    if ids.numel():
        _bucket_of[ceil_div(ids.numel(), block),](ids, out, ids.numel(), buckets, BLOCK=block)
    return out
