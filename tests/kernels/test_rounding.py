import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.cases import BACKENDS, FAST
from unequal.kernels import reference

NARROW = [torch.float16, torch.bfloat16]


def same_bits(one, other):
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("dtype", NARROW)
@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=30),
    key=st.integers(0, 2**64 - 1),
    slot=st.integers(0, 2**33),
)
def test_agrees_bitwise_with_reference(backend, dtype, values, key, slot):
    values, slots = torch.tensor([values, values]), torch.tensor([slot, slot + 1])
    assert same_bits(backend.round_rows(values, slots, dtype, key), reference.round_rows(values, slots, dtype, key))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", NARROW)
def test_special_values_and_exact_ones_stay(backend, dtype):
    exact = torch.tensor([[0.0, -0.0, 1.0, -2.5, 2.0**-14, 2.0**-20, float("inf"), float("-inf"), float("nan")]])
    rounded = backend.round_rows(exact, torch.tensor([3]), dtype, 99)
    assert same_bits(rounded[:, :-1].contiguous(), exact.to(dtype)[:, :-1].contiguous()) and rounded[0, -1].isnan()


@pytest.mark.parametrize("backend", BACKENDS)
def test_float16_saturates(backend):
    rounded = backend.round_rows(torch.tensor([[65504.0, 65519.0, 1e6, -3e38]]), torch.tensor([0]), torch.float16, 1)
    assert rounded.tolist() == [[65504.0, 65504.0, 65504.0, -65504.0]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("value", [1 / 3, -0.7, 3e-6, 1e-7])
def test_unbiased(backend, dtype, value):
    rows = 20_000
    rounded = backend.round_rows(torch.full((rows, 4), value), torch.arange(rows), dtype, 5).double()
    low, high = rounded.min(), rounded.max()
    assert low <= value <= high and rounded.unique().numel() == 2
    spread = float(high - low) / 2 / (4 * rows) ** 0.5
    assert abs(float(rounded.mean()) - value) < 5 * spread


@pytest.mark.parametrize("backend", BACKENDS)
def test_depends_on_key_and_row_and_column(backend):
    values = torch.full((2, 64), 1 / 3)
    slots = torch.tensor([0, 1])
    first = backend.round_rows(values, slots, torch.bfloat16, 1)
    assert torch.equal(first, backend.round_rows(values, slots, torch.bfloat16, 1))
    assert not torch.equal(first, backend.round_rows(values, slots, torch.bfloat16, 2))
    assert not torch.equal(first[0], first[1])
    assert torch.equal(first[1:], backend.round_rows(values[1:], slots[1:], torch.bfloat16, 1))
