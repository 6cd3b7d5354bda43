# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Stochastic rounding to float16 and bfloat16: up or down in proportion to the distance, decided by (seed, step, row)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .random import row_key, signed, word

TILE = 4096


@triton.jit
def random_bits(row_keys, columns):
    """16 random bits for every value: row_keys [rows, 1], columns [1, columns]; one word serves four neighbouring columns.

    By shifts alone: the compiler then sees that the four columns of a thread share their word."""
    columns = columns.to(tl.uint32)
    words = word(row_keys, columns >> 2) >> ((columns & 3) * 16).to(tl.uint64)
    return words.to(tl.uint32) & 0xFFFF


@triton.jit
def round_bfloat(values, random):
    """float32 to bfloat16. Infinity and NaN stay."""
    bits = values.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    special = tl.where(size > 0x7F800000, bits | 0x00400000, bits)
    rounded = tl.where(size >= 0x7F800000, special, bits + random)
    return (rounded >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def round_half(values, random):
    """float32 to float16. Infinity and NaN stay; what is too large saturates."""
    bits = values.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    random = random & 0x1FFF
    # Below 2^-14 the spacing is 2^-24. Larger values are kept out of the conversion: theirs would overflow.
    small = tl.where(size < 0x38800000, size, 0).to(tl.float32, bitcast=True)
    tiny = (small * 16777216.0 + random.to(tl.float32) * 0.0001220703125).to(tl.uint32)
    normal = (size + random) >> 13
    normal = tl.where(normal > 0x23BFF, 0x7BFF, normal - 0x1C000)
    special = tl.where(size > 0x7F800000, 0x7E00, 0x7C00)
    rounded = tl.where(size < 0x38800000, tiny, tl.where(size < 0x7F800000, normal, special))
    return (rounded | ((bits >> 16) & 0x8000)).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def round_to(values, row_keys, columns, dtype: tl.constexpr):
    """float32 values [rows, columns] in that dtype; row_keys [rows, 1] are row_key(the table's key of this step, slots)."""
    if dtype == tl.float16:
        return round_half(values, random_bits(row_keys, columns))
    elif dtype == tl.bfloat16:
        return round_bfloat(values, random_bits(row_keys, columns))
    else:
        return values


@triton.jit(do_not_specialize=["count", "dim", "key"])
def _round_rows(values, out, slots, count, dim, key, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < count)[:, None] & (columns < dim)[None, :]
    row_keys = row_key(key, tl.load(slots + rows, mask=rows < count, other=0))
    places = (rows * dim)[:, None] + columns[None, :]
    tile = tl.load(values + places, mask=inside, other=0.0)
    tl.store(out + places, round_to(tile, row_keys[:, None], columns[None, :], out.dtype.element_ty), mask=inside)


def tile_of(dim: int) -> tuple[int, int]:
    """Rows and columns of the tile of a kernel that goes over whole rows."""
    columns = min(256, triton.next_power_of_2(dim))
    return TILE // columns, columns


def round_rows(values: Tensor, slots: Tensor, dtype: torch.dtype, key: int) -> Tensor:
    """Rows of float32 [n, dim] in the narrower dtype; row i is that of slots[i]."""
    values, slots = values.contiguous(), slots.contiguous()
    count, dim = values.shape
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    rows, columns = tile_of(dim)
    grid = (triton.cdiv(count, rows), triton.cdiv(dim, columns))
    _round_rows[grid](values, out, slots, count, dim, signed(key), ROWS=rows, COLUMNS=columns)
    return out
