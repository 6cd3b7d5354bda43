# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""What the kernels share that read rows of different width: where a record lies, and which columns it has. See csrc/narrow.h."""

import triton
import triton.language as tl

from .optimizers import state_width
from .rows import FIELDS

CLASS_FIELDS: tl.constexpr = tl.constexpr(10)
# Of a class: values of its rows; in words where their states, utility and mask begin, and their size; its first slab; the number
# of its table, the table's dim and update group.
WIDTH: tl.constexpr = tl.constexpr(0)
STATE: tl.constexpr = tl.constexpr(1)
UTILITY: tl.constexpr = tl.constexpr(3)
LIVE: tl.constexpr = tl.constexpr(4)
WORDS: tl.constexpr = tl.constexpr(5)
FIRST_SLAB: tl.constexpr = tl.constexpr(6)
TABLE: tl.constexpr = tl.constexpr(7)
DIM_OF: tl.constexpr = tl.constexpr(8)
GROUP: tl.constexpr = tl.constexpr(9)


@triton.jit
def record_of(classes, addresses, first_class, class_bits, slab_log2, slots):
    """The class of each slot, among those of all tables, and the address of its record. Slot 0 always exists."""
    chunks, place = slots & ((1 << class_bits) - 1), slots >> class_bits
    kind = first_class + chunks
    # Candidates, of class 0, lie in one piece.
    slab = tl.where(chunks == 0, 0, place >> slab_log2)
    within = tl.where(chunks == 0, place, place & ((1 << slab_log2) - 1))
    field = classes + kind * CLASS_FIELDS
    base = tl.load(addresses + tl.load(field + FIRST_SLAB) + slab)
    return kind, base + within * tl.load(field + WORDS) * 4


@triton.jit
def resolve_rows(tables, table, classes, addresses, slots, wanted):
    """Of slots of one table that are wanted: width << 48 | address of the record; 0 where there is no row."""
    own = tables + table * FIELDS
    first_class, slab_log2, rows, class_bits = tl.load(own), tl.load(own + 1), tl.load(own + 2), tl.load(own + 6)
    known = wanted & (slots >= 0) & (slots < rows)
    kind, record = record_of(classes, addresses, first_class, class_bits, slab_log2, tl.where(known, slots, 0))
    width = tl.load(classes + kind * CLASS_FIELDS + WIDTH)
    return tl.where(known & (width > 0), (width << 48) | record, 0)


@triton.jit
def words_of(record):
    return record.to(tl.pointer_type(tl.float32))


@triton.jit
def words_before(width, WHICH: tl.constexpr, DTYPE: tl.constexpr, OPTIMIZER: tl.constexpr):
    """Words of a record of that many values, at least one, before state WHICH (0 or 1) or its utility (2)."""
    words = width
    if DTYPE != tl.float32:
        words = (width + 1) // 2
    for state in tl.static_range(WHICH):
        if state_width(state, OPTIMIZER) == 1:
            words += 1
        elif state_width(state, OPTIMIZER) == 2:
            words += width
    return words


@triton.jit
def bits_before(mask, chunks):
    """How many of the mask's bits lie below each chunk's."""
    x = mask & ((tl.full((), 1, tl.int64) << chunks) - 1)
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    x = x + (x >> 8)
    x = x + (x >> 16)
    return (x + (x >> 32)) & 0x7F


@triton.jit
def mask_at(record, offset, wanted):
    """Masks lie on borders of 4 bytes."""
    words = record.to(tl.pointer_type(tl.uint32)) + offset
    low, high = tl.load(words, mask=wanted, other=0), tl.load(words + 1, mask=wanted, other=0)
    return (low.to(tl.uint64) | (high.to(tl.uint64) << 32)).to(tl.int64)


@triton.jit
def live_columns(mask, width, columns, CHUNK: tl.constexpr, MASKED: tl.constexpr):
    """Where among a row's values each column of its vector lies, and which columns it has: [rows, columns]."""
    if MASKED:
        chunks = (columns // CHUNK).to(tl.int64)[None, :]
        at = bits_before(mask[:, None], chunks) * CHUNK + (columns % CHUNK)[None, :]
        return at.to(tl.int32), ((mask[:, None] >> chunks) & 1) != 0
    else:
        return (columns + tl.zeros_like(columns))[None, :], columns[None, :] < width[:, None]
