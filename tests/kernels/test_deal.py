import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.cases import THREADED
from unequal.kernels import reference


@pytest.mark.parametrize("backend", THREADED)
@given(
    ids=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=50),
    parts=st.integers(1, 9),
    hashed=st.booleans(),
)
def test_agrees_with_reference(backend, ids, parts, hashed):
    numbers = torch.tensor(ids, dtype=torch.int64)
    numbers = numbers if hashed else numbers.clamp(min=0)
    order, sizes = backend.deal(numbers, parts, hashed)
    expected_order, expected_sizes = reference.deal(numbers, parts, hashed)
    assert torch.equal(order.cpu(), expected_order) and torch.equal(sizes.cpu(), expected_sizes)


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
        _, sizes = reference.deal(ids, 4, hashed)
        assert hashed is False or sizes.min() > 200
        assert sizes.sum() == 1000
