"""What a codec loses, against bounds that follow from its precision."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unequal.exchange.codecs import DTYPES, decode, encode, wire_size
from unequal.plan.placement import CODECS

RUNS = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), max_size=6)
LARGEST_HALF = 65504.0


def random_values(runs, seed, spread):
    """Numbers of very different sizes, and some zeros."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(rows * width for rows, width in runs)
    sizes = torch.randint(-spread, spread + 1, (count,), generator=generator).double()
    values = torch.randn(count, generator=generator).double() * 2**sizes
    return (values * (torch.rand(count, generator=generator) > 0.1)).float()


def bound(values, runs, codec):
    """The largest error that each value may have."""
    size = values.double().abs()
    if codec == "fp32":
        return torch.zeros_like(size)
    if codec == "fp16":  # 11 significant bits; below 2⁻¹⁴ steps of 2⁻²⁴
        return torch.where(size > LARGEST_HALF, size - LARGEST_HALF, (size * 2**-11).clamp(min=2**-25))
    if codec == "bf16":  # 8 significant bits, float32's exponents
        return (size * 2**-8).clamp(min=2**-134)
    rows = torch.split(size, [width for rows, width in runs for _ in range(rows)]) if size.numel() else []
    # Half a step; a float32 scale, quotient and product are each wrong by 2⁻²⁴ of the row's largest value at most.
    parts = [(row.max() / 254 + row.max() * 2**-22).clamp(min=2**-148).expand_as(row) for row in rows]
    return torch.cat(parts) if parts else size


@pytest.mark.parametrize("codec", CODECS)
@given(runs=RUNS, seed=st.integers(0, 1000), spread=st.sampled_from([0, 3, 20]))
@settings(max_examples=60, deadline=None)
def test_errors_are_within_the_precision(codec, runs, seed, spread):
    values = random_values(runs, seed, spread)
    wire = encode(values, runs, codec)
    assert wire.dtype == DTYPES[codec] and wire.dim() == 1
    assert wire.numel() == sum(wire_size(rows, width, codec) for rows, width in runs)
    back = decode(wire, runs, codec)
    assert back.dtype == torch.float32 and back.shape == values.shape
    wrong = (back.double() - values.double()).abs() - bound(values, runs, codec)
    assert wrong.numel() == 0 or wrong.max() <= 0
    assert torch.equal(decode(encode(back, runs, codec), runs, codec), back) or codec == "int8"
    assert torch.equal(back[values == 0], values[values == 0])


@pytest.mark.parametrize("codec", CODECS)
def test_rows_are_independent_of_their_neighbours(codec):
    """So that a sum over the same rows is the same, however they travel."""
    runs = [(3, 4), (0, 7), (2, 4), (1, 1), (4, 6)]
    values = random_values(runs, 1, 6)
    together, first = decode(encode(values, runs, codec), runs, codec), 0
    for rows, width in runs:
        for _ in range(rows):
            row = values[first : first + width]
            alone = decode(encode(row, [(1, width)], codec), [(1, width)], codec)
            assert torch.equal(alone, together[first : first + width])
            first += width


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("special", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_a_number_stays_visible(codec, special):
    """float16 alone saturates, so that a large gradient is cut and not turned into infinity; NaN stays NaN there, too."""
    values = torch.tensor([1.0, special, 0.5, 2.0])
    back = decode(encode(values, [(1, 4)], codec), [(1, 4)], codec)
    if codec == "fp16" and special == special:
        assert back.tolist() == [1.0, math.copysign(LARGEST_HALF, special), 0.5, 2.0]
    else:
        assert not back[1].isfinite()


def test_bytes_per_row():
    assert [wire_size(3, 16, codec) * DTYPES[codec].itemsize for codec in ("fp32", "fp16", "bf16", "int8")] == [
        3 * 16 * 4, 3 * 16 * 2, 3 * 16 * 2, 3 * (16 + 4),
    ]  # fmt: skip
