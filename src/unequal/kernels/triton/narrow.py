# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Moving rows from one width to another."""

import math
from collections.abc import Hashable
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..request import Records, TableRows
from .initialize import fresh, nearest
from .launch import alignments, ceil_div, launch
from .layout import DTYPES, Layout, classes_of
from .optimizers import state_width
from .random import row_key, signed
from .records import CLASS_FIELDS, LIVE, STATE, UTILITY, WIDTH, WORDS, live_columns, mask_at, record_of, words_of
from .rows import rows_in_tile

TILE = 512
_COMPILED: dict[Hashable, Any] = {}
"""see launch.py"""
COPIED = 128
"""words that `place` moves at a time"""


@triton.jit
def _move_state(
    source, to, had, rows, chunks, more, at_old, lived, all_old, at_new, lives, inherit,
    SIZE: tl.constexpr, INHERIT: tl.constexpr,
):  # fmt: skip
    """Of one state of the optimizer: what a row's chunks had; others 0 or, where they INHERIT, such a share of the largest, or of
    what the row has on average. `more`: of its chunks."""
    if SIZE == 1:
        state = tl.load(source, mask=had, other=0.0)
        if INHERIT:
            held = (chunks - more).to(tl.float32) + inherit * more.to(tl.float32)
            state *= tl.where(more > 0, held / tl.maximum(chunks, 1).to(tl.float32), 1.0)
        tl.store(to, state, mask=rows)
    elif SIZE == 2:
        state = tl.load(source[:, None] + at_old, mask=lived, other=0.0)
        if INHERIT:
            held = tl.load(source[:, None] + at_old, mask=all_old, other=0.0)
            state = tl.where(lived, state, inherit * tl.max(held, 1)[:, None])
        tl.store(to[:, None] + at_new, state, mask=lives)


