# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Pooled and unpooled lookup over all features in one launch: a program serves a few bags (or ids) of one feature."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..request import Request
from .launch import aligned, launch
from .layout import TILE, Layout, layout_of, rows_per_block, warps_for
from .narrow_lookup import look_up_narrow, resolve
from .rows import FIELDS, find_last, place_of, rows_in_tile, values_of, write_bags


@triton.jit(do_not_specialize=["size", "feature_count", "group"])
def plan_blocks(features, offsets, first_block, sequence_first, size, feature_count, group, COUNT: tl.constexpr):
    """One program: where each feature's blocks start, and where its vectors start among all sequence outputs. Features of
    other groups have no blocks."""
    f = tl.arange(0, COUNT)
    known = f < feature_count
    record = features + f * FIELDS
    pooling = tl.load(record + 1, mask=known, other=1)
    index = tl.load(record + 3, mask=known, other=0)
    dim = tl.load(record + 4, mask=known, other=0)
    per_block = tl.load(record + 5, mask=known, other=1)
    member = known & (tl.load(record + 6, mask=known, other=-1) == group)
    ids = tl.load(offsets + (index + 1) * size, mask=known, other=0) - tl.load(
        offsets + index * size, mask=known, other=0
    )
    blocks = tl.where(member, (tl.where(pooling == 0, ids, size) + per_block - 1) // per_block, 0)
    ends = tl.cumsum(blocks, 0)
    tl.store(first_block + f, tl.where(known, ends - blocks, 2147483647).to(tl.int32))
    values = tl.where(known & (pooling == 0), ids * dim, 0)
    tl.store(sequence_first + f, tl.cumsum(values, 0) - values)


@triton.jit
def note(wrong, feature, slots, outside):
    """Leaves an id that the feature's table does not hold for the host to find. Of several, any: all are wrong."""
    place = wrong + feature * 2 + tl.zeros_like(slots)
    tl.store(place, tl.full(slots.shape, 1, tl.int64), mask=outside)
    tl.store(place + 1, slots, mask=outside)


@triton.jit
def pool(
    feature, block, address, table, pooling, place, offsets, slots, weights, pooled, stride, wrong, size, count,
    DIM: tl.constexpr, TILE: tl.constexpr, UNIT: tl.constexpr, DTYPE: tl.constexpr, SLABS: tl.constexpr,
    WEIGHTED: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = triton.next_power_of_2(DIM)
    BAGS: tl.constexpr = rows_in_tile(DIM, TILE)
    first_slab, slab_log2, rows, strict = tl.load(table), tl.load(table + 1), tl.load(table + 2), tl.load(table + 7)
    bag = block * BAGS + tl.arange(0, BAGS)
    columns = tl.arange(0, BLOCK)
    start = tl.load(offsets + bag, mask=bag < size, other=0)
    end = tl.minimum(tl.load(offsets + bag + 1, mask=bag < size, other=0), count)
    sums = tl.zeros((BAGS, BLOCK), tl.float32)
    strict = (tl.zeros((BAGS,), tl.int64) + strict) != 0
    for step in range(tl.max(end - start, 0)):
        position = start + step
        here = position < end
        slot = tl.load(slots + position, mask=here, other=0)
        inside = here & (slot >= 0) & (slot < rows)
        note(wrong, feature, slot, here & (inside == 0) & strict)
        slab, at = place_of(address, first_slab, slab_log2, tl.where(inside, slot, 0), SLABS)
        read = inside[:, None] & (columns < DIM)[None, :]
        row = tl.load(values_of(slab, at, columns, DIM, DTYPE), mask=read, other=0.0).to(tl.float32)
        if WEIGHTED:
            row *= tl.load(weights + position, mask=here, other=0.0)[:, None]
        sums += row
    write_bags(pooled, stride, place, bag, size, sums, end - start, pooling, columns, DIM, UNIT)


@triton.jit
def gather(
    feature, block, address, table, first, last, slots, sequences, wrong,
    DIM: tl.constexpr, TILE: tl.constexpr, DTYPE: tl.constexpr, SLABS: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = triton.next_power_of_2(DIM)
    ROWS: tl.constexpr = rows_in_tile(DIM, TILE)
    first_slab, slab_log2, rows, strict = tl.load(table), tl.load(table + 1), tl.load(table + 2), tl.load(table + 7)
    number = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    here = first + number < last
    slot = tl.load(slots + first + number, mask=here, other=0)
    inside = here & (slot >= 0) & (slot < rows)
    slab, at = place_of(address, first_slab, slab_log2, tl.where(inside, slot, 0), SLABS)
    wanted = (columns < DIM)[None, :]
    row = tl.load(values_of(slab, at, columns, DIM, DTYPE), mask=inside[:, None] & wanted, other=0.0)
    out = (sequences + number * DIM)[:, None] + columns[None, :]
    tl.store(out, row.to(sequences.dtype.element_ty), mask=here[:, None] & wanted, eviction_policy="evict_first")
    if strict != 0:
        note(wrong, feature, slot, here & (inside == 0))


@triton.jit(do_not_specialize=["stride", "size", "count", "group"])
def look_up(
    first_block, sequence_first, features, tables, address, slots, offsets, weights, pooled, sequences, wrong,
    stride, size, count, group, COUNT: tl.constexpr, DIMS: tl.constexpr, TILE: tl.constexpr, UNIT: tl.constexpr,
    DTYPE: tl.constexpr, SLABS: tl.constexpr, WEIGHTED: tl.constexpr, POOLED: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    feature = find_last(first_block, tl.program_id(0), COUNT)
    block = tl.program_id(0) - tl.load(first_block + feature)
    record = features + feature * FIELDS
    table = tables + tl.load(record) * FIELDS
    pooling, place, index, dim = tl.load(record + 1), tl.load(record + 2), tl.load(record + 3), tl.load(record + 4)
    own_offsets = offsets + index * size
    if tl.load(record + 6) != group:  # a program too many: it came to a feature that another launch serves
        dim = tl.full((), -1, tl.int64)
    for k in tl.static_range(len(DIMS)):
        if dim == DIMS[k]:
            if POOLED:
                if pooling != 0:
                    pool(
                        feature, block, address, table, pooling, place, own_offsets, slots, weights, pooled, stride,
                        wrong, size, count, DIMS[k], TILE, UNIT, DTYPE, SLABS, WEIGHTED,
                    )  # fmt: skip
            if SEQUENCES:
                if pooling == 0:
                    first = tl.load(own_offsets)
                    last = tl.minimum(tl.load(own_offsets + size), count)
                    # A sequence output starts where the one before ends, on a multiple of UNIT values.
                    own = sequences + tl.load(sequence_first + feature) // UNIT * UNIT
                    gather(feature, block, address, table, first, last, slots, own, wrong, DIMS[k], TILE, DTYPE, SLABS)


@dataclass(frozen=True, slots=True)
class Blocks:
    """How a launch is cut into programs."""

    first: Tensor
    """the first program of each feature"""
    sequence_first: Tensor
    """the first value of each sequence feature among all sequence outputs"""
    count: int
    """programs; with sequence features an upper bound, as the host need not know how long the lists are"""


def blocks_of(request: Request, layout: Layout, group: int) -> Blocks:
    """The blocks of a group of features. Without sequence features they depend on the batch's size alone."""
    known: Blocks | None = layout.blocks.get((group, request.size))
    if known is not None:
        return known
    padded = layout.padded_features
    first = torch.empty(padded, dtype=torch.int32, device=layout.device)
    sequence_first = torch.empty(padded, dtype=torch.int64, device=layout.device)
    arguments = (layout.features, request.offsets, first, sequence_first, request.size, len(request.features), group)
    launch(layout.compiled, aligned(request.offsets), plan_blocks, 1, arguments, (padded,))
    members = [request.features[f] for f in layout.lookups[group].members]
    count = sum(-(-request.size // rows_per_block(spec.dim)) for spec in members if spec.pooling is not None)
    listed = [rows_per_block(spec.dim) for spec in members if spec.pooling is None]
    if listed:
        return Blocks(first, sequence_first, count + request.ids.numel() // min(listed) + len(listed))
    layout.blocks[group, request.size] = Blocks(first, sequence_first, count)
    return layout.blocks[group, request.size]  # type: ignore[no-any-return]


def _joined(sequences: Sequence[Tensor]) -> tuple[Tensor | None, bool]:
    """All sequence outputs as one vector, and whether they already lie one after the other, so that it is their own memory."""
    if not sequences:
        return None, True
    sizes = [part.numel() for part in sequences]
    starts = [part.data_ptr() - sequences[0].data_ptr() for part in sequences]
    total, item = sum(sizes), sequences[0].element_size()
    together = starts == [sum(sizes[:k]) * item for k in range(len(sizes))] and all(
        part.is_contiguous() and part.untyped_storage().data_ptr() == sequences[0].untyped_storage().data_ptr()
        for part in sequences
    )
    return sequences[0].as_strided((total,), (1,)) if together else sequences[0].new_empty(total), together


def _first_wrong(request: Request) -> int:
    """The place of the first id that a strict table does not hold, counted over the features one after the other, or -1."""
    before = 0
    for f, spec in enumerate(request.features):
        rows, slots = request.tables[spec.table], request.slots_of(f)
        outside = (slots < 0) | (slots >= rows.rows)
        if rows.strict and bool(outside.any()):
            return before + int(outside.nonzero()[0])
        before += slots.numel()
    return -1


def lookup(request: Request, pooled: Tensor | None, sequences: Sequence[Tensor], wrong: Tensor | None = None) -> int:
    """Fills the outputs. With `wrong` (int64 [features, 2] on the device, zeros at first) nothing waits for the device: an id
    that a strict table does not hold reads as zeros and is left there as (1, id) of its feature."""
    layout = layout_of(request)
    joined, together = _joined(sequences)
    noted = wrong
    if noted is None:
        noted = torch.zeros(len(request.features), 2, dtype=torch.int64, device=layout.device)
    slots = request.ids if request.slots is None else request.slots
    any_output = joined if pooled is None else pooled
    assert any_output is not None
    stride = any_output.stride(0)
    unit = math.gcd(
        layout.unit, stride if pooled is not None else 0, any_output.data_ptr() // any_output.element_size()
    )
    flags = (request.weights is not None, pooled is not None, joined is not None)
    whole = aligned(slots, request.offsets, request.weights, any_output, joined)
    key = (*flags, whole, unit, any_output.dtype, slots.numel() >> 31, stride >> 31)
    resolved = None if layout.classes is None else resolve(request, layout, slots)
    for group in layout.lookups:
        blocks = blocks_of(request, layout, group.number)
        arguments = (
            blocks.first, blocks.sequence_first, layout.features, layout.tables, layout.slabs[0], slots, request.offsets,
            request.weights, any_output, any_output if joined is None else joined, noted, stride, request.size,
            slots.numel(), group.number,
        )  # fmt: skip
        constants = (layout.padded_features, group.dims, TILE, unit, group.dtype, group.slabs, *flags)
        warps = warps_for(max(group.dims))
        if resolved is None:
            launch(layout.compiled, (group.number, *key), look_up, blocks.count, arguments, constants, warps=warps)
            continue
        chunk, masked, each, _, *borders = group.narrow
        launch(
            layout.compiled, (group.number, *key), look_up_narrow, blocks.count,
            (blocks.first, blocks.sequence_first, layout.features, resolved, *arguments[6:10], *arguments[11:]),
            (layout.padded_features, group.dims, TILE, unit, *flags, group.dtype, group.optimizer, chunk, masked, each, *borders),
            warps=warps,
        )  # fmt: skip
    if joined is not None and not together:
        for part, source in zip(sequences, joined.split([part.numel() for part in sequences])):
            part.copy_(source.view(part.shape))
    return -1 if wrong is not None else _first_wrong(request)
