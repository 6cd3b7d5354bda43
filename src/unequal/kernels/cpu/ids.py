"""Ids as they travel (csrc/ids.cpp)."""

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..reference.ids import WHOLE
from .describe import native_library, pointer


def narrow_ids(blocks: Sequence[tuple[Tensor, int]], device: torch.device) -> Tensor:
    kept = [(ids.contiguous(), size) for ids, size in blocks]
    described = np.array([(ids.data_ptr(), ids.numel(), size) for ids, size in kept], np.int64).reshape(-1, 3)
    message = torch.empty(int((described[:, 1] * described[:, 2]).sum()), dtype=torch.uint8, device=device)
    native_library().uq_narrow_ids(pointer(described), ctypes.c_int64(len(kept)), pointer(message))
    return message


def widen_ids(message: Tensor, runs: npt.NDArray[np.int64]) -> Tensor:
    if (runs[:, 1] == WHOLE).all():
        return message.view(torch.int64)
    runs = np.ascontiguousarray(runs)
    ids = torch.empty(int(runs[:, 0].sum()), dtype=torch.int64)
    native_library().uq_widen_ids(pointer(message), pointer(runs), ctypes.c_int64(len(runs)), pointer(ids))
    return ids
