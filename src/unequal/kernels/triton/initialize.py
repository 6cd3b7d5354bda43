# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Fresh rows: uniform with a given standard deviation, drawn from (table key, id, column) alone."""

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..request import TableRows
from .layout import DTYPES
from .random import row_key, signed, word
from .rounding import tile_of
from .rows import place_of, values_of

PROGRAMS = 2048
"""at most so many, each with many tiles: where the count is known on the device alone, most have nothing to do"""


@triton.jit
def fresh(row_keys, columns, width):
    """float32 numbers in ±width/2; row_keys [rows, 1], columns [1, columns]; one word serves two neighbouring columns."""
    columns = columns.to(tl.uint32)
    words = word(row_keys, columns >> 1) >> tl.where((columns & 1) == 1, 8, 40).to(tl.uint64)
    # All but the last product is exact, so that no fused multiplication can change it.
    return ((words.to(tl.uint32) & 0xFFFFFF).to(tl.float32) * 5.9604644775390625e-08 - 0.5) * width


@triton.jit
def nearest(values, dtype: tl.constexpr):
    """To the nearest number, ties to even. bfloat16 by hand: Triton's interpreter cuts off."""
    if dtype == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return values.to(dtype)


@triton.jit(do_not_specialize=["slab_log2", "key"])
def _initialize(
    addresses, ids, first, count, slab_log2, key, width, DIM: tl.constexpr, DTYPE: tl.constexpr, SLABS: tl.constexpr,
    OWN_NUMBER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    start, total = tl.load(first), tl.load(count)
    for block in range(tl.program_id(0).to(tl.int64), tl.cdiv(total, ROWS), tl.num_programs(0)):
        rows = block * ROWS + tl.arange(0, ROWS).to(tl.int64)
        live = rows < total
        slots = tl.where(live, start + rows, 0)
        numbers = slots if OWN_NUMBER else tl.load(ids + rows, mask=live, other=0)
        tile = fresh(row_key(key, numbers)[:, None], columns[None, :], width)
        address, place = place_of(addresses, 0, slab_log2, slots, SLABS)
        to = values_of(address, place, columns, DIM, DTYPE)
        tl.store(to, nearest(tile, DTYPE), mask=live[:, None] & (columns < DIM)[None, :])


@lru_cache(maxsize=1024)
def _addresses(slabs: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(slabs, dtype=torch.int64).to(device)


def initialize(rows: TableRows, ids: Tensor | None, first: int | Tensor, count: int | Tensor, std: float) -> None:
    """Fills slots [first, first + count); slot first + i is that of ids[i], or of its own number where ids is None.

    first and count may be int64 tensors of one number on the device, with ids as long as count can be: nothing is read back."""
    device, (tile, columns) = rows.weights[0].device, tile_of(rows.dim)
    if isinstance(count, int):
        most = count
    else:
        assert ids is not None, "a count on the device comes with ids"
        most = ids.numel()
    number = lambda x: torch.full((1,), x, dtype=torch.int64, device=device) if isinstance(x, int) else x  # noqa: E731
    addresses = _addresses(tuple(slab.data_ptr() for slab in rows.weights), device)
    _initialize[min(PROGRAMS, triton.cdiv(most, tile)), triton.cdiv(rows.dim, columns)](
        addresses,
        addresses if ids is None else ids.contiguous(),
        number(first),
        number(count),
        rows.slab_log2,
        signed(rows.key),
        2 * math.sqrt(3) * std,
        DIM=rows.dim,
        DTYPE=DTYPES[rows.dtype],
        SLABS=rows.slab_log2 >= 0,
        OWN_NUMBER=ids is None,
        ROWS=tile,
        COLUMNS=columns,
    )
