"""Budgets in bytes: what the tables take, at every step, with everything that says where rows are and how they matter."""

import pytest
import torch

import unequal as uq
from unequal.width import POLICIES

from .test_width import device


def batches(count, size=64, ids=20_000, seed=0):
    """More ids in every step than there is room for, some far more often than others."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        drawn = (torch.rand(3 * size, generator=generator) ** 6 * ids).long()
        yield uq.Batch(("a", "b", "c"), drawn * 7, torch.ones(3 * size, dtype=torch.int64))


def embeddings(width, rows=None, dtype="fp32", optimizer=None):
    tables = [uq.Table("a", dim=16, dtype=dtype), uq.Table("b", rows=rows, dim=8, dtype=dtype)]
    features = {name: uq.Feature(table, pooling="sum") for name, table in zip("abc", [*tables, tables[0]])}
    return uq.Embeddings(features, optimizer=optimizer or uq.RowWiseAdagrad(lr=0.1), width=width, device=device())


def step(module, batch):
    out = module(batch.to(module.device)).pooled
    generator = torch.Generator().manual_seed(out.shape[0])
    ((out - torch.randn(out.shape, generator=generator).to(out.device)) ** 2).sum().backward()


def taken(module):
    return sum(module.memory().values())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("size", [12_000, 60_000, 300_000])
def test_the_tables_never_take_more(policy, size):
    module = embeddings(uq.Width(budget=f"{size} b", policy=policy))
    for batch in batches(80):
        step(module, batch)
        assert taken(module) <= size
    assert taken(module) > 0.75 * size or policy == "none", "and most of it"


@pytest.mark.parametrize(
    "options", [{"start": "full", "ramp": 40}, {"chunk": 4}, {"most": 1.0}, {"every": 3}, {"every": 40}]
)
@pytest.mark.parametrize("rows", [None, 140_000])
def test_whatever_the_settings(options, rows):
    module = embeddings(uq.Width(budget="60 KB", **options), rows=rows)
    ramp = options.get("ramp", 0) if rows is not None else 0
    for number, batch in enumerate(batches(100)):
        step(module, batch)
        assert taken(module) <= 60_000 or number < ramp
    assert len(module.width_reports) > 1


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize(
    "optimizer", [uq.SGD(lr=0.01), uq.Adagrad(lr=0.1), uq.Adam(lr=0.01)], ids=lambda o: type(o).__name__
)
def test_whatever_a_value_takes(optimizer, dtype):
    module = embeddings(uq.Width(budget="80 KB"), dtype=dtype, optimizer=optimizer)
    for batch in batches(60):
        step(module, batch)
        assert taken(module) <= 80_000


def test_a_round_spends_what_there_is():
    """Ids that are known want more than that."""
    module = embeddings(uq.Width(budget="100 KB", most=1.0, hysteresis=0.0))
    for batch in batches(60):
        step(module, batch)
    module._rounds.round(60)
    assert 97_000 <= taken(module) <= 100_000


@pytest.mark.parametrize("kernels", ["cpu", "reference", "triton"])
def test_bytes_are_foretold(monkeypatch, kernels):
    if kernels == "triton":
        pytest.importorskip("unequal.kernels.triton")
    monkeypatch.setenv("UNEQUAL_KERNELS", kernels)
    module = embeddings(uq.Width(budget="20 KB", every=4), rows=1_000_000)
    assert module._kernels.name == kernels
    for batch in batches(9, size=24):
        step(module, batch)
        assert taken(module) <= 20_000
    module._rounds.round(9)
    for storage in module._narrow_storages().values():
        assert storage.live and storage.bytes_with(storage.counts) == sum(storage.memory().values())


def test_the_least_budget_holds_rows():
    with pytest.raises(uq.RecipeError, match=r"at least ([\d,]+) bytes") as error:
        embeddings(uq.Width(budget="100 b"))
    least = int(str(error.value).split("at least ")[1].split(" bytes")[0].replace(",", ""))
    module = embeddings(uq.Width(budget=f"{least} b", every=5))
    for batch in batches(30):
        step(module, batch)
    assert any(storage.live for storage in module._narrow_storages().values())
