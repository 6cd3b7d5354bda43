"""How a row looks on the wire: float32, float16, bfloat16, or 8-bit integers behind a scale of 4 bytes."""

import torch
from torch import Tensor

WIRE_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.uint8}
SCALE_BYTES = 4
LARGEST_HALF = 65504.0


def encode_rows(rows: Tensor, codec: str) -> Tensor:
    """[rows, width] of float32 as elements of the wire's dtype."""
    if codec == "int8":
        scale = rows.abs().amax(1, keepdim=True)
        scale /= torch.full_like(scale, 127)  # by a number a GPU would multiply with the inverse, which is not the same
        steps = torch.where(scale > 0, rows / scale, 0.0).round().clamp(-127, 127).to(torch.int8)
        return torch.cat([scale.view(torch.uint8), steps.view(torch.uint8)], 1)
    if codec == "fp16":  # what float16 cannot hold becomes its largest number, not infinity
        rows = rows.clamp(-LARGEST_HALF, LARGEST_HALF)
    return rows.to(WIRE_DTYPES[codec])


def decode_rows(wire: Tensor, codec: str) -> Tensor:
    """The float32 values of what `encode_rows` gave."""
    if codec != "int8":
        return wire.float()
    scale = wire[:, :SCALE_BYTES].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return wire[:, SCALE_BYTES:].contiguous().view(torch.int8).float() * scale
