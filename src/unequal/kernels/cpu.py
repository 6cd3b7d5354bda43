"""The C++ kernels (csrc/) behind the backend contract: fills in their descriptors and calls them on torch's thread count."""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .native import library
from .request import MASK, POOLINGS, WAYS, Records, Request, TableRows

_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
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
    *("uq_lookup", "uq_hash_find", "uq_hash_insert", "uq_hash_entries", "uq_unique", "uq_offsets"),
    *("uq_narrow_find", "uq_narrow_entries"),
)
"""functions that give a count of 64 bits"""
_SPEC = np.dtype([(name, np.int64) for name in ("table", "pooling", "place")])


class _Request(ctypes.Structure):
    parts: Record  # what `sequences` points to
    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("index", "size", "ids", "slots", "offsets", "weights", "pooled", "pooled_stride", "sequences")
    ]


def _library() -> ctypes.CDLL:
    native = library()
    assert native is not None, "the caller asks for this backend only where the library is there"
    if native.uq_lookup.restype is not ctypes.c_int64:
        for name in _COUNTING:
            getattr(native, name).restype = ctypes.c_int64
    return native


def _pointer(array: Tensor | Record) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.data_ptr() if isinstance(array, Tensor) else array.ctypes.data)


def _threads(lookups: int) -> int:
    """Torch's thread count, less where there is too little work to be worth waking them. Results do not depend on it."""
    return max(1, min(torch.get_num_threads(), lookups // 2048))


def _describe_table(rows: TableRows) -> Record:
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
        fixed["slab_log2"], fixed["dim"], fixed["dtype"] = slab_log2, rows.dim, _DTYPES[rows.dtype]
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
        return _pointer(tables), ctypes.c_int64(len(tables)), _pointer(specs), ctypes.c_int64(len(specs))


def _fix(request: Request) -> _Fixed:
    features, tables = request.features, request.tables
    fixed: _Fixed | None = features.cached
    if (
        fixed is None
        or len(fixed.sources) != len(tables)
        or any(rows.cached is not source for rows, source in zip(tables, fixed.sources))
    ):
        fixed = features.cached = _Fixed(
            np.array([(spec.table, POOLINGS[spec.pooling], spec.place) for spec in features], _SPEC),
            np.concatenate([_describe_table(rows) for rows in tables]),
            [rows.cached for rows in tables],
            [t for t, rows in enumerate(tables) if not rows.strict],
        )
    for t in fixed.growing:
        fixed.tables["rows"][t] = tables[t].rows
        records = tables[t].records
        if records is not None:
            fixed.tables["gain"][t] = records.gain
    return fixed


def _describe(request: Request, pooled: Tensor | None, sequences: Sequence[Tensor | None]) -> _Request:
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


def _rows_contiguous(part: Tensor | None) -> Tensor | None:
    """As the kernels read gradients: float32, the values of a row side by side."""
    if part is None:
        return None
    if part.dtype != torch.float32:
        part = part.float()
    return part if part.stride(-1) == 1 else part.contiguous()


def lookup(request: Request, pooled: Tensor | None, sequences: Sequence[Tensor]) -> int:
    return int(
        _library().uq_lookup(
            *_fix(request).arguments(),
            ctypes.byref(_describe(request, pooled, sequences)),
            _threads(request.ids.numel()),
        )
    )


def update(
    request: Request, pooled: Tensor | None, sequences: Sequence[Tensor | None], *, lr_factor: float, step: int
) -> None:
    pooled, sequences = _rows_contiguous(pooled), [_rows_contiguous(part) for part in sequences]
    failed = _library().uq_update(
        *_fix(request).arguments(),
        ctypes.byref(_describe(request, pooled, sequences)),
        ctypes.c_double(lr_factor),
        ctypes.c_int64(step),
        _threads(request.ids.numel()),
    )
    if failed:
        raise MemoryError("no memory for the update's buffers; the tables are unchanged")


def initialize(rows: TableRows, ids: Tensor | None, first: int, count: int, std: float) -> None:
    record = _describe_table(rows)
    _library().uq_initialize(
        _pointer(record),
        None if ids is None else _pointer(ids),
        ctypes.c_int64(first),
        ctypes.c_int64(count),
        ctypes.c_uint64(rows.key),
        ctypes.c_float(2 * math.sqrt(3) * std),
        _threads(count),
    )


def round_rows(values: Tensor, slots: Tensor, dtype: torch.dtype, key: int) -> Tensor:
    values, slots = values.contiguous(), slots.contiguous()
    out = torch.empty(values.shape, dtype=dtype)
    _library().uq_round(
        _pointer(values),
        _pointer(out),
        _pointer(slots),
        ctypes.c_int64(values.shape[0]),
        ctypes.c_int64(values.shape[1]),
        ctypes.c_int64(_DTYPES[dtype]),
        ctypes.c_uint64(key),
    )
    return out


def offsets(lengths: Tensor) -> tuple[Tensor, int]:
    if lengths.dtype not in (torch.int32, torch.int64):
        lengths = lengths.long()
    lengths = lengths.contiguous()
    starts = torch.empty(lengths.numel() + 1, dtype=torch.int64)
    count, width = ctypes.c_int64(lengths.numel()), ctypes.c_int64(lengths.element_size())
    return starts, int(_library().uq_offsets(_pointer(lengths), count, width, _pointer(starts)))


def unique(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    ids = ids.contiguous()
    distinct, inverse, counts = torch.empty_like(ids), torch.empty_like(ids), torch.empty_like(ids)
    found = int(
        _library().uq_unique(
            _pointer(ids),
            ctypes.c_int64(ids.numel()),
            _pointer(distinct),
            _pointer(inverse),
            _pointer(counts),
            _threads(ids.numel()),
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
    failed = _library().uq_route(
        _pointer(ids),
        ctypes.c_int64(ids.numel()),
        None if directory is None else _pointer(directory._table),
        ctypes.c_int64(0) if directory is None else directory._capacity,
        (ctypes.c_int64 * len(cuts))(*cuts),
        ctypes.c_int64(len(cuts)),
        ctypes.c_int64(parts),
        ctypes.c_int64(divisor),
        ctypes.c_int64(places),
        int(hashed),
        _pointer(order),
        _pointer(sizes),
        _pointer(numbers),
    )
    if failed:
        raise MemoryError(f"no memory to route {ids.numel():,} ids")
    return order, sizes, numbers


def deal_bags(ids: Tensor, lengths: Tensor, parts: int, hashed: bool) -> tuple[Tensor, Tensor, Tensor]:
    ids, lengths = ids.contiguous(), lengths.to(torch.int64).contiguous()
    dealt, sizes = torch.empty_like(ids), torch.empty(parts, dtype=torch.int64)
    shares = torch.empty(parts, lengths.numel(), dtype=torch.int64)
    _library().uq_deal_bags(
        _pointer(ids),
        _pointer(lengths),
        ctypes.c_int64(lengths.numel()),
        ctypes.c_int64(parts),
        int(hashed),
        _pointer(dealt),
        _pointer(shares),
        _pointer(sizes),
    )
    return dealt, shares, sizes


def pair_dots(x: Tensor, products: Tensor) -> None:
    x, (samples, features, dim) = x.contiguous(), x.shape
    failed = _library().uq_pair_dots(
        _pointer(x),
        ctypes.c_int64(samples),
        ctypes.c_int64(features),
        ctypes.c_int64(dim),
        _pointer(products),
        _threads(samples * features),
    )
    if failed:
        raise MemoryError(f"no memory to multiply {features:,} vectors of {dim:,}")


def pair_dots_gradient(x: Tensor, gradient: Tensor, out: Tensor) -> None:
    x, (samples, features, dim) = x.contiguous(), x.shape
    gradient = gradient if gradient.stride(1) == 1 else gradient.contiguous()
    failed = _library().uq_pair_dots_gradient(
        _pointer(x),
        _pointer(gradient),
        ctypes.c_int64(gradient.stride(0)),
        ctypes.c_int64(samples),
        ctypes.c_int64(features),
        ctypes.c_int64(dim),
        _pointer(out),
        _threads(samples * features),
    )
    if failed:
        raise MemoryError(f"no memory to multiply {features:,} vectors of {dim:,}")


class HashDirectory:
    """Id → slot by open addressing; 12 bytes an entry, at most 3/4 full."""

    def __init__(self, admit_after: int = 1, first_slot: int = 0) -> None:
        self.admit_after = admit_after
        self.next_slot = first_slot
        self._used = 0
        self._table = self._empty(64)

    @staticmethod
    def _empty(capacity: int) -> Tensor:
        return torch.full((capacity, 3), -1, dtype=torch.int32)

    @property
    def _capacity(self) -> ctypes.c_int64:
        return ctypes.c_int64(self._table.shape[0])

    def _make_room(self, entries: int) -> None:
        capacity = self._table.shape[0]
        while entries * 4 > capacity * 3:
            capacity *= 2
        if capacity > self._table.shape[0]:
            larger = self._empty(capacity)
            _library().uq_hash_rehash(_pointer(self._table), self._capacity, _pointer(larger), ctypes.c_int64(capacity))
            self._table = larger

    def find(self, ids: Tensor, otherwise: int = -1) -> Tensor:
        return self._find(ids.contiguous(), otherwise)[0]

    def _find(self, ids: Tensor, otherwise: int) -> tuple[Tensor, int]:
        slots = torch.empty_like(ids)
        missing = _library().uq_hash_find(
            _pointer(self._table),
            self._capacity,
            _pointer(ids),
            ctypes.c_int64(ids.numel()),
            ctypes.c_int64(otherwise),
            _pointer(slots),
            _threads(ids.numel()),
        )
        return slots, int(missing)

    def insert(self, ids: Tensor, rare: int = -1) -> tuple[Tensor, Tensor]:
        ids = ids.contiguous()
        slots, missing = self._find(ids, -1)
        if missing == 0:
            return slots, ids[:0]
        if (self._used + missing) * 4 > self._table.shape[0] * 3:  # repeated ids need no room: count what is really new
            self._make_room(self._used + unique(ids[slots < 0])[0].numel())
        admitted, used = torch.empty(missing, dtype=torch.int64), ctypes.c_int64(self._used)
        count = int(
            _library().uq_hash_insert(
                _pointer(self._table),
                self._capacity,
                _pointer(ids),
                ctypes.c_int64(ids.numel()),
                ctypes.c_int64(self.next_slot),
                ctypes.c_int64(self.admit_after),
                ctypes.c_int64(rare),
                _pointer(slots),
                _pointer(admitted),
                ctypes.byref(used),
            )
        )
        self._used, self.next_slot = used.value, self.next_slot + count
        return slots, admitted[:count]

    @property
    def known(self) -> int:
        return self._used

    def entries(self) -> tuple[Tensor, Tensor]:
        ids = torch.empty(self._used, dtype=torch.int64)
        slots = torch.empty(self._used, dtype=torch.int64)
        _library().uq_hash_entries(_pointer(self._table), self._capacity, _pointer(ids), _pointer(slots))
        live = slots >= 0
        by_slot, by_id = slots[live].argsort(), ids[~live].argsort()
        return torch.cat([ids[live][by_slot], ids[~live][by_id]]), torch.cat(
            [slots[live][by_slot], slots[~live][by_id]]
        )

    def restore(self, ids: Tensor, slots: Tensor, next_slot: int) -> None:
        self._table, self._used, self.next_slot = self._empty(64), ids.numel(), next_slot
        self._make_room(self._used)
        ids, slots = ids.contiguous(), slots.contiguous()
        _library().uq_hash_put(
            _pointer(self._table), self._capacity, _pointer(ids), _pointer(slots), ctypes.c_int64(ids.numel())
        )

    @property
    def bytes(self) -> int:
        return self._table.numel() * 4


class NarrowDirectory:
    """Id → slot for live rows alone. Where ids are below a bound that makes it worth while: an array of slots. Otherwise by open
    addressing: 8 or 12 bytes an entry, so many that 3/4 are in use after it was made."""

    ARRAY, SHORT, LONG = 0, 1, 2
    FULL = 0.85
    """share in use at which it grows"""

    def __init__(self, bound: int | None, rows: int = 0) -> None:
        self.bound, self.used = bound, 0
        self._make(rows)

    def _make(self, rows: int) -> None:
        entries = max(64, rows * 4 // 3 + 1)
        size = 8 if self.bound is not None and self.bound <= 2**32 else 12
        if self.bound is not None and self.bound * 4 <= entries * size:
            self.kind, self._capacity, words = self.ARRAY, self.bound, self.bound
        else:
            self.kind, self._capacity, words = (self.SHORT if size == 8 else self.LONG), entries, entries * size // 4
        self._memory = torch.full((words,), -1, dtype=torch.int32)

    def _place(self) -> tuple[ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64]:
        return ctypes.c_int64(self.kind), _pointer(self._memory), ctypes.c_int64(self._capacity)

    def find(self, ids: Tensor) -> Tensor:
        """The slot of every id, -1 where it has none."""
        ids = ids.contiguous()
        slots = torch.empty_like(ids)
        self.find_into(ids, slots)
        return slots

    def find_into(self, ids: Tensor, slots: Tensor) -> int:
        """The same into contiguous memory that is there; gives how many have none."""
        count, threads = ctypes.c_int64(ids.numel()), _threads(ids.numel())
        return int(_library().uq_narrow_find(*self._place(), _pointer(ids), count, _pointer(slots), threads))

    def insert(self, ids: Tensor, slots: Tensor) -> None:
        """Of ids that it does not hold yet."""
        rows = self.used + ids.numel()
        if self.kind != self.ARRAY and rows > self.FULL * self._capacity:
            held = self.entries()
            self._make(rows * 5 // 4)
            self._put(*held)
        self._put(ids, slots)
        self.used = rows

    def _put(self, ids: Tensor, slots: Tensor) -> None:
        ids, slots = ids.contiguous(), slots.contiguous()
        _library().uq_narrow_put(*self._place(), _pointer(ids), _pointer(slots), ctypes.c_int64(ids.numel()))

    def entries(self) -> tuple[Tensor, Tensor]:
        ids, slots = torch.empty(self.used, dtype=torch.int64), torch.empty(self.used, dtype=torch.int64)
        _library().uq_narrow_entries(*self._place(), _pointer(ids), _pointer(slots))
        return ids, slots

    @property
    def bytes(self) -> int:
        return self._memory.nbytes


def bucket_of(ids: Tensor, buckets: int) -> Tensor:
    ids, out = ids.contiguous(), torch.empty_like(ids)
    count = ctypes.c_int64(ids.numel())
    _library().uq_narrow_buckets(_pointer(ids), count, ctypes.c_int64(buckets), _pointer(out))
    return out


def follow(
    keys: Tensor, utilities: Tensor, stamps: Tensor, step: int, class_bits: int, ids: Tensor, slots: Tensor
) -> None:
    failed = _library().uq_narrow_follow(
        _pointer(keys),
        _pointer(utilities),
        _pointer(stamps),
        ctypes.c_int64(keys.numel() // WAYS),
        ctypes.c_int64(utilities.shape[1]),
        ctypes.c_int32(step),
        ctypes.c_int64(class_bits),
        _pointer(ids),
        ctypes.c_int64(ids.numel()),
        _pointer(slots),
    )
    if failed:
        raise MemoryError(f"no memory to follow {ids.numel():,} ids without a row")


def rebuild(
    rows: TableRows, ids: Tensor, old: Tensor, slots: Tensor, masks: Tensor | None, utilities: Tensor | None, std: float
) -> tuple[Tensor, Tensor]:
    assert rows.records is not None
    words = torch.from_numpy(rows.records.layout[:, 5])[slots & ((1 << rows.records.class_bits) - 1)]
    starts = words.cumsum(0) - words
    made = torch.empty(int(words.sum()))
    parts = [part.contiguous() for part in (ids, old, slots)]
    _library().uq_narrow_rebuild(
        _pointer(_describe_table(rows)),
        *(_pointer(part) for part in parts),
        None if masks is None else _pointer(masks),
        None if utilities is None else _pointer(utilities),
        ctypes.c_int64(ids.numel()),
        ctypes.c_float(2 * math.sqrt(3) * std),
        _pointer(made),
        _pointer(starts),
        _threads(ids.numel()),
    )
    return made, starts


def place(rows: TableRows, slots: Tensor, made: Tensor, starts: Tensor) -> None:
    slots = slots.contiguous()
    _library().uq_narrow_place(
        _pointer(_describe_table(rows)),
        _pointer(slots),
        ctypes.c_int64(slots.numel()),
        _pointer(made),
        _pointer(starts),
    )
