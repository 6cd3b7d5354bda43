# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""What an update needs to know before it sees a gradient: which lookups read the same row.

  number_rows   per lookup: the number of its row over all tables (the sort key) and where its gradient will lie
  torch.sort    by row, equal rows in order of position
  cut_pieces    a run of equal rows is one piece, or several where it is longer than PIECE

Every size that depends on the data stays on the device: nothing here waits for it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...errors import DataError
from ..request import Request
from .launch import aligned, ceil_div, launch, power_of_two
from .layout import Layout
from .records import CLASS_FIELDS, WIDTH, record_of
from .rows import FIELDS, slab_of

PIECE = 64
"""lookups that are summed one after the other at most"""
CUT = 1024
"""sorted lookups of a program of cut_pieces"""
IDS = 512
"""lookups of a program of number_rows"""


@dataclass(frozen=True, slots=True)
class Sorted:
    """The lookups of a batch, sorted by row and cut into pieces."""

    keys: Tensor
    """row numbers, ascending"""
    order: Tensor
    """the lookups in that order"""
    sources: Tensor
    """where each one's gradient lies, in units: within the pooled gradient, or feature << 44 | place in the feature's own"""
    factors: Tensor | None
    """what each lookup's gradient is to be multiplied by, in the batch's order"""
    pieces: Tensor
    """the first lookup of each piece, negative (its highest bit set) where a run begins there, too; then the end"""
    places: Tensor
    """of each piece the slab of its row << 48 | the row's place there; -1: no row. Where rows differ in width: the address of the
    row's record"""
    kinds: Tensor | None
    """there: its table << 16 | how many values it has"""
    runs: Tensor
    """the first lookup of each run of several pieces, in any order"""
    counters: Tensor
    """how many such runs and how many pieces there are"""


