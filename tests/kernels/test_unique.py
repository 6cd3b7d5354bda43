import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.cases import BACKENDS, FAST
from unequal.kernels import reference

IDS = st.one_of(st.integers(0, 20), st.integers(-(2**63), 2**63 - 1))


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=100, deadline=None)
@given(ids=st.lists(IDS, max_size=200))
def test_order_of_first_appearance(backend, ids):
    distinct, inverse, counts = backend.unique(torch.tensor(ids, dtype=torch.int64))
    assert distinct.tolist() == list(dict.fromkeys(ids))
    assert distinct[inverse].tolist() == ids
    assert counts.tolist() == [ids.count(id_) for id_ in dict.fromkeys(ids)]


@pytest.mark.parametrize("backend", FAST)
def test_many_ids_on_any_number_of_threads(backend):
    generator = torch.Generator().manual_seed(0)
    ids = (torch.rand(200_000, generator=generator) ** 5 * 1e6).long() * 1_000_003
    expected = reference.unique(ids)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for part, wanted in zip(backend.unique(ids), expected):
            assert torch.equal(part, wanted)
