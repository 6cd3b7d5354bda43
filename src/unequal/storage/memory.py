"""Memory for tables and outputs: large pieces lie on 2 MiB pages, and outputs are given out again once nobody holds them."""

import ctypes
import mmap
import sys
import weakref
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

HUGE = 2 << 20
PAGES = 16 << 10
"""bytes from which a piece is worth pages of its own"""
_NUMPY = {torch.float32: np.float32, torch.float16: np.uint16, torch.bfloat16: np.uint16, torch.int64: np.int64}


def _mapping(size: int) -> Any:
    """Zeroed memory straight from the system, on 2 MiB pages where the system has them; starts on such a page."""
    # Private: shared memory, mmap's default, would lie on small pages.
    area = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without transparent huge pages: small pages serve too
            area.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(area, np.uint8)
    start = -whole.ctypes.data % HUGE
    return whole[start : start + size]


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """A zeroed tensor. On the CPU, large ones take resident memory only where they are touched."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = int(np.prod(shape, dtype=np.int64))
    size = count * dtype.itemsize
    if size < 2 * HUGE:
        return torch.zeros(shape, dtype=dtype)
    tensor = torch.from_numpy(_mapping(size).view(_NUMPY[dtype]))
    return tensor.view(dtype).view(shape)


def own_pages(shape: tuple[int, int], device: torch.device | str) -> Tensor:
    """A zeroed float32 tensor whose memory goes back to the system with it: among others in the C library's it would stay."""
    size = shape[0] * shape[1] * 4
    if torch.device(device).type != "cpu" or size < PAGES or size >= 2 * HUGE:
        return zeros(shape, torch.float32, device)
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.from_numpy(np.frombuffer(area, np.float32)).view(shape)


def give_back_freed() -> None:
    """Memory that was freed goes back to the system, where the C library would keep it for later."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library than glibc
            ctypes.CDLL(None).malloc_trim(0)


class OutputPool:
    """Float32 buffers for outputs. A fresh page costs more than what is written to it, so a buffer is used again as soon as
    no tensor refers to it: each is lent as a numpy array, whose end is noticed through a weak reference."""

    SMALL = 1 << 20

    def __init__(self) -> None:
        self._free: list[Any] = []
        self._lent: dict[int, tuple[weakref.ref[Any], Any]] = {}
        self._most_lent = 0

    def take(self, rows: int, columns: int) -> Tensor:
        """An uninitialised [rows, columns]."""
        size = rows * columns * 4
        if size < self.SMALL:
            return torch.empty(rows, columns)
        fitting = [area for area in self._free if size <= area.size <= 2 * size + 2 * HUGE]
        if fitting:
            area = min(fitting, key=lambda candidate: candidate.size)
            self._free = [other for other in self._free if other is not area]
        else:
            # What is kept for outputs of another size makes room: it would stay for ever, and this one be made anew in each step.
            if self._free and len(self._free) + len(self._lent) >= self._most_lent:
                self._free.pop(0)
            # A little more than asked: jagged outputs differ in size from step to step.
            area = _mapping(-(-(size + size // 8) // HUGE) * HUGE)
        view = area[:size].view(np.float32)
        number = id(area)
        self._lent[number] = (weakref.ref(view, partial(self._give_back, number)), area)
        self._most_lent = max(self._most_lent, len(self._lent))
        return torch.from_numpy(view).view(rows, columns)

    def _give_back(self, number: int, _: Any) -> None:
        _, area = self._lent.pop(number)
        if len(self._free) + len(self._lent) < self._most_lent:
            self._free.append(area)

    def __deepcopy__(self, memo: dict[int, Any]) -> "OutputPool":
        return OutputPool()

    def __reduce__(self) -> tuple[type["OutputPool"], tuple[()]]:
        return OutputPool, ()
