"""How rows look on the wire: float32, float16, bfloat16, or 8-bit integers with a scale per row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..kernels.reference.codecs import SCALE_BYTES, WIRE_DTYPES, decode_rows, encode_rows
from ..plan.placement import Codec

Runs = Sequence[tuple[int, int]]
"""(rows, width) of blocks that lie one after the other in one flat tensor"""
DTYPES = WIRE_DTYPES
Count = TypeVar("Count", int, npt.NDArray[np.int64])


def wire_size(rows: Count, width: Count, codec: Codec) -> Count:
    """Elements of the wire's dtype that a block takes, or blocks each."""
    return rows * (width + SCALE_BYTES if codec == "int8" else width)


def encode(values: Tensor, runs: Runs, codec: Codec) -> Tensor:
    """Blocks of float32 rows, one after the other, as they travel."""
    if codec == "fp32":
        return values
    if codec != "int8":
        return encode_rows(values, codec)
    blocks = [
        encode_rows(block.view(-1, width), codec).flatten()
        for block, width in _blocks(values, runs, 0)
        if block.numel()
    ]
    return torch.cat(blocks) if blocks else values.new_empty(0, dtype=torch.uint8)


def decode(wire: Tensor, runs: Runs, codec: Codec) -> Tensor:
    """The float32 values of what `encode` gave."""
    if codec == "fp32":
        return wire
    if codec != "int8":
        return wire.float()
    blocks = [
        decode_rows(block.view(-1, width + SCALE_BYTES), codec) for block, width in _blocks(wire, runs, SCALE_BYTES)
    ]
    return torch.cat([block.flatten() for block in blocks]) if blocks else wire.new_empty(0, dtype=torch.float32)


def _blocks(values: Tensor, runs: Runs, extra: int) -> list[tuple[Tensor, int]]:
    """Neighbours of one width are taken together."""
    joined: list[list[int]] = []
    for rows, width in runs:
        if joined and joined[-1][1] == width:
            joined[-1][0] += rows
        elif rows:
            joined.append([rows, width])
    parts = torch.split(values, [rows * (width + extra) for rows, width in joined]) if joined else ()
    return [(part, width) for part, (_, width) in zip(parts, joined)]
