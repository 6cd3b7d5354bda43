# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""What several kernels share: which feature or table a program serves, and where a slot's row lies."""

import triton
import triton.language as tl

FIELDS: tl.constexpr = tl.constexpr(8)
SLAB_FIELDS: tl.constexpr = tl.constexpr(5)


@triton.constexpr_function
def rows_in_tile(dim, tile):
    """How many rows of that width a program holds at a time."""
    return max(1, min(32, tile // triton.next_power_of_2(dim)))


@triton.jit
def find_last(first, number, COUNT: tl.constexpr):
    """The last of COUNT ascending entries that is not above the number."""
    entries = tl.load(first + tl.arange(0, COUNT))
    return tl.sum((entries <= number).to(tl.int32), 0) - 1


@triton.jit
def slab_of(slab_log2, slots):
    """Which of a table's slabs holds each slot, and the slot's place there; see TableRows.slab_log2."""
    size = tl.maximum(slab_log2, 0)
    one = tl.full((), 1, tl.int64)
    shifted = slots + (one << size)
    # The exponent of the number as float64 is the place of its highest bit; exact below 2^53.
    top = (shifted.to(tl.float64).to(tl.int64, bitcast=True) >> 52) - 1023
    several = slab_log2 >= 0
    return tl.where(several, top - size, 0), tl.where(several, shifted - (one << top), slots)


@triton.jit
def place_of(addresses, first_slab, slab_log2, slots, SLABS: tl.constexpr):
    """The address of the slab that holds each slot, and the slot's place there."""
    if SLABS:
        slab, place = slab_of(slab_log2, slots)
        return tl.load(addresses + first_slab + slab), place
    else:
        return tl.load(addresses + first_slab), slots


@triton.jit
def values_of(address, place, columns, DIM: tl.constexpr, DTYPE: tl.constexpr):
    """Pointers to the values [slots, columns]. Slabs start on 16-byte borders, which the compiler cannot know."""
    base = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)
    return (base + place * DIM)[:, None] + columns[None, :]


@triton.jit
def write_bags(
    pooled, stride, place, bag, size, sums, lengths, pooling, columns, DIM: tl.constexpr, UNIT: tl.constexpr
):  # fmt: skip
    """Sums of bags, or their means, to where the feature begins in each sample."""
    if pooling == 2:
        sums *= (1.0 / tl.maximum(lengths, 1).to(tl.float32))[:, None]
    # In units, so that the compiler sees that rows start on borders wide stores may start on.
    out = (pooled + (bag.to(tl.int64) * (stride // UNIT) + place // UNIT) * UNIT)[:, None] + columns[None, :]
    written = (bag < size)[:, None] & (columns < DIM)[None, :]
    # The cache is for rows that come again, not for outputs.
    tl.store(out, sums.to(pooled.dtype.element_ty), mask=written, eviction_policy="evict_first")
