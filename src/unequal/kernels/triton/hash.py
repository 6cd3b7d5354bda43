# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The hash directory of tables with unbounded ids: id → slot, open addressing on the device, no collisions between ids.

Threads claim entries in any order, so where an id lies in the table may differ from run to run; what it gives never does: slots
are numbered by the position at which an id first appears."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..request import capturing
from .launch import ceil_div, power_of_two
from .random import GOLDEN, mix64

# An entry is a key (the id) and a slot: >= 0 live, -1 - n seen n times and not admitted yet. While a batch is inserted,
# FIRST + i: admitted with it, and position i is the first to name it.
EMPTY: tl.constexpr = tl.constexpr(-(2**63))
"""key of a free entry; the id that is this number lies in the last entry, which is its alone"""
FIRST: tl.constexpr = tl.constexpr(-(2**31))
USED: tl.constexpr = tl.constexpr(0)
NEXT: tl.constexpr = tl.constexpr(1)
AHEAD = 4
"""batches for which room is made at once, so that readings a few steps old suffice"""


@triton.jit
def _any(which):
    return tl.max(which.to(tl.int32), 0) > 0


@triton.jit
def _home(ids, capacity):
    """Where the search for an id begins. `capacity` is a power of two; entry `capacity` is the last one."""
    at = mix64(ids.to(tl.uint64) * GOLDEN + GOLDEN) & (capacity - 1).to(tl.uint64)
    return tl.where(ids == EMPTY, capacity.to(tl.int64), at.to(tl.int64))


@triton.jit
def _claim(keys, capacity, positions, ids, wanted):
    """The entry of each id, taken for it where it had none; and which were taken here."""
    last = (capacity - 1).to(tl.int64)
    at = _home(ids, capacity)
    pending = wanted & (ids != EMPTY)
    taken = pending & (ids == EMPTY)
    while _any(pending):
        held = tl.load(keys + at, mask=pending, other=EMPTY)
        free = pending & (held == EMPTY)
        if _any(free):
            # A swap takes no mask: the others put EMPTY in the place of EMPTY, anywhere, but not all in one place.
            old = tl.atomic_cas(
                keys + tl.where(free, at, positions & last),
                tl.full(ids.shape, EMPTY, tl.int64),
                tl.where(free, ids, EMPTY),
                sem="relaxed",
            )
            taken = taken | (free & (old == EMPTY))
            held = tl.where(free, tl.where(old == EMPTY, ids, old), held)
        pending = pending & (held != ids)
        at = tl.where(pending, (at + 1) & last, at)
    return at, taken


@triton.jit
def find_slots(keys, slots, capacity, ids, wanted):
    """What the entry of each id holds; -1 where it has none."""
    at = _home(ids, capacity)
    held = tl.load(keys + at, mask=wanted, other=EMPTY)
    pending = (held != ids) & (held != EMPTY)
    while _any(pending):
        at = tl.where(pending, (at + 1) & (capacity - 1).to(tl.int64), at)
        held = tl.load(keys + at, mask=pending, other=EMPTY)
        pending = (held != ids) & (held != EMPTY)
    return tl.load(slots + at, mask=wanted, other=-1).to(tl.int64)


