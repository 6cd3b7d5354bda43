"""What rows seem to be worth counts by how often they were read."""

import numpy as np
import pytest
import torch

import unequal as uq
from unequal.storage.tally import Tally
from unequal.train import checkpoint
from unequal.width.evidence import Reads, believed, divided, doubts
from unequal.width.measures import alone_in_all

FEATURES = 2


def module_of(rows=(64, None), **width):
    """Features of one id a sample, one for each table."""
    features = {f"f{t}": uq.Feature(uq.Table(f"t{t}", rows=count, dim=4), "sum") for t, count in enumerate(rows)}
    how = {"budget": "30 KB" if None in rows else "25%", "every": 4, **width}
    return uq.Embeddings(features, optimizer=uq.SGD(lr=0.1), width=uq.Width(chunk=1, **how))


def train(module, steps, size=8, seed=0):
    random = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        ids = torch.randint(0, 64, (len(module.features) * size,), generator=random)
        batch = uq.Batch(tuple(module.features), ids, torch.ones_like(ids)).to(module.device)
        (module(batch).pooled ** 2).sum().backward()


def reads_of(module):
    return module.shown()["reads"]


def test_half_is_believed_where_a_row_was_read_often_enough():
    """Four rows share 80 reads as they share what they are worth: of the row that was read 20 times half counts."""
    worth = torch.tensor([[1.0], [2.0], [2.0], [3.0]])
    reads = Reads({"a": Tally(), "b": Tally()}, before={"a": 70.0, "b": 0.0}, seen={"a": 0, "b": 0})
    reads.tallies["a"].note(10, 3)
    found = doubts(["a", "b"], reads, 20.0, {"a": worth, "b": worth}, {"a", "b"}, alone_in_all)
    assert found == {"a": 2.0, "b": 0.0}
    assert not doubts(["a", "b"], reads, 20.0, {"a": worth, "b": worth}, {"a"}, alone_in_all), "some are not followed"
    counted = believed(worth, found["a"])[:, 0].tolist()
    assert counted == pytest.approx([1 / 3, 1.0, 1.0, 9 / 5])
    assert believed(worth, 0.0) is worth
    assert not believed(torch.zeros(3, 1), 2.0).any()


def test_doubts_are_those_of_all_ranks():
    """One has the rows of the first table, the other those of the second; both read both."""
    tables, worth = ["a", "b"], {"a": torch.tensor([[3.0]]), "b": torch.tensor([[1.0], [4.0]])}
    parts = [Reads({name: Tally() for name in tables}, asked={"a": 0, "b": 0}) for _ in range(2)]
    for part, counts in zip(parts, [(10, 20), (20, 80)]):
        part.load({"a": 0.0, "b": 0.0})
        part.note(tables, counts)
    own = [np.array([3.0, 0, 10, 20, 0]), np.array([0.0, 5, 20, 80, 0])]

    def totals(rank):
        def together(values):
            np.testing.assert_array_equal(values, own[rank])
            return own[0] + own[1]

        return together

    held = [{"a": worth["a"]}, {"b": worth["b"]}]
    found = [doubts(tables, part, 30.0, held[rank], held[rank], totals(rank)) for rank, part in enumerate(parts)]
    assert found[0] == found[1] == {"a": 3.0, "b": 1.5}


@pytest.mark.parametrize("kernels", ["cpu", "reference", "triton"])
def test_reads_of_training_are_counted(monkeypatch, kernels):
    if kernels == "triton":
        pytest.importorskip("unequal.kernels.triton")
    monkeypatch.setenv("UNEQUAL_KERNELS", "" if kernels == "cpu" else kernels)
    module = module_of()
    train(module, 3)
    module.eval()
    train_ids = torch.arange(16)
    module(uq.Batch(("f0", "f1"), train_ids, torch.ones_like(train_ids)).to(module.device))  # is not counted
    module.train()
    train(module, 2, size=4)
    assert reads_of(module) == {"t0": 32.0, "t1": 32.0}


def test_rows_that_were_read_a_few_times_get_less():
    """Rows of both tables seem to be worth the same, but those of the second were read once each."""

    def widths(reads):
        module = module_of((64, 64), most=1.0, hysteresis=0.0)
        train(module, 1)
        for storage in module._storages.values():
            state = storage.state()
            state["utilities"][:], state["candidate_utilities"] = 1.0, torch.ones(64 - len(state["ids"]), 1)
            live = set(state["ids"].tolist())
            state["candidates"] = torch.tensor([id_ for id_ in range(64) if id_ not in live])
            storage.load(state)
        module._rounds.reads.load(reads)
        for step in range(4):
            assert module._rounds.round(step).kept <= 0.25
        return [storage.values / 64 for storage in module._storages.values()]

    assert widths(None) == pytest.approx([1.0, 1.0], abs=0.05), "it is not known"
    assert widths({"t0": 6400.0, "t1": 6400.0}) == pytest.approx([1.0, 1.0], abs=0.05)
    often, once = widths({"t0": 64_000.0, "t1": 64.0})
    assert often > 4 * once


def test_saved_and_loaded(tmp_path):
    module, other, third = module_of(), module_of(), module_of()
    train(module, 6)
    path = checkpoint.save(tmp_path, 1, {}, {}, embeddings=module)
    assert checkpoint.open(path).shown["reads"] == reads_of(module) == {"t0": 48.0, "t1": 48.0}
    train(other, 3, seed=1)  # what was there is gone
    checkpoint.load(path, embeddings=other)
    third.load_state_dict(module.state_dict())
    assert reads_of(other) == reads_of(third) == reads_of(module)
    for each in (module, other, third):
        train(each, 4, seed=2)
        assert reads_of(each) == {"t0": 80.0, "t1": 80.0}


def test_checkpoints_that_do_not_say_it(tmp_path, monkeypatch):
    """Older ones: what rows seem to be worth is believed, as it was when they were saved."""
    module, other = module_of(), module_of()
    train(module, 6)
    path = checkpoint.save(tmp_path, 1, {}, {}, embeddings=module)
    monkeypatch.setattr(type(checkpoint.open(path)), "shown", None)
    checkpoint.load(path, embeddings=other)
    assert reads_of(other) is None
    train(other, 4)
    assert other.width_reports[-1].values
    assert checkpoint.open(checkpoint.save(tmp_path / "again", 2, {}, {}, embeddings=other)).shown is None


def test_parts_add_up():
    whole = {"a": 10.0, "b": 3.0}
    assert Reads.together([divided(whole, 4)] * 4) == whole
    assert Reads.together([whole, None]) is None and divided(None, 2) is None
