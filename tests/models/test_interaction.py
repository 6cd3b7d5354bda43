import importlib

import pytest
import torch

from unequal.kernels import backend
from unequal.models.interaction import CrossInteraction, DotInteraction


@pytest.mark.parametrize("features", [1, 2, 3, 7])
@pytest.mark.parametrize("size", [0, 1, 5])
def test_dots_agree_with_einsum(features, size):
    dim = 6
    vectors = torch.randn(size, features * dim, dtype=torch.float64, requires_grad=True)
    interaction = DotInteraction([dim] * features, dim)
    assert not list(interaction.parameters())
    x = vectors.detach().clone().requires_grad_()
    parts = x.view(size, features, dim)
    products = torch.einsum("bid,bjd->bij", parts, parts)
    if features == 1:
        expected = x
    else:
        expected = torch.stack([products[:, i, j] for i in range(features) for j in range(i + 1, features)], 1)
    got = interaction(vectors)
    assert got.shape == (size, interaction.outputs)
    torch.testing.assert_close(got, expected)
    upstream = torch.randn_like(got)
    got.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close(vectors.grad, x.grad)


def test_dot_gradients_against_differences():
    interaction = DotInteraction([3, 3, 3, 3], 3)
    assert torch.autograd.gradcheck(interaction, torch.randn(2, 12, dtype=torch.float64, requires_grad=True))


def test_mixed_dims_are_projected():
    dims = [4, 8, 3]
    interaction = DotInteraction(dims, 8).double()
    vectors = torch.randn(5, sum(dims), dtype=torch.float64)
    a, b, c = vectors.split(dims, 1)
    first, _, third = interaction.projections
    a, c = a @ first.weight.T, c @ third.weight.T
    expected = torch.stack([(a * b).sum(1), (a * c).sum(1), (b * c).sum(1)], 1)
    torch.testing.assert_close(interaction(vectors), expected)
    assert {name for name, _ in interaction.named_parameters()} == {"projections.0.weight", "projections.2.weight"}


@pytest.mark.parametrize("rank", [0, 2])
def test_cross_agrees_with_the_formula(rank):
    interaction = CrossInteraction([2, 3], layers=3, rank=rank).double()
    start = torch.randn(4, 5, dtype=torch.float64)
    expected = start.clone()
    for layer in interaction.layers:
        if rank:
            down, up = layer
            matrix, bias = up.weight @ down.weight, up.bias
        else:
            matrix, bias = layer.weight, layer.bias
        expected = torch.stack([x0 * (matrix @ x + bias) + x for x0, x in zip(start, expected)])
    torch.testing.assert_close(interaction(start), expected)
    assert interaction.outputs == 5


@pytest.mark.parametrize("kernels", ["", "reference"])
def test_float32_goes_by_the_kernels(monkeypatch, kernels):
    monkeypatch.setenv("UNEQUAL_KERNELS", kernels)
    chosen = backend("cpu")
    called = []
    for name in ("pair_dots", "pair_dots_gradient"):
        module = importlib.import_module(f"unequal.kernels.{chosen.name}")
        kernel = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, kernel=kernel, name=name: called.append(name) or kernel(*a))
    interaction = DotInteraction([10] * 7, 10)
    vectors = torch.randn(33, 70, requires_grad=True)
    exact = vectors.detach().double().requires_grad_()
    got, expected = interaction(vectors), interaction(exact)
    upstream = torch.randn_like(got)
    got.backward(upstream)
    expected.backward(upstream.double())
    assert called == ["pair_dots", "pair_dots_gradient"]
    torch.testing.assert_close(got, expected.float())
    torch.testing.assert_close(vectors.grad, exact.grad.float())


def test_under_autocast():
    torch.manual_seed(0)
    interaction = DotInteraction([16] * 3, 16)
    vectors = torch.randn(5, 48, requires_grad=True)
    exact = vectors.detach().clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        got = interaction(vectors)
    assert got.dtype == torch.bfloat16
    expected = interaction(exact)
    torch.testing.assert_close(got.float(), expected, rtol=0.02, atol=0.1)
    got.float().sum().backward()
    expected.sum().backward()
    assert vectors.grad.dtype == torch.float32
    torch.testing.assert_close(vectors.grad, exact.grad, rtol=0.02, atol=0.05)


def test_results_that_are_kept_are_not_written_over():
    """Large ones lie in memory that is used again."""
    torch.manual_seed(0)
    interaction = DotInteraction([32] * 27, 32)
    kept = []
    for _ in range(3):
        vectors = torch.randn(800, 27 * 32, requires_grad=True)
        products = interaction(vectors)
        upstream = torch.randn_like(products)
        products.backward(upstream)
        kept.append((vectors, products, upstream))
    for vectors, products, upstream in kept:
        exact = vectors.detach().double().requires_grad_()
        expected = interaction(exact)
        expected.backward(upstream.double())
        torch.testing.assert_close(products, expected.float(), rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(vectors.grad, exact.grad.float(), rtol=1e-5, atol=1e-4)
