"""Tables whose rows differ in width: the directory, the candidates, and moving rows. See csrc/narrow.h for how records lie."""

import math

import torch
from torch import Tensor

from ..request import GOLDEN, WAYS, Records, TableRows
from .rows import keys_of, mix64, shift_right, signed


def chunks_of(records: Records, slots: Tensor) -> Tensor:
    return slots & ((1 << records.class_bits) - 1)


def by_class(records: Records, slots: Tensor) -> list[tuple[int, Tensor, Tensor]]:
    """(class, which of the slots, their places) for each class that is met."""
    chunks, parts = chunks_of(records, slots), []
    for k in range(records.chunks + 1):
        which = ((chunks == k) & (slots >= 0)).nonzero()[:, 0]
        if which.numel():
            parts.append((k, which, slots[which] >> records.class_bits))
    return parts


def read_records(records: Records, k: int, places: Tensor) -> Tensor:
    """[rows, words]"""
    if k == 0:
        return records.slabs[0][0][places]
    slabs, within = places >> records.slab_log2, places & ((1 << records.slab_log2) - 1)
    out = torch.empty(places.numel(), int(records.layout[k, 5]))
    for slab in torch.unique(slabs).tolist():
        out[slabs == slab] = records.slabs[k][slab][within[slabs == slab]]
    return out


def write_records(records: Records, k: int, places: Tensor, rows: Tensor) -> None:
    if k == 0:
        records.slabs[0][0][places] = rows
        return
    slabs, within = places >> records.slab_log2, places & ((1 << records.slab_log2) - 1)
    for slab in torch.unique(slabs).tolist():
        records.slabs[k][slab][within[slabs == slab]] = rows[slabs == slab]


