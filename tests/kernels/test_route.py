import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.cases import FAST, THREADED
from unequal.kernels import reference

IDS = st.one_of(st.integers(0, 30), st.integers(-(2**63), 2**63 - 1))


@pytest.mark.parametrize("backend", FAST)
@settings(max_examples=60, deadline=None)
@given(
    ids=st.lists(IDS, max_size=60),
    known=st.lists(IDS, max_size=40, unique=True),
    cuts=st.lists(st.integers(0, 40), max_size=2),
    nodes=st.integers(1, 3),
    size=st.integers(1, 4),
    far=st.booleans(),
    hashed=st.booleans(),
)
def test_agrees_with_reference(backend, ids, known, cuts, nodes, size, far, hashed):
    """To the ranks of a node by their number there, or along a lane to the nodes; with and without a directory."""
    numbers = torch.tensor(ids, dtype=torch.int64)
    numbers = numbers if hashed else numbers.clamp(min=0)
    way = (sorted(cuts), nodes * size, *((size, nodes) if far else (1, size)), hashed)
    for entries in (None, known):
        own, expected = None, None
        if entries is not None:
            own, expected = backend.HashDirectory(), reference.HashDirectory()
            for directory in (own, expected):
                directory.restore(torch.tensor(entries, dtype=torch.int64), torch.arange(len(entries)), len(entries))
        found = backend.route(numbers, own, *way)
        for part, wanted in zip(found, reference.route(numbers, expected, *way)):
            assert torch.equal(part.cpu(), wanted)


@given(ids=st.lists(st.integers(0, 99), max_size=50), cuts=st.tuples(st.integers(0, 9), st.integers(0, 9)))
def test_tiers_and_places(ids, cuts):
    """Numbers below a cut come first; within a tier by place, in the old order."""
    cuts, numbers = sorted(cuts), torch.tensor(ids, dtype=torch.int64)
    directory = reference.HashDirectory()
    directory.restore(torch.arange(10), torch.arange(10), 10)
    order, sizes, found = reference.route(numbers, directory, cuts, 6, 1, 3, False)

    def group(id_):
        tier = sum(id_ >= 10 or id_ >= cut for cut in cuts)
        return tier, id_ % 6 % 3

    assert numbers[order].tolist() == sorted(ids, key=group)
    assert found.tolist() == [id_ if id_ < 10 else -1 for id_ in ids]
    groups = [group(id_) for id_ in ids]
    assert sizes.tolist() == [[groups.count((tier, place)) for place in range(3)] for tier in range(3)]


@pytest.mark.parametrize("backend", THREADED)
@given(
    lists=st.lists(st.lists(st.integers(0, 2**63 - 1), max_size=6), max_size=9),
    parts=st.integers(1, 5),
    hashed=st.booleans(),
)
def test_bags_agree_with_reference(backend, lists, parts, hashed):
    ids = torch.tensor([id_ for part in lists for id_ in part], dtype=torch.int64)
    lengths = torch.tensor([len(part) for part in lists], dtype=torch.int64)
    for one, other in zip(
        backend.deal_bags(ids, lengths, parts, hashed), reference.deal_bags(ids, lengths, parts, hashed)
    ):
        assert torch.equal(one, other)


def test_every_part_gets_its_share():
    ids = torch.arange(0, 7_000_000, 7000)
    for hashed in (False, True):
        _, sizes, _ = reference.route(ids, None, (), 4, 1, 4, hashed)
        assert hashed is False or sizes.min() > 200
        assert sizes.sum() == 1000
