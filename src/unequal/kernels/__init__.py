"""Kernels behind one contract: `reference` (torch, short, obviously right), `cpu` (C++). A backend is a module with

    lookup(request, pooled, sequences)         fills the outputs; gives the first wrong position or -1
    update(request, pooled, sequences, ...)    sums gradients per row and applies the optimizer, in place
    initialize(rows, ids, first, count, std)   fresh rows
    round_rows(values, slots, dtype, key)      stochastic rounding
    unique(ids)                                distinct ids, inverse, counts
    HashDirectory(...)                         id → slot for unbounded ids
"""

import os
from types import ModuleType

import torch

from ..errors import UserError


def backend(device: torch.device | str = "cpu") -> ModuleType:
    """The kernels for a device. UNEQUAL_KERNELS=reference asks for the reference ones."""
    device = torch.device(device)
    from . import reference

    if os.environ.get("UNEQUAL_KERNELS") == "reference":
        return reference
    if device.type == "cpu":
        from . import cpu, native

        return cpu if native.library() is not None else reference
    raise UserError(f"tables on device '{device}': expected 'cpu'; move the module to the CPU")
