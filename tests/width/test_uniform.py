"""Small tables in few bytes: all rows equally wide, with nothing beside their values and optimizer state."""

import copy

import pytest
import torch

import unequal as uq
from unequal.storage.narrow import NarrowStorage

from .test_width import OPTIMIZERS, batches, compare, embeddings, train

TIGHT = uq.Width(budget="1 KB", every=4)
"""of two tables of 60 rows: a value and a number of row-wise AdaGrad for each come to 960 bytes"""
FITTING = [optimizer for optimizer in OPTIMIZERS if optimizer.state_bytes_per_row(1) <= 4]


def storages(module):
    assert all(isinstance(storage, NarrowStorage) for storage in module._storages.values())
    return module._storages


def test_bytes_are_those_of_plain_tables():
    module = embeddings(TIGHT)
    train(module, batches(9))
    assert module.memory() == {"weights": 120 * 4, "optimizer": 120 * 4, "directory": 0}
    assert all(storage.how.uniform and storage.counts[1] == 60 for storage in storages(module).values())
    assert module.width_reports and not any(report.pruned or report.regained for report in module.width_reports)


def test_it_is_a_plain_table_of_that_dim():
    """With zeros in the other columns; squares of a row add up in another order."""

    def made(width, dim):
        table = uq.Table("t", rows=50, dim=dim, init_std=0.1)
        features = {name: uq.Feature(table, pooling=how) for name, how in (("a", "sum"), ("b", None), ("c", "mean"))}
        return uq.Embeddings(features, optimizer=uq.RowWiseAdagrad(lr=0.1), width=width)

    narrow, plain = made(uq.Width(budget="450 b", rate=1), 8), made(None, 1)
    assert narrow.memory() == plain.memory()
    for batch in batches(6, rows=50):
        found, wanted = narrow(batch), plain(batch)
        for own, other in (
            (found["a"], wanted["a"]),
            (found["b"].values, wanted["b"].values),
            (found["c"], wanted["c"]),
        ):
            torch.testing.assert_close(own[:, :1], other, rtol=1e-5, atol=1e-6)
            assert not own[:, 1:].any()
        for out in (found, wanted):
            (out["a"] - 1).square()[:, :1].sum().add(
                (out["b"].values + out["c"].sum())[:, :1].square().sum()
            ).backward()
    torch.testing.assert_close(
        narrow.state_dict()["t.weight"].view(50, 1), plain.state_dict()["t.weight"], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("kernels", ["cpu", "triton"])
@pytest.mark.parametrize("optimizer", FITTING, ids=lambda optimizer: type(optimizer).__name__)
def test_agrees_with_reference(monkeypatch, optimizer, kernels):
    if kernels == "triton":
        pytest.importorskip("unequal.kernels.triton")
    monkeypatch.setenv("UNEQUAL_KERNELS", kernels)
    own = embeddings(TIGHT, optimizer)
    monkeypatch.setenv("UNEQUAL_KERNELS", "reference")
    expected = embeddings(TIGHT, optimizer)
    assert own._kernels.name == kernels and all(storage.how.uniform for storage in storages(own).values())
    for found, wanted in zip(train(own, batches(4, size=8)), train(expected, batches(4, size=8)), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    compare(own.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("small", ["first", "second"])
@pytest.mark.parametrize("kernels", ["cpu", "triton"])
def test_beside_tables_that_are_followed(monkeypatch, kernels, small):
    """Found in one call with them. Of those what was long ago counts less, at each step between rounds."""
    if kernels == "triton":
        pytest.importorskip("unequal.kernels.triton")
    monkeypatch.setenv("UNEQUAL_KERNELS", kernels)
    width = uq.Width(budget="30%", tables={small: "600 b"}, every=3, decay=0.6)
    own = embeddings(width)
    monkeypatch.setenv("UNEQUAL_KERNELS", "reference")
    expected = embeddings(width)
    uniform = storages(own)[small]
    (followed,) = (storage for name, storage in storages(own).items() if name != small)
    assert followed.how.by_id and not followed.how.uniform and uniform.how.uniform and uniform.how.start == 1
    for found, wanted in zip(train(own, batches(5, size=8)), train(expected, batches(5, size=8)), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    compare(own.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-5)
    assert any(report.pruned or report.regained for report in own.width_reports)


@pytest.mark.parametrize(
    ("budget", "chunks"),
    [
        ("960 b", (1, 1)),  # one value and AdaGrad's number for each of 120 rows
        ("1100 b", (1, 1)),
        ("1200 b", (2, 1)),  # not enough for all: one table first
        ("1350 b", (2, 1)),
        ("1400 b", None),  # what is followed takes less than seven tenths
        ("959 b", "at least"),  # not every row can have a value, and following needs more than that
        ("30%", None),
    ],
)
def test_where_rows_are_equally_wide(budget, chunks):
    if isinstance(chunks, str):
        with pytest.raises(uq.RecipeError, match=chunks):
            embeddings(uq.Width(budget=budget))
        return
    module = embeddings(uq.Width(budget=budget))
    found = tuple(storage.how.start for storage in storages(module).values() if storage.how.uniform)
    assert found == (chunks or ())


def test_tables_of_a_few_rows():
    """To follow them takes more than they could be worth, whatever the share."""
    tables = [uq.Table(f"t{number}", rows=3, dim=4) for number in range(5)]
    features = {table.name: uq.Feature(table) for table in tables}
    module = uq.Embeddings(features, optimizer=uq.RowWiseAdagrad(lr=0.1), width=uq.Width(budget="250 b"))
    assert all(storage.how.uniform for storage in storages(module).values())
    assert sum(module.memory().values()) == 240 and module.memory()["weights"] == 15 * 12


@pytest.mark.parametrize("options", [{"policy": "fiited"}, {"policy": "adaembed"}, {"start": "full"}])
def test_other_policies_follow_all_the_same(options):
    module = embeddings(uq.Width(budget="2 KB", **options))
    assert not any(storage.how.uniform for storage in storages(module).values())


def test_large_tables_are_followed():
    """There most rows are rare, and a few wide ones are worth more than one value for each."""
    module = embeddings(uq.Width(budget="800 KB"), rows=40_000)
    assert not any(storage.how.uniform for storage in storages(module).values())


def test_saved_loaded_and_copied():
    data = list(batches(8))
    module = embeddings(TIGHT)
    train(module, data[:4])
    other = embeddings(TIGHT, seed=5)
    other.load_state_dict(module.state_dict())
    compare(module.state_dict(), other.state_dict(), rtol=0, atol=0)
    third = copy.deepcopy(module)
    for found, wanted, also in zip(*(train(one, data[4:]) for one in (module, other, third)), strict=True):
        assert torch.equal(found, wanted) and torch.equal(found, also)


def test_a_table_saved_with_another_width_is_refused():
    module, wider, followed = (embeddings(uq.Width(budget=budget)) for budget in ("1 KB", "1.2 KB", "30%"))
    for batch in batches(3):
        train(followed, [batch])
    for own, saved in ((module, wider), (module, followed), (followed, module)):
        with pytest.raises(RuntimeError, match="load it with the width it was saved with"):
            own.load_state_dict(saved.state_dict())


@pytest.mark.parametrize("wrong", [-1, 60])
def test_an_id_outside_the_table_is_refused(wrong):
    module = embeddings(TIGHT)
    lengths = torch.cat([torch.zeros(2), torch.tensor([1.0, 2.0]), torch.zeros(2)]).long()
    with pytest.raises(uq.DataError, match=rf"feature 'b', sample 1 of the batch: id {wrong} is not in \[0, 60\)"):
        module(uq.Batch(("a", "b", "c"), torch.tensor([3, 4, wrong]), lengths))