@triton.jit(do_not_specialize=["count", "class_bits", "slab_log2", "key", "std_width", "inherit"])
def _rebuild(
    classes, addresses, ids, old, slots, masks, starts, made, count, class_bits, slab_log2, key, std_width, inherit,
    DIM: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, DTYPE: tl.constexpr, OPTIMIZER: tl.constexpr,
    MASKED: tl.constexpr, EACH: tl.constexpr, SQUARES: tl.constexpr, INHERITS: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = triton.next_power_of_2(DIM)
    ROWS: tl.constexpr = rows_in_tile(DIM, TILE)
    columns = tl.arange(0, BLOCK)
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = i < count
    slot = tl.load(slots + i, mask=here, other=0)
    chunks = slot & ((1 << class_bits) - 1)
    field = classes + chunks * CLASS_FIELDS
    to = made + tl.load(starts + i, mask=here, other=0)
    before = tl.load(old + i, mask=here, other=-1)
    known = before >= 0
    kind, record = record_of(classes, addresses, 0, class_bits, slab_log2, tl.maximum(before, 0))
    from_field = classes + kind * CLASS_FIELDS
    had = known & (kind > 0)
    more = tl.where(had, chunks - (before & ((1 << class_bits) - 1)), 0)
    mask_old = tl.zeros_like(slot)
    mask_new = tl.zeros_like(slot)
    if MASKED:
        mask_old = mask_at(record, tl.load(from_field + LIVE), had)
        mask_new = tl.load(masks + i, mask=here, other=0)
    at_old, lived = live_columns(mask_old, tl.load(from_field + WIDTH), columns, CHUNK, MASKED)
    at_new, lives = live_columns(mask_new, tl.load(field + WIDTH), columns, CHUNK, MASKED)
    lives = lives & here[:, None] & (columns < DIM)[None, :]
    all_old = lived & had[:, None] & (columns < DIM)[None, :]
    lived = all_old & lives
    widths = tl.full((ROWS,), 0.0, tl.float32) + std_width
    if INHERITS:
        all_held = tl.load(record.to(tl.pointer_type(DTYPE))[:, None] + at_old, mask=all_old, other=0.0)
        widths = tl.maximum(widths, tl.max(tl.abs(all_held.to(tl.float32)), 1))
    drawn = fresh(row_key(key, tl.load(ids + i, mask=here, other=0))[:, None], columns[None, :], widths[:, None])
    held = tl.load(record.to(tl.pointer_type(DTYPE))[:, None] + at_old, mask=lived, other=0.0)
    values = tl.where(lived, held, nearest(drawn, DTYPE))
    tl.store(to.to(tl.pointer_type(DTYPE))[:, None] + at_new, values, mask=lives)
    for which in tl.static_range(2):
        source = words_of(record) + tl.load(from_field + STATE + which)
        goal = to + tl.load(field + STATE + which)
        _move_state(
            source, goal, had, here, chunks, more, at_old, lived, all_old, at_new, lives, inherit,
            state_width(which, OPTIMIZER), SQUARES == which,
        )  # fmt: skip
    source = words_of(record) + tl.load(from_field + UTILITY)
    goal = to + tl.load(field + UTILITY)
    for each in range(EACH):
        tl.store(goal + each, tl.load(source + each, mask=known, other=0.0), mask=here)
    if MASKED:
        words = (to + tl.load(field + LIVE)).to(tl.pointer_type(tl.uint32))
        tl.store(words, mask_new.to(tl.uint32), mask=here)
        tl.store(words + 1, (mask_new >> 32).to(tl.uint32), mask=here)


@triton.jit(do_not_specialize=["count", "class_bits", "slab_log2"])
def _place(
    classes, addresses, slots, made, starts, count, class_bits, slab_log2, ROWS: tl.constexpr, COPIED: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = i < count
    kind, record = record_of(classes, addresses, 0, class_bits, slab_log2, tl.load(slots + i, mask=here, other=0))
    words = tl.where(here, tl.load(classes + kind * CLASS_FIELDS + WORDS), 0)
    source = made + tl.load(starts + i, mask=here, other=0)
    for first in range(0, tl.max(words, 0), COPIED):
        columns = first + tl.arange(0, COPIED)
        inside = columns[None, :] < words[:, None]
        # As integers: the bits of a mask may be those of a signalling NaN.
        part = tl.load(source.to(tl.pointer_type(tl.int32))[:, None] + columns[None, :], mask=inside, other=0)
        tl.store(record.to(tl.pointer_type(tl.int32))[:, None] + columns[None, :], part, mask=inside)


@triton.jit(do_not_specialize=["count", "class_bits", "slab_log2"])
def _worth(
    classes, addresses, slots, utilities, masks, count, class_bits, slab_log2, EACH: tl.constexpr, MASKED: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = i < count
    kind, record = record_of(classes, addresses, 0, class_bits, slab_log2, tl.load(slots + i, mask=here, other=0))
    field = classes + kind * CLASS_FIELDS
    source = words_of(record) + tl.load(field + UTILITY)
    for each in range(EACH):
        tl.store(utilities + i * EACH + each, tl.load(source + each, mask=here, other=0.0), mask=here)
    if MASKED:
        tl.store(masks + i, mask_at(record, tl.load(field + LIVE), here), mask=here)


@triton.jit(do_not_specialize=["slab_log2", "gain"])
def _fade(classes, slabs, rows, addresses, slab_log2, gain, EACH: tl.constexpr, ROWS: tl.constexpr):
    """A program takes ROWS rows of a slab. `slabs`: the class of each; `rows`: how many it has."""
    number = tl.program_id(0).to(tl.int64) * ROWS
    slab = number >> slab_log2
    place = (number & ((1 << slab_log2) - 1)) + tl.arange(0, ROWS)
    field = classes + tl.load(slabs + slab) * CLASS_FIELDS
    to = tl.load(addresses + slab).to(tl.pointer_type(tl.float32)) + tl.load(field + UTILITY)
    to += place * tl.load(field + WORDS)
    here = place < tl.load(rows + slab)
    for each in range(EACH):
        tl.store(to + each, tl.load(to + each, mask=here, other=0.0) / gain, mask=here)


@lru_cache(maxsize=256)
def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64).to(device)


def _describe(rows: TableRows, device: torch.device) -> tuple[Tensor, Tensor]:
    """The classes of one table and the addresses of its slabs; of all tables, where a step has made them."""
    known = rows.cached
    if isinstance(known, Layout) and known.classes is not None and known.device == device:
        first, count = known.first_classes[id(rows)]
        return known.classes[first : first + count], known.slabs[0]
    _, fields, addresses = classes_of([rows], [0])
    flat = tuple(number for field in fields for number in field)
    return _on_device(flat, device), _on_device(tuple(addresses), device)


def _records(rows: TableRows) -> Records:
    assert rows.records is not None
    return rows.records


def rebuild(
    rows: TableRows, ids: Tensor, old: Tensor, slots: Tensor, masks: Tensor | None, std: float, inherit: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The records of rows at new slots, one after the other, and where each begins. `old`: the slot that a row has now, or -1
    where it is new. Chunks that a row had are kept, others are fresh. `inherit`: squares of gradients of new values begin as such
    a share of the largest of the row's others; an average over the row counts them with as much; and they are drawn from ± half
    of the row's largest value, where that is more than what new rows have."""
    records, device = _records(rows), ids.device
    sizes = _on_device(tuple(records.layout[:, 5].tolist()), device)
    words = sizes[slots & ((1 << records.class_bits) - 1)]
    starts = words.cumsum(0) - words
    made = torch.zeros(int(words.sum()), device=device)
    classes, addresses = _describe(rows, device)
    count, tile = ids.numel(), int(rows_in_tile(records.dim, TILE))
    parts = [None if part is None else part.contiguous() for part in (ids, old, slots, masks)]
    seed = signed(rows.key)
    constants = (
        records.dim, TILE, records.chunk, DTYPES[records.dtype], rows.optimizer.code, records.masked, records.utilities,
        rows.optimizer.squares if inherit > 0 else -1, inherit > 0,
    )  # fmt: skip
    launch(
        _COMPILED, (device, *constants, -(2**31) <= seed < 2**31, alignments(classes, addresses, *parts, starts, made)),
        _rebuild, ceil_div(count, tile),
        (classes, addresses, *parts, starts, made, count, records.class_bits, records.slab_log2, seed,
         2 * math.sqrt(3) * std, float(inherit)),
        constants, warps=4,
    )  # fmt: skip
    return made, starts


def place(rows: TableRows, slots: Tensor, made: Tensor, starts: Tensor) -> None:
    """Puts such records to their slots."""
    records, count, tile = _records(rows), slots.numel(), 8
    tensors = (*_describe(rows, slots.device), slots.contiguous(), made, starts)
    launch(
        _COMPILED, (slots.device, alignments(*tensors)), _place, ceil_div(count, tile),
        (*tensors, count, records.class_bits, records.slab_log2), (tile, COPIED), warps=4,
    )  # fmt: skip


def worth(rows: TableRows, slots: Tensor) -> tuple[Tensor, Tensor | None]:
    """What rows are worth, and which chunks they have where any may live."""
    records, count, tile = _records(rows), slots.numel(), 256
    utilities = torch.empty(count, records.utilities, device=slots.device)
    masks = torch.empty_like(slots) if records.masked else None
    tensors = (*_describe(rows, slots.device), slots.contiguous(), utilities, masks)
    launch(
        _COMPILED, (slots.device, records.utilities, masks is None, alignments(*tensors)), _worth, ceil_div(count, tile),
        (*tensors, count, records.class_bits, records.slab_log2), (records.utilities, records.masked, tile), warps=4,
    )  # fmt: skip
    return utilities, masks


def fade(rows: TableRows, gain: float) -> None:
    """Divides the utilities of all rows; not those of candidates."""
    records = _records(rows)
    device = records.slabs[0][0].device
    fields, kinds = _describe(rows, device)[0], [k for k, slabs in enumerate(records.slabs) if k for _ in slabs]
    addresses = [slab.data_ptr() for slabs in records.slabs[1:] for slab in slabs]
    sizes = [slab.shape[0] for slabs in records.slabs[1:] for slab in slabs]
    tile = min(256, 1 << records.slab_log2)
    if kinds:
        _fade[(len(kinds) << records.slab_log2) // tile,](
            fields, *(_on_device(tuple(numbers), device) for numbers in (kinds, sizes, addresses)), records.slab_log2, gain,
            EACH=records.utilities, ROWS=tile,
        )  # fmt: skip
