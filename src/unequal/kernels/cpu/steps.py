"""Lookup, update and what stands around them in a step: csrc/ called on torch's thread count."""

import ctypes
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..request import Request, TableRows
from .describe import (
    DTYPES,
    describe,
    describe_table,
    fix,
    native_library,
    pointer,
    rows_contiguous,
    thread_count,
)

if TYPE_CHECKING:
    from .hash import HashDirectory


def lookup(request: Request, pooled: Tensor | None, sequences: Sequence[Tensor]) -> int:
    return int(
        native_library().uq_lookup(
            *fix(request).arguments(),
            ctypes.byref(describe(request, pooled, sequences)),
            thread_count(request.ids.numel()),
        )
    )


def update(
    request: Request, pooled: Tensor | None, sequences: Sequence[Tensor | None], *, lr_factor: float, step: int
) -> None:
    pooled, sequences = rows_contiguous(pooled), [rows_contiguous(part) for part in sequences]
    failed = native_library().uq_update(
        *fix(request).arguments(),
        ctypes.byref(describe(request, pooled, sequences)),
        ctypes.c_double(lr_factor),
        ctypes.c_int64(step),
        thread_count(request.ids.numel()),
    )
    if failed:
        raise MemoryError("no memory for the update's buffers; the tables are unchanged")


def initialize(rows: TableRows, ids: Tensor | None, first: int, count: int, std: float) -> None:
    record = describe_table(rows)
    native_library().uq_initialize(
        pointer(record),
        None if ids is None else pointer(ids),
        ctypes.c_int64(first),
        ctypes.c_int64(count),
        ctypes.c_uint64(rows.key),
        ctypes.c_float(2 * math.sqrt(3) * std),
        thread_count(count),
    )


def round_rows(values: Tensor, slots: Tensor, dtype: torch.dtype, key: int) -> Tensor:
    values, slots = values.contiguous(), slots.contiguous()
    out = torch.empty(values.shape, dtype=dtype)
    native_library().uq_round(
        pointer(values),
        pointer(out),
        pointer(slots),
        ctypes.c_int64(values.shape[0]),
        ctypes.c_int64(values.shape[1]),
        ctypes.c_int64(DTYPES[dtype]),
        ctypes.c_uint64(key),
    )
    return out


def offsets(lengths: Tensor) -> tuple[Tensor, int]:
    if lengths.dtype not in (torch.int32, torch.int64):
        lengths = lengths.long()
    lengths = lengths.contiguous()
    starts = torch.empty(lengths.numel() + 1, dtype=torch.int64)
    count, width = ctypes.c_int64(lengths.numel()), ctypes.c_int64(lengths.element_size())
    return starts, int(native_library().uq_offsets(pointer(lengths), count, width, pointer(starts)))


def unique(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    ids = ids.contiguous()
    distinct, inverse, counts = torch.empty_like(ids), torch.empty_like(ids), torch.empty_like(ids)
    found = int(
        native_library().uq_unique(
            pointer(ids),
            ctypes.c_int64(ids.numel()),
            pointer(distinct),
            pointer(inverse),
            pointer(counts),
            thread_count(ids.numel()),
        )
    )
    if found < 0:
        raise MemoryError(f"no memory to make {ids.numel()} ids unique")
    return distinct[:found], inverse, counts[:found]


def route(
    ids: Tensor,
    directory: "HashDirectory | None",
    cuts: Sequence[int],
    parts: int,
    divisor: int,
    places: int,
    hashed: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    ids, order, numbers = ids.contiguous(), torch.empty_like(ids), torch.empty_like(ids)
    sizes = torch.empty(len(cuts) + 1, places, dtype=torch.int64)
    failed = native_library().uq_route(
        pointer(ids),
        ctypes.c_int64(ids.numel()),
        None if directory is None else pointer(directory._table),
        ctypes.c_int64(0) if directory is None else directory._capacity,
        (ctypes.c_int64 * len(cuts))(*cuts),
        ctypes.c_int64(len(cuts)),
        ctypes.c_int64(parts),
        ctypes.c_int64(divisor),
        ctypes.c_int64(places),
        int(hashed),
        pointer(order),
        pointer(sizes),
        pointer(numbers),
    )
    if failed:
        raise MemoryError(f"no memory to route {ids.numel():,} ids")
    return order, sizes, numbers


def deal_bags(ids: Tensor, lengths: Tensor, parts: int, hashed: bool) -> tuple[Tensor, Tensor, Tensor]:
    ids, lengths = ids.contiguous(), lengths.to(torch.int64).contiguous()
    dealt, sizes = torch.empty_like(ids), torch.empty(parts, dtype=torch.int64)
    shares = torch.empty(parts, lengths.numel(), dtype=torch.int64)
    native_library().uq_deal_bags(
        pointer(ids),
        pointer(lengths),
        ctypes.c_int64(lengths.numel()),
        ctypes.c_int64(parts),
        int(hashed),
        pointer(dealt),
        pointer(shares),
        pointer(sizes),
    )
    return dealt, shares, sizes


def pair_dots(x: Tensor, products: Tensor) -> None:
    x, (samples, features, dim) = x.contiguous(), x.shape
    failed = native_library().uq_pair_dots(
        pointer(x),
        ctypes.c_int64(samples),
        ctypes.c_int64(features),
        ctypes.c_int64(dim),
        pointer(products),
        thread_count(samples * features),
    )
    if failed:
        raise MemoryError(f"no memory to multiply {features:,} vectors of {dim:,}")


def pair_dots_gradient(x: Tensor, gradient: Tensor, out: Tensor) -> None:
    x, (samples, features, dim) = x.contiguous(), x.shape
    gradient = gradient if gradient.stride(1) == 1 else gradient.contiguous()
    failed = native_library().uq_pair_dots_gradient(
        pointer(x),
        pointer(gradient),
        ctypes.c_int64(gradient.stride(0)),
        ctypes.c_int64(samples),
        ctypes.c_int64(features),
        ctypes.c_int64(dim),
        pointer(out),
        thread_count(samples * features),
    )
    if failed:
        raise MemoryError(f"no memory to multiply {features:,} vectors of {dim:,}")
