"""Fresh rows: uniform with a given standard deviation, drawn from (table key, id, column) alone."""

import math

import torch
from torch import Tensor

from ..request import GOLDEN, TableRows
from .rows import keys_of, mix64, shift_right, signed, write


def initialize(rows: TableRows, ids: Tensor | None, first: int, count: int, std: float) -> None:
    """Fills slots [first, first + count); slot first + i is that of ids[i], or of its own number where ids is None."""
    numbers = torch.arange(first, first + count) if ids is None else ids
    columns = torch.arange(rows.dim)
    words = mix64(keys_of(rows.key, numbers)[:, None] + (columns // 2 + 1) * signed(GOLDEN))
    bits = torch.where(columns % 2 == 1, shift_right(words, 8), shift_right(words, 40)) & 0xFFFFFF
    # The width as one float32 number, so that every backend multiplies by the same.
    width = torch.tensor(2 * math.sqrt(3) * std, dtype=torch.float32)
    values = (bits.float() * 2.0**-24 - 0.5) * width
    write(rows, rows.weights, torch.arange(first, first + count), values.to(rows.dtype))
