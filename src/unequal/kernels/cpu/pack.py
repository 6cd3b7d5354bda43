"""Rows of different width as they travel (csrc/pack.cpp)."""

import ctypes

import numpy as np
import torch
from torch import Tensor

from ..reference.codecs import WIRE_DTYPES
from ..reference.pack import Runs
from ..request import TableRows
from .describe import Record, describe_table, native_library, pointer, thread_count

CODECS = {codec: number for number, codec in enumerate(WIRE_DTYPES)}


def used_chunks(rows: Tensor, runs: Runs) -> Tensor:
    rows, described = rows.contiguous(), _describe(runs)
    masks = torch.empty(int(described[:, 0].sum()), dtype=torch.int64)
    native_library().uq_used_chunks(pointer(rows), pointer(described), ctypes.c_int64(len(runs)), pointer(masks))
    return masks


def packed_sizes(live: Tensor, runs: Runs, codec: str, norms: bool) -> list[int]:
    live, described, sizes = live.contiguous(), _describe(runs), np.zeros(len(runs), np.int64)
    native_library().uq_packed_sizes(*_arguments(live, described, codec, norms), pointer(sizes))
    return [int(size) for size in sizes]


def pack(rows: Tensor, live: Tensor, runs: Runs, codec: str, norms: bool) -> Tensor:
    rows, live, described = rows.contiguous(), live.contiguous(), _describe(runs)
    message = torch.empty(sum(packed_sizes(live, runs, codec, norms)), dtype=WIRE_DTYPES[codec])
    arguments = _arguments(live, described, codec, norms)
    if native_library().uq_pack(pointer(rows), *arguments, pointer(message), thread_count(live.numel())):
        raise MemoryError(f"no memory to pack {live.numel():,} rows")
    return message


def unpack(wire: Tensor, live: Tensor, runs: Runs, codec: str, norms: bool, out: Tensor) -> None:
    wire, live, described = wire.contiguous(), live.contiguous(), _describe(runs)
    assert out.is_contiguous()
    arguments = _arguments(live, described, codec, norms)
    if native_library().uq_unpack(pointer(wire), *arguments, pointer(out), thread_count(live.numel())):
        raise MemoryError(f"no memory to unpack {live.numel():,} rows")


def write_rows(rows: TableRows, slots: Tensor, values: Tensor, masks: Tensor | None) -> None:
    slots, values = slots.contiguous(), values.contiguous()
    masks = None if masks is None else masks.contiguous()
    native_library().uq_write_rows(
        pointer(describe_table(rows)),
        pointer(slots),
        ctypes.c_int64(slots.numel()),
        pointer(values),
        None if masks is None else pointer(masks),
    )


def _describe(runs: Runs) -> Record:
    return np.array(runs, np.int64).reshape(-1, 3)


def _arguments(
    live: Tensor, runs: Record, codec: str, norms: bool
) -> tuple[ctypes.c_void_p | None, ctypes.c_void_p | None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, int]:
    masked = live.dtype == torch.int64
    numbers, masks = (None, pointer(live)) if masked else (pointer(live), None)
    return numbers, masks, pointer(runs), ctypes.c_int64(len(runs)), ctypes.c_int64(CODECS[codec]), int(norms)
