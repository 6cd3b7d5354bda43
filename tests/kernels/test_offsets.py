import pytest
import torch

from tests.kernels.cases import THREADED
from unequal.kernels import reference


@pytest.mark.parametrize("backend", [pytest.param(reference, id="reference"), *THREADED])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16])
@pytest.mark.parametrize("lengths", [[], [3], [0, 2, 0, 5], [1, -4, 2]])
def test_starts_and_smallest(backend, dtype, lengths):
    offsets, smallest = backend.offsets(torch.tensor(lengths, dtype=dtype))
    assert offsets.tolist() == [sum(lengths[:k]) for k in range(len(lengths) + 1)] and offsets.dtype == torch.int64
    assert smallest == min([0, *lengths])


@pytest.mark.parametrize("backend", THREADED)
def test_lengths_that_do_not_lie_side_by_side(backend):
    lengths = torch.arange(12).reshape(3, 4).T.reshape(-1)[::2]
    assert torch.equal(backend.offsets(lengths)[0][1:], lengths.cumsum(0))
