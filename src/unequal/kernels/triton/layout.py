# mypy: allow-untyped-calls
"""What the kernels read about tables and features, as small tensors on the device. Made once per module, not per step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from ...errors import UserError
from ...optim import Optimizer
from ..request import POOLINGS, Records, Request, TableRows, capturing
from .launch import power_of_two
from .random import signed
from .rows import rows_in_tile

DTYPES = {
    torch.float32: triton.language.float32,
    torch.float16: triton.language.float16,
    torch.bfloat16: triton.language.bfloat16,
}
TILE = 512
"""values a lookup program holds: 4 rows of 128"""
SMALL_KEYS = 2**31 - 1
"""with fewer rows than this, their numbers are sorted as int32"""
MOST_DIMS = 4
"""row widths that one launch serves; a kernel holds code for each"""


@cache
def rows_per_block(dim: int) -> int:
    return int(rows_in_tile(dim, TILE))


def warps_for(dim: int) -> int:
    """One warp holds a tile in registers; a row wider than the tile takes more."""
    return max(1, power_of_two(dim) // TILE)


@dataclass(frozen=True, slots=True)
class Group:
    """Features or tables that one launch serves: those that share a dtype (and an optimizer), with a few row widths."""

    number: int
    members: tuple[int, ...]
    dims: tuple[int, ...]
    dtype: Any
    optimizer: int
    slabs: bool
    """whether a table among them lies in several slabs"""
    narrow: tuple[int, ...] = ()
    """of tables whose rows differ in width: chunk (0 where it does not matter), masked, utilities of a row, their kind, on what
    borders their records start, in bytes, and how many values come and go together at least"""


def _groups(
    kinds: Sequence[tuple[Any, ...]], dims: Sequence[int], slabs: Sequence[bool], records: Sequence[Records | None]
) -> list[Group]:
    groups: list[Group] = []
    for kind in dict.fromkeys(kinds):
        members = [m for m, other in enumerate(kinds) if other == kind]
        widths = sorted({dims[m] for m in members})
        for start in range(0, len(widths), MOST_DIMS):
            some = tuple(widths[start : start + MOST_DIMS])
            chosen = tuple(m for m in members if dims[m] in some)
            narrow = (*kind[2], *_borders([records[m] for m in chosen])) if kind[2] else ()
            groups.append(
                Group(len(groups), chosen, some, DTYPES[kind[0]], kind[1], any(slabs[m] for m in chosen), narrow)
            )
    return groups


@dataclass(slots=True)
class Layout:
    features: Tensor
    """int64 [features, 8]: table, pooling, place, place in the batch, dim, bags or ids per block, lookup group, 0"""
    tables: Tensor
    """int64 [tables, 8]: first slab, slab_log2, rows, dim, first key, update group, 0, strict. Where rows differ in width: first
    class, not slab, and class_bits in the place of 0"""
    slabs: Tensor
    """int64 [3, slabs]: addresses of weights and states; [1, slabs] where rows differ in width"""
    lookups: list[Group]
    updates: list[Group]
    key_dtype: torch.dtype
    """of the numbers that rows of all tables are sorted by"""
    nowhere: int
    """the number of no row, above all others"""
    columns: int
    widest: int
    has_sequences: bool
    has_factors: bool
    """whether a feature averages, so that its gradients are scaled"""
    padded_features: int
    places: Tensor
    """int64: per feature of the batch which of the module's it is, or -1; padded"""
    batch_features: int
    index: bytes
    device: torch.device
    unit: int
    """all dims and places are multiples of this many values, up to 16 bytes' worth of float32"""
    first_keys: Tensor
    """int64: the number of each table's first row among all; padded with numbers above them"""
    slab_records: Tensor
    """int64 [slabs, 5]: table, first slot, dim, update group, key of the generator. Where rows differ in width: of tables"""
    slab_numbers: Tensor
    """float32 [slabs, 12]: the optimizer's numbers, see optimizers.py. Where rows differ in width: of tables"""
    classes: Tensor | None = None
    """where rows differ in width: int64 [classes, 10], see records.py"""
    first_classes: dict[int, tuple[int, int]] = field(default_factory=dict)
    """there: of each table, by its identity, the first of its classes and how many there are"""
    gains: Tensor | None = None
    """there: float32 [tables], what each one's gain is to that of the leading one; they grow alike until they start afresh"""
    leading: int = 0
    """there: the first table whose rows are followed; the gain of others stays as it is"""
    compiled: dict[Any, Any] = field(default_factory=dict)
    """see launch.py"""
    numbers_seen: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    """see on_device"""
    captured: list[Tensor] = field(default_factory=list)
    """what graphs read again whenever they are replayed"""
    blocks: dict[tuple[int, int], Any] = field(default_factory=dict)
    """(group, batch size) → Blocks, where they are known beforehand"""

    @property
    def kind(self) -> tuple[Any, ...]:
        """What kernels are compiled for, beside what their launches are told apart by."""
        sizes = self.padded_features, len(self.places), len(self.first_keys), self.columns, self.widest, self.unit
        flags = self.has_sequences, self.has_factors, self.classes is None
        return *sizes, *flags, self.key_dtype, self.device, self.lookups, self.updates

    @property
    def record_units(self) -> list[int]:
        """Where rows differ in width: how many values can be read at once from their records, which start on any borders."""
        return [group.narrow[4] // (group.dtype.primitive_bitwidth // 8) for group in self.updates if group.narrow]

    def on_device(self, numbers: tuple[int, ...]) -> Tensor:
        """Numbers of the host on the device, without waiting for it. Addresses come again from step to step, so they are kept."""
        captures = capturing(self.device)
        known = self.numbers_seen.get(numbers)
        if known is None:
            if len(self.numbers_seen) >= 4096:
                self.numbers_seen.clear()
            on_host = torch.tensor(numbers, dtype=torch.int64, pin_memory=self.device.type == "cuda")
            known = self.numbers_seen[numbers] = on_host.to(self.device, non_blocking=True)
            if captures:
                self.captured.append(on_host)
        if captures:
            self.captured.append(known)
        return known


def layout_of(request: Request) -> Layout:
    known = request.features.cached
    if (
        isinstance(known, Layout)
        and known.index == request.index.tobytes()
        and known.batch_features == request.batch_features
        and all(rows.cached is known for rows in request.tables)
    ):
        return known
    made = _make(request)
    if made.classes is not None and isinstance(known, Layout) and known.kind == made.kind:
        made.compiled = known.compiled  # it was only laid out anew
    request.features.cached = made
    for rows in request.tables:
        rows.cached = made
    return made


def _make(request: Request) -> Layout:
    tables, specs, device = request.tables, request.features, request.ids.device
    narrow = tables[0].records is not None
    assert all((rows.records is not None) == narrow for rows in tables), "a module's tables are all narrow, or none is"
    slab_first = np.cumsum([0, *(len(rows.weights) for rows in tables)])
    first_key = np.cumsum([0, *(rows.rows + 1 for rows in tables)])  # one more per table, for ids that it does not hold
    updates = _groups(
        [(rows.dtype, rows.optimizer.code, _narrow_kind(rows.records)) for rows in tables],
        [rows.dim for rows in tables],
        [rows.slab_log2 >= 0 for rows in tables],
        [rows.records for rows in tables],
    )
    lookups = _groups(
        [(tables[spec.table].dtype, *_lookup_kind(tables[spec.table])) for spec in specs],
        [spec.dim for spec in specs],
        [tables[spec.table].slab_log2 >= 0 for spec in specs],
        [tables[spec.table].records for spec in specs],
    )
    group_of_table = {t: group.number for group in updates for t in group.members}
    group_of_feature = {f: group.number for group in lookups for f in group.members}
    feature_records = [
        (spec.table, POOLINGS[spec.pooling], spec.place, int(request.index[f]), spec.dim, rows_per_block(spec.dim),
         group_of_feature[f], 0)
        for f, spec in enumerate(specs)
    ]  # fmt: skip
    table_records = [
        (int(slab_first[t]), rows.slab_log2, rows.rows, rows.dim, int(first_key[t]), group_of_table[t],
         0, int(rows.strict))
        for t, rows in enumerate(tables)
    ]  # fmt: skip
    classes: list[list[int]] = []
    addresses: list[list[int]] = [[]]
    if narrow:
        first_class, classes, addresses[0] = classes_of(tables, [group_of_table[t] for t in range(len(tables))])
        for t, rows in enumerate(tables):
            assert rows.records is not None
            bits = (rows.records.class_bits, 0)
            table_records[t] = (first_class[t], rows.records.slab_log2, *table_records[t][2:6], *bits)
    else:
        addresses = [_addresses(tables, which) for which in range(3)]
    slab_records = [
        (t, 0 if rows.slab_log2 < 0 else (1 << rows.slab_log2) * ((1 << slab) - 1), rows.dim, group_of_table[t],
         signed(rows.key))
        for t, rows in enumerate(tables)
        for slab in range(1 if narrow else len(rows.weights))
    ]  # fmt: skip
    if narrow and max(rows.dim for rows in tables) >= 2**15:
        raise UserError("rows of different width have fewer than 32,768 values on a GPU; make the tables' dim smaller")
    if len(slab_records) >= 2**15:  # the kernels keep a slab's number in 15 bits
        raise UserError(
            f"the tables of one module lie in {len(slab_records)} pieces, 32767 are possible; split the module"
        )
    padded_tables = max(2, power_of_two(len(tables)))  # with one, Triton 3.6 fails on the search among them
    batch_features = request.batch_features
    places = [-1] * power_of_two(batch_features)
    for f, place in enumerate(request.index.tolist()):
        places[place] = f
    numbers = [_numbers(rows.optimizer) for rows in tables]
    on_device = lambda values, dtype: torch.tensor(values, dtype=dtype).to(device)  # noqa: E731
    return Layout(
        features=on_device(feature_records, torch.int64),
        tables=on_device(table_records, torch.int64),
        slabs=on_device(addresses, torch.int64),
        lookups=lookups,
        updates=updates,
        key_dtype=torch.int32 if first_key[-1] < SMALL_KEYS else torch.int64,
        nowhere=int(first_key[-1]),
        columns=sum(spec.dim for spec in specs if spec.pooling is not None),
        widest=max(rows.dim for rows in tables),
        has_sequences=any(spec.pooling is None for spec in specs),
        has_factors=any(spec.pooling == "mean" for spec in specs),
        padded_features=power_of_two(len(specs)),
        places=on_device(places, torch.int64),
        batch_features=batch_features,
        index=request.index.tobytes(),
        device=device,
        unit=math.gcd(4, *(rows.dim for rows in tables), *(spec.place for spec in specs if spec.pooling is not None)),
        first_keys=on_device([*first_key[:-1], *[2**62] * (padded_tables - len(tables))], torch.int64),
        slab_records=on_device(slab_records, torch.int64),
        slab_numbers=on_device([numbers[record[0]] for record in slab_records], torch.float32),
        classes=on_device(classes, torch.int64) if narrow else None,
        first_classes=_numbered(tables, first_class) if narrow else {},
        gains=on_device(_gains(tables), torch.float32) if narrow else None,
        leading=_leading(tables),
    )


def _narrow_kind(records: Records | None) -> tuple[int, ...]:
    """What updates of these rows are made for; empty for rows of one width."""
    if records is None:
        return ()
    by_chunk = records.masked or records.utilities > 1
    return (records.chunk if by_chunk else 0, int(records.masked), records.utilities, records.kind)


def _lookup_kind(rows: TableRows) -> tuple[int, tuple[int, ...]]:
    """Likewise lookups. Only where a mask lies depends on more than a row's width."""
    records = rows.records
    if records is None:
        return 0, ()
    return (rows.optimizer.code, (records.chunk, 1, records.utilities, 0)) if records.masked else (0, (0, 0, 0, 0))


def _borders(all_records: Sequence[Records | None]) -> tuple[int, int]:
    bytes_, values = 16, 16
    for records in all_records:
        assert records is not None
        bytes_ = math.gcd(bytes_, *(4 * words for words in records.layout[1:, 5].tolist()))
        values = math.gcd(values, records.chunk)
    return bytes_, values


def _numbered(tables: Sequence[TableRows], first: Sequence[int]) -> dict[int, tuple[int, int]]:
    return {id(rows): (k, len(rows.records.slabs)) for rows, k in zip(tables, first) if rows.records is not None}


def _gains(tables: Sequence[TableRows]) -> list[float]:
    gains = [rows.records.gain for rows in tables if rows.records is not None]
    return [gain / gains[_leading(tables)] for gain in gains]


def _leading(tables: Sequence[TableRows]) -> int:
    followed = (t for t, rows in enumerate(tables) if rows.records is not None and rows.records.kind)
    return next(followed, 0)


def classes_of(tables: Sequence[TableRows], groups: Sequence[int]) -> tuple[list[int], list[list[int]], list[int]]:
    """The number of each table's first class among all, the fields of all classes, and the addresses of all slabs."""
    first: list[int] = []
    fields: list[list[int]] = []
    addresses: list[int] = []
    for t, rows in enumerate(tables):
        records = rows.records
        assert records is not None
        first.append(len(fields))
        for layout, slabs in zip(records.layout.tolist(), records.slabs):
            fields.append([*layout, len(addresses), t, records.dim, groups[t]])
            addresses += [slab.data_ptr() for slab in slabs]
    assert max(addresses) < 2**48, "addresses leave room for a width"
    return first, fields, addresses


def _addresses(tables: Sequence[TableRows], which: int) -> list[int]:
    """Of the weights (0) or a state (1, 2) of every slab of every table."""
    addresses = []
    for rows in tables:
        parts = [rows.weights, *rows.states]
        slabs = parts[which] if which < len(parts) else rows.weights
        addresses += [slab.data_ptr() for slab in slabs]
    return addresses


def _numbers(optimizer: Optimizer) -> tuple[float, ...]:
    beta1, beta2, eps, trust = optimizer.hyperparameters()
    logs: list[float] = []
    for beta in (beta1, beta2):
        log = math.log(beta) if beta > 0 else -1e30  # whose power is 0, as that of a beta of 0 is
        logs += [float(np.float32(log)), log - float(np.float32(log))]
    return (optimizer.lr, optimizer.weight_decay, beta1, beta2, eps, trust, 1 - beta1, 1 - beta2, *logs)
