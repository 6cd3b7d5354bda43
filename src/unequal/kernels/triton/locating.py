# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""A batch's ids to slots, for all tables of a module whose rows differ in width at once: rows that live, candidates that are
followed, and rows for new ids."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..request import WAYS, Request
from .directory import (
    FOLLOWED,
    LONG,
    NOT_ONE,
    SHORT,
    SIGN,
    enter,
    enter_newcomer,
    known_candidates,
    live_slots,
    place_of_newcomer,
    put_in_array,
)
from .initialize import fresh, nearest
from .launch import INTERPRETED, aligned, ceil_div, launch
from .layout import Layout, layout_of
from .lookup import note
from .optimizers import state_width
from .random import row_key
from .records import (
    CLASS_FIELDS,
    DIM_OF,
    GROUP,
    LIVE,
    STATE,
    UTILITY,
    WIDTH,
    live_columns,
    record_of,
    resolve_rows,
    words_of,
)
from .rows import FIELDS, SLAB_FIELDS, rows_in_tile

DIRECTORY_FIELDS: tl.constexpr = tl.constexpr(13)
IDS = 64
"""ids of a program of locate_ids, a warp: all of them wait for the one that is searched for longest"""
REGISTERS = 64
"""of its threads: with them as many programs as a processor takes, 32, fit on it"""
TILE = 512
FIND, FOLLOW, CHOOSE, ENTER = 0, 1, 2, 3
"""what a launch does: find rows (and candidates at once, where nothing comes between), candidates, places of newcomers, and
writing these down"""
LISTS, SETTLERS = (64, 33) if not INTERPRETED else (2, 1)
"""lists of newcomers: at the end of one alone programs of locate_ids would wait for each other; and programs of settle_newcomers
for each list, which take these in turn"""
APART: tl.constexpr = tl.constexpr(8)
"""how far apart the lists' lengths lie"""


