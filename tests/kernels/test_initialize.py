import pytest
import torch

from tests.kernels.cases import BACKENDS, FAST, make_rows
from unequal.kernels import reference


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [1, 6, 7, 64])
@pytest.mark.parametrize("slab_log2", [-1, 2])
def test_agrees_bitwise_with_reference(backend, dtype, dim, slab_log2):
    one, other = (make_rows(50, dim, dtype=dtype, slab_log2=slab_log2) for _ in range(2))
    ids = torch.tensor([5, -3, 2**62, 0, -(2**63)])
    for kernels, rows in ((backend, one), (reference, other)):
        kernels.initialize(rows, None, 0, 50, 0.1)
        kernels.initialize(rows, ids, 7, 5, 0.2)
    for slab, wanted in zip(one.weights, other.weights):
        assert torch.equal(slab.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("backend", BACKENDS)
def test_distribution(backend):
    rows = make_rows(20_000, 16)
    backend.initialize(rows, None, 0, 20_000, 0.05)
    values = rows.weights[0]
    assert abs(float(values.mean())) < 5e-4 and abs(float(values.std()) - 0.05) < 5e-4
    assert values.unique().numel() > 0.98 * values.numel()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_depends_on_its_id_alone(backend):
    one, other = make_rows(10, 8), make_rows(30, 8)
    backend.initialize(one, torch.tensor([42]), 3, 1, 0.1)
    backend.initialize(other, torch.tensor([7, 42]), 20, 2, 0.1)
    assert torch.equal(one.weights[0][3], other.weights[0][21])


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("std", [0.05, 1e-5])
def test_ties_are_rounded_to_even(backend, dtype, std):
    """Few values lie exactly between two: it takes many to meet them. 1e-5 is below the smallest normal float16."""
    one, other = (make_rows(5_000, 64, dtype=dtype) for _ in range(2))
    backend.initialize(one, None, 0, 5_000, std)
    reference.initialize(other, None, 0, 5_000, std)
    assert torch.equal(one.weights[0].view(torch.uint8), other.weights[0].view(torch.uint8))
