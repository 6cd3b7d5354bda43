"""Checkpoints of tables whose rows differ in width, from and to a GPU."""

from pathlib import Path

import pytest
import torch

import unequal as uq
from tests.width.test_width import batches, embeddings, train
from unequal.exported import load
from unequal.train import checkpoint, export

from .test_width_gpu import on_gpu, state


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("policy", ["water-filling", "fiited", "itep"])
def test_goes_on_bitwise_and_elsewhere(tmp_path: Path, policy: str, dtype: str) -> None:
    width = uq.Width(budget="30%", policy=policy, every=4)
    own = on_gpu(embeddings(width, dtype=dtype))
    train(own, batches(6))
    path = checkpoint.save(tmp_path, 6, {}, {}, embeddings=own)
    same, other = on_gpu(embeddings(width, dtype=dtype)), embeddings(width, dtype=dtype)
    for module in (same, other):
        checkpoint.load(path, embeddings=module)
        before, after = state(own), state(module)
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    for found, wanted in zip(train(same, batches(8, seed=3)), train(own, batches(8, seed=3)), strict=True):
        assert torch.equal(found, wanted)
    before, after = state(own), state(same)
    assert all(torch.equal(before[name], after[name]) for name in before)
    train(other, batches(8, seed=3))
    back = on_gpu(embeddings(width, dtype=dtype))
    checkpoint.load(checkpoint.save(tmp_path, 14, {}, {}, embeddings=other), embeddings=back)
    before, after = state(other), state(back)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_export_is_read_on_a_gpu(tmp_path: Path) -> None:
    module = on_gpu(embeddings(uq.Width(budget="30%", policy="fiited", every=4)))
    train(module, batches(6))
    saved = checkpoint.open(checkpoint.save(tmp_path, 6, {}, {}, embeddings=module))
    export.write(saved, tmp_path / "m.safetensors", {"features": {}})
    ids, offsets = torch.arange(-3, 70), torch.tensor([0, 3, 3, 73])
    for name, table in load(tmp_path / "m.safetensors", device="cuda").tables.items():
        here = load(tmp_path / "m.safetensors").tables[name]
        assert torch.equal(table.lookup(ids.cuda()).cpu(), here.lookup(ids))
        torch.testing.assert_close(
            table.pooled(ids.cuda(), offsets.cuda(), "mean").cpu(), here.pooled(ids, offsets, "mean")
        )
