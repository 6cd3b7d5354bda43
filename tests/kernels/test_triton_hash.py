"""What the Triton kernels add to the contract: results whose size stays on the device, and bounds that the host knows."""

import copy

import pytest
import torch

from tests.kernels.cases import DEVICE, make_rows, moved
from unequal.kernels import reference
from unequal.kernels.triton.hash import HashDirectory, _Reading
from unequal.kernels.triton.initialize import initialize
from unequal.kernels.triton.unique import unique_padded

MARKER = -(2**63)
ON_GPU = pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")


def batches_of(sizes, among, seed=0):
    """Batches of ids that repeat within and between them, the one that marks free entries among them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-(2**63), 2**63 - 1, (among,), generator=generator)
    ids[0] = MARKER
    return [ids[torch.randint(0, among, (size,), generator=generator)].to(DEVICE) for size in sizes]


@pytest.mark.parametrize("admit_after", [1, 3])
def test_padded_insert_agrees_with_reference(admit_after):
    directory, wanted = HashDirectory(admit_after, 1, DEVICE), reference.HashDirectory(admit_after, 1)
    for ids in batches_of([5, 0, 700, 3000, 3000, 64], 1500):
        before = wanted.next_slot
        slots, admitted, number, first_slot = directory.insert_padded(ids, 0)
        expected_slots, expected = wanted.insert(ids.cpu(), 0)
        assert torch.equal(slots.cpu(), expected_slots)
        assert torch.equal(admitted[: expected.numel()].cpu(), expected) and not admitted[expected.numel() :].any()
        assert number.tolist() == [expected.numel()] and first_slot.tolist() == [before]
        assert directory.slot_bound >= wanted.next_slot
    for got, expected in zip(directory.entries(), wanted.entries()):
        assert torch.equal(got.cpu(), expected)
    assert directory.next_slot == directory.slot_bound == wanted.next_slot


def test_marker_is_an_id_like_any_other():
    ids = torch.tensor([MARKER, 5, MARKER], device=DEVICE)
    directory = HashDirectory(admit_after=3, first_slot=1, device=DEVICE)
    assert directory.find(ids).tolist() == [-1, -1, -1]
    assert directory.insert(ids, 0)[0].tolist() == [0, 0, 0]
    directory.insert_padded(torch.arange(100, device=DEVICE), 0)  # the directory grows with ids that wait
    entries = dict(zip(*(part.tolist() for part in directory.entries())))
    assert len(entries) == 101 and entries[MARKER] == -3 and entries[5] == -3 and entries[6] == -2
    assert directory.insert(ids[:1], 0)[0].tolist() == [1]


def test_growth():
    batches = batches_of([20_000] * 3, 50_000)
    directory, wanted = HashDirectory(device=DEVICE), reference.HashDirectory()
    for ids in batches:
        assert torch.equal(directory.insert(ids)[0].cpu(), wanted.insert(ids.cpu())[0])
    assert torch.equal(directory.find(torch.cat(batches)).cpu(), wanted.find(torch.cat(batches).cpu()))
    assert directory.next_slot * 4 <= directory.capacity * 3 and directory.bytes < 12 * 3 * directory.next_slot


def test_bounds_hold_while_readings_are_late(monkeypatch):
    """The device is waited for only where the bound leaves no room, and known ids make the directory no larger."""
    refreshed = []
    refresh = HashDirectory.refresh
    monkeypatch.setattr(_Reading, "arrived", lambda self: False)
    monkeypatch.setattr(HashDirectory, "refresh", lambda self: (refreshed.append(self), refresh(self)))
    directory = HashDirectory(device=DEVICE)
    ids = torch.arange(100, device=DEVICE)
    for step in range(40):
        directory.insert_padded(ids if step % 2 else ids.flip(0))
        assert directory.slot_bound >= 100
    assert 1 <= len(refreshed) <= 20 and directory.capacity <= 1024
    assert directory.next_slot == 100


def test_bounds_follow_readings():
    directory = HashDirectory(device=DEVICE)
    ids = torch.arange(100, device=DEVICE)
    for _ in range(40):
        directory.insert_padded(ids)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
    assert directory.slot_bound <= 300
    directory.refresh()
    assert directory.slot_bound == 100


def test_copies_are_independent():
    directory = HashDirectory(device=DEVICE)
    directory.insert_padded(torch.tensor([3, 4], device=DEVICE))
    twin = copy.deepcopy(directory)
    twin.insert_padded(torch.tensor([5], device=DEVICE))
    assert (directory.next_slot, twin.next_slot) == (2, 3)
    assert directory.find(torch.tensor([3, 5], device=DEVICE)).tolist() == [0, -1]


def test_padded_unique():
    ids = torch.tensor([7, MARKER, 7, 0, MARKER, 7], device=DEVICE)
    distinct, inverse, counts, number = unique_padded(ids)
    assert distinct.tolist() == [7, MARKER, 0, 0, 0, 0] and counts.tolist() == [3, 2, 1, 0, 0, 0]
    assert inverse.tolist() == [0, 1, 0, 2, 1, 0] and number.tolist() == [3]
    assert unique_padded(ids[:0])[3].tolist() == [0]


@pytest.mark.parametrize("slab_log2", [-1, 2])
@pytest.mark.parametrize(("first", "count"), [(3, 9), (28, 0), (0, 20)])
def test_initialize_with_numbers_on_the_device(slab_log2, first, count):
    ids = torch.arange(20) * 1_000_003
    wanted = make_rows(28, 8, slab_log2=slab_log2)  # slabs of 4, 8 and 16 rows: slot 28 lies beyond them
    rows = moved(wanted, DEVICE) if DEVICE != "cpu" else make_rows(28, 8, slab_log2=slab_log2)
    on_device = lambda number: torch.tensor([number], device=DEVICE)  # noqa: E731
    initialize(rows, ids.to(DEVICE), on_device(first), on_device(count), 0.1)
    reference.initialize(wanted, ids[:count], first, count, 0.1)
    for slab, expected in zip(rows.weights, wanted.weights):
        assert torch.equal(slab.cpu(), expected)


@ON_GPU
def test_nothing_waits_for_the_device():
    batches = batches_of([4096] * 8, 100_000)
    rows = moved(make_rows(28, 8, slab_log2=2), DEVICE)
    directory = HashDirectory(admit_after=2, first_slot=1, device=DEVICE)
    directory.insert_padded(batches[0], 0)
    initialize(
        rows,
        batches[0],
        torch.zeros(1, dtype=torch.int64, device=DEVICE),
        directory.insert_padded(batches[0][:0])[2],
        0.1,
    )
    torch.cuda.set_sync_debug_mode("error")
    try:
        for ids in batches[1:3]:
            _, admitted, number, first_slot = directory.insert_padded(ids, 0)
            initialize(rows, admitted[:4], torch.zeros_like(first_slot), number.clamp(max=4), 0.1)
            unique_padded(ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@ON_GPU
def test_captured_insert():
    batches = batches_of([2048] * 6, 5000)
    directory, wanted = HashDirectory(device=DEVICE), reference.HashDirectory()
    for ids in batches[:2]:
        assert torch.equal(directory.insert_padded(ids)[0].cpu(), wanted.insert(ids.cpu())[0])
    directory.make_room(2048 * 8)
    capacity, static, graph = directory.capacity, batches[2].clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        slots = directory.insert_padded(static)[0]
    for ids in batches[2:]:
        static.copy_(ids)
        directory.make_room(ids.numel())
        graph.replay()
        assert directory.capacity == capacity
        assert torch.equal(slots.cpu(), wanted.insert(ids.cpu())[0])
    assert directory.next_slot == wanted.next_slot
