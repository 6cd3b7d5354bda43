"""Where lists start."""

import torch
from torch import Tensor


def offsets(lengths: Tensor) -> tuple[Tensor, int]:
    """(int64 offsets, one more than lengths; the smallest length, or 0 where none is negative)."""
    starts = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=starts[1:])
    return starts, min(0, *lengths.tolist()) if lengths.numel() else 0