@triton.jit(do_not_specialize=["capacity", "count", "otherwise"])
def _find(keys, slots, capacity, ids, count, otherwise, out, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    slot = find_slots(keys, slots, capacity, tl.load(ids + i, mask=inside, other=EMPTY), inside)
    tl.store(out + i, tl.where(slot >= 0, slot, otherwise), mask=inside)


@triton.jit(do_not_specialize=["capacity", "count"])
def _put(keys, slots, capacity, counters, ids, values, count, BLOCK: tl.constexpr):
    """Enters (id, slot) pairs as they are, but for those with slot -1."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values + i, mask=i < count, other=-1).to(tl.int32)
    used = value != -1
    at, taken = _claim(keys, capacity, i, tl.load(ids + i, mask=used, other=EMPTY), used)
    tl.store(slots + at, value, mask=used)
    tl.atomic_add(counters + USED, tl.sum(taken.to(tl.int64), 0), sem="relaxed")


@triton.jit(do_not_specialize=["capacity", "count"])
def _locate(keys, slots, capacity, counters, ids, count, entries, out, COUNTED: tl.constexpr, BLOCK: tl.constexpr):
    """out ← the slot of every id, -1 where it has none; those are counted, or admitted at once."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    id_ = tl.load(ids + i, mask=inside, other=EMPTY)
    at, taken = _claim(keys, capacity, i, id_, inside)
    slot = tl.load(slots + at, mask=inside, other=0)
    if COUNTED:
        tl.atomic_add(slots + at, -1, mask=inside & (slot < 0), sem="relaxed")
    else:
        first = (i + FIRST).to(tl.int32)
        tl.atomic_min(slots + at, first, mask=inside & (slot < 0) & (slot > first), sem="relaxed")
    tl.store(entries + i, at, mask=inside)
    tl.store(out + i, tl.maximum(slot, -1).to(tl.int64), mask=inside)
    if _any(taken):
        tl.atomic_add(counters + USED, tl.sum(taken.to(tl.int64), 0), sem="relaxed")


@triton.jit(do_not_specialize=["count", "admit_after"])
def _admit(slots, entries, out, count, admit_after, BLOCK: tl.constexpr):
    """Marks the entries that have now been seen often enough. Marks lie below every count, so that each stays enough."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    unknown = tl.load(out + i, mask=i < count, other=0) < 0
    at = tl.load(entries + i, mask=unknown, other=0)
    slot = tl.load(slots + at, mask=unknown, other=0)
    first = (i + FIRST).to(tl.int32)
    tl.atomic_min(slots + at, first, mask=unknown & (slot < -admit_after) & (slot > first), sem="relaxed")


@triton.jit(do_not_specialize=["count"])
def _mark(slots, counters, entries, out, count, marks, first_slot, BLOCK: tl.constexpr):
    """marks ← 1 where an id that was admitted appears first."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    unknown = tl.load(out + i, mask=i < count, other=0) < 0
    at = tl.load(entries + i, mask=unknown, other=0)
    slot = tl.load(slots + at, mask=unknown, other=0)
    tl.store(marks + i, (unknown & (slot == i + FIRST)).to(tl.int32), mask=i < count)
    if tl.program_id(0) == 0:
        tl.store(first_slot, tl.load(counters + NEXT))


@triton.jit(do_not_specialize=["count", "admit_after", "rare"])
def _settle(
    slots, counters, ids, entries, out, count, ranks, first_slot, admit_after, rare, admitted, number, BLOCK: tl.constexpr
):  # fmt: skip
    """Gives the admitted ids their slots. An entry that another program settles first is read as that slot, else as its
    mark: both lead to the same number."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    unknown = tl.load(out + i, mask=i < count, other=0) < 0
    at = tl.load(entries + i, mask=unknown, other=0)
    slot = tl.load(slots + at, mask=unknown, other=0).to(tl.int64)
    marked = unknown & (slot < -admit_after)
    rank = tl.load(ranks + (slot - FIRST), mask=marked, other=1).to(tl.int64) - 1
    start = tl.load(first_slot)
    total = tl.load(ranks + count - 1, mask=count > 0, other=0).to(tl.int64)
    is_first = marked & (slot == i + FIRST)
    slot = tl.where(marked, start + rank, tl.where(slot >= 0, slot, rare))
    tl.store(slots + at, slot.to(tl.int32), mask=is_first)
    tl.store(out + i, slot, mask=unknown)
    tl.store(admitted + rank, tl.load(ids + i, mask=is_first, other=0), mask=is_first)
    tl.store(admitted + i, tl.zeros_like(i), mask=(i >= total) & (i < count))
    if tl.program_id(0) == 0:
        tl.store(number, total)
        tl.store(counters + NEXT, start + total)


def block_of(ids: Tensor) -> int:
    """Ids per program. In the interpreter, which works on the CPU, a program costs as much as a thousand ids."""
    return 256 if ids.device.type == "cuda" else min(16384, power_of_two(max(16, ids.numel())))


def empty_table(capacity: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Keys and slots of that many entries, a power of two, and the last one."""
    return (
        torch.full((capacity + 1,), EMPTY.value, dtype=torch.int64, device=device),
        torch.full((capacity + 1,), -1, dtype=torch.int32, device=device),
    )


def assign(
    keys: Tensor, slots: Tensor, counters: Tensor, ids: Tensor, admit_after: int, rare: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See HashDirectory.insert_padded. counters: entries used, next slot. There must be room for all ids."""
    capacity, count, block = keys.numel() - 1, ids.numel(), block_of(ids)
    grid = (max(1, ceil_div(count, block)),)
    out, entries, admitted = torch.empty_like(ids), torch.empty_like(ids), torch.empty_like(ids)
    marks = torch.empty(count, dtype=torch.int32, device=ids.device)
    number, first_slot = (torch.empty(1, dtype=torch.int64, device=ids.device) for _ in range(2))
    _locate[grid](keys, slots, capacity, counters, ids, count, entries, out, COUNTED=admit_after > 1, BLOCK=block)
    if admit_after > 1:
        _admit[grid](slots, entries, out, count, admit_after, BLOCK=block)
    _mark[grid](slots, counters, entries, out, count, marks, first_slot, BLOCK=block)
    ranks = marks.cumsum(0, dtype=torch.int32)
    _settle[grid](
        slots, counters, ids, entries, out, count, ranks, first_slot, admit_after, rare, admitted, number, BLOCK=block
    )  # fmt: skip
    return out, admitted, number, first_slot


class _Reading:
    """The counters on their way to the host."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.values = torch.zeros(2, dtype=torch.int64, pin_memory=on_gpu)
        self.event = torch.cuda.Event() if on_gpu else None
        self.under_way = False
        self.given = 0
        """ids given to the directory before it began"""

    def start(self, counters: Tensor, given: int) -> None:
        self.values.copy_(counters, non_blocking=True)
        if self.event is not None:
            self.event.record()
        self.under_way, self.given = True, given

    def arrived(self) -> bool:
        return self.under_way and (self.event is None or self.event.query())


class HashDirectory:
    """Id → slot; 12 bytes an entry, at most 3/4 full. The counts are on the device; the host knows bounds of them, from
    readings that come without waiting and from the number of ids given since."""

    def __init__(self, admit_after: int = 1, first_slot: int = 0, device: torch.device | str | None = None) -> None:
        self.admit_after = admit_after
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._start(32, first_slot)

    def _start(self, capacity: int, next_slot: int) -> None:
        self._keys, self._slots = empty_table(capacity, self.device)
        self._counters = torch.tensor([0, next_slot]).to(self.device)
        self._used, self._next_slot = 0, next_slot
        self._given = self._known = 0
        """ids given so far, and how many of them the numbers above know of"""
        self._reading = _Reading(self.device)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and saved ones start their own reading: an event can be neither copied nor saved."""
        self.refresh()
        return {name: value for name, value in self.__dict__.items() if name != "_reading"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reading = _Reading(self.device)

    @property
    def capacity(self) -> int:
        """Entries; when it changes, captured graphs that use the directory are out of date."""
        return self._keys.numel() - 1

    @staticmethod
    def bytes_for(rows: int) -> int:
        """What one takes that has come to hold so many."""
        return 12 * (1 + max(32, 1 << (-(-4 * rows // 3) - 1).bit_length()))

    @property
    def bytes(self) -> int:
        return self._keys.numel() * 12

    @property
    def next_slot(self) -> int:
        """The slot that the next admitted id gets. Waits for the device where ids were given since the last reading."""
        if self._known != self._given:
            self.refresh()
        return self._next_slot

    @property
    def slot_bound(self) -> int:
        """At least next_slot. Waits for nothing."""
        return self._next_slot + self._given - self._known

    def _bound(self) -> int:
        return self._used + self._given - self._known

    def _know(self, counters: Tensor, given: int) -> None:
        self._used, self._next_slot = counters.tolist()
        self._known, self._reading.under_way = given, False

    def refresh(self) -> None:
        """Makes the bounds exact. Waits for the device."""
        self._know(self._counters, self._given)

    def _has_room(self, entries: int) -> bool:
        return entries * 4 <= self.capacity * 3

    def _grow(self, entries: int) -> None:
        capacity = self.capacity
        while entries * 4 > capacity * 3:
            capacity *= 2
        if capacity > self.capacity:
            keys, slots = self._keys, self._slots
            self._keys, self._slots = empty_table(capacity, self.device)
            self._counters[USED.value].zero_()
            self._put(keys, slots)

    def _put(self, ids: Tensor, slots: Tensor) -> None:
        block = block_of(ids)
        _put[ceil_div(ids.numel(), block),](
            self._keys, self._slots, self.capacity, self._counters, ids, slots, ids.numel(), BLOCK=block
        )

    def make_room(self, count: int) -> None:
        """Room for the next `count` ids. Waits for the device only where the bound leaves none. insert_padded calls it; before
        the replay of a captured one the caller does."""
        if self._reading.arrived():
            self._know(self._reading.values, self._reading.given)
        if not self._has_room(self._bound() + count):
            self.refresh()
            if not self._has_room(self._used + AHEAD * count):
                self._grow(self._used + AHEAD * count)
        if not self._reading.under_way:
            self._reading.start(self._counters, self._given)
        self._given += count

    def find(self, ids: Tensor, otherwise: int = -1) -> Tensor:
        """The slot of every id; `otherwise` where it has none."""
        ids, out, block = ids.contiguous(), torch.empty_like(ids), block_of(ids)
        _find[ceil_div(ids.numel(), block),](
            self._keys, self._slots, self.capacity, ids, ids.numel(), otherwise, out, BLOCK=block
        )
        return out

    def insert_padded(self, ids: Tensor, rare: int = -1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(slots, admitted ids in slot order and then zeros, how many were admitted, the slot of the first of them); the last
        two are single numbers on the device. Waits for nothing but what make_room does."""
        if not capturing(self.device):
            self.make_room(ids.numel())
        return assign(self._keys, self._slots, self._counters, ids.contiguous(), self.admit_after, rare)

    def insert(self, ids: Tensor, rare: int = -1) -> tuple[Tensor, Tensor]:
        """Like find, after admitting what has now been seen often enough; also the ids that were admitted, in slot order."""
        if not self._has_room(self._bound() + ids.numel()):
            self.refresh()
        if not self._has_room(self._used + ids.numel()):  # repeated ids need no room: count what is really new
            self._grow(self._used + ids[self.find(ids) < 0].unique().numel())
        self._given += ids.numel()
        slots, admitted, number, _ = assign(
            self._keys, self._slots, self._counters, ids.contiguous(), self.admit_after, rare
        )
        self.refresh()
        return slots, admitted[: int(number)]

    @property
    def known(self) -> int:
        """How many ids `entries` gives. Waits for the device."""
        self.refresh()
        return self._used

    def entries(self) -> tuple[Tensor, Tensor]:
        """All ids and their slots; an id seen n times without a slot has -1 - n. Live ids by slot, the others by id."""
        ids, slots = self._keys[self._slots != -1], self._slots[self._slots != -1].long()
        live = slots >= 0
        by_slot, by_id = slots[live].argsort(), ids[~live].argsort()
        return torch.cat([ids[live][by_slot], ids[~live][by_id]]), torch.cat(
            [slots[live][by_slot], slots[~live][by_id]]
        )

    def restore(self, ids: Tensor, slots: Tensor, next_slot: int) -> None:
        """Takes the place of everything held: what `entries` gave."""
        self._start(32, next_slot)
        self._grow(ids.numel())
        self._put(ids.to(self.device).contiguous(), slots.to(self.device).contiguous())
        self.refresh()
