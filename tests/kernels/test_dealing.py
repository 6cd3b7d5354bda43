"""The ids of all tables of a step at once: as table by table."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.cases import THREADED
from unequal.kernels import reference

ANY = st.integers(-(2**63), 2**63 - 1)


@st.composite
def tables(draw):
    """(rows or None, asked for, lists of ids) of every table."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        rows = draw(st.sampled_from([None, 1, 3, 40, 10**9]))
        id_ = ANY if rows is None else st.integers(0, rows - 1)
        lists = draw(st.lists(st.lists(st.one_of(id_, st.just(0)), max_size=30), min_size=1, max_size=3))
        found.append((rows, draw(st.booleans()), lists))
    return found


def described(found, order):
    """What `unique_tables` is given where the lists lie in this order."""
    lists = [part for _, _, own in found for part in own]
    begin, ids = {}, []
    for k in order:
        begin[k] = len(ids)
        ids += lists[k]
    spans = np.array([(begin[k], begin[k] + len(part)) for k, part in enumerate(lists)], np.int64)
    firsts = np.cumsum([0, *(len(own) for _, _, own in found)])
    shape = [(first, len(own), -1 if rows is None else rows, asked) for first, (rows, asked, own) in zip(firsts, found)]
    return torch.tensor(ids, dtype=torch.int64), spans, np.array(shape, np.int64)


@pytest.mark.parametrize("backend", THREADED)
@settings(max_examples=100, deadline=None)
@given(found=tables(), seed=st.integers(0, 99))
def test_unique_as_table_by_table(backend, found, seed):
    lists = [part for _, _, own in found for part in own]
    ids, spans, shape = described(found, np.random.default_rng(seed).permutation(len(lists)))
    wrong, unique, inverse = backend.unique_tables(ids, spans, shape)
    assert wrong is None and len(unique) == sum(asked for _, asked, _ in found)
    unique = iter(unique)
    for (_, asked, own), (first, count, *_) in zip(found, shape):
        if not asked:
            continue
        expected = reference.unique(torch.tensor([id_ for part in own for id_ in part], dtype=torch.int64))
        distinct, counts = next(unique)
        assert torch.equal(distinct, expected[0]) and torch.equal(counts, expected[2])
        places = [inverse[a:b] for a, b in spans[first : first + count].tolist()]
        assert torch.equal(torch.cat(places), expected[1])


@pytest.mark.parametrize("backend", THREADED)
@pytest.mark.parametrize("bad", [-1, 5, 2**62])
def test_the_first_table_with_a_wrong_id(backend, bad):
    found = [(5, True, [[0, 4]]), (5, False, [[1], [2, bad]]), (None, True, [[bad]]), (5, True, [[bad]])]
    assert backend.unique_tables(*described(found, range(5)))[0] == 1


@pytest.mark.parametrize("backend", THREADED)
def test_many_ids_on_any_number_of_threads(backend):
    draw = torch.Generator().manual_seed(0)
    ids = (torch.rand(200_000, generator=draw) ** 5 * 1e6).long()
    spans = np.array([(0, 90_000), (110_000, 200_000), (90_000, 110_000)], np.int64)
    shape = np.array([(0, 2, 10**6, 1), (2, 1, -1, 1)], np.int64)
    expected = [reference.unique(torch.cat([ids[:90_000], ids[110_000:]])), reference.unique(ids[90_000:110_000])]
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        wrong, found, inverse = backend.unique_tables(ids, spans, shape)
        assert wrong is None
        for (distinct, counts), wanted in zip(found, expected):
            assert torch.equal(distinct, wanted[0]) and torch.equal(counts, wanted[2])
        assert torch.equal(torch.cat([inverse[:90_000], inverse[110_000:]]), expected[0][1])
        assert torch.equal(inverse[90_000:110_000], expected[1][1])


@pytest.mark.parametrize("backend", THREADED)
def test_places_are_followed_in_their_spans_alone(backend):
    numbers, out = torch.tensor([1, 0, 2, 0, 1]), torch.full((5,), -7)
    backend.follow_places(numbers, [(0, 2, torch.tensor([10, 11])), (3, 5, None)], out)
    assert out.tolist() == [11, 10, -7, 0, 1]
