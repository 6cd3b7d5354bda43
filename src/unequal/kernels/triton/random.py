# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The counter-based generator on tiles: the same words as kernels/request.py and csrc/common.h make."""

import triton
import triton.language as tl

GOLDEN: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15)


def signed(key: int) -> int:
    """A 64-bit key as int64, so that kernels are compiled for one kind of argument, not for two."""
    return key - 2**64 if key >= 2**63 else key


@triton.jit
def mix64(x):
    """A bijection of uint64 words."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def row_key(key, numbers):
    """One generator key per row: of its id for fresh rows, of its slot for rounding. Integers of any kind; wraps around."""
    return mix64(key.to(tl.uint64) + numbers.to(tl.uint64) * GOLDEN)


@triton.jit
def word(row_keys, numbers):
    """Word of that number, from 0, of each row's sequence."""
    return mix64(row_keys + (numbers.to(tl.uint64) + 1) * GOLDEN)
