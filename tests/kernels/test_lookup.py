import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.cases import BACKENDS, FAST, FEW, THREADED, TRITON, make_request, make_rows, outputs_for, sized
from unequal.kernels import reference
from unequal.kernels.request import FeatureSpecs


def run(backend, request):
    pooled, sequences = outputs_for(request)
    return backend.lookup(request, pooled, sequences), pooled, sequences


@pytest.mark.parametrize("backend", BACKENDS)
def test_small_case_by_hand(backend):
    rows = make_rows(4, 3)
    w = rows.weights[0]
    lists = [[0, 1], [], [3, 3, 2]]
    request = make_request([rows], [(0, "sum", lists), (0, "mean", lists), (0, None, lists)])
    wrong, pooled, (sequence,) = run(backend, request)
    assert wrong == -1
    assert torch.allclose(pooled[:, :3], torch.stack([w[0] + w[1], torch.zeros(3), 2 * w[3] + w[2]]))
    assert torch.allclose(pooled[:, 3:], torch.stack([(w[0] + w[1]) / 2, torch.zeros(3), (2 * w[3] + w[2]) / 3]))
    assert torch.equal(sequence, w[[0, 1, 3, 3, 2]])


@st.composite
def requests(draw):
    dims = st.sampled_from([1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 24, 31, 32, 64, 65, 100, 128, 130])
    dtypes = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
    tables = [
        make_rows(
            draw(st.integers(1, 40)),
            draw(dims),
            dtype=draw(dtypes),
            slab_log2=draw(st.sampled_from([-1, 0, 1, 3])),
            seed=t,
        )
        for t in range(draw(st.integers(1, 3)))
    ]
    size = draw(st.integers(0, 5))
    features = []
    for _ in range(draw(st.integers(1, 4))):
        table = draw(st.integers(0, len(tables) - 1))
        ids = st.integers(0, tables[table].rows - 1)
        lists = draw(st.lists(st.lists(ids, max_size=6), min_size=size, max_size=size))
        features.append((table, draw(st.sampled_from(["sum", "mean", None])), lists))
    return make_request(tables, features, weights=draw(st.booleans()))


@pytest.mark.parametrize("backend", THREADED)
@settings(max_examples=150, deadline=None)
@given(request=requests())
def test_agrees_with_reference(backend, request):
    wrong, pooled, sequences = run(backend, request)
    assert wrong == -1
    _, expected, expected_sequences = run(reference, request)
    if pooled is not None:
        torch.testing.assert_close(pooled, expected, rtol=1e-5, atol=1e-6)
    for one, other in zip(sequences, expected_sequences):
        assert torch.equal(one, other)


@pytest.mark.parametrize("backend", TRITON)
@FEW
@given(request=requests())
def test_triton_agrees_with_reference(backend, request):
    test_agrees_with_reference.hypothesis.inner_test(backend, request)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wrong_id", [-1, -5, 10, 2**40])
def test_names_the_first_wrong_id(backend, wrong_id):
    tables = [make_rows(10, 8), make_rows(10, 16)]
    request = make_request(tables, [(0, "sum", [[1, 2], [3]]), (1, None, [[4], [wrong_id, 5, wrong_id]])])
    assert run(backend, request)[0] == 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_missing_rows_read_as_zeros(backend):
    rows = make_rows(6, 16, slab_log2=1, strict=False)
    request = make_request([rows], [(0, "sum", [[-1], [2, -1]]), (0, None, [[-1, 3], []])])
    wrong, pooled, (sequence,) = run(backend, request)
    assert wrong == -1
    full = torch.cat(rows.weights)
    assert torch.equal(pooled, torch.stack([torch.zeros(16), full[2]]))
    assert torch.equal(sequence, torch.stack([torch.zeros(16), full[3]]))


@pytest.mark.parametrize("backend", THREADED)
def test_same_bits_for_any_number_of_threads(backend):
    generator = torch.Generator().manual_seed(1)
    tables = [make_rows(1000, 64), make_rows(50, 20)]
    features = [
        (t, pooling, [torch.randint(tables[t].rows, (int(n),), generator=generator).tolist() for n in lengths])
        for t, pooling in [(0, "sum"), (1, "mean"), (0, None)]
        for lengths in [torch.randint(0, 40, (500,), generator=generator)]
    ]
    request = make_request(tables, features, weights=True)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(run(backend, request))
    for _, pooled, (sequence,) in results[1:]:
        assert torch.equal(pooled, results[0][1]) and torch.equal(sequence, results[0][2][0])


@pytest.mark.parametrize("backend", FAST)
def test_outputs_may_lie_in_wider_rows(backend):
    rows = make_rows(5, 16)
    request = make_request([rows], [(0, "sum", [[1], [2, 3]])])
    wide = torch.full((2, 40), 7.0)
    request = dataclasses.replace(request, features=FeatureSpecs([dataclasses.replace(request.features[0], place=10)]))
    assert backend.lookup(request, wide, []) == -1
    assert torch.equal(wide[:, 10:26], torch.stack([rows.weights[0][1], rows.weights[0][2] + rows.weights[0][3]]))
    assert (wide[:, :10] == 7).all() and (wide[:, 26:] == 7).all()


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("dims", [(64, 64), (64, 20), (8, 16), (128, 32)])
def test_outputs_larger_than_the_caches(backend, dims):
    """They are written another way, where the width of a row allows it."""
    generator = torch.Generator().manual_seed(2)
    tables = [make_rows(500, dim, seed=t) for t, dim in enumerate(dims)]
    lists = [
        torch.randint(500, (int(n),), generator=generator).tolist()
        for n in torch.arange(sized(backend, 24_000, 40)) % 4
    ]
    request = make_request(tables, [(0, "sum", lists), (1, "mean", lists), (0, None, lists)])
    wrong, pooled, (sequence,) = run(backend, request)
    assert wrong == -1
    _, expected, (expected_sequence,) = run(reference, request)
    torch.testing.assert_close(pooled, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(sequence, expected_sequence)
