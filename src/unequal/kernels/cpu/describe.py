"""The descriptors that the C++ kernels take (csrc/common.h), filled in from requests and tables."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..native import library
from ..request import MASK, POOLINGS, Records, Request, TableRows

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
Record = npt.NDArray[Any]
# Mirrors of the structs in csrc/common.h.
_TABLE = np.dtype(
    [
        (name, np.int64)
        for name in ("weights", "state0", "state1", "slab_log2", "rows", "dim", "dtype", "optimizer", "strict")
    ]
    + [(name, np.float64) for name in ("lr", "decay", "beta1", "beta2", "eps", "trust")]
    + [("key", np.uint64)]
    + [
        (name, np.int64)
        for name in ("chunk", "class_bits", "class_slabs", "records", "utilities", "utility_kind", "masked")
    ]
    + [("gain", np.float64)]
    + [(name, np.int64) for name in ("correction1", "correction2", "rounding_key")]
)
_COUNTING = (
    *("uq_lookup", "uq_hash_find", "uq_hash_insert", "uq_hash_entries", "uq_unique", "uq_unique_tables"),
    *("uq_offsets", "uq_narrow_find", "uq_narrow_entries", "uq_narrow_moved"),
)
"""functions that give a count of 64 bits"""
_SPEC = np.dtype([(name, np.int64) for name in ("table", "pooling", "place")])


class _Request(ctypes.Structure):
    parts: Record  # what `sequences` points to
    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("index", "size", "ids", "slots", "offsets", "weights", "pooled", "pooled_stride", "sequences")
    ]


def native_library() -> ctypes.CDLL:
    native = library()
    assert native is not None, "the caller asks for this backend only where the library is there"
    if native.uq_lookup.restype is not ctypes.c_int64:
        for name in _COUNTING:
            getattr(native, name).restype = ctypes.c_int64
    return native


def pointer(array: Tensor | Record) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.data_ptr() if isinstance(array, Tensor) else array.ctypes.data)


def thread_count(lookups: int) -> int:
    """Torch's thread count, less where there is too little work to be worth waking them. Results do not depend on it."""
    return max(1, min(torch.get_num_threads(), lookups // 2048))


def describe_table(rows: TableRows) -> Record:
    """The fixed part of a table's descriptor, kept until its slabs change."""
    if rows.cached is None:
        fixed = np.zeros(1, _TABLE)
        if rows.records is None:
            pointers = [np.array([s.data_ptr() for s in slabs], np.uint64) for slabs in (rows.weights, *rows.states)]
        else:
            pointers = [_describe_records(fixed, rows.records)]
        fixed["weights"] = pointers[0].ctypes.data
        for name, pointer in zip(("state0", "state1"), pointers[1:]):
            fixed[name] = pointer.ctypes.data
        slab_log2 = rows.slab_log2 if rows.records is None else rows.records.slab_log2
        fixed["slab_log2"], fixed["dim"], fixed["dtype"] = slab_log2, rows.dim, DTYPES[rows.dtype]
        fixed["strict"], fixed["key"], fixed["lr"] = rows.strict, rows.key & MASK, rows.optimizer.lr
        fixed["optimizer"], fixed["decay"] = rows.optimizer.code, rows.optimizer.weight_decay
        fixed["beta1"], fixed["beta2"], fixed["eps"], fixed["trust"] = rows.optimizer.hyperparameters()
        rows.cached = (fixed, pointers)  # the pointer arrays must live as long as the record
    record: Record = rows.cached[0]
    record["rows"] = rows.rows
    return record


def _describe_records(fixed: Record, records: Records) -> Record:
    """Fills in what tables with rows of different width have, and gives the pointers of all slabs."""
    most = max(len(slabs) for slabs in records.slabs)
    pointers = np.zeros((len(records.slabs), most), np.uint64)
    for k, slabs in enumerate(records.slabs):
        pointers[k, : len(slabs)] = [slab.data_ptr() for slab in slabs]
    fixed["chunk"], fixed["class_bits"], fixed["class_slabs"] = records.chunk, records.class_bits, most
    fixed["records"], fixed["utilities"] = records.layout.ctypes.data, records.utilities
    fixed["utility_kind"], fixed["masked"] = records.kind, records.masked
    return pointers


@dataclass(slots=True)
class _Fixed:
    """What a module's descriptors have in common from step to step. Kept with its features."""

    specs: Record
    tables: Record
    sources: list[Any]
    """the tables' own descriptors that `tables` was made of"""
    growing: list[int]
    """the tables whose number of rows may change"""

    def arguments(self) -> tuple[ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64]:
        tables, specs = self.tables, self.specs
        return pointer(tables), ctypes.c_int64(len(tables)), pointer(specs), ctypes.c_int64(len(specs))


def fix(request: Request) -> _Fixed:
    features, tables = request.features, request.tables
    fixed: _Fixed | None = features.cached
    if (
        fixed is None
        or len(fixed.sources) != len(tables)
        or any(rows.cached is not source for rows, source in zip(tables, fixed.sources))
    ):
        fixed = features.cached = _Fixed(
            np.array([(spec.table, POOLINGS[spec.pooling], spec.place) for spec in features], _SPEC),
            np.concatenate([describe_table(rows) for rows in tables]),
            [rows.cached for rows in tables],
            [t for t, rows in enumerate(tables) if not rows.strict],
        )
    for t in fixed.growing:
        fixed.tables["rows"][t] = tables[t].rows
        records = tables[t].records
        if records is not None:
            fixed.tables["gain"][t] = records.gain
    return fixed


def describe(request: Request, pooled: Tensor | None, sequences: Sequence[Tensor | None]) -> _Request:
    parts = [(0, 0) if part is None else (part.data_ptr(), part.stride(0)) for part in sequences]
    described = _Request(
        index=request.index.ctypes.data,
        size=request.size,
        ids=request.ids.data_ptr(),
        slots=0 if request.slots is None else request.slots.data_ptr(),
        offsets=request.offsets.data_ptr(),
        weights=0 if request.weights is None else request.weights.data_ptr(),
        pooled=0 if pooled is None else pooled.data_ptr(),
        pooled_stride=0 if pooled is None else pooled.stride(0),
    )
    if parts:
        described.parts = np.array(parts, np.int64)
        described.sequences = described.parts.ctypes.data
    return described


def rows_contiguous(part: Tensor | None) -> Tensor | None:
    """As the kernels read gradients: float32, the values of a row side by side."""
    if part is None:
        return None
    if part.dtype != torch.float32:
        part = part.float()
    return part if part.stride(-1) == 1 else part.contiguous()
