# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Backward fused with the optimizer for rows that differ in width. Gradients are summed like those of whole rows, over all
columns: how much a row matters is told by the gradient of its whole vector, whatever of it exists."""

import triton
import triton.language as tl

from .optimizers import NUMBERS, apply, state_width
from .random import row_key
from .records import live_columns, mask_at, words_before, words_of
from .rounding import round_to
from .rows import FIELDS, SLAB_FIELDS, rows_in_tile
from .sorting import row_records
from .summing import sum_of_piece, sum_of_run

READS: tl.constexpr = tl.constexpr(2)
"""of utilities that add up reads; below it gradients, above it both"""


@triton.jit
def state_pointers(record, width, live, at, lives, WHICH: tl.constexpr, DTYPE: tl.constexpr, OPTIMIZER: tl.constexpr):
    """To a state of a tile of rows, and which of them are real: one per value, or one per row."""
    base = (words_of(record) + words_before(width, WHICH, DTYPE, OPTIMIZER))[:, None]
    if state_width(WHICH, OPTIMIZER) == 2:
        return base + at, lives
    else:
        return base, live[:, None]


@triton.jit
def value_pointers(record, at, DTYPE: tl.constexpr, ALIGN: tl.constexpr):
    """Records start on such borders, which the compiler cannot know."""
    return tl.multiple_of(record.to(tl.pointer_type(DTYPE)), ALIGN)[:, None] + at


@triton.jit
def read_records(
    record, width, live, columns, DIM: tl.constexpr, DTYPE: tl.constexpr, OPTIMIZER: tl.constexpr, CHUNK: tl.constexpr,
    MASKED: tl.constexpr, EACH: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Where each column lies, which there are, their values and states, of a tile of rows."""
    live = live & (width > 0)
    mask = tl.zeros_like(record)
    if MASKED:
        mask = mask_at(record, words_before(width, 2, DTYPE, OPTIMIZER) + EACH, live)
    at, lives = live_columns(mask, width, columns, CHUNK, MASKED)
    lives = lives & live[:, None] & (columns < DIM)[None, :]
    w = tl.load(value_pointers(record, at, DTYPE, ALIGN), mask=lives, other=0.0).to(tl.float32)
    first = tl.zeros((1, 1), tl.float32)
    second = tl.zeros((1, 1), tl.float32)
    if state_width(0, OPTIMIZER):
        pointers, real = state_pointers(record, width, live, at, lives, 0, DTYPE, OPTIMIZER)
        first = tl.load(pointers, mask=real, other=0.0)
    if state_width(1, OPTIMIZER):
        pointers, real = state_pointers(record, width, live, at, lives, 1, DTYPE, OPTIMIZER)
        second = tl.load(pointers, mask=real, other=0.0)
    return at, lives, w, first, second


@triton.jit
def utilities_of(record, width, DTYPE: tl.constexpr, OPTIMIZER: tl.constexpr):
    """Of candidates they are all there is."""
    return words_of(record) + tl.where(width > 0, words_before(width, 2, DTYPE, OPTIMIZER), 0)


