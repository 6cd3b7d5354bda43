import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import unequal as uq


def make():
    return uq.Batch.from_jagged(
        {"a": uq.Jagged.from_lists([[1, 2], [], [3]], [[0.1, 0.2], [], [0.3]]), "b": torch.tensor([7, 8, 9])},
        dense=torch.ones(3, 2),
        labels=torch.zeros(3, 1),
    )


def test_layout_and_access():
    batch = make().check()
    assert batch.size == 3 and batch.ids.tolist() == [1, 2, 3, 7, 8, 9]
    assert batch.offsets.tolist() == [0, 2, 2, 3, 4, 5, 6]
    assert batch["a"].to_lists() == [[1, 2], [], [3]] and batch["b"].to_lists() == [[7], [8], [9]]
    assert batch["a"].weights.tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert batch["b"].weights.tolist() == [1, 1, 1]
    with pytest.raises(uq.DataError, match="no feature 'c'"):
        batch["c"]


def test_padding():
    jagged = uq.Jagged(torch.arange(6.0).view(3, 2).requires_grad_(), torch.tensor([1, 0, 2]))
    padded = jagged.to_padded(2, fill=-1.0)
    assert padded.tolist() == [[[0, 1], [-1, -1]], [[-1, -1], [-1, -1]], [[2, 3], [4, 5]]]
    assert jagged.mask(2).tolist() == [[True, False], [False, False], [True, True]]
    padded.sum().backward()
    assert jagged.values.grad.tolist() == [[1, 1]] * 3


@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4), max_size=6))
def test_lists_round_trip(lists):
    assert uq.Jagged.from_lists(lists).to_lists() == lists


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": torch.tensor([2, 0, 1, 1, 1])}, "do not divide"),
        ({"lengths": torch.tensor([2, 0, 1, 1, 1, 2])}, "add up to 7, but there are 6"),
        ({"lengths": torch.tensor([2, -1, 2, 1, 1, 1])}, "negative length"),
        ({"ids": torch.zeros(6)}, "must be int64"),
        ({"dense": torch.ones(2, 2)}, "dense has 2 samples"),
        ({"weights": torch.ones(5)}, "5 weights for 6 ids"),
        ({"features": ("a", "a")}, "named twice"),
    ],
)
def test_what_does_not_add_up_is_named(change, message):
    import dataclasses

    with pytest.raises(uq.DataError, match=message):
        dataclasses.replace(make(), _offsets=None, **change).check()


def test_features_of_different_size_are_refused():
    with pytest.raises(uq.DataError, match="differ in their number of samples"):
        uq.Batch.from_jagged({"a": torch.tensor([1]), "b": torch.tensor([1, 2])})
