# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""What values save, of lines of a lookup's output, in one launch: as tensors it is a dozen, and each takes the host longer than
the device."""

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import alignments, launch, power_of_two

TILE = 8192
"""values that a program, of 16 warps, holds"""
COMPILED: dict[Hashable, Any] = {}
"""see launch"""
PLACES: dict[Hashable, Tensor] = {}
"""on each device, by the dims of an output's features: the first column of each feature, and its dim"""


@triton.jit
def finite(number):
    return tl.where(tl.abs(number) < float("inf"), number, 0.0)  # what is not a number is not below it either


@triton.jit(do_not_specialize=["columns", "stride", "count", "features", "factor", "square_factor"])
def add_products(
    values, gradient, places, sums, columns, stride, count, features, factor, square_factor, LINES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A program adds up one feature, its lines in order: in float32 those that are so many lines apart, then all of them in
    float64."""
    f = tl.program_id(0)
    first, dim = tl.load(places + f * 2), tl.load(places + f * 2 + 1)
    column = tl.arange(0, BLOCK)
    added = tl.zeros((LINES, BLOCK), tl.float32)
    squares = tl.zeros((LINES, BLOCK), tl.float32)
    wholes = tl.zeros((LINES,), tl.float32)
    whole_squares = tl.zeros((LINES,), tl.float32)
    for begin in range(0, count, LINES):
        line = (begin + tl.arange(0, LINES)).to(tl.int64)[:, None]
        here = (line < count) & (column < dim)[None, :]
        own = tl.load(values + line * columns + first + column[None, :], mask=here, other=0.0).to(tl.float32)
        upstream = tl.load(gradient + line * stride + first + column[None, :], mask=here, other=0.0).to(tl.float32)
        products = own * upstream
        added += products
        squares += products * products
        of_lines = tl.sum(products, 1)
        wholes += of_lines
        whole_squares += of_lines * of_lines
    all_added, all_squares = tl.sum(added.to(tl.float64), 0), tl.sum(squares.to(tl.float64), 0)
    whole, whole_square = tl.sum(wholes.to(tl.float64), 0), tl.sum(whole_squares.to(tl.float64), 0)
    to, to_squares = sums + f, sums + features + columns + f
    tl.store(to, tl.load(to) + finite(whole * factor))
    tl.store(to_squares, tl.load(to_squares) + finite(whole_square * square_factor))
    to, to_squares = sums + features + first + column, sums + columns + features * 2 + first + column
    tl.store(to, tl.load(to, mask=column < dim) + finite(all_added * factor), mask=column < dim)
    tl.store(
        to_squares, tl.load(to_squares, mask=column < dim) + finite(all_squares * square_factor), mask=column < dim
    )


def count_savings(
    values: Tensor, gradient: Tensor, dims: Sequence[int], factor: float, square_factor: float, sums: Tensor
) -> None:
    """See csrc/savings.cpp."""
    values = values.contiguous()
    gradient = gradient if gradient.stride(1) == 1 else gradient.contiguous()
    known = (tuple(dims), values.device)
    places = PLACES.get(known)
    if places is None:
        firsts = np.cumsum([0, *dims[:-1]])
        places = PLACES[known] = torch.tensor(np.stack([firsts, dims], 1)).to(values.device)
    block = power_of_two(max(dims))
    lines, columns = values.shape
    launch(
        COMPILED, (block, values.dtype, gradient.dtype, *alignments(values, gradient), values.device), add_products,
        len(dims),
        (values, gradient, places, sums, columns, gradient.stride(0), lines, len(dims), factor, square_factor),
        (max(1, TILE // block), block), warps=16,
    )  # fmt: skip
