"""Ids in messages: as many bytes as they need, in all backends the same ones."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.cases import THREADED
from unequal.kernels import reference
from unequal.plan.parts import id_bytes

CPU = torch.device("cpu")


@st.composite
def messages(draw):
    """Blocks of ids and the bytes of one."""
    found = []
    for size in draw(st.lists(st.integers(1, 8), max_size=6)):
        last = 2 ** (8 * size) - 1 if size < 8 else 2**63 - 1
        ids = draw(st.lists(st.integers(0 if size < 8 else -(2**63), last), max_size=20))
        found.append((torch.tensor(ids, dtype=torch.int64), size))
    return found


@pytest.mark.parametrize("backend", [pytest.param(reference, id="reference"), *THREADED])
@settings(max_examples=60, deadline=None)
@given(blocks=messages())
def test_there_and_back(backend, blocks):
    message = backend.narrow_ids(blocks, CPU)
    assert message.tolist() == [
        byte for ids, size in blocks for id in ids.tolist() for byte in (id % 2**64).to_bytes(8, "little")[:size]
    ]
    runs = np.array([(ids.numel(), size) for ids, size in blocks], np.int64).reshape(-1, 2)
    found = backend.widen_ids(message, runs)
    assert found.dtype == torch.int64 and found.tolist() == [id for ids, _ in blocks for id in ids.tolist()]
    assert torch.equal(message, reference.narrow_ids(blocks, CPU))


def test_bytes_of_an_id():
    assert [id_bytes(rows) for rows in (1, 2, 256, 257, 2**16, 2**16 + 1, 2**31, 2**32, 2**32 + 1, 2**63, None)] == [
        1, 1, 1, 2, 2, 3, 4, 4, 5, 8, 8
    ]  # fmt: skip
