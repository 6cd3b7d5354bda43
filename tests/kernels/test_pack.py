"""Rows of different width as they travel, against a model in plain Python and between backends."""

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.cases import DEVICE, THREADED
from unequal.kernels import reference
from unequal.kernels.reference.codecs import WIRE_DTYPES, encode_rows
from unequal.kernels.request import Records, TableRows
from unequal.optim import SGD


class Triton:
    """The Triton kernels behind the same calls on tensors of the host. On the CPU all but `write_rows` are the reference's."""

    def __init__(self):
        from unequal.kernels import triton

        self._kernels = triton

    def pack(self, rows, live, *rest):
        return self._kernels.pack(rows.to(DEVICE), live.to(DEVICE), *rest).cpu()

    def packed_sizes(self, live, *rest):
        return self._kernels.packed_sizes(live.to(DEVICE), *rest)

    def unpack(self, wire, live, runs, codec, norms, out):
        there = torch.empty_like(out, device=DEVICE)
        self._kernels.unpack(wire.to(DEVICE), live.to(DEVICE), runs, codec, norms, there)
        out.copy_(there)

    def used_chunks(self, rows, runs):
        return self._kernels.used_chunks(rows.to(DEVICE), runs).cpu()

    def write_rows(self, rows, slots, values, masks):
        slabs = rows.records.slabs
        rows.records.slabs = [[slab.to(DEVICE) for slab in own] for own in slabs]
        moved = None if masks is None else masks.to(DEVICE)
        self._kernels.write_rows(rows, slots.to(DEVICE), values.to(DEVICE), moved)
        rows.records.slabs = [[slab.cpu() for slab in own] for own in rows.records.slabs]


TRITON = [pytest.param(Triton(), id="triton")]
FAST = [*THREADED, *(TRITON if DEVICE == "cuda" else [])]
BACKENDS = [pytest.param(reference, id="reference"), *FAST]
FLOATS = st.sampled_from([0.0, 1.0, -1.5, 3e-6, -2e-20, 70000.0, -1e30, 0.1]) | st.floats(-4, 4, width=32)


