# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Sums of gradients, in a fixed order: of a piece one after the other, of the pieces of a run in groups."""

import triton
import triton.language as tl


@triton.jit
def gradient_rows(
    source, i, more, order, factors, gradients, gradient_first, columns,
    UNIT: tl.constexpr, DIM: tl.constexpr, FACTORS: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """The gradients of the sorted lookups i, whose sources are given."""
    source = source.to(tl.int64)
    if SEQUENCES:
        source = (source & ((1 << 44) - 1)) + tl.load(gradient_first + (source >> 44), mask=more, other=0)
    # In units, so that the compiler sees that rows start on borders wide loads may start on.
    rows = (gradients + source * UNIT)[:, None] + columns[None, :]
    g = tl.load(rows, mask=more[:, None] & (columns < DIM)[None, :], other=0.0).to(tl.float32)
    if FACTORS:
        g *= tl.load(factors + tl.load(order + i, mask=more, other=0), mask=more, other=0.0)[:, None]
    return g


@triton.jit
def sum_of_piece(
    source, sources, start, end, live, order, factors, gradients, gradient_first, columns,
    UNIT: tl.constexpr, DIM: tl.constexpr, FACTORS: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Of the lookups from start to end, one after the other. The first one's source is there already."""
    sums = gradient_rows(
        source, start, live, order, factors, gradients, gradient_first, columns, UNIT, DIM, FACTORS, SEQUENCES
    )  # fmt: skip
    for step in range(1, tl.max(tl.where(live, end - start, 0), 0)):
        i = start + step
        more = live & (i < end)
        source = tl.load(sources + i, mask=more, other=0)
        sums += gradient_rows(
            source, i, more, order, factors, gradients, gradient_first, columns, UNIT, DIM, FACTORS, SEQUENCES
        )  # fmt: skip
    return sums


@triton.jit
def sum_of_run(
    keys, key, partial, begin, count, columns,
    PIECE: tl.constexpr, CUT: tl.constexpr, DIM: tl.constexpr, WIDEST: tl.constexpr, JOIN: tl.constexpr,
):  # fmt: skip
    """Adds what the pieces of a run that was cut came to; also where the last of them begins."""
    BLOCK: tl.constexpr = triton.next_power_of_2(DIM)
    AHEAD: tl.constexpr = max(1, min(JOIN, JOIN * 128 // BLOCK))
    inside = columns < DIM
    total = tl.load(partial + (begin // PIECE * 2 + 1).to(tl.int64) * WIDEST + columns, mask=inside, other=0.0)
    last = begin
    # Pieces follow each other every PIECE lookups, but begin afresh at multiples of CUT.
    border = (begin // CUT + 1) * CUT
    in_first = (border - begin + PIECE - 1) // PIECE
    first = 1
    more = 1
    while more != 0:
        number = first + tl.arange(0, AHEAD)
        at = tl.where(number < in_first, begin + number * PIECE, border + (number - in_first) * PIECE)
        same = (at < count) & (tl.load(keys + at, mask=at < count, other=-2) == key)
        parts = (partial + (at // PIECE * 2).to(tl.int64) * WIDEST)[:, None] + columns[None, :]
        total += tl.sum(tl.load(parts, mask=same[:, None] & inside[None, :], other=0.0), 0)
        last = tl.maximum(last, tl.max(tl.where(same, at, begin), 0))
        first += AHEAD
        more = (tl.sum(same.to(tl.int32), 0) == AHEAD).to(tl.int32)
    return total, last
