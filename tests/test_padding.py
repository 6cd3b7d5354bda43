import pytest
import torch

from unequal import Jagged

LENGTHS = [2, 0, 3, 1]


@pytest.mark.parametrize("length", [None, 0, 2, 5])
@pytest.mark.parametrize("shape", [(), (2,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_lists_are_cut_or_filled_to_one_length(length, shape, dtype):
    lists = Jagged(torch.randint(1, 100, (6, *shape)).to(dtype), torch.tensor(LENGTHS))
    padded, mask = lists.to_padded(length, fill=7), lists.mask(length)
    wide = 3 if length is None else length
    assert padded.shape == (4, wide, *shape) and padded.dtype == dtype and mask.shape == (4, wide)
    for number, values in enumerate(lists.values.split(LENGTHS)):
        kept = min(len(values), wide)
        assert torch.equal(padded[number, :kept], values[:kept]) and (padded[number, kept:] == 7).all()
        assert mask[number].tolist() == [True] * kept + [False] * (wide - kept)


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_nothing_to_pad(lengths):
    lists = Jagged(torch.zeros(0, 4), torch.tensor(lengths, dtype=torch.int32))
    assert lists.to_padded().shape == (len(lengths), 0, 4)
    assert lists.to_padded(3).tolist() == [[[0.0] * 4] * 3] * len(lengths)


@pytest.mark.parametrize("length", [None, 2])
def test_padding_passes_gradients_on(length):
    lengths = torch.tensor(LENGTHS)
    values = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: Jagged(v, lengths).to_padded(length), values)