@st.composite
def messages(draw):
    """Runs of several tables with rows at full width, and which chunks each row has."""
    runs, live, values = [], [], []
    by_mask = draw(st.booleans())
    for _ in range(draw(st.integers(0, 3))):
        chunk, chunks, count = draw(st.sampled_from([1, 2, 3, 4, 9])), draw(st.integers(1, 9)), draw(st.integers(0, 5))
        runs.append((count, chunk * chunks, chunk))
        most = 2**chunks - 1 if by_mask else chunks
        live += draw(st.lists(st.integers(0, most), min_size=count, max_size=count))
        seed = draw(st.lists(FLOATS, min_size=7, max_size=7))
        values += [seed[(13 * k + k // 5) % 7] for k in range(count * chunk * chunks)]
    dtype = torch.int64 if by_mask else torch.uint8
    return runs, torch.tensor(live, dtype=dtype), torch.tensor(values, dtype=torch.float32)


def rows_of(runs, live, flat):
    """(values, columns that live, columns) of every row."""
    at, number = 0, 0
    for count, width, chunk in runs:
        for _ in range(count):
            k = int(live[number])
            has = [(k >> (c // chunk)) & 1 if live.dtype == torch.int64 else c // chunk < k for c in range(width)]
            yield flat[at : at + width], [c for c in range(width) if has[c]], width
            at, number = at + width, number + 1


def packed_by_hand(runs, live, flat, codec, norms):
    """Bytes."""
    message = b""
    for row, columns, width in rows_of(runs, live, flat):
        if columns:
            message += encode_rows(row[columns][None], codec).view(torch.uint8).numpy().tobytes()
        if norms and len(columns) < width:
            norm = math.sqrt(sum(float(row[c]) ** 2 for c in range(width) if c not in columns))
            exact = torch.tensor([norm], dtype=torch.float32)
            message += (exact if codec == "fp32" else exact.bfloat16()).view(torch.uint8).numpy().tobytes()
    return message


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codec", WIRE_DTYPES)
@settings(max_examples=60, deadline=None)
@given(message=messages(), norms=st.booleans())
def test_a_message_is_live_values_and_norms(backend, codec, message, norms):
    runs, live, flat = message
    norms = norms and live.dtype == torch.uint8
    wire = backend.pack(flat, live, runs, codec, norms)
    assert wire.dtype == WIRE_DTYPES[codec]
    assert wire.view(torch.uint8).numpy().tobytes() == packed_by_hand(runs, live, flat, codec, norms)
    assert sum(backend.packed_sizes(live, runs, codec, norms)) == wire.numel()


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("codec", WIRE_DTYPES)
@settings(max_examples=60, deadline=None)
@given(message=messages(), norms=st.booleans())
def test_agrees_with_reference(backend, codec, message, norms):
    runs, live, flat = message
    norms = norms and live.dtype == torch.uint8
    assert backend.packed_sizes(live, runs, codec, norms) == reference.packed_sizes(live, runs, codec, norms)
    wire = reference.pack(flat, live, runs, codec, norms)
    found, expected = torch.full_like(flat, 7.0), torch.full_like(flat, 5.0)
    backend.unpack(wire, live, runs, codec, norms, found)
    reference.unpack(wire, live, runs, codec, norms, expected)
    assert torch.equal(found, expected)
    for row, columns, width in rows_of(runs, live, found):
        others = [c for c in range(width) if c not in columns]
        assert not row[others[1:] if norms else others].any()
    if codec == "fp32":
        for (row, columns, width), (was, _, _) in zip(rows_of(runs, live, found), rows_of(runs, live, flat)):
            assert torch.equal(row[columns], was[columns])
            if norms and len(columns) < width:
                first = len(columns)
                assert math.isclose(row[first], was[first:].double().norm(), rel_tol=1e-6, abs_tol=1e-44)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codec", WIRE_DTYPES)
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_what_is_not_a_number_stays_visible(backend, codec, special):
    """Among values that live, and among those that are folded."""
    runs, live = [(2, 16, 2)], torch.tensor([8, 3], dtype=torch.uint8)
    flat = torch.arange(32.0)
    flat[[9, 30]] = special
    out = torch.empty(32)
    backend.unpack(backend.pack(flat, live, runs, codec, True), live, runs, codec, True, out)
    if codec == "fp16" and special == special:
        assert out[9] == math.copysign(65504.0, special)
    else:
        assert not out[9].isfinite()
    assert not out[16 + 6].isfinite() and not out[16 + 7 :].any()


@pytest.mark.parametrize("backend", THREADED)
@pytest.mark.parametrize("codec", WIRE_DTYPES)
def test_threads_change_nothing(backend, codec):
    generator = torch.Generator().manual_seed(1)
    runs = [(3000, 64, 4), (0, 8, 2), (2500, 24, 3)]
    live = torch.cat(
        [torch.randint(0, 17, (3000,), generator=generator), torch.randint(0, 9, (2500,), generator=generator)]
    )
    live, flat = live.to(torch.uint8), torch.randn(3000 * 64 + 2500 * 24, generator=generator)
    found = []
    for threads in (1, 2, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            wire, out = backend.pack(flat, live, runs, codec, True), torch.empty_like(flat)
            backend.unpack(wire, live, runs, codec, True, out)
        finally:
            torch.set_num_threads(before)
        found.append((wire, out))
    for wire, out in found[1:]:
        assert torch.equal(wire, found[0][0]) and torch.equal(out, found[0][1])
    assert torch.equal(found[0][0], reference.pack(flat, live, runs, codec, True)) or codec != "fp32"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_norm_that_travels_twice_stays(backend):
    """However small: where rows go by two hops, it is folded again."""
    small = struct.unpack("f", struct.pack("f", 1e-42))[0]
    flat, live, runs = torch.tensor([1.0, small, 0.0, 0.0]), torch.tensor([1], dtype=torch.uint8), [(1, 4, 1)]
    out = torch.empty(4)
    backend.unpack(backend.pack(flat, live, runs, "fp32", True), live, runs, "fp32", True, out)
    assert out.tolist() == flat.tolist()


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=60, deadline=None)
@given(message=messages())
def test_used_chunks(backend, message):
    runs, _, flat = message
    at, expected = 0, []
    for count, width, chunk in runs:
        for _ in range(count):
            row = flat[at : at + width].view(-1, chunk)
            expected.append(sum(1 << k for k, part in enumerate(row) if part.any()))
            at += width
    assert backend.used_chunks(flat, runs).tolist() == expected


@pytest.mark.parametrize("backend", [*THREADED, *TRITON])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_written_records_agree(backend, dtype, masked):
    generator, dim, chunk = torch.Generator().manual_seed(3), 12, 3
    tables = []
    for _ in range(2):
        records = Records.make(dim, dtype, SGD(lr=0.0), chunk=chunk, masked=masked, by_chunk=False, kind=0, slab_log2=2)
        records.slabs[0].append(torch.zeros(1, 1))
        for k in range(1, 5):
            records.slabs[k] += [torch.full((4, int(records.layout[k, 5])), 9.0) for _ in range(2)]
        tables.append(TableRows([], [], records.bound, SGD(lr=0.0), strict=False, records=records))
    masks = torch.tensor([15, 1, 6, 3, 8, 13, 7, 2], dtype=torch.int64)
    chunks = [bin(mask).count("1") for mask in masks.tolist()]
    slots = torch.tensor([(place % 8) << 3 | k for place, k in enumerate(chunks)])
    slots[3] = -1
    values = torch.randn(8, dim, generator=generator)
    for kernels, rows in zip((reference, backend), tables):
        kernels.write_rows(rows, slots, values, masks if masked else None)
    for own, expected in zip(*(rows.records.slabs for rows in tables)):
        assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(own, expected))
    first = tables[0].records.slabs[4][0][0].view(dtype)
    assert torch.equal(first[:dim], values[0].to(dtype))
