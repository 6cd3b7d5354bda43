# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Backward fused with the optimizer. Lookups are sorted by row (sorting.py); each row's gradients are summed in a fixed order and
the row is updated once, so results do not depend on how programs are scheduled.

  update_pieces  sums each piece; where it is the whole run the row is updated, otherwise the sum is left in `partial`
  join_pieces    adds the sums of the runs that were cut, in order, and updates their rows
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..request import Request
from . import sorting
from .launch import INTERPRETED, launch
from .layout import Group, Layout, layout_of, warps_for
from .narrow_update import join_pieces_narrow, update_pieces_narrow
from .optimizers import NUMBERS, apply, state_width
from .random import row_key
from .rounding import round_to
from .rows import SLAB_FIELDS, rows_in_tile, values_of
from .sorting import Sorted, row_places, sort
from .summing import sum_of_piece, sum_of_run

TILE = 128
"""values a program of update_pieces, a warp, holds: one row of 128, or several"""
REGISTERS = 64
"""of its threads, with which as many programs as a processor takes, 32, fit on it. Rows wider than the tile need more"""
WIDE_TILE = 256
"""the same where rows have 16 bits: two of 128, and as many registers as it takes; one took 5 to 16% longer (docs/gpu.md)"""
JOIN = 128
"""partial sums that join_pieces adds at a time"""
PROGRAMS, JOINERS = (256 * 132, 8 * 132) if not INTERPRETED else (8, 2)
"""programs of update_pieces and join_pieces, which take pieces or runs in turn: enough to fill a large GPU. In the interpreter
programs run one after the other."""


