"""Kernels behind one contract: `reference` (torch, short, obviously right), `cpu` (C++). A backend is a module with

lookup(request, pooled, sequences)         fills the outputs; gives the first wrong position or -1
update(request, pooled, sequences, ...)    sums gradients per row and applies the optimizer, in place
initialize(rows, ids, first, count, std)   fresh rows
round_rows(values, slots, dtype, key)      stochastic rounding
unique(ids)                                distinct ids, inverse, counts
HashDirectory(...)                         id → slot for unbounded ids
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any

import torch

from ..errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """One set of kernels."""

    name: str
    lookup: Callable[..., int]
    update: Callable[..., None]
    initialize: Callable[..., None]
    round_rows: Callable[..., torch.Tensor]
    unique: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    HashDirectory: Callable[..., Any]


def _from_module(name: str, module: ModuleType) -> Backend:
    return Backend(
        name=name, **{part.name: getattr(module, part.name) for part in fields(Backend) if part.name != "name"}
    )


def backend(device: torch.device | str = "cpu") -> Backend:
    """The kernels for a device. UNEQUAL_KERNELS=reference asks for the reference ones."""
    device = torch.device(device)
    if device.type != "cpu":
        raise UserError(f"tables on device '{device}': expected 'cpu'; move the module to the CPU")
    from . import native, reference

    if os.environ.get("UNEQUAL_KERNELS") == "reference" or native.library() is None:
        return _from_module("reference", reference)
    from . import cpu

    return _from_module("cpu", cpu)
