import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.cases import BACKENDS, FAST, FEW, THREADED, TRITON
from unequal.kernels import reference

IDS = st.one_of(st.integers(0, 15), st.integers(-(2**63), 2**63 - 1))
BATCHES = st.lists(st.lists(IDS, max_size=40), max_size=6)


def ids_of(numbers):
    return torch.tensor(numbers, dtype=torch.int64)


@pytest.mark.parametrize("backend", BACKENDS)
def test_slots_in_order_of_appearance(backend):
    directory = backend.HashDirectory()
    slots, admitted = directory.insert(ids_of([7, -1, 7, 2**63 - 1]))
    assert slots.tolist() == [0, 1, 0, 2] and admitted.tolist() == [7, -1, 2**63 - 1]
    assert directory.find(ids_of([-1, 8, 7]), otherwise=-1).tolist() == [1, -1, 0]
    assert directory.next_slot == 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_admission(backend):
    directory = backend.HashDirectory(admit_after=3, first_slot=1)
    assert directory.insert(ids_of([5, 6]), rare=0)[0].tolist() == [0, 0]
    slots, admitted = directory.insert(ids_of([6, 5, 6, 9, 9, 9]), rare=0)
    assert slots.tolist() == [1, 0, 1, 2, 2, 2] and admitted.tolist() == [6, 9]
    assert directory.insert(ids_of([5]), rare=0)[0].tolist() == [3]


@pytest.mark.parametrize("backend", THREADED)
@settings(max_examples=100, deadline=None)
@given(batches=BATCHES, admit_after=st.integers(1, 4), again=st.booleans())
def test_agrees_with_reference(backend, batches, admit_after, again):
    one, other = backend.HashDirectory(admit_after, 1), reference.HashDirectory(admit_after, 1)
    for batch in batches:
        for got, wanted in zip(one.insert(ids_of(batch), 0), other.insert(ids_of(batch), 0)):
            assert torch.equal(got, wanted)
        if again:
            restored = backend.HashDirectory(admit_after, 1)
            restored.restore(*one.entries(), one.next_slot)
            one = restored
        assert torch.equal(one.find(ids_of(batch)), other.find(ids_of(batch)))
    for got, wanted in zip(one.entries(), other.entries()):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("backend", TRITON)
@FEW
@given(batches=BATCHES, admit_after=st.integers(1, 4), again=st.booleans())
def test_triton_agrees_with_reference(backend, batches, admit_after, again):
    test_agrees_with_reference.hypothesis.inner_test(backend, batches, admit_after, again)


@pytest.mark.parametrize("backend", THREADED)
def test_growth_and_threads(backend):
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(-(2**62), 2**62, (30_000,), generator=generator) for _ in range(3)]
    batches += [batches[0], torch.cat([batches[1][:100]] * 50)]
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        directory = backend.HashDirectory()
        results.append([directory.insert(batch)[0] for batch in batches])
    assert all(torch.equal(a, b) for run in results[1:] for a, b in zip(run, results[0]))
    assert torch.equal(torch.cat(results[0][:3]), torch.arange(90_000))
    assert directory.bytes < 12 * 90_000 * 3


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("count", [1, 24, 25, 48, 49, 96, 97, 5000])
def test_bytes_are_foretold(backend, count):
    directory = backend.HashDirectory()
    directory.insert(torch.arange(count) * 7919)
    assert directory.bytes == directory.bytes_for(count)


@pytest.mark.parametrize("backend", FAST)
def test_repeated_ids_do_not_swell_the_directory(backend):
    directory = backend.HashDirectory()
    directory.insert(torch.zeros(100_000, dtype=torch.int64))
    assert directory.bytes <= 12 * 64