@triton.jit
def state_of(address, slab, place, live, columns, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Pointers to a state of a tile of rows, and which of them are real: one per value, or one per row."""
    base = tl.load(address + slab)
    if WIDTH == 2:
        return values_of(base, place, columns, DIM, tl.float32), live[:, None] & (columns < DIM)[None, :]
    else:
        return (base.to(tl.pointer_type(tl.float32)) + place)[:, None], live[:, None]


@triton.jit
def read_rows(
    places, live, columns, address, slab_count, DIM: tl.constexpr, DTYPE: tl.constexpr, OPTIMIZER: tl.constexpr
):  # fmt: skip
    """Weights and states of a tile of rows, each in its own slab."""
    FIRST: tl.constexpr = state_width(0, OPTIMIZER)
    SECOND: tl.constexpr = state_width(1, OPTIMIZER)
    slab, place = places >> 48, places & ((1 << 48) - 1)
    values = live[:, None] & (columns < DIM)[None, :]
    w = tl.load(values_of(tl.load(address + slab), place, columns, DIM, DTYPE), mask=values, other=0.0).to(tl.float32)
    first = tl.zeros((1, 1), tl.float32)
    second = tl.zeros((1, 1), tl.float32)
    if FIRST:
        pointers, real = state_of(address + slab_count, slab, place, live, columns, DIM, FIRST)
        first = tl.load(pointers, mask=real, other=0.0)
    if SECOND:
        pointers, real = state_of(address + 2 * slab_count, slab, place, live, columns, DIM, SECOND)
        second = tl.load(pointers, mask=real, other=0.0)
    return w, first, second


@triton.jit
def update_rows(
    places, live, w, first, second, gradients, columns, slab_records, slab_numbers, clock, address, slab_count,
    DIM: tl.constexpr, DTYPE: tl.constexpr, OPTIMIZER: tl.constexpr,
):  # fmt: skip
    """Applies the optimizer to what read_rows gave and writes it back."""
    FIRST: tl.constexpr = state_width(0, OPTIMIZER)
    SECOND: tl.constexpr = state_width(1, OPTIMIZER)
    slab, place = places >> 48, places & ((1 << 48) - 1)
    w, first, second = apply(w, gradients, first, second, slab_numbers + slab * NUMBERS, clock, DIM, OPTIMIZER)
    if FIRST:
        pointers, real = state_of(address + slab_count, slab, place, live, columns, DIM, FIRST)
        tl.store(pointers, first, mask=real)
    if SECOND:
        pointers, real = state_of(address + 2 * slab_count, slab, place, live, columns, DIM, SECOND)
        tl.store(pointers, second, mask=real)
    pointers = values_of(tl.load(address + slab), place, columns, DIM, DTYPE)
    values = live[:, None] & (columns < DIM)[None, :]
    if DTYPE == tl.float32:
        tl.store(pointers, w, mask=values)
    else:
        record = slab_records + slab * SLAB_FIELDS
        step_key = row_key(tl.load(record + 4), tl.load(clock).to(tl.int64))
        row_keys = row_key(step_key, place + tl.load(record + 1))
        tl.store(pointers, round_to(w, row_keys[:, None], columns[None, :], DTYPE), mask=values)


@triton.jit
def update_pieces_of(
    pieces, places, count, order, sources, factors, gradients, gradient_first, partial,
    slab_records, slab_numbers, clock, address, slab_count, group,
    UNIT: tl.constexpr, PIECE: tl.constexpr, DIM: tl.constexpr, WIDEST: tl.constexpr, TILE: tl.constexpr,
    DTYPE: tl.constexpr, OPTIMIZER: tl.constexpr, FACTORS: tl.constexpr, SEQUENCES: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """The pieces of tables of one width; a program takes ROWS at a time. It lives on latencies: what a piece is, and where its
    first gradient lies, is read while the piece before is worked on; rows and gradients are read at the same time."""
    BLOCK: tl.constexpr = triton.next_power_of_2(DIM)
    ROWS: tl.constexpr = rows_in_tile(DIM, TILE)
    columns = tl.arange(0, BLOCK)
    piece = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    begin = tl.load(pieces + piece, mask=piece < count, other=0)
    end = tl.load(pieces + piece + 1, mask=piece < count, other=0)
    place = tl.load(places + piece, mask=piece < count, other=-1)
    source = tl.load(sources + (begin & 0x7FFFFFFF), mask=piece < count, other=0)
    for first_piece in range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS):
        piece = first_piece + tl.num_programs(0) * ROWS + tl.arange(0, ROWS)
        next_begin = tl.load(pieces + piece, mask=piece < count, other=0)
        next_end = tl.load(pieces + piece + 1, mask=piece < count, other=0)
        next_place = tl.load(places + piece, mask=piece < count, other=-1)
        live = place >= 0
        place = tl.maximum(place, 0)
        if MIXED:
            record = slab_records + (place >> 48) * SLAB_FIELDS
            live = live & (tl.load(record + 2) == DIM) & (tl.load(record + 3) == group)
        whole = live & (begin < 0) & (end < 0)
        start, end = begin & 0x7FFFFFFF, end & 0x7FFFFFFF
        w, first, second = read_rows(place, whole, columns, address, slab_count, DIM, DTYPE, OPTIMIZER)
        sums = sum_of_piece(
            source, sources, start, end, live, order, factors, gradients, gradient_first, columns,
            UNIT, DIM, FACTORS, SEQUENCES,
        )  # fmt: skip
        source = tl.load(sources + (next_begin & 0x7FFFFFFF), mask=piece < count, other=0)
        update_rows(
            place, whole, w, first, second, sums, columns, slab_records, slab_numbers, clock, address, slab_count,
            DIM, DTYPE, OPTIMIZER,
        )  # fmt: skip
        # Of the pieces of cut runs that begin between two multiples of PIECE, at most one is the first of its run, and one not.
        kept = (partial + ((start // PIECE) * 2 + (begin < 0).to(tl.int32)).to(tl.int64) * WIDEST)[:, None]
        tl.store(kept + columns[None, :], sums, mask=(live & (whole == 0))[:, None] & (columns < DIM)[None, :])
        begin, end, place = next_begin, next_end, next_place


@triton.jit(do_not_specialize=["slab_count", "group"])
def update_pieces(
    pieces, places, counters, order, sources, factors, gradients, gradient_first, partial,
    slab_records, slab_numbers, clock, address, slab_count, group,
    UNIT: tl.constexpr, PIECE: tl.constexpr, DIMS: tl.constexpr, WIDEST: tl.constexpr, TILE: tl.constexpr,
    DTYPE: tl.constexpr, OPTIMIZER: tl.constexpr, FACTORS: tl.constexpr, SEQUENCES: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    count = tl.load(counters + 1)
    for k in tl.static_range(len(DIMS)):
        update_pieces_of(
            pieces, places, count, order, sources, factors, gradients, gradient_first, partial,
            slab_records, slab_numbers, clock, address, slab_count, group,
            UNIT, PIECE, DIMS[k], WIDEST, TILE, DTYPE, OPTIMIZER, FACTORS, SEQUENCES, MIXED,
        )  # fmt: skip


@triton.jit
def join_run(
    keys, key, place, partial, begin, count, slab_records, slab_numbers, clock, address, slab_count,
    PIECE: tl.constexpr, CUT: tl.constexpr, DIM: tl.constexpr, WIDEST: tl.constexpr, JOIN: tl.constexpr,
    DTYPE: tl.constexpr, OPTIMIZER: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = triton.next_power_of_2(DIM)
    columns = tl.arange(0, BLOCK)
    live = tl.full((1,), 1, tl.int1)
    w, state, second = read_rows(place, live, columns, address, slab_count, DIM, DTYPE, OPTIMIZER)
    total, _ = sum_of_run(keys, key, partial, begin, count, columns, PIECE, CUT, DIM, WIDEST, JOIN)
    update_rows(
        place, live, w, state, second, total[None, :], columns, slab_records, slab_numbers, clock, address, slab_count,
        DIM, DTYPE, OPTIMIZER,
    )  # fmt: skip


@triton.jit(do_not_specialize=["slab_count", "group", "count"])
def join_pieces(
    keys, partial, runs, counters, first_keys, tables, slab_records, slab_numbers, clock, address, slab_count, group,
    count, PIECE: tl.constexpr, CUT: tl.constexpr, COUNT: tl.constexpr, DIMS: tl.constexpr, WIDEST: tl.constexpr,
    JOIN: tl.constexpr, DTYPE: tl.constexpr, OPTIMIZER: tl.constexpr,
):  # fmt: skip
    """A program takes one run that was cut after the other."""
    for number in range(tl.program_id(0), tl.load(counters), tl.num_programs(0)):
        begin = tl.load(runs + number)
        key = tl.load(keys + begin)
        place = row_places(first_keys, tables, key + tl.zeros((1,), tl.int64), tl.full((1,), 1, tl.int1), COUNT)
        record = slab_records + tl.maximum(tl.max(place, 0) >> 48, 0) * SLAB_FIELDS
        mine = (tl.max(place, 0) >= 0) & (tl.load(record + 3) == group)
        for k in tl.static_range(len(DIMS)):
            if mine & (tl.load(record + 2) == DIMS[k]):
                join_run(
                    keys, key, place, partial, begin, count, slab_records, slab_numbers, clock, address, slab_count,
                    PIECE, CUT, DIMS[k], WIDEST, JOIN, DTYPE, OPTIMIZER,
                )  # fmt: skip


def _tile(group: Group) -> int:
    return TILE if group.dtype == tl.float32 else WIDE_TILE


def _registers(group: Group) -> int | None:
    return REGISTERS if group.dtype == tl.float32 and max(group.dims) <= TILE else None


def update(
    request: Request,
    pooled: Tensor | None,
    sequences: Sequence[Tensor | None],
    *,
    lr_factor: float = 1.0,
    step: int = 0,
    clock: Tensor | None = None,
) -> None:
    """Applies the gradients of the outputs (None: not used) to the tables. `clock` (float64 [2] on the device: step, factor of
    the learning rate) takes the place of the numbers where nothing may wait for the device; its step is advanced."""
    layout = layout_of(request)
    if clock is None:
        clock = torch.tensor([step, lr_factor], dtype=torch.float64).to(layout.device)
    given = [part for part in (pooled, *sequences) if part is not None and part.numel()]
    if given and request.ids.numel():
        _apply(request, layout, pooled, sequences, given, clock)
    else:
        clock[:1] += 1


def _apply(
    request: Request,
    layout: Layout,
    pooled: Tensor | None,
    sequences: Sequence[Tensor | None],
    given: Sequence[Tensor],
    clock: Tensor,
) -> None:
    dtype = given[0].dtype if len({part.dtype for part in given}) == 1 else torch.float32
    pooled, sequences = _readable(pooled, dtype), [_readable(part, dtype) for part in sequences]
    gradients = next(part for part in (pooled, *sequences) if part is not None and part.numel())
    columns = layout.columns if pooled is None else pooled.shape[1]
    unit, firsts, used = math.gcd(layout.unit, columns, *layout.record_units), None, None
    if layout.has_sequences:  # their gradients are tensors of their own
        parts = [sequences[spec.place] if spec.pooling is None else pooled for spec in request.features]
        size = unit * gradients.element_size()
        starts = tuple(0 if part is None else (part.data_ptr() - gradients.data_ptr()) // size for part in parts)
        firsts = layout.on_device(starts)
        if any(part is None for part in parts):
            used = layout.on_device(tuple(int(part is not None) for part in parts))
    work = sort(request, layout, clock, used, columns, unit)
    count, slabs, compiled = request.ids.numel(), layout.slabs.shape[1], layout.compiled
    room = (count // sorting.PIECE + 1) * 2 * layout.widest
    partial = torch.empty(room, dtype=torch.float32, device=layout.device)
    if layout.classes is not None:
        _apply_narrow(request, layout, work, gradients, firsts, partial, clock, unit)
        return
    shared = (layout.slab_records, layout.slab_numbers, clock, layout.slabs, slabs)
    for group in layout.updates:
        mixed = len(layout.updates) > 1 or len(group.dims) > 1
        launch(
            compiled, (group.number, dtype, work.sources.dtype, work.factors is not None, unit), update_pieces,
            min(PROGRAMS, count),
            (work.pieces, work.places, work.counters, work.order, work.sources, work.factors, gradients, firsts, partial,
             *shared, group.number),
            (unit, sorting.PIECE, group.dims, layout.widest, _tile(group), group.dtype, group.optimizer,
             work.factors is not None, firsts is not None, mixed),
            warps=warps_for(max(group.dims)), registers=_registers(group),
        )  # fmt: skip
        launch(
            compiled, group.number, join_pieces, min(JOINERS, count),
            (work.keys, partial, work.runs, work.counters, layout.first_keys, layout.tables, *shared, group.number,
             count),
            (sorting.PIECE, sorting.CUT, len(layout.first_keys), group.dims, layout.widest, JOIN, group.dtype,
             group.optimizer),
            warps=8,
        )  # fmt: skip


def _apply_narrow(
    request: Request,
    layout: Layout,
    work: Sorted,
    gradients: Tensor,
    firsts: Tensor | None,
    partial: Tensor,
    clock: Tensor,
    unit: int,
) -> None:
    """To rows that differ in width."""
    records = request.tables[layout.leading].records
    assert records is not None
    count = request.ids.numel()
    tables = (
        layout.tables, layout.slab_records, layout.slab_numbers, layout.gains, records.gain, clock,
    )  # fmt: skip
    for group in layout.updates:
        mixed = len(layout.updates) > 1 or len(group.dims) > 1
        launch(
            layout.compiled, (group.number, gradients.dtype, work.sources.dtype, work.factors is not None, unit),
            update_pieces_narrow, min(PROGRAMS, count),
            (work.keys, work.pieces, work.places, work.kinds, work.counters, work.order, work.sources, work.factors,
             gradients, firsts, partial, *tables, group.number, layout.widest // unit),
            (unit, sorting.PIECE, group.dims, _tile(group), group.dtype, group.optimizer, work.factors is not None,
             firsts is not None, mixed, *group.narrow),
            warps=warps_for(max(group.dims)), registers=_registers(group),
        )  # fmt: skip
        launch(
            layout.compiled, group.number, join_pieces_narrow, min(JOINERS, count),
            (work.keys, partial, work.runs, work.counters, layout.first_keys, layout.classes, layout.slabs, *tables,
             group.number, count),
            (sorting.PIECE, sorting.CUT, len(layout.first_keys), group.dims, layout.widest, JOIN, group.dtype,
             group.optimizer, *group.narrow),
            warps=8,
        )  # fmt: skip


def _readable(part: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Contiguous and on a 16-byte border, as the kernels read gradients."""
    if part is None:
        return None
    if part.dtype != dtype or not part.is_contiguous():
        part = part.to(dtype).contiguous()
    return part if part.data_ptr() % 16 == 0 else part.clone()