def values_of(records: Records, k: int, rows: Tensor) -> Tensor:
    """[rows, values] of the table's dtype"""
    words = -(-int(records.layout[k, 0]) * records.dtype.itemsize // 4)
    return rows[:, :words].contiguous().view(records.dtype)[:, : int(records.layout[k, 0])]


def set_values(records: Records, k: int, rows: Tensor, values: Tensor) -> None:
    width = int(records.layout[k, 0])
    words = -(-width * records.dtype.itemsize // 4)
    padded = torch.zeros(rows.shape[0], words * 4 // records.dtype.itemsize, dtype=records.dtype)
    padded[:, :width] = values
    rows[:, :words] = padded.view(torch.float32)


def columns_of(records: Records, k: int, rows: Tensor) -> Tensor:
    """[rows, values]: the column of the vector that each value of a row is."""
    if not records.masked:
        return torch.arange(int(records.layout[k, 0])).expand(rows.shape[0], -1)
    mask = int(records.layout[k, 4])
    bits = rows[:, mask : mask + 2].flatten().clone().view(torch.int64)
    live = (bits[:, None] >> torch.arange(records.chunks)) & 1
    chunks = torch.argsort(live, dim=1, descending=True, stable=True)[:, :k]
    return (chunks[:, :, None] * records.chunk + torch.arange(records.chunk)).flatten(1)


def read_vectors(records: Records, slots: Tensor) -> Tensor:
    """[slots, dim] float32: zeros where a chunk does not exist."""
    out = torch.zeros(slots.numel(), records.dim)
    for k, which, places in by_class(records, slots):
        if k:
            rows = read_records(records, k, places)
            spread = torch.zeros(which.numel(), records.dim)
            spread.scatter_(1, columns_of(records, k, rows), values_of(records, k, rows).float())
            out[which] = spread
    return out


def fresh_values(rows: TableRows, ids: Tensor, columns: Tensor, widths: Tensor) -> Tensor:
    """[ids, columns] float32, as `initialize` draws them. widths [ids, 1]: of the uniform distribution."""
    words = mix64(keys_of(rows.key, ids)[:, None] + (columns // 2 + 1) * signed(GOLDEN))
    bits = torch.where(columns % 2 == 1, shift_right(words, 8), shift_right(words, 40)) & 0xFFFFFF
    return (bits.float() * 2.0**-24 - 0.5) * widths


def spread_over(ids: Tensor, places: int) -> Tensor:
    return shift_right(shift_right(mix64(ids * signed(GOLDEN) + signed(GOLDEN)), 32) * places, 32)


bucket_of = spread_over


class NarrowDirectory:
    in_order = False
    GROWN = 16

    def __init__(self, bound: int | None, rows: int = 0) -> None:
        self._slots: dict[int, int] = {}

    @property
    def used(self) -> int:
        return len(self._slots)

    def find(self, ids: Tensor) -> Tensor:
        return torch.tensor([self._slots.get(id_, -1) for id_ in ids.tolist()], dtype=torch.int64)

    def find_into(self, ids: Tensor, slots: Tensor) -> int:
        slots.copy_(self.find(ids))
        return int((slots < 0).sum())

    def insert(self, ids: Tensor, slots: Tensor) -> None:
        self._slots.update((id_, slot) for id_, slot in zip(ids.tolist(), slots.tolist()) if slot >= 0)

    def entries(self) -> tuple[Tensor, Tensor]:
        parts = (self._slots.keys(), self._slots.values())
        ids, slots = (torch.tensor(list(part), dtype=torch.int64) for part in parts)
        return ids, slots

    @property
    def bytes(self) -> int:
        return self.bytes_for(len(self._slots))

    def bytes_for(self, rows: int) -> int:
        return 16 * rows


class FollowedDirectory:
    """Ids part, part + of, part + 2·of … below a bound, all of which are followed, have a word each. A negative one is the slot
    of the id's row, but for its sign; any other is a float32 number, what the id is worth without a row."""

    FOLLOWED, SIGN = 4, -(2**31)
    GROWN = 16
    in_order = True
    bytes, version = 0, 0
    """its memory is that of what is followed, and stays where it is"""

    def __init__(self, bound: int, part: int, of: int, worth: Tensor) -> None:
        """`worth` [ids, 1]: zeros, which it takes over."""
        self.bound, self.part, self.of, self.worth = bound, part, of, worth
        self.kind = self.FOLLOWED | part << 8 | of << 32
        self.memory = worth.view(torch.int32).view(-1)
        self.capacity, self.used = self.memory.numel(), 0

    def bytes_for(self, rows: int) -> int:
        return 0

    def _numbers(self, ids: Tensor) -> Tensor:
        return ids if self.of == 1 else torch.div(ids, self.of, rounding_mode="floor")

    def find(self, ids: Tensor) -> Tensor:
        """The slot of every id, -1 where it has no row."""
        inside = (ids >= 0) & (ids < self.bound)
        words = self.memory[self._numbers(torch.where(inside, ids, self.part))].long()
        return torch.where(inside & (words < 0), words - self.SIGN, -1)

    def find_into(self, ids: Tensor, slots: Tensor) -> int:
        slots.copy_(self.find(ids))
        return int((slots < 0).sum())

    def insert(self, ids: Tensor, slots: Tensor) -> None:
        """Of ids that have no row yet, but for those with a slot of -1."""
        known = (slots >= 0).nonzero()[:, 0]
        self.memory[self._numbers(ids[known])] = (slots[known] + self.SIGN).to(torch.int32)
        self.used += known.numel()

    def make_room(self, count: int) -> None:
        """Nothing: every id has its word."""

    def entries(self) -> tuple[Tensor, Tensor]:
        """Ids that have a row, in order, and their slots."""
        numbers = (self.memory < 0).nonzero()[:, 0]
        return numbers * self.of + self.part, self.memory[numbers].long() - self.SIGN


def follow(
    keys: Tensor, utilities: Tensor, stamps: Tensor, step: int, class_bits: int, ids: Tensor, slots: Tensor
) -> None:
    """Gives ids without a row (slot -1) the slot of their candidate. Buckets have WAYS candidates; in one step each takes up at
    most one newcomer, the smallest id, in place of its least useful candidate that was not read now."""
    missing = (slots < 0).nonzero()[:, 0]
    buckets = bucket_of(ids, keys.numel() // WAYS)
    newcomers: dict[int, int] = {}
    for i in missing.tolist():
        bucket, id_ = int(buckets[i]), int(ids[i])
        for k in range(bucket * WAYS, (bucket + 1) * WAYS):
            if int(keys[k]) == id_ and float(utilities[k, 0]) >= 0:
                slots[i] = k << class_bits
                stamps[k] = step
        if slots[i] < 0:
            newcomers[bucket] = min(id_, newcomers.get(bucket, id_))
    for bucket, id_ in newcomers.items():
        free = [k for k in range(bucket * WAYS, (bucket + 1) * WAYS) if int(stamps[k]) != step]
        if free:
            k = min(free, key=lambda k: float(utilities[k].sum()))
            keys[k], stamps[k], utilities[k] = id_, step, 0
            slots[(ids == id_) & (slots < 0)] = k << class_bits


def lay_out(slots: Tensor, chunks: Tensor, counts: Tensor, class_bits: int) -> Tensor:
    """New slots of rows that will have so many chunks, -1 for none: the rows of a class lie without a gap, those that can stay
    where they are do, and others follow in order. counts: rows of every class."""
    # All classes at once, one after the other: on a GPU a loop over them would wait for the device again and again.
    chunks = chunks.to(torch.int64)
    begins = counts.cumsum(0) - counts
    places = slots >> class_bits
    stays = (slots & ((1 << class_bits) - 1) == chunks) & (places < counts[chunks])
    # There are at least as many places as are needed, and one for those that write nothing.
    taken = torch.zeros(slots.numel() + 1, dtype=torch.bool, device=slots.device)
    taken[torch.where(stays, begins[chunks] + places, slots.numel())] = True
    free = (~taken).nonzero()[:, 0]
    movers = ((chunks > 0) & ~stays).nonzero()[:, 0]
    movers = movers[chunks[movers].argsort(stable=True)]
    out = torch.where(stays, slots, -1)
    k = chunks[movers]
    out[movers] = ((free[: movers.numel()] - begins[k]) << class_bits) | k
    return out


def rebuild(
    rows: TableRows, ids: Tensor, old: Tensor, slots: Tensor, masks: Tensor | None, std: float, inherit: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The records of rows at new slots, one after the other, and where each begins. `old`: the slot that a row has now, or -1
    where it is new. Chunks that a row had are kept, others are fresh. `inherit`: squares of gradients of new values begin as such
    a share of the largest of the row's others; an average over the row counts them with as much; and they are drawn from ± half
    of the row's largest value, where that is more than what new rows have."""
    records = rows.records
    assert records is not None
    chunks = chunks_of(records, slots)
    words = torch.from_numpy(records.layout[:, 5])[chunks]
    starts = words.cumsum(0) - words
    made = torch.zeros(int(words.sum()))
    columns = torch.arange(records.dim)
    widths = torch.full((ids.numel(), 1), 2 * math.sqrt(3) * std, dtype=torch.float32)
    for k, which, places in by_class(records, old):
        if inherit and k:
            held = values_of(records, k, read_records(records, k, places))
            widths[which] = torch.maximum(widths[which], held.float().abs().amax(1, keepdim=True))
    vectors = fresh_values(rows, ids, columns, widths).to(records.dtype)
    states = [torch.zeros(ids.numel(), records.dim if per == "value" else 1) for _, per in rows.optimizer.state]
    usefulness = torch.zeros(ids.numel(), records.utilities)
    for k, which, places in by_class(records, old):
        had = read_records(records, k, places)
        utility = int(records.layout[k, 3])
        usefulness[which] = had[:, utility : utility + records.utilities]
        if k == 0:
            continue
        at = columns_of(records, k, had)
        vectors[which] = vectors[which].scatter(1, at, values_of(records, k, had))
        numbered = enumerate(zip(states, records.layout[k, 1:].tolist(), rows.optimizer.state))
        for number, (state, begin, (_, per)) in numbered:
            if per == "row":
                state[which, 0] = had[:, begin]
                if inherit and number == rows.optimizer.squares:
                    more = (chunks[which] - k).clamp(min=0)
                    state[which, 0] *= torch.where(more > 0, (k + inherit * more.float()) / chunks[which], 1.0)
            else:
                if inherit and number == rows.optimizer.squares:
                    state[which] = inherit * had[:, begin : begin + at.shape[1]].amax(1, keepdim=True)
                state[which] = state[which].scatter(1, at, had[:, begin : begin + at.shape[1]])
    for k, which, _ in by_class(records, slots):
        new = torch.zeros(which.numel(), int(records.layout[k, 5]))
        _, *begins = records.layout[k].tolist()
        if masks is not None:
            new[:, begins[3] : begins[3] + 2] = masks[which][:, None].contiguous().view(torch.float32)
        at = columns_of(records, k, new)
        set_values(records, k, new, vectors[which].gather(1, at))
        for state, begin, (_, per) in zip(states, begins, rows.optimizer.state):
            if per == "row":
                new[:, begin] = state[which, 0]
            else:
                new[:, begin : begin + at.shape[1]] = state[which].gather(1, at)
        new[:, begins[2] : begins[2] + records.utilities] = usefulness[which]
        made[starts[which][:, None] + torch.arange(new.shape[1])] = new
    return made, starts


def place(rows: TableRows, slots: Tensor, made: Tensor, starts: Tensor) -> None:
    assert rows.records is not None
    for k, which, places in by_class(rows.records, slots):
        at = starts[which][:, None] + torch.arange(int(rows.records.layout[k, 5]))
        write_records(rows.records, k, places, made[at])
