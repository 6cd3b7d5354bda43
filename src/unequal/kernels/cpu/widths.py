"""How wide rows will be at a threshold, and what that comes to (csrc/narrow_widths.cpp)."""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .describe import native_library, pointer, thread_count


def _between(
    utilities: Tensor, old: Tensor, ends: Sequence[int], grow: Tensor, shrink: Tensor, out: Tensor | None
) -> list[int]:
    utilities, old, grow, shrink = (part.contiguous() for part in (utilities, old, grow, shrink))
    sums, last = np.empty(len(ends), np.int64), np.array(ends, np.int64)
    native_library().uq_narrow_between(
        pointer(utilities),
        pointer(old),
        pointer(last),
        ctypes.c_int64(len(ends)),
        pointer(grow),
        pointer(shrink),
        ctypes.c_int64(grow.shape[1]),
        pointer(sums),
        None if out is None else pointer(out),
        thread_count(len(old)),
    )
    found: list[int] = sums.tolist()
    return found


def widths_between(utilities: Tensor, old: Tensor, ends: Sequence[int], grow: Tensor, shrink: Tensor) -> Tensor:
    out = torch.empty_like(old)
    _between(utilities, old, ends, grow, shrink, out)
    return out


def chunks_between(utilities: Tensor, old: Tensor, ends: Sequence[int], grow: Tensor, shrink: Tensor) -> list[int]:
    return _between(utilities, old, ends, grow, shrink, None)


def tally_widths(old: Tensor, chunks: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    out = torch.empty(2 + classes + 1, dtype=torch.int64)
    native_library().uq_narrow_tally(
        pointer(old), pointer(chunks), ctypes.c_int64(len(old)), ctypes.c_int64(classes + 1), pointer(out)
    )
    return out[:2], out[2:]


def class_sums(chunks: Tensor, worth: Tensor, classes: int) -> Tensor:
    out = torch.empty(classes + 1, dtype=torch.float64)
    native_library().uq_narrow_class_sums(
        pointer(chunks),
        pointer(worth),
        ctypes.c_int64(worth.stride(0)),
        ctypes.c_int64(len(chunks)),
        ctypes.c_int64(classes + 1),
        pointer(out),
    )
    return out[1:]
