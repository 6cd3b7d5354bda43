"""Tables whose ids are all followed: one word says where an id's row is, or what it is worth without one."""

import copy

import pytest
import torch

import unequal as uq
from unequal.kernels import backend

from .test_width import batches, compare, embeddings, train

KERNELS = ("reference", "cpu", "triton")
WIDTH = uq.Width(budget="20%", every=4)


@pytest.fixture(params=KERNELS)
def kernels(request, monkeypatch):
    if request.param == "triton":
        pytest.importorskip("unequal.kernels.triton")
    monkeypatch.setenv("UNEQUAL_KERNELS", request.param)
    return backend("cpu")


@pytest.mark.parametrize(("part", "of"), [(0, 1), (0, 3), (2, 3), (1, 2)])
def test_slots_and_what_ids_are_worth_do_not_disturb_each_other(kernels, part, of):
    bound = 100
    own = torch.arange(part, bound, of)
    worth = torch.zeros(own.numel(), 1)
    directory = kernels.FollowedDirectory(bound, part, of, worth)
    numbers = torch.randperm(own.numel(), generator=torch.Generator().manual_seed(of))
    rows, others = own[numbers[: len(own) // 2]], own[numbers[len(own) // 2 :]]
    worth[others // of, 0] = others.float() + 0.5
    largest = 2**31 - 1
    slots = torch.arange(rows.numel()) * 7919
    slots[-1] = largest  # a slot may have any 31 bits, those of what is no number too
    slots[0] = 0
    directory.insert(rows, slots)
    assert directory.used == rows.numel() and torch.equal(directory.find(rows), slots)
    assert (directory.find(others) == -1).all() and torch.equal(worth[others // of, 0], others.float() + 0.5)
    assert directory.find(torch.tensor([-1, bound + 3 * of, 2**62])).tolist() == [-1, -1, -1]
    found = directory.entries()
    order = rows.argsort()
    assert directory.in_order and torch.equal(found[0], rows[order]) and torch.equal(found[1], slots[order])
    more, at = torch.tensor([part]), torch.tensor([-1])
    directory.insert(more, at)  # no slot: nothing
    assert directory.used == rows.numel()


def test_gradients_of_a_row_that_has_come_since_do_not_harm_it(kernels):
    """Two batches are read, then both are learnt from. By the second one ids have rows that the first has followed without."""
    module = embeddings(uq.Width(budget="20%", every=10**6))
    storage, purse = module._storages["first"], module._storages["first"].how.purse
    data = list(batches(3, size=8))
    left, purse.left = purse.left, 0.0
    first = module(data[0])
    assert storage.live == 0 and purse.left == 0
    purse.left = left
    second = module(data[0])
    assert storage.live > 0
    ids, slots = storage.directory.entries()
    for outputs in (first, second):
        (outputs["a"].sum() + outputs["b"].values.sum() + outputs["c"].square().sum()).backward()
    assert torch.equal(storage.directory.find(ids), slots)
    train(module, data[1:])


@pytest.mark.parametrize("wrong", [float("nan"), -float("nan"), float("inf")])
def test_a_training_that_diverges_keeps_its_rows(kernels, wrong):
    """What is no number has the bits of a slot: it is no utility."""
    module = embeddings(WIDTH)
    train(module, batches(5))
    storages = module._storages.values()
    before = [storage.directory.entries() for storage in storages]
    for batch in batches(2, size=8):
        outputs = module(batch)
        (outputs["a"].sum() * wrong + outputs["b"].values.sum() * wrong + outputs["c"].sum() * wrong).backward()
    for storage, (ids, slots) in zip(storages, before):
        assert torch.equal(storage.directory.find(ids), slots)
        others = storage.records.slabs[0][0].view(torch.int32) >= 0
        assert (storage.records.slabs[0][0][others] >= 0).all()
    train(module, batches(6))


def test_what_long_ago_was_fades_and_rows_stay(kernels):
    module = embeddings(uq.Width(budget="20%", every=4, decay=0.5))
    train(module, batches(6))
    for storage in module._storages.values():
        ids, slots = storage.directory.entries()
        places, names = storage.candidates()
        assert places.numel() and not set(names.tolist()) & set(ids.tolist())
        worth = storage.records.slabs[0][0][places].clone()
        gain = storage.records.gain
        storage._fade()
        assert torch.equal(storage.directory.find(ids), slots)
        torch.testing.assert_close(storage.records.slabs[0][0][places], worth / gain)


def test_copied_saved_and_loaded(kernels):
    data = list(batches(9))
    module = embeddings(WIDTH)
    train(module, data[:5])
    copied, loaded = copy.deepcopy(module), embeddings(WIDTH)
    loaded.load_state_dict(module.state_dict())
    for one in (module, copied, loaded):
        for storage in one._storages.values():
            assert storage.how.in_directory and storage.directory.worth is storage.records.slabs[0][0]
            assert storage.directory.memory.data_ptr() == storage.directory.worth.data_ptr()
        train(one, data[5:])
    compare(module.state_dict(), copied.state_dict(), rtol=0, atol=0)
    compare(module.state_dict(), loaded.state_dict(), rtol=1e-5, atol=1e-6)  # utilities are in another measure