class Directories:
    """What the kernels read about where the rows of all tables are found. Made anew whenever something of it moves."""

    def __init__(
        self, tables: Sequence[tuple[Any, Tensor, Tensor, Tensor, int, int, int, Tensor]], device: torch.device
    ) -> None:
        """Of each table: its directory, its candidates (ids, utilities, stamps), class_bits, whether candidates are followed
        (2: each at the place of its id), its clock, and two numbers: of ids that were looked up, and of those without a row."""
        buckets = [keys.numel() // WAYS for _, keys, *_ in tables]
        self.newcomers = torch.full((sum(buckets),), NOT_ONE.value, dtype=torch.int64, device=device)
        first = self.newcomers.data_ptr()
        fields = []
        for (directory, keys, utilities, stamps, class_bits, followed, clock, counter), count in zip(tables, buckets):
            bound = 2**63 - 1 if directory.bound is None else directory.bound
            fields.append(
                [directory.kind, directory.memory.data_ptr(), directory.capacity, keys.data_ptr(), utilities.data_ptr(),
                 stamps.data_ptr(), first, count, utilities.shape[1], class_bits | followed << 8, clock - tables[0][-2], bound,
                 counter.data_ptr()]
            )  # fmt: skip
            first += count * 8
        self.fields = torch.tensor(fields, dtype=torch.int64).to(device)
        self.bounded = any(directory.bound is not None for directory, *_ in tables)
        self.counters = torch.zeros(2, LISTS, APART.value, dtype=torch.int32, device=device)
        """how many ids are neither rows nor candidates, by list: of this step, and of the one before, in turn"""
        self.turn = 0


@triton.jit(do_not_specialize=["size", "count", "batch_features", "step", "turn"])
def locate_ids(
    places, features, directories, ids, slots, offsets, owners, wrong, waiting, resolved, tables, classes, addresses, counters,
    size, count, batch_features, step, turn,
    COUNT: tl.constexpr, IDS: tl.constexpr, WAYS: tl.constexpr, PHASE: tl.constexpr, AT_ONCE: tl.constexpr,
    OWNED: tl.constexpr, NOTED: tl.constexpr, COUNTED: tl.constexpr, LISTED: tl.constexpr, RESOLVED: tl.constexpr,
    LISTS: tl.constexpr,
):  # fmt: skip
    """A program takes IDS positions of the batch, feature by feature where they belong to several. `owners` ← the table of ids
    without a row, or -1. `waiting` ← table << 32 | position of newcomers, which are few, in lists, in any order. `resolved` ←
    where rows lie, see resolve_slots."""
    if COUNTED:
        if tl.program_id(0) == 0:  # of the step before, and of the next
            tl.store(counters + ((1 - turn) * LISTS + tl.arange(0, LISTS)) * APART, tl.zeros((LISTS,), tl.int32))
    which = tl.program_id(0) % LISTS
    counter_of_list = counters + (turn * LISTS + which) * APART
    waiting_list = waiting
    if LISTED:
        waiting_list = waiting + room_of_list(tl.num_programs(0), IDS, LISTS) * which
    begin = tl.program_id(0).to(tl.int64) * IDS
    positions = begin + tl.arange(0, IDS)
    end = tl.minimum(begin + IDS, count)
    number = tl.arange(0, COUNT)
    ends = tl.load(offsets + (number.to(tl.int64) + 1) * size, mask=number < batch_features, other=9223372036854775807)
    all_ids = tl.load(ids + positions, mask=positions < end, other=0)
    while begin < end:
        index = tl.sum((ends <= begin).to(tl.int32), 0).to(tl.int64)
        feature_end = tl.min(tl.where(number == index, ends, 9223372036854775807), 0)
        here = (positions >= begin) & (positions < tl.minimum(feature_end, end))
        f = tl.load(places + index)
        read = here & ((f + tl.zeros_like(positions)) >= 0)
        f = tl.maximum(f, 0)
        table = tl.load(features + f * FIELDS)
        own = directories + table * DIRECTORY_FIELDS
        keys = tl.load(own + 3).to(tl.pointer_type(tl.int64))
        utilities = tl.load(own + 4).to(tl.pointer_type(tl.float32))
        stamps = tl.load(own + 5).to(tl.pointer_type(tl.int32))
        newcomers = tl.load(own + 6).to(tl.pointer_type(tl.int64))
        buckets, each, bits = tl.load(own + 7), tl.load(own + 8), tl.load(own + 9)
        class_bits, followed = bits & 255, bits >> 8
        now = (tl.load(own + 10) + step).to(tl.int32)
        id_ = tl.where(read, all_ids, 0)
        inside = read & (id_ >= 0) & (id_ < tl.load(own + 11))
        if tl.load(own + 11) == 9223372036854775807:
            inside = read
        if PHASE == 0:
            slot = live_slots(tl.load(own), tl.load(own + 1), tl.load(own + 2), id_, inside)
            missing = inside & (slot < 0)
            if NOTED:
                note(wrong, f, id_, read & (inside == 0))
            if COUNTED:
                counter = tl.load(own + 12).to(tl.pointer_type(tl.int64))
                tl.atomic_add(counter, tl.sum(inside.to(tl.int64), 0), sem="relaxed")
                tl.atomic_add(counter + 1, tl.sum(missing.to(tl.int64), 0), sem="relaxed")
            if RESOLVED:
                found = resolve_rows(tables, table, classes, addresses, slot, inside)
                tl.store(resolved + positions, found, mask=here)
            if OWNED:
                tl.store(owners + positions, tl.where(missing, table, -1).to(tl.int32), mask=here)
            if AT_ONCE:
                if (followed != 0) & (tl.max(missing.to(tl.int32), 0) != 0):
                    candidate = id_ << class_bits
                    if followed == 1:
                        candidate = known_candidates(
                            keys, utilities, stamps, newcomers, buckets, each, now, class_bits, id_, missing, WAYS
                        )  # fmt: skip
                        if LISTED:
                            list_newcomers(waiting_list, counter_of_list, table, positions, missing & (candidate < 0))
                    slot = tl.where(missing, candidate, slot)
            tl.store(slots + positions, tl.where(inside, slot, -1), mask=here)
        else:
            slot = tl.load(slots + positions, mask=inside, other=0)
            missing = inside & (slot < 0)
            if followed == 2:
                tl.store(slots + positions, id_ << class_bits, mask=missing)
            elif followed != 0:
                slot = known_candidates(
                    keys, utilities, stamps, newcomers, buckets, each, now, class_bits, id_, missing, WAYS
                )  # fmt: skip
                tl.store(slots + positions, slot, mask=missing)
                if LISTED:
                    list_newcomers(waiting_list, counter_of_list, table, positions, missing & (slot < 0))
        begin = feature_end


@triton.jit
def room_of_list(programs, IDS: tl.constexpr, LISTS: tl.constexpr):
    return ((programs + LISTS - 1) // LISTS).to(tl.int64) * IDS


@triton.jit
def list_newcomers(waiting, counter, table, positions, new):
    count = tl.sum(new.to(tl.int32), 0)
    if count > 0:
        first = tl.atomic_add(counter, count, sem="relaxed")
        tl.store(waiting + first + tl.cumsum(new.to(tl.int32), 0) - 1, (table << 32) | positions, mask=new)


@triton.jit(do_not_specialize=["programs", "step", "turn"])
def settle_newcomers(
    directories, ids, slots, waiting, counters, programs, step, turn, IDS: tl.constexpr, WAYS: tl.constexpr,
    ENTER: tl.constexpr, LISTS: tl.constexpr,
):  # fmt: skip
    """Chooses places for those that were listed by so many programs, or writes them down there."""
    which = tl.program_id(0) % LISTS
    count = tl.load(counters + (turn * LISTS + which) * APART)
    waiting_list = waiting + room_of_list(programs, IDS, LISTS) * which
    for first in range(tl.program_id(0) // LISTS * IDS, count, tl.num_programs(0) // LISTS * IDS):
        i = first + tl.arange(0, IDS)
        here = i < count
        entry = tl.load(waiting_list + i, mask=here, other=0)
        own, position = directories + (entry >> 32) * DIRECTORY_FIELDS, entry & 0xFFFFFFFF
        keys = tl.load(own + 3).to(tl.pointer_type(tl.int64))
        utilities = tl.load(own + 4).to(tl.pointer_type(tl.float32))
        stamps = tl.load(own + 5).to(tl.pointer_type(tl.int32))
        newcomers = tl.load(own + 6).to(tl.pointer_type(tl.int64))
        buckets, each, class_bits = tl.load(own + 7), tl.load(own + 8), tl.load(own + 9) & 255
        most, now = tl.max(tl.where(here, each, 0), 0), (tl.load(own + 10) + step).to(tl.int32)
        id_ = tl.load(ids + position, mask=here, other=0)
        if ENTER:
            slot = tl.load(slots + position, mask=here, other=0)
            enter_newcomer(
                keys, utilities, stamps, newcomers, buckets, each, most, now, class_bits, id_, slot, here, WAYS
            )  # fmt: skip
        else:
            slot = place_of_newcomer(
                keys, utilities, stamps, newcomers, buckets, each, most, now, class_bits, id_, here, WAYS
            )  # fmt: skip
            tl.store(slots + position, slot, mask=here)


def locate_all(
    request: Request,
    directories: Directories,
    slots: Tensor,
    *,
    phases: Sequence[int],
    step: int,
    at_once: bool = False,
    owners: Tensor | None = None,
    wrong: Tensor | None = None,
    counted: bool = False,
    resolves: bool = False,
) -> None:
    """Fills the slots of all ids. `owners` (int32, like ids) ← the table of every id that has no row, or -1. Ids outside a table
    are left in `wrong`, see lookup. `counted`: ids are counted, and those without a row. `resolves`: where rows lie is left in
    the request, for the lookup. Waits for nothing."""
    layout, count = layout_of(request), request.ids.numel()
    programs = ceil_div(count, IDS)
    each_list = ceil_div(programs, LISTS)
    waiting = None
    if CHOOSE in phases:
        waiting = torch.empty(each_list * IDS * LISTS, dtype=torch.int64, device=slots.device)
    if resolves:
        request.resolved = torch.empty_like(slots)
    if counted:  # a step begins
        directories.turn = 1 - directories.turn
    arguments = (
        layout.places, layout.features, directories.fields, request.ids, slots, request.offsets, owners, wrong, waiting,
        request.resolved, layout.tables, layout.classes, layout.slabs, directories.counters, request.size, count,
        layout.batch_features, step, directories.turn,
    )  # fmt: skip
    noted = wrong is not None and directories.bounded
    whole = aligned(request.ids, request.offsets)
    for phase in phases:
        if phase in (CHOOSE, ENTER):
            launch(
                layout.compiled, (phase, whole), settle_newcomers, min(SETTLERS, each_list) * LISTS,
                (directories.fields, request.ids, slots, waiting, directories.counters, programs, step, directories.turn),
                (IDS, WAYS, phase == ENTER, LISTS),
            )  # fmt: skip
            continue
        constants = (
            len(layout.places),
            IDS,
            WAYS,
            phase,
            at_once,
            owners is not None,
            noted,
            counted,
            waiting is not None,
            resolves,
            LISTS,
        )
        key = (phase, at_once, owners is None, wrong is None, noted, counted, waiting is None, resolves, whole)
        launch(layout.compiled, key, locate_ids, programs, arguments, constants, warps=1, registers=REGISTERS)


@triton.jit(do_not_specialize=["count"])
def enter_ids(directories, owners, ids, slots, count, BLOCK: tl.constexpr):
    """Puts ids that differ and have no row yet into the directories of their tables; not those with slot -1."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = i < count
    slot = tl.load(slots + i, mask=here, other=-1)
    id_ = tl.load(ids + i, mask=here, other=0)
    table = tl.load(owners + i, mask=here, other=-1).to(tl.int64)
    # Sorted by table: a program meets few of them.
    for t in range(tl.min(tl.where(here, table, 32767), 0), tl.max(table, 0) + 1):
        own = directories + t * DIRECTORY_FIELDS
        mine = here & (table == t) & (slot >= 0)
        kind, memory, capacity = tl.load(own), tl.load(own + 1), tl.load(own + 2)
        if kind == SHORT:
            enter(memory, capacity, id_, slot, mine, SHORT)
        elif kind == LONG:
            enter(memory, capacity, id_, slot, mine, LONG)
        elif (kind & 255) == FOLLOWED:
            put_in_array(memory, id_ // (kind >> 32), slot + SIGN, mine)
        else:
            put_in_array(memory, id_, slot, mine)


@triton.jit(do_not_specialize=["count", "group"])
def make_rows(
    owners, ids, slots, masks, widths, tables, classes, addresses, table_records, count, group,
    DIM: tl.constexpr, TILE: tl.constexpr, DTYPE: tl.constexpr, OPTIMIZER: tl.constexpr, CHUNK: tl.constexpr,
    MASKED: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Fresh rows at new slots: those of tables of this group and dim; not those with slot -1."""
    BLOCK: tl.constexpr = triton.next_power_of_2(DIM)
    ROWS: tl.constexpr = rows_in_tile(DIM, TILE)
    columns = tl.arange(0, BLOCK)
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + i, mask=i < count, other=-1)
    t = tl.load(owners + i, mask=i < count, other=0).to(tl.int64)
    table = tables + t * FIELDS
    kind, record = record_of(
        classes, addresses, tl.load(table), tl.load(table + 6), tl.load(table + 1), tl.maximum(slot, 0)
    )  # fmt: skip
    field = classes + kind * CLASS_FIELDS
    here = (slot >= 0) & (tl.load(field + DIM_OF) == DIM) & (tl.load(field + GROUP) == group)
    mask = tl.zeros_like(slot)
    if MASKED:
        mask = tl.load(masks + i, mask=here, other=0)
    at, lives = live_columns(mask, tl.load(field + WIDTH), columns, CHUNK, MASKED)
    lives = lives & here[:, None] & (columns < DIM)[None, :]
    keys = row_key(tl.load(table_records + t * SLAB_FIELDS + 4), tl.load(ids + i, mask=here, other=0))
    drawn = fresh(keys[:, None], columns[None, :], tl.load(widths + t)[:, None])
    tl.store(record.to(tl.pointer_type(DTYPE))[:, None] + at, nearest(drawn, DTYPE), mask=lives)
    for which in tl.static_range(2):
        state = words_of(record) + tl.load(field + STATE + which)
        if state_width(which, OPTIMIZER) == 1:
            tl.store(state, tl.zeros((ROWS,), tl.float32), mask=here)
        elif state_width(which, OPTIMIZER) == 2:
            tl.store(state[:, None] + at, tl.zeros((ROWS, BLOCK), tl.float32), mask=lives)
    utility = words_of(record) + tl.load(field + UTILITY)
    for each in range(EACH):
        tl.store(utility + each, tl.zeros((ROWS,), tl.float32), mask=here)
    if MASKED:
        words = record.to(tl.pointer_type(tl.uint32)) + tl.load(field + LIVE)
        tl.store(words, mask.to(tl.uint32), mask=here)
        tl.store(words + 1, (mask >> 32).to(tl.uint32), mask=here)


def admit_all(
    request: Request,
    directories: Directories,
    owners: Tensor,
    ids: Tensor,
    slots: Tensor,
    masks: Tensor | None,
    widths: Tensor,
) -> None:
    """Makes fresh rows for new ids, sorted by the table that owns them, at these slots, and enters them; with slot -1 nothing.
    `widths` (float32, of tables): of the uniform distribution that values are drawn from."""
    layout: Layout = layout_of(request)
    count = ids.numel()
    enter_ids[ceil_div(count, 256),](directories.fields, owners, ids, slots, count, BLOCK=256)
    for group in layout.updates:
        chunk, masked, each, *_ = group.narrow
        for dim in group.dims:
            make_rows[ceil_div(count, int(rows_in_tile(dim, TILE))),](
                owners, ids, slots, masks if masked else None, widths, layout.tables, layout.classes, layout.slabs,
                layout.slab_records, count, group.number, DIM=dim, TILE=TILE, DTYPE=group.dtype, OPTIMIZER=group.optimizer,
                CHUNK=chunk, MASKED=masked, EACH=each,
            )  # fmt: skip
