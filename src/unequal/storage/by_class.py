"""How many rows have 0, 1, 2 … chunks, and what they are worth together. What is counted stays where the rows are."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels import Backend

PIECE = 1 << 20
"""rows that are counted at a time"""


def counts(chunks: Tensor, classes: int, on_device: bool) -> Tensor:
    """How many rows have none, one, two … of so many chunks. `on_device`: whether it is a device that would be waited for."""
    if not on_device:
        return torch.bincount(chunks, minlength=classes + 1)
    each = torch.arange(classes + 1, dtype=chunks.dtype, device=chunks.device)
    found = torch.zeros_like(each, dtype=torch.int64)
    for part in torch.split(chunks, PIECE):
        found += (part == each[:, None]).sum(1)
    return found


def sums(chunks: Tensor, worth: Tensor, classes: int, kernels: Backend) -> Tensor:
    """[classes] float64: what rows of 1, 2, … chunks are worth, in the same order whatever computes it."""
    if kernels.class_sums is not None:
        return kernels.class_sums(chunks, worth, classes)
    each = torch.arange(classes + 1, dtype=chunks.dtype, device=chunks.device)
    found = torch.zeros(classes + 1, dtype=torch.float64, device=chunks.device)
    for part, own in zip(torch.split(chunks, PIECE), torch.split(worth, PIECE)):
        if kernels.on_device:  # there bincount would add up in any order
            found += torch.where(part == each[:, None], own, 0.0).sum(1, dtype=torch.float64)
        else:
            found += torch.bincount(part, own.double(), minlength=classes + 1)
    return found[1:]
