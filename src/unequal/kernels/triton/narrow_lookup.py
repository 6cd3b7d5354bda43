# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Pooled and unpooled lookup of rows that differ in width: missing chunks and missing rows are zeros. Cut into programs like the
lookup of whole rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..request import Request
from .launch import aligned, ceil_div, launch
from .layout import Layout
from .records import live_columns, mask_at, resolve_rows, words_before
from .rows import FIELDS, find_last, rows_in_tile, write_bags

IDS = 512
"""slots of a program of resolve_slots"""


@triton.jit(do_not_specialize=["size", "count", "batch_features"])
def resolve_slots(
    places, features, tables, classes, addresses, slots, offsets, resolved, size, count, batch_features,
    COUNT: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    """resolved ← width << 48 | address of the record of each id's row; 0 where it has none. Programs that read rows then have to
    wait for nothing else first."""
    begin = tl.program_id(0).to(tl.int64) * IDS
    positions = begin + tl.arange(0, IDS)
    end = tl.minimum(begin + IDS, count)
    number = tl.arange(0, COUNT)
    ends = tl.load(offsets + (number.to(tl.int64) + 1) * size, mask=number < batch_features, other=9223372036854775807)
    slot = tl.load(slots + positions, mask=positions < count, other=-1)
    while begin < end:
        index = tl.sum((ends <= begin).to(tl.int32), 0).to(tl.int64)
        feature_end = tl.min(tl.where(number == index, ends, 9223372036854775807), 0)
        here = (positions >= begin) & (positions < tl.minimum(feature_end, end))
        f = tl.load(places + index)
        table = tl.load(features + tl.maximum(f, 0) * FIELDS)
        wanted = here & ((f + tl.zeros_like(positions)) >= 0)
        found = resolve_rows(tables, table, classes, addresses, slot, wanted)
        tl.store(resolved + positions, found, mask=here)
        begin = feature_end


@triton.jit
def vectors(
    resolved, columns, DIM: tl.constexpr, DTYPE: tl.constexpr, OPTIMIZER: tl.constexpr, CHUNK: tl.constexpr,
    MASKED: tl.constexpr, EACH: tl.constexpr, ALIGN: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Rows, [slots, columns], in the table's dtype."""
    record = resolved & 0xFFFFFFFFFFFF
    # The compiler sees that values come and go in groups, so that it may read these at once.
    width = tl.multiple_of((resolved >> 48).to(tl.int32), VALUES)
    mask = tl.zeros_like(resolved)
    if MASKED:
        mask = mask_at(record, words_before(width, 2, DTYPE, OPTIMIZER) + EACH, width > 0)
    at, live = live_columns(mask, width, columns, CHUNK, MASKED)
    values = tl.multiple_of(record.to(tl.pointer_type(DTYPE)), ALIGN)
    return tl.load(values[:, None] + at, mask=live & (columns < DIM)[None, :], other=0.0)


@triton.jit
def pool(
    block, pooling, place, offsets, resolved, weights, pooled, stride, size, count,
    DIM: tl.constexpr, TILE: tl.constexpr, UNIT: tl.constexpr, WEIGHTED: tl.constexpr, DTYPE: tl.constexpr,
    OPTIMIZER: tl.constexpr, CHUNK: tl.constexpr, MASKED: tl.constexpr, EACH: tl.constexpr, ALIGN: tl.constexpr,
    VALUES: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = triton.next_power_of_2(DIM)
    BAGS: tl.constexpr = rows_in_tile(DIM, TILE)
    bag = block * BAGS + tl.arange(0, BAGS)
    columns = tl.arange(0, BLOCK)
    start = tl.load(offsets + bag, mask=bag < size, other=0)
    end = tl.minimum(tl.load(offsets + bag + 1, mask=bag < size, other=0), count)
    sums = tl.zeros((BAGS, BLOCK), tl.float32)
    for step in range(tl.max(end - start, 0)):
        position = start + step
        here = position < end
        found = tl.load(resolved + position, mask=here, other=0)
        row = vectors(found, columns, DIM, DTYPE, OPTIMIZER, CHUNK, MASKED, EACH, ALIGN, VALUES).to(tl.float32)
        if WEIGHTED:
            row *= tl.load(weights + position, mask=here, other=0.0)[:, None]
        sums += row
    write_bags(pooled, stride, place, bag, size, sums, end - start, pooling, columns, DIM, UNIT)


@triton.jit
def gather(
    block, first, last, resolved, sequences, DIM: tl.constexpr, TILE: tl.constexpr, DTYPE: tl.constexpr,
    OPTIMIZER: tl.constexpr, CHUNK: tl.constexpr, MASKED: tl.constexpr, EACH: tl.constexpr, ALIGN: tl.constexpr,
    VALUES: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = triton.next_power_of_2(DIM)
    ROWS: tl.constexpr = rows_in_tile(DIM, TILE)
    number = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    here = first + number < last
    found = tl.load(resolved + first + number, mask=here, other=0)
    row = vectors(found, columns, DIM, DTYPE, OPTIMIZER, CHUNK, MASKED, EACH, ALIGN, VALUES)
    out = (sequences + number * DIM)[:, None] + columns[None, :]
    written = here[:, None] & (columns < DIM)[None, :]
    tl.store(out, row.to(sequences.dtype.element_ty), mask=written, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["stride", "size", "count", "group"])
def look_up_narrow(
    first_block, sequence_first, features, resolved, offsets, weights, pooled, sequences, stride, size, count, group,
    COUNT: tl.constexpr, DIMS: tl.constexpr, TILE: tl.constexpr, UNIT: tl.constexpr, WEIGHTED: tl.constexpr,
    POOLED: tl.constexpr, SEQUENCES: tl.constexpr, DTYPE: tl.constexpr, OPTIMIZER: tl.constexpr, CHUNK: tl.constexpr,
    MASKED: tl.constexpr, EACH: tl.constexpr, ALIGN: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    feature = find_last(first_block, tl.program_id(0), COUNT)
    block = tl.program_id(0) - tl.load(first_block + feature)
    record = features + feature * FIELDS
    pooling, place, index, dim = tl.load(record + 1), tl.load(record + 2), tl.load(record + 3), tl.load(record + 4)
    own_offsets = offsets + index * size
    if tl.load(record + 6) != group:  # a program too many: it came to a feature that another launch serves
        dim = tl.full((), -1, tl.int64)
    for k in tl.static_range(len(DIMS)):
        if dim == DIMS[k]:
            if POOLED:
                if pooling != 0:
                    pool(
                        block, pooling, place, own_offsets, resolved, weights, pooled, stride, size, count, DIMS[k], TILE,
                        UNIT, WEIGHTED, DTYPE, OPTIMIZER, CHUNK, MASKED, EACH, ALIGN, VALUES,
                    )  # fmt: skip
            if SEQUENCES:
                if pooling == 0:
                    first = tl.load(own_offsets)
                    last = tl.minimum(tl.load(own_offsets + size), count)
                    # A sequence output starts where the one before ends, on a multiple of UNIT values.
                    own = sequences + tl.load(sequence_first + feature) // UNIT * UNIT
                    gather(
                        block, first, last, resolved, own, DIMS[k], TILE, DTYPE, OPTIMIZER, CHUNK, MASKED, EACH, ALIGN,
                        VALUES,
                    )  # fmt: skip


def resolve(request: Request, layout: Layout, slots: Tensor) -> Tensor:
    """Where the row of each slot lies, and how wide it is."""
    if request.resolved is not None:
        resolved, request.resolved = request.resolved, None
        return resolved
    resolved, count = torch.empty_like(slots), slots.numel()
    arguments = (
        layout.places, layout.features, layout.tables, layout.classes, layout.slabs, slots, request.offsets, resolved,
        request.size, count, layout.batch_features,
    )  # fmt: skip
    key = aligned(slots, request.offsets)
    launch(layout.compiled, key, resolve_slots, ceil_div(count, IDS), arguments, (len(layout.places), IDS), warps=4)
    return resolved
