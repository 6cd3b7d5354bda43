import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.cases import THREADED
from unequal.kernels import reference

EITHER = [pytest.param(reference, id="reference"), *THREADED]
SHAPES = st.tuples(st.integers(0, 5), st.integers(1, 70), st.integers(1, 150))


def dots(backend, x):
    products = x.new_empty(x.shape[0], x.shape[1] * (x.shape[1] - 1) // 2)
    backend.pair_dots(x, products)
    return products


def dots_gradient(backend, x, gradient):
    out = x.new_empty(x.shape)
    backend.pair_dots_gradient(x, gradient, out)
    return out


def exact_dots(x):
    return dots(reference, x)


def exact_gradient(x, gradient):
    return dots_gradient(reference, x, gradient)


def drawn(shape, seed=0):
    """Vectors, and a gradient of their products."""
    samples, features, _ = shape
    generator = torch.Generator().manual_seed(seed)
    gradient = torch.randn(samples, features * (features - 1) // 2, generator=generator)
    return torch.randn(shape, generator=generator), gradient


def assert_sums_are_right(got, sum_exactly, *inputs, terms):
    """Within what float32 sums of so many terms may be off, in any order: terms · eps · the sum of the absolute values."""
    exact = sum_exactly(*(part.double() for part in inputs))
    size = sum_exactly(*(part.double().abs() for part in inputs))
    assert got.dtype == torch.float32 and got.shape == exact.shape
    assert ((got.double() - exact).abs() <= terms * torch.finfo(torch.float32).eps * size).all()


@pytest.mark.parametrize("features", [2, 5])
def test_the_reference_by_its_definition(features):
    x, gradient = drawn((3, features, 4))
    x = x.double().requires_grad_()
    pairs = [(i, j) for i in range(features) for j in range(i + 1, features)]
    expected = torch.stack([(x[:, i] * x[:, j]).sum(1) for i, j in pairs], 1)
    torch.testing.assert_close(exact_dots(x.detach()), expected)
    expected.backward(gradient.double())
    torch.testing.assert_close(exact_gradient(x.detach(), gradient.double()), x.grad)


@pytest.mark.parametrize("backend", EITHER)
@settings(max_examples=100, deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 1000))
def test_any_shape(backend, shape, seed):
    x, gradient = drawn(shape, seed)
    assert_sums_are_right(dots(backend, x), exact_dots, x, terms=shape[2])
    got = dots_gradient(backend, x, gradient)
    assert_sums_are_right(got, exact_gradient, x, gradient, terms=shape[1])


@pytest.mark.parametrize("backend", EITHER)
def test_one_feature_has_no_pairs(backend):
    x, gradient = drawn((3, 1, 7))
    assert dots(backend, x).shape == (3, 0)
    assert torch.equal(dots_gradient(backend, x, gradient), torch.zeros(3, 1, 7))


@pytest.mark.parametrize("backend", THREADED)
@pytest.mark.parametrize("shape", [(800, 27, 64), (500, 13, 50), (70, 101, 16), (2600, 3, 200)])
def test_the_same_bits_on_any_number_of_threads_and_in_any_batch(backend, shape):
    """The first of the shapes is written past the caches; its first samples alone are not."""
    x, gradient = drawn(shape)
    products, back = None, None
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        again, back_again = dots(backend, x), dots_gradient(backend, x, gradient)
        assert products is None or torch.equal(products, again)
        assert back is None or torch.equal(back, back_again)
        products, back = again, back_again
    assert_sums_are_right(products, exact_dots, x, terms=shape[2])
    assert_sums_are_right(back, exact_gradient, x, gradient, terms=shape[1])
    some = slice(5, 17)
    assert torch.equal(dots(backend, x[some]), products[some])
    assert torch.equal(dots_gradient(backend, x[some], gradient[some]), back[some])


@pytest.mark.parametrize("backend", THREADED)
def test_vectors_that_do_not_lie_side_by_side(backend):
    x, gradient = drawn((6, 5, 16))
    apart = torch.empty(16, 5, 6).permute(2, 1, 0).copy_(x)
    gradients = gradient, torch.empty(10, 6).T.copy_(gradient), torch.empty(6, 13)[:, 2:12].copy_(gradient)
    unaligned = torch.empty(x.numel() + 1)[1:].view_as(x).copy_(x)
    expected, expected_back = dots(backend, x), dots_gradient(backend, x, gradient)
    for other in (apart, unaligned):
        assert torch.equal(dots(backend, other), expected)
        for part in gradients:
            assert torch.equal(dots_gradient(backend, other, part), expected_back)
    ones = torch.ones(1, 1).expand(6, 10)
    assert torch.equal(dots_gradient(backend, x, ones), dots_gradient(backend, x, ones.contiguous()))


@pytest.mark.parametrize("backend", EITHER)
def test_what_is_not_finite_stays_in_its_sample(backend):
    x, gradient = drawn((3, 6, 20))
    expected, expected_back = dots(backend, x), dots_gradient(backend, x, gradient)
    x[1, 2, 3] = float("nan")
    products, back = dots(backend, x), dots_gradient(backend, x, gradient)
    others = [0, 2]
    assert torch.equal(products[others], expected[others]) and torch.equal(back[others], expected_back[others])
    with_it = [(i == 2) | (j == 2) for i in range(6) for j in range(i + 1, 6)]
    assert products[1].isnan().tolist() == with_it
    assert back[1].isnan().any(0).tolist() == [column == 3 for column in range(20)]