@triton.jit(do_not_specialize=["size", "longest_step", "count", "columns", "nowhere", "batch_features"])
def number_rows(
    places, features, tables, slots, offsets, weights, used, keys, sources, factors, size, longest_step, count, columns,
    nowhere, batch_features, COUNT: tl.constexpr, IDS: tl.constexpr, UNIT: tl.constexpr, WEIGHTED: tl.constexpr,
    FACTORS: tl.constexpr, SEQUENCES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """A program takes IDS positions of the batch, feature by feature where they belong to several."""
    begin = tl.program_id(0).to(tl.int64) * IDS
    positions = begin + tl.arange(0, IDS)
    end = tl.minimum(begin + IDS, count)
    number = tl.arange(0, COUNT)
    ends = tl.load(offsets + (number.to(tl.int64) + 1) * size, mask=number < batch_features, other=9223372036854775807)
    while begin < end:
        # Features end where the next begins: as many of them lie before a position as have ended by then.
        index = tl.sum((ends <= begin).to(tl.int32), 0).to(tl.int64)
        feature_end = tl.min(tl.where(number == index, ends, 9223372036854775807), 0)
        here = (positions >= begin) & (positions < tl.minimum(feature_end, end))
        f = tl.load(places + index)
        read = f >= 0
        f = tl.maximum(f, 0)
        if MASKED:
            read = read & (tl.load(used + f) != 0)
        record = features + f * FIELDS
        table = tables + tl.load(record) * FIELDS
        pooling, place, dim = tl.load(record + 1), tl.load(record + 2), tl.load(record + 4)
        rows, first_key = tl.load(table + 2), tl.load(table + 4)
        slot = tl.load(slots + positions, mask=here, other=-1)
        inside = (slot >= 0) & (slot < rows)
        key = tl.where(read, first_key + tl.where(inside, slot, rows), nowhere)
        tl.store(keys + positions, key.to(keys.dtype.element_ty), mask=here)
        own = offsets + index * size
        source = (positions - tl.load(own)) * (dim // UNIT)
        factor = tl.full((IDS,), 1.0, tl.float32)
        if pooling != 0:
            bag = bags_of(own, positions, size, longest_step, here)
            source = bag.to(tl.int64) * (columns // UNIT) + place // UNIT
            if FACTORS:
                if pooling == 2:
                    length = tl.load(own + bag + 1, mask=here, other=1) - tl.load(own + bag, mask=here, other=0)
                    factor = 1.0 / length.to(tl.float32)
                if WEIGHTED:
                    factor *= tl.load(weights + positions, mask=here, other=0.0)
        if SEQUENCES:
            source = source | (f << 44)
        tl.store(sources + positions, source.to(sources.dtype.element_ty), mask=here)
        if FACTORS:
            tl.store(factors + positions, factor, mask=here)
        begin = feature_end


@triton.jit
def bags_of(offsets, positions, size, longest_step, here):
    """The bag of each position: the last that does not begin behind it. `longest_step`: a power of two, at most `size`."""
    # Where all bags are equally long the bag follows from the position; otherwise it is searched for.
    begin, end = tl.load(offsets), tl.load(offsets + size)
    bag = tl.minimum((positions - begin) * size // tl.maximum(end - begin, 1), size - 1).to(tl.int32)
    bag = tl.where(here, tl.maximum(bag, 0), 0)
    right = (tl.load(offsets + bag) <= positions) & (tl.load(offsets + bag + 1) > positions)
    if tl.min((right | (here == 0)).to(tl.int32), 0) == 0:
        bag = tl.zeros_like(bag)
        step = longest_step
        while step > 0:
            probe = bag + step
            known = here & (probe < size)
            bag = tl.where(known & (tl.load(offsets + probe, mask=known, other=0) <= positions), probe, bag)
            step = step // 2
    return bag


@triton.jit
def later(a, b):
    return tl.maximum(a, b)


@triton.jit
def cuts_of(keys, i, count, PIECE: tl.constexpr, CUT: tl.constexpr):
    """Each sorted lookup's row number, where its run begins (or the CUT lookups that are looked at do), whether it is the first
    of its run, and whether a piece begins there."""
    here = i < count
    key = tl.load(keys + i, mask=here, other=-1)
    head = here & (key != tl.load(keys + i - 1, mask=here & (i > 0), other=-2))
    start = tl.associative_scan(tl.where(head | (i % CUT == 0), i, 0), 0, later)
    return key, start, head, here & ((i - start) % PIECE == 0)


@triton.jit(do_not_specialize=["count"])
def count_pieces(keys, counts, counters, clock, count, PIECE: tl.constexpr, CUT: tl.constexpr):
    i = tl.program_id(0) * CUT + tl.arange(0, CUT)
    _, _, _, cuts = cuts_of(keys, i, count, PIECE, CUT)
    tl.store(counts + tl.program_id(0), tl.sum(cuts.to(tl.int32), 0))
    if tl.program_id(0) == 0:
        tl.store(counters, 0)
        tl.store(clock, tl.load(clock) + 1.0)


@triton.jit(do_not_specialize=["count"])
def cut_pieces(
    keys, counts, order, sources, pieces, places, kinds, sorted_sources, runs, counters, first_keys, tables, classes,
    addresses, count, PIECE: tl.constexpr, CUT: tl.constexpr, COUNT: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """See Sorted. Puts the sources into sorted order, too."""
    block = tl.program_id(0)
    before = tl.zeros((CUT,), tl.int32)
    for first in range(0, block, CUT):
        other = first + tl.arange(0, CUT)
        before += tl.load(counts + other, mask=other < block, other=0)
    i = block * CUT + tl.arange(0, CUT)
    here = i < count
    key, start, head, cuts = cuts_of(keys, i, count, PIECE, CUT)
    piece = tl.sum(before, 0) + tl.cumsum(cuts.to(tl.int32), 0) - 1
    tl.store(pieces + piece, tl.where(head, i | -2147483648, i), mask=cuts)
    if NARROW:
        kind, record = row_records(first_keys, tables, classes, addresses, key, cuts, COUNT)
        tl.store(kinds + piece, kind, mask=cuts)
        tl.store(places + piece, record, mask=cuts)
    else:
        tl.store(places + piece, row_places(first_keys, tables, key, cuts, COUNT), mask=cuts)
    if block == tl.num_programs(0) - 1:
        total = tl.sum(before, 0) + tl.sum(cuts.to(tl.int32), 0)
        tl.store(pieces + total, count | -2147483648)
        tl.store(counters + 1, total)
    # A run has several pieces where a second one begins, or where it goes on behind the last of these lookups.
    begins_here = here & ((start % CUT != 0) | (key != tl.load(keys + start - 1, mask=here & (start > 0), other=-2)))
    goes_on = (i % CUT == CUT - 1) & (i + 1 < count) & (i - start < PIECE)
    goes_on = goes_on & (tl.load(keys + i + 1, mask=goes_on, other=-1) == key)
    found = begins_here & ((i - start == PIECE) | goes_on)
    number = tl.sum(found.to(tl.int32), 0)
    if number > 0:
        first = tl.atomic_add(counters, number, sem="relaxed")
        tl.store(runs + first + tl.cumsum(found.to(tl.int32), 0) - 1, start, mask=found)
    position = tl.load(order + i, mask=here, other=0)
    tl.store(sorted_sources + i, tl.load(sources + position, mask=here, other=0), mask=here)


@triton.jit
def tables_of(first_keys, keys, wanted, COUNT: tl.constexpr):
    t = tl.zeros_like(keys).to(tl.int32)
    step = COUNT // 2
    while step > 0:
        t = tl.where(tl.load(first_keys + t + step, mask=wanted, other=0) <= keys, t + step, t)
        step //= 2
    return t


@triton.jit
def row_records(first_keys, tables, classes, addresses, keys, wanted, COUNT: tl.constexpr):
    """Of each row number its table << 16 | its width, and the address of its record, -1 where there is no such row."""
    t = tl.where(wanted, tables_of(first_keys, keys, wanted, COUNT), 0)
    table = tables + t * FIELDS
    slots = keys.to(tl.int64) - tl.load(table + 4)
    known = wanted & (slots >= 0) & (slots < tl.load(table + 2))
    kind, record = record_of(
        classes, addresses, tl.load(table), tl.load(table + 6), tl.load(table + 1), tl.where(known, slots, 0)
    )
    width = tl.load(classes + kind * CLASS_FIELDS + WIDTH).to(tl.int32)
    return (t << 16) | width, tl.where(known, record, -1)


@triton.jit
def row_places(first_keys, tables, keys, wanted, COUNT: tl.constexpr):
    """Of each row number the slab, in the high 16 bits, and the place there; -1 where there is no such row."""
    table = tables + tables_of(first_keys, keys, wanted, COUNT) * FIELDS
    slots = keys.to(tl.int64) - tl.load(table + 4, mask=wanted, other=0)
    known = (slots >= 0) & (slots < tl.load(table + 2, mask=wanted, other=0))
    slab, place = slab_of(tl.load(table + 1, mask=wanted, other=-1), tl.where(known, slots, 0))
    return tl.where(known, ((tl.load(table, mask=wanted, other=0) + slab) << 48) + place, -1)


def sort(
    request: Request, layout: Layout, clock: Tensor, used: Tensor | None, columns: int, unit: int
) -> Sorted:  # fmt: skip
    """`used` (on the device, one per feature): which features have a gradient; all where it is not given. `columns`: of the
    pooled gradient, which may have more than this request's features. Advances the clock's step, as this is where an update
    begins."""
    count, device = request.ids.numel(), layout.device
    if count >= 2**31:
        raise DataError(
            f"a batch of {count} ids", remedy="a GPU takes fewer than 2^31 ids at a time; make batches smaller"
        )
    weighted, averaged = request.weights is not None, request.weights is not None or layout.has_factors
    slots = request.ids if request.slots is None else request.slots
    keys = torch.empty(count, dtype=layout.key_dtype, device=device)
    small = not layout.has_sequences and request.size * columns < 2**31
    sources = torch.empty(count, dtype=torch.int32 if small else torch.int64, device=device)
    factors = torch.empty(count, device=device) if averaged else None
    arguments = (
        layout.places, layout.features, layout.tables, slots, request.offsets, request.weights, used, keys, sources, factors,
        request.size, power_of_two(request.size + 1) // 2, count, columns, layout.nowhere,
        layout.batch_features,
    )  # fmt: skip
    constants = (
        len(layout.places), IDS, unit, weighted, averaged, layout.has_sequences, used is not None,
    )  # fmt: skip
    key = (aligned(slots, request.offsets, request.weights), weighted, small, used is not None, unit)
    launch(layout.compiled, key, number_rows, ceil_div(count, IDS), arguments, constants, warps=4)
    keys, order = torch.sort(keys, stable=True)
    return _cut(layout, clock, keys, order, sources, factors)


def _cut(layout: Layout, clock: Tensor, keys: Tensor, order: Tensor, sources: Tensor, factors: Tensor | None) -> Sorted:
    count, device = keys.numel(), keys.device
    blocks = ceil_div(count, CUT)
    # 4 numbers each: views then start on 16-byte borders.
    room = [4, -(-blocks // 4) * 4, -(-count // 4) * 4, count + 1]
    counters, counts, runs, pieces = torch.empty(sum(room), dtype=torch.int32, device=device).split(room)
    places = torch.empty(count, dtype=torch.int64, device=device)
    kinds = None if layout.classes is None else torch.empty(count, dtype=torch.int32, device=device)
    sorted_sources = torch.empty_like(sources)
    launch(layout.compiled, None, count_pieces, blocks, (keys, counts, counters, clock, count), (PIECE, CUT), warps=4)
    arguments = (
        keys, counts, order, sources, pieces, places, kinds, sorted_sources, runs, counters, layout.first_keys,
        layout.tables, layout.classes, layout.slabs, count,
    )  # fmt: skip
    constants = (PIECE, CUT, len(layout.first_keys), kinds is not None)
    launch(layout.compiled, sources.dtype, cut_pieces, blocks, arguments, constants, warps=4)
    return Sorted(keys, order, sorted_sources, factors, pieces, places, kinds, runs, counters)
