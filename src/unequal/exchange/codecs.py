"""How rows look on the wire: float32, float16, bfloat16, or 8-bit integers with a scale per row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..plan.placement import Codec

Runs = Sequence[tuple[int, int]]
"""(rows, width) of blocks that lie one after the other in one flat tensor"""
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.uint8}
SCALE_BYTES = 4
Count = TypeVar("Count", int, npt.NDArray[np.int64])


def wire_size(rows: Count, width: Count, codec: Codec) -> Count:
    """Elements of the wire's dtype that a block takes, or blocks each."""
    return rows * (width + SCALE_BYTES if codec == "int8" else width)


def encode(values: Tensor, runs: Runs, codec: Codec) -> Tensor:
    """Blocks of float32 rows, one after the other, as they travel."""
    if codec == "fp32":
        return values
    if codec == "fp16":  # what float16 cannot hold becomes its largest number, not infinity
        return values.clamp(-65504.0, 65504.0).to(torch.float16)
    if codec == "bf16":
        return values.to(torch.bfloat16)
    blocks = [_encode_rows(block.view(-1, width)) for block, width in _blocks(values, runs, 0) if block.numel()]
    return torch.cat(blocks) if blocks else values.new_empty(0, dtype=torch.uint8)


def decode(wire: Tensor, runs: Runs, codec: Codec) -> Tensor:
    """The float32 values of what `encode` gave."""
    if codec == "fp32":
        return wire
    if codec != "int8":
        return wire.float()
    blocks = [_decode_rows(block.view(-1, width + SCALE_BYTES)) for block, width in _blocks(wire, runs, SCALE_BYTES)]
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


def _encode_rows(rows: Tensor) -> Tensor:
    scale = rows.abs().amax(1, keepdim=True) / 127
    steps = torch.where(scale > 0, rows / scale, 0.0).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([scale.view(torch.uint8), steps.view(torch.uint8)], 1).flatten()


def _decode_rows(wire: Tensor) -> Tensor:
    scale = wire[:, :SCALE_BYTES].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return wire[:, SCALE_BYTES:].contiguous().view(torch.int8).float() * scale
