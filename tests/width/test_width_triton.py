"""Tables whose rows differ in width with Triton kernels, on a GPU or interpreted: as in the reference over steps and rounds."""

import copy

import pytest
import torch

import unequal as uq
from unequal.kernels import reference
from unequal.storage.narrow import NarrowStorage
from unequal.width import POLICIES

from .test_width import OPTIMIZERS, batches, compare, embeddings, known_apart, train

triton = pytest.importorskip("unequal.kernels.triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def both(monkeypatch):
    """Two equal modules, one with the Triton kernels and one with the reference."""

    def make(width, **options):
        monkeypatch.setenv("UNEQUAL_KERNELS", "triton")
        own = embeddings(width, **options)
        monkeypatch.setenv("UNEQUAL_KERNELS", "reference")
        expected = embeddings(width, **options)
        assert own._kernels.name == "triton" and expected._kernels.name == "reference"
        return own, expected

    return make


@pytest.mark.parametrize("policy", POLICIES)
def test_agrees_with_reference(both, policy):
    """Outputs, rows, optimizer state, utilities and candidates."""
    own, expected = both(uq.Width(budget="30%", policy=policy, every=3))
    data = list(batches(5, size=10))
    for found, wanted in zip(train(own, data), train(expected, data), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    compare(own.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-5)
    if policy != "none":
        assert any(report.pruned and report.regained for report in own.width_reports)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: type(optimizer).__name__)
def test_optimizers(both, optimizer):
    own, expected = both(uq.Width(budget="30%", policy="fiited", every=2, state="row"), optimizer=optimizer)
    data = list(batches(3, size=6))
    train(own, data)
    train(expected, data)
    compare(own.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("policy", ["water-filling", "fiited"])
def test_16_bits(both, policy, dtype):
    own, expected = both(uq.Width(budget="30%", policy=policy, every=3, chunk=1), dtype=dtype)
    data = list(batches(4, size=6))
    train(own, data)
    train(expected, data)
    compare(own.state_dict(), expected.state_dict(), rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize(("rows", "budget"), [(60, "5%"), (60_000, "0.005%")])
def test_a_table_by_itself_and_all_at_once_are_the_same(monkeypatch, rows, budget):
    """What a rank's shards are asked one by one, a module's tables are asked together; candidates by number, and by hashing."""
    monkeypatch.setenv("UNEQUAL_KERNELS", "triton")
    width = uq.Width(budget=budget, every=10**6)
    together, apart = embeddings(width, rows=rows), embeddings(width, rows=rows)
    assert together._storages["first"].how.by_id == (rows == 60)
    data = list(batches(4, size=60, rows=rows))  # so many that several programs list newcomers

    def one_by_one(request, insert, wrong):
        slots = torch.full_like(request.ids, -1)
        for t, storage in enumerate(apart._storages.values()):
            spans = [slice(int(request.starts[f]), int(request.ends[f])) for f in apart._readers[t]]
            found = storage.locate(torch.cat([request.ids[span] for span in spans]), insert)
            for span, part in zip(spans, torch.split(found, [span.stop - span.start for span in spans])):
                slots[span] = part
        return slots

    train(apart, data[:1])
    train(together, data[:1])
    monkeypatch.setattr(apart._locator, "locate", one_by_one)
    for found, wanted in zip(train(together, data[1:]), train(apart, data[1:]), strict=True):
        assert torch.equal(found, wanted)
    compare(together.state_dict(), apart.state_dict(), rtol=0, atol=0)
    assert together.state_dict()["first.candidates"].numel() and not together._storages["first"].affords_rows


@pytest.mark.parametrize("bound", [None, 2**20, 500])
def test_directory(bound):
    """By open addressing, with entries of both sizes, and as an array."""
    generator = torch.Generator().manual_seed(0)
    directory, expected = triton.NarrowDirectory(bound), reference.NarrowDirectory(bound)
    ids = torch.randperm(500, generator=generator)
    if bound is None:
        ids = ids * 2**53 - 2**62
    elif bound > 500:
        ids = ids * 2000
    for first in range(0, 400, 80):
        part = slice(first, first + 80)
        directory.insert(ids[part].to(DEVICE), torch.arange(first, first + 80, device=DEVICE))
        expected.insert(ids[part], torch.arange(first, first + 80))
        assert directory.used == expected.used
        asked = torch.cat([ids, torch.tensor([-1, 2**40, 2**32 + int(ids[0])])])
        assert torch.equal(directory.find(asked.to(DEVICE)).cpu(), expected.find(asked))
    found = sorted(zip(*(part.tolist() for part in directory.entries())))
    assert found == sorted(zip(*(part.tolist() for part in expected.entries())))
    assert directory.kind == {None: 2, 2**20: 1, 500: 0}[bound]


def test_buckets():
    ids = torch.cat([torch.arange(50), torch.tensor([-1, 2**63 - 1, -(2**63)])])
    for buckets in (1, 7, 2**31 - 1):
        assert torch.equal(triton.bucket_of(ids.to(DEVICE), buckets).cpu(), reference.bucket_of(ids, buckets))


@pytest.mark.parametrize("each", [1, 3])
def test_follow(each):
    """Candidates that are known, newcomers that meet, and buckets that are full."""
    generator = torch.Generator().manual_seed(1)
    parts = [torch.zeros(24, dtype=torch.int64), torch.full((24, each), -1.0), torch.zeros(24, dtype=torch.int32)]
    others = [part.clone() for part in parts]
    parts = [part.to(DEVICE) for part in parts]
    for step in range(1, 12):
        ids = torch.randint(-20, 20, (30,), generator=generator)
        slots = torch.where(torch.rand(30, generator=generator) < 0.2, 5, -1)
        found = slots.to(DEVICE, copy=True)
        triton.follow(*parts, step, 3, ids.to(DEVICE), found)
        reference.follow(*others, step, 3, ids, slots)
        assert torch.equal(found.cpu(), slots)
        gained = torch.randint(0, 50, (24, 1), generator=generator) / 64
        for group in (parts, others):
            read = group[2] == step
            group[1][read] += gained.to(read.device)[read]
        assert all(torch.equal(one.cpu(), other) for one, other in zip(parts, others))
    assert (slots < 0).any() and (slots >= 0).any()


def test_an_id_that_a_table_does_not_have_is_refused(monkeypatch):
    monkeypatch.setenv("UNEQUAL_KERNELS", "triton")
    module = embeddings(uq.Width(budget="30%"))
    lengths = torch.tensor([1, 1, 1])
    module(uq.Batch(("a", "b", "c"), torch.tensor([1, 60, 2]), lengths).to(DEVICE))
    with pytest.raises(uq.DataError, match=r"feature 'b' .* id 60 is not in \[0, 60\) of table 'second'"):
        module.check()
    assert 60 not in module.state_dict()["second.ids"].tolist()


def test_it_goes_on_alike_in_a_copy(monkeypatch):
    monkeypatch.setenv("UNEQUAL_KERNELS", "triton")
    module = embeddings(uq.Width(budget="30%", every=3))
    data = list(batches(4, size=6))
    train(module, data[:2])
    other = copy.deepcopy(module)
    assert isinstance(other._storages["first"], NarrowStorage)
    for found, wanted in zip(train(module, data[2:]), train(other, data[2:]), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    "where", ["unequal.storage.narrow.NarrowStorage._slab", "unequal.width.parts.steadily"], ids=["slabs", "choosing"]
)
def test_a_round_without_device_memory_changes_nothing(monkeypatch, where):
    monkeypatch.setenv("UNEQUAL_KERNELS", "triton")
    module = embeddings(uq.Width(budget="30%", every=10**6))
    train(module, batches(3, size=8))
    before = {name: part.clone() for name, part in module.state_dict().items()}
    assert module._rounds is not None
    # Where the threshold is looked for the same is asked of a sample, which is small.
    monkeypatch.setattr("unequal.width.rounds.threshold_of", lambda *_: 1e-3)

    def short(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(where, short)
    with pytest.warns(UserWarning, match="found no memory .*CUDA out of memory"):
        assert module._rounds.round(8).failed
    compare(known_apart(module.state_dict()), known_apart(before), rtol=1e-6, atol=0)
