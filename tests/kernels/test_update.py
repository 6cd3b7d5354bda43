import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.cases import (
    BACKENDS,
    FAST,
    FEW,
    THREADED,
    TRITON,
    clone_tables,
    make_request,
    make_rows,
    random_gradients,
    sized,
)
from unequal.kernels import reference
from unequal.optim import LAMB, LARS, OPTIMIZERS, SGD, Adam, RowWiseAdagrad

DECAYING = [kind(lr=0.05, weight_decay=0.01) for kind in OPTIMIZERS.values()]
PLAIN = [kind(lr=0.05) for kind in OPTIMIZERS.values()]


def name(optimizer):
    return f"{type(optimizer).__name__}{'-decay' if optimizer.weight_decay else ''}"


def run(backend, request, gradients, steps=1):
    """New tables after some steps with the same gradients; the request's own are left alone."""
    request = dataclasses.replace(request, tables=clone_tables(list(request.tables)))
    for step in range(steps):
        backend.update(request, *gradients, lr_factor=0.5, step=step)
    return request.tables


def assert_tables_close(tables, expected):
    for one, other in zip(tables, expected):
        tolerance = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[one.dtype]
        for slab, wanted in zip(one.weights, other.weights):
            torch.testing.assert_close(slab.float(), wanted.float(), rtol=tolerance, atol=tolerance / 10)
        for slabs, wanted_slabs in zip(one.states, other.states):
            for slab, wanted in zip(slabs, wanted_slabs):
                torch.testing.assert_close(slab, wanted, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_small_case_by_hand(backend):
    rows = make_rows(4, 2, optimizer=SGD(lr=1.0))
    before = rows.weights[0].clone()
    request = make_request([rows], [(0, "mean", [[1, 1, 2], []]), (0, None, [[2], [3]])])
    pooled, sequence = torch.tensor([[3.0, 6.0], [9.0, 9.0]]), torch.tensor([[1.0, 1.0], [5.0, 7.0]])
    backend.update(request, pooled, [sequence], lr_factor=1.0, step=0)
    change = torch.tensor([[0.0, 0.0], [2.0, 4.0], [1.0 + 1.0, 2.0 + 1.0], [5.0, 7.0]])
    torch.testing.assert_close(before - rows.weights[0], change)


@st.composite
def requests(draw):
    dims = st.sampled_from([1, 3, 4, 5, 8, 9, 16, 24, 32, 40, 64, 100, 128])
    tables = [
        make_rows(
            draw(st.integers(1, 30)),
            draw(dims),
            optimizer=draw(st.sampled_from(DECAYING + PLAIN)),
            slab_log2=draw(st.sampled_from([-1, 0, 2])),
            seed=t,
            strict=False,
        )
        for t in range(draw(st.integers(1, 3)))
    ]
    size = draw(st.integers(0, 6))
    features = []
    for _ in range(draw(st.integers(1, 4))):
        table = draw(st.integers(0, len(tables) - 1))
        ids = st.integers(-1, tables[table].rows - 1)
        lists = draw(st.lists(st.lists(ids, max_size=8), min_size=size, max_size=size))
        features.append((table, draw(st.sampled_from(["sum", "mean", None])), lists))
    return make_request(tables, features, weights=draw(st.booleans()))


@pytest.mark.parametrize("backend", THREADED)
@settings(max_examples=120, deadline=None)
@given(request=requests(), seed=st.integers(0, 5))
def test_agrees_with_reference(backend, request, seed):
    gradients = random_gradients(request, seed)
    assert_tables_close(run(backend, request, gradients, steps=2), run(reference, request, gradients, steps=2))


@pytest.mark.parametrize("backend", TRITON)
@FEW
@given(request=requests(), seed=st.integers(0, 5))
def test_triton_agrees_with_reference(backend, request, seed):
    test_agrees_with_reference.hypothesis.inner_test(backend, request, seed)


ALL_CASES = [(backend, optimizer, dim) for backend in THREADED for optimizer in DECAYING for dim in (7, 16, 64)]
ALL_CASES += [(backend, optimizer, 16) for backend in THREADED for optimizer in PLAIN]
SOME_CASES = [(backend, optimizer, dim) for backend in TRITON for optimizer in DECAYING for dim in (7, 64)]


@pytest.mark.parametrize(
    ("backend", "optimizer", "dim"),
    [
        pytest.param(*backend.values, optimizer, dim, id=f"{backend.id}-{name(optimizer)}-{dim}")
        for backend, optimizer, dim in ALL_CASES + SOME_CASES
    ],
)
def test_every_optimizer_on_many_lookups(backend, optimizer, dim):
    """Enough lookups for several buckets, rows hot enough to be summed in pieces, shared tables, all poolings."""
    generator = torch.Generator().manual_seed(3)
    tables = [make_rows(3000, dim, optimizer=optimizer), make_rows(3, dim, optimizer=optimizer, seed=1)]
    lists = lambda rows: [  # noqa: E731
        (torch.rand(int(n), generator=generator) ** 4 * rows).long().tolist()
        for n in torch.randint(0, 12, (sized(backend, 700, 20),), generator=generator)
    ]
    features = [(0, "sum", lists(3000)), (0, "mean", lists(3000)), (0, None, lists(3000)), (1, "sum", lists(3))]
    request = make_request(tables, features, weights=True)
    gradients = random_gradients(request)
    assert_tables_close(run(backend, request, gradients), run(reference, request, gradients))


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("poolings", [("sum",), (None,), ("sum", "mean", None)])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("rows", [5, 70_000])
def test_tables_with_many_lookups(backend, poolings, weights, rows):
    """So many that they are placed into buckets first; of few rows, each is read more often than one thread should sum."""
    generator = torch.Generator().manual_seed(4)
    size = sized(backend, 1000, 12 if rows == 5 else 4)
    lists = lambda: [  # noqa: E731
        (torch.rand(int(n), generator=generator) ** 3 * rows).long().tolist()
        for n in torch.randint(0, 90, (size,), generator=generator)
    ]
    tables = [make_rows(rows, 16, optimizer=RowWiseAdagrad(lr=0.1), strict=False), make_rows(9, 5)]
    features = [(0, pooling, lists()) for pooling in poolings] + [(1, "sum", [[3, -1]] * size)]
    request = make_request(tables, features, weights=weights)
    gradients = random_gradients(request)
    assert_tables_close(run(backend, request, gradients), run(reference, request, gradients))


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("optimizer", PLAIN, ids=name)
def test_narrow_tables(backend, dtype, optimizer):
    tables = [
        make_rows(40, 12, dtype=dtype, optimizer=optimizer),
        make_rows(40, 32, dtype=dtype, optimizer=optimizer, slab_log2=2),
    ]
    lists = [[1, 2, 3], [3, 3], [], [39, 0]]
    request = make_request(tables, [(0, "sum", lists), (1, None, lists)])
    gradients = random_gradients(request)
    steps = sized(backend, 3, 2)
    assert_tables_close(run(backend, request, gradients, steps), run(reference, request, gradients, steps))


@pytest.mark.parametrize("backend", THREADED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("optimizer", PLAIN, ids=name)
def test_same_bits_for_any_number_of_threads(backend, optimizer, dtype):
    generator = torch.Generator().manual_seed(5)
    tables = [
        make_rows(20_000, 32, dtype=dtype, optimizer=optimizer),
        make_rows(2, 20, dtype=dtype, optimizer=optimizer),
    ]
    lists = lambda rows: [  # noqa: E731
        (torch.rand(int(n), generator=generator) ** 6 * rows).long().tolist()
        for n in torch.randint(0, 30, (2000,), generator=generator)
    ]
    request = make_request(
        tables, [(0, "sum", lists(20_000)), (0, None, lists(20_000)), (1, "mean", lists(2))], weights=True
    )
    gradients = random_gradients(request)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(run(backend, request, gradients, steps=2))
    for tables in results[1:]:
        for one, other in zip(tables, results[0]):
            assert torch.equal(one.weights[0], other.weights[0])
            for slabs, wanted in zip(one.states, other.states):
                assert torch.equal(slabs[0], wanted[0])


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("optimizer", PLAIN, ids=name)
def test_a_row_repeated_100_000_times(backend, optimizer):
    rows = make_rows(3, 16, optimizer=optimizer)
    request = make_request([rows], [(0, None, [[1] * sized(backend, 100_000, 1_100)])])
    gradients = random_gradients(request)
    first, second = run(backend, request, gradients), run(backend, request, gradients)
    assert torch.equal(first[0].weights[0], second[0].weights[0])
    assert_tables_close(first, run(reference, request, gradients))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_were_not_read_are_not_touched(backend):
    tables = [make_rows(10, 8, optimizer=Adam(lr=0.1, weight_decay=0.1))]
    request = make_request(tables, [(0, "sum", [[2, 5], []])])
    after = run(backend, request, random_gradients(request))
    others = [i for i in range(10) if i not in (2, 5)]
    assert torch.equal(after[0].weights[0][others], tables[0].weights[0][others])
    for slabs, before in zip(after[0].states, tables[0].states):
        assert torch.equal(slabs[0][others], before[0][others])
    assert not torch.equal(after[0].weights[0][[2, 5]], tables[0].weights[0][[2, 5]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_outputs_that_were_not_used_give_no_update(backend):
    tables = [make_rows(10, 8), make_rows(10, 4)]
    request = make_request(tables, [(0, "sum", [[1]]), (1, None, [[2, 3]])])
    pooled, (sequence,) = random_gradients(request)
    after = run(backend, request, (pooled, [None]))
    assert torch.equal(after[1].weights[0], tables[1].weights[0])
    assert not torch.equal(after[0].weights[0], tables[0].weights[0])
    after = run(backend, request, (None, [sequence]))
    assert torch.equal(after[0].weights[0], tables[0].weights[0])
    assert not torch.equal(after[1].weights[0], tables[1].weights[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("optimizer", [LAMB(lr=0.1), LARS(lr=0.1, trust=0.1)], ids=name)
def test_a_row_of_zeros_can_still_learn(backend, optimizer):
    rows = make_rows(2, 8, optimizer=optimizer)
    rows.weights[0].zero_()
    for slabs in rows.states:
        slabs[0].zero_()
    request = make_request([rows], [(0, "sum", [[1]])])
    backend.update(request, torch.ones(1, 8), [], lr_factor=1.0, step=0)
    assert rows.weights[0][1].isfinite().all() and (rows.weights[0][1] < 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_any_layout(backend):
    rows = make_rows(6, 8, optimizer=RowWiseAdagrad(lr=0.1))
    request = make_request([rows], [(0, "sum", [[1], [2, 2]])])
    gradient = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    transposed = run(backend, request, (gradient.T, []))
    plain = run(backend, request, (gradient.T.contiguous(), []))
    spread = run(backend, request, (torch.ones(()).expand(2, 8), []))
    ones = run(backend, request, (torch.ones(2, 8), []))
    assert torch.equal(transposed[0].weights[0], plain[0].weights[0])
    assert torch.equal(spread[0].weights[0], ones[0].weights[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_with_columns_of_others(backend):
    """A request may have some of the features that share a pooled output."""
    tables = [make_rows(6, 8, optimizer=RowWiseAdagrad(lr=0.1)), make_rows(6, 4, optimizer=RowWiseAdagrad(lr=0.1))]
    request = make_request(tables, [(0, "sum", [[1], [2, 2]]), (1, "mean", [[3, 4], [5]])])
    gradient = torch.randn(2, 22, generator=torch.Generator().manual_seed(0))
    places = [2, 16]
    specs = [dataclasses.replace(spec, place=place) for spec, place in zip(request.features, places)]
    spread = dataclasses.replace(request, features=type(request.features)(specs))
    alone = torch.cat([gradient[:, 2:10], gradient[:, 16:20]], 1)
    for one, other in zip(run(backend, spread, (gradient, [])), run(backend, request, (alone, []))):
        assert torch.equal(one.weights[0], other.weights[0])
