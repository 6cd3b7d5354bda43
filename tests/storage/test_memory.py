import gc

import pytest
import torch

from unequal.storage.memory import HUGE, OutputPool, zeros


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 3, 3_000_000])
def test_zeros(dtype, rows):
    tensor = zeros((rows, 5), dtype)
    assert tensor.shape == (rows, 5) and tensor.dtype == dtype and bool((tensor == 0).all())
    tensor.fill_(1)
    if rows > 1000:
        assert tensor.data_ptr() % HUGE == 0


def test_a_buffer_is_lent_again_only_when_nobody_holds_it(monkeypatch):
    monkeypatch.undo()
    pool = OutputPool()
    first = pool.take(1000, 1000)
    address = first.data_ptr()
    view = first[5:].view(-1)
    first.fill_(3)
    del first
    second = pool.take(1000, 1000)
    assert second.data_ptr() != address and bool((view == 3).all())
    del view
    gc.collect()
    third = pool.take(990, 1000)
    assert third.data_ptr() == address


def test_autograd_keeps_a_buffer_alive(monkeypatch):
    monkeypatch.undo()
    pool = OutputPool()
    leaf = torch.ones(600_000, requires_grad=True)
    part = pool.take(600_000, 1).fill_(2).view(-1)
    loss = (leaf * part).sum()
    del part
    pool.take(600_000, 1).fill_(9)
    loss.backward()
    assert bool((leaf.grad == 2).all())


def test_free_buffers_do_not_pile_up(monkeypatch):
    monkeypatch.undo()
    pool = OutputPool()
    for rows in range(300_000, 3_000_000, 300_000):
        pool.take(rows, 1)
    assert len(pool._free) <= 1


def test_buffers_of_another_size_take_the_place_of_free_ones(monkeypatch):
    """As after an evaluation with larger batches: the next steps' outputs are used again, and the large one is given up."""
    monkeypatch.undo()
    pool = OutputPool()
    pool.take(8_000_000, 1)
    address = pool.take(300_000, 1).data_ptr()
    assert pool.take(300_000, 1).data_ptr() == address
    assert [area.size < 8_000_000 for area in pool._free] == [True]