@triton.jit
def add_utility(
    to, held, width, live, gradients, reads, gain, columns, CHUNK: tl.constexpr, EACH: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """gradients [rows, columns] of whole vectors; reads and gain [rows]; held: the first utility of each. Of a candidate what is
    negative is none, but says where a row is that it has got since; what is no number would, too."""
    if KIND:
        if KIND >= READS:
            gain *= reads.to(tl.float32)
        squares = gradients * gradients
        for each in tl.static_range(EACH):
            gained = gain
            if KIND != READS:
                own = squares
                if EACH > 1:
                    own = tl.where((columns // CHUNK == each)[None, :], squares, 0.0)
                gained = gain * tl.sqrt(tl.sum(own, 1))
            if each > 0:
                held = tl.load(to + each, mask=live, other=0.0)
            more = held + gained
            counts = (width > 0) | ((held.to(tl.int32, bitcast=True) >= 0) & (more >= 0))
            tl.store(to + each, more, mask=live & counts)


@triton.jit
def update_records(
    record, width, table, live, at, lives, w, first, second, held, gradients, reads, key, columns, tables, table_records,
    table_numbers, gains, gain, clock,
    DIM: tl.constexpr, DTYPE: tl.constexpr, OPTIMIZER: tl.constexpr, CHUNK: tl.constexpr, EACH: tl.constexpr,
    KIND: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Applies the optimizer to what read_records gave, writes it back, and adds to utilities. `key`: the rows' numbers."""
    # All that is read is read before anything is written: the compiler cannot know that they are not the same.
    gain *= tl.load(gains + table)
    followed = live
    live = live & (width > 0)
    g = tl.where(lives, gradients, 0.0)
    divisor = tl.maximum(width, 1).to(tl.float32)[:, None]
    w, first, second = apply(w, g, first, second, table_numbers + table * NUMBERS, clock, divisor, OPTIMIZER)
    if state_width(0, OPTIMIZER):
        pointers, real = state_pointers(record, width, live, at, lives, 0, DTYPE, OPTIMIZER)
        tl.store(pointers, first, mask=real)
    if state_width(1, OPTIMIZER):
        pointers, real = state_pointers(record, width, live, at, lives, 1, DTYPE, OPTIMIZER)
        tl.store(pointers, second, mask=real)
    pointers = value_pointers(record, at, DTYPE, ALIGN)
    if DTYPE == tl.float32:
        tl.store(pointers, w, mask=lives)
    else:
        step_key = row_key(tl.load(table_records + table * SLAB_FIELDS + 4), tl.load(clock).to(tl.int64))
        row_keys = row_key(step_key, key.to(tl.int64) - tl.load(tables + table * FIELDS + 4))
        tl.store(pointers, round_to(w, row_keys[:, None], at, DTYPE), mask=lives)
    to = utilities_of(record, width, DTYPE, OPTIMIZER)
    add_utility(to, held, width, followed, gradients, reads, gain, columns, CHUNK, EACH, KIND)


@triton.jit
def update_pieces_of(
    keys, pieces, places, kinds, count, order, sources, factors, gradients, gradient_first, partial,
    tables, table_records, table_numbers, gains, gain, clock, group, widest,
    UNIT: tl.constexpr, PIECE: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
    DTYPE: tl.constexpr, OPTIMIZER: tl.constexpr, FACTORS: tl.constexpr, SEQUENCES: tl.constexpr, MIXED: tl.constexpr,
    CHUNK: tl.constexpr, MASKED: tl.constexpr, EACH: tl.constexpr, KIND: tl.constexpr, ALIGN: tl.constexpr,
    VALUES: tl.constexpr,
):  # fmt: skip
    """As update.py does it for whole rows."""
    BLOCK: tl.constexpr = triton.next_power_of_2(DIM)
    ROWS: tl.constexpr = rows_in_tile(DIM, TILE)
    columns = tl.arange(0, BLOCK)
    piece = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    begin = tl.load(pieces + piece, mask=piece < count, other=0)
    end = tl.load(pieces + piece + 1, mask=piece < count, other=0)
    record = tl.load(places + piece, mask=piece < count, other=-1)
    kind = tl.load(kinds + piece, mask=piece < count, other=0)
    source = tl.load(sources + (begin & 0x7FFFFFFF), mask=piece < count, other=0)
    for first_piece in range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS):
        piece = first_piece + tl.num_programs(0) * ROWS + tl.arange(0, ROWS)
        next_begin = tl.load(pieces + piece, mask=piece < count, other=0)
        next_end = tl.load(pieces + piece + 1, mask=piece < count, other=0)
        next_record = tl.load(places + piece, mask=piece < count, other=-1)
        next_kind = tl.load(kinds + piece, mask=piece < count, other=0)
        live = record >= 0
        # The compiler sees that values come and go in groups, so that it may read these at once.
        width, table = tl.multiple_of(kind & 0xFFFF, VALUES), kind >> 16
        if MIXED:
            own = table_records + table * SLAB_FIELDS
            live = live & (tl.load(own + 2) == DIM) & (tl.load(own + 3) == group)
        whole = live & (begin < 0) & (end < 0)
        start, end = begin & 0x7FFFFFFF, end & 0x7FFFFFFF
        at, lives, w, first, second = read_records(
            record, width, whole, columns, DIM, DTYPE, OPTIMIZER, CHUNK, MASKED, EACH, ALIGN
        )  # fmt: skip
        held = tl.zeros_like(width).to(tl.float32)
        if KIND:
            held = tl.load(utilities_of(record, width, DTYPE, OPTIMIZER), mask=whole, other=0.0)
        sums = sum_of_piece(
            source, sources, start, end, live, order, factors, gradients, gradient_first, columns,
            UNIT, DIM, FACTORS, SEQUENCES,
        )  # fmt: skip
        source = tl.load(sources + (next_begin & 0x7FFFFFFF), mask=piece < count, other=0)
        key = kind
        if DTYPE != tl.float32:
            key = tl.load(keys + start, mask=whole, other=0)
        update_records(
            record, width, table, whole, at, lives, w, first, second, held, sums, end - start, key, columns, tables,
            table_records, table_numbers, gains, gain, clock, DIM, DTYPE, OPTIMIZER, CHUNK, EACH, KIND, ALIGN,
        )  # fmt: skip
        # In units, like gradients: with wider borders values would be dealt out to threads in another way, and change hands.
        number = ((start // PIECE) * 2 + (begin < 0).to(tl.int32)).to(tl.int64)
        kept = (partial + number * widest * UNIT)[:, None]
        tl.store(kept + columns[None, :], sums, mask=(live & (whole == 0))[:, None] & (columns < DIM)[None, :])
        begin, end, record, kind = next_begin, next_end, next_record, next_kind


@triton.jit(do_not_specialize=["group", "gain", "widest"])
def update_pieces_narrow(
    keys, pieces, places, kinds, counters, order, sources, factors, gradients, gradient_first, partial,
    tables, table_records, table_numbers, gains, gain, clock, group, widest,
    UNIT: tl.constexpr, PIECE: tl.constexpr, DIMS: tl.constexpr, TILE: tl.constexpr,
    DTYPE: tl.constexpr, OPTIMIZER: tl.constexpr, FACTORS: tl.constexpr, SEQUENCES: tl.constexpr, MIXED: tl.constexpr,
    CHUNK: tl.constexpr, MASKED: tl.constexpr, EACH: tl.constexpr, KIND: tl.constexpr, ALIGN: tl.constexpr,
    VALUES: tl.constexpr,
):  # fmt: skip
    count = tl.load(counters + 1)
    for k in tl.static_range(len(DIMS)):
        update_pieces_of(
            keys, pieces, places, kinds, count, order, sources, factors, gradients, gradient_first, partial,
            tables, table_records, table_numbers, gains, gain, clock, group, widest,
            UNIT, PIECE, DIMS[k], TILE, DTYPE, OPTIMIZER, FACTORS, SEQUENCES, MIXED, CHUNK, MASKED, EACH, KIND,
            ALIGN, VALUES,
        )  # fmt: skip


@triton.jit
def join_run(
    keys, key, record, kind, partial, begin, count, tables, table_records, table_numbers, gains, gain, clock,
    PIECE: tl.constexpr, CUT: tl.constexpr, DIM: tl.constexpr, WIDEST: tl.constexpr, JOIN: tl.constexpr,
    DTYPE: tl.constexpr, OPTIMIZER: tl.constexpr, CHUNK: tl.constexpr, MASKED: tl.constexpr, EACH: tl.constexpr,
    KIND: tl.constexpr, ALIGN: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = triton.next_power_of_2(DIM)
    columns = tl.arange(0, BLOCK)
    live = tl.full((1,), 1, tl.int1)
    width, table = tl.multiple_of(kind & 0xFFFF, VALUES), kind >> 16
    at, lives, w, first, second = read_records(
        record, width, live, columns, DIM, DTYPE, OPTIMIZER, CHUNK, MASKED, EACH, ALIGN
    )  # fmt: skip
    held = tl.zeros_like(width).to(tl.float32)
    if KIND:
        held = tl.load(utilities_of(record, width, DTYPE, OPTIMIZER))
    total, last = sum_of_run(keys, key, partial, begin, count, columns, PIECE, CUT, DIM, WIDEST, JOIN)
    # The run ends inside its last piece.
    rest = last + tl.arange(0, PIECE)
    same = (rest < count) & (tl.load(keys + rest, mask=rest < count, other=-2) == key)
    reads = last - begin + tl.sum(same.to(tl.int32), 0)
    update_records(
        record, width, table, live, at, lives, w, first, second, held, total[None, :], reads + tl.zeros((1,), tl.int32),
        key + tl.zeros((1,), tl.int64), columns, tables, table_records, table_numbers, gains, gain, clock,
        DIM, DTYPE, OPTIMIZER, CHUNK, EACH, KIND, ALIGN,
    )  # fmt: skip


@triton.jit(do_not_specialize=["group", "count", "gain"])
def join_pieces_narrow(
    keys, partial, runs, counters, first_keys, classes, addresses, tables, table_records, table_numbers, gains, gain, clock,
    group, count, PIECE: tl.constexpr, CUT: tl.constexpr, COUNT: tl.constexpr, DIMS: tl.constexpr, WIDEST: tl.constexpr,
    JOIN: tl.constexpr, DTYPE: tl.constexpr, OPTIMIZER: tl.constexpr, CHUNK: tl.constexpr, MASKED: tl.constexpr,
    EACH: tl.constexpr, KIND: tl.constexpr, ALIGN: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """A program takes one run that was cut after the other."""
    for number in range(tl.program_id(0), tl.load(counters), tl.num_programs(0)):
        begin = tl.load(runs + number)
        key = tl.load(keys + begin)
        one = tl.full((1,), 1, tl.int1)
        kind, record = row_records(
            first_keys, tables, classes, addresses, key + tl.zeros((1,), tl.int64), one, COUNT
        )  # fmt: skip
        own = table_records + (tl.max(kind, 0) >> 16) * SLAB_FIELDS
        mine = (tl.max(record, 0) >= 0) & (tl.load(own + 3) == group)
        for k in tl.static_range(len(DIMS)):
            if mine & (tl.load(own + 2) == DIMS[k]):
                join_run(
                    keys, key, record, kind, partial, begin, count, tables, table_records, table_numbers, gains, gain,
                    clock, PIECE, CUT, DIMS[k], WIDEST, JOIN, DTYPE, OPTIMIZER, CHUNK, MASKED, EACH, KIND, ALIGN, VALUES,
                )  # fmt: skip
