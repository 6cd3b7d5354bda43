"""Checkpoints of tables whose rows differ in width: they go on bitwise, and load on any number of ranks."""

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import unequal as uq
from unequal.errors import CheckpointError
from unequal.kernels import backend
from unequal.optim import Adagrad, Adam, RowWiseAdagrad, RowWiseAdam
from unequal.plan.placement import Placement, part_of, place
from unequal.storage.shards import NarrowShard
from unequal.train import checkpoint, resharding_width
from unequal.width import POLICIES, Rounds

from .worlds import CPU, good, run_ranks

FEATURES = ("a", "b", "c")


def batches(count, size=24, seed=0, rows=60):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        lengths = torch.randint(0, 5, (3 * size,), generator=generator)
        ids = (torch.rand(int(lengths.sum()), generator=generator) ** 3 * rows).long()
        yield uq.Batch(FEATURES, ids, lengths)


def embeddings(width, optimizer=None, dtype="fp32", seed=0, rows=60):
    first, second = (
        uq.Table("first", rows=rows, dim=8, dtype=dtype),
        uq.Table("second.one", rows=rows, dim=4, dtype=dtype),
    )
    features = {
        "a": uq.Feature(first, pooling="mean"),
        "b": uq.Feature(second, pooling=None),
        "c": uq.Feature(first, pooling="sum"),
    }
    return uq.Embeddings(features, optimizer=optimizer or RowWiseAdagrad(lr=0.1), width=width, seed=seed)


def train(module, data, seed=1):
    generator = torch.Generator().manual_seed(seed)
    outputs = []
    for batch in data:
        out = module(batch)
        parts = [out.pooled, out["b"].values]
        sum(((part - torch.randn(part.shape[1], generator=generator)) ** 2).sum() for part in parts).backward()
        outputs.append(torch.cat([part.detach().flatten() for part in parts]))
    return outputs


def assert_same(one, two):
    assert one.keys() == two.keys()
    for name in one:
        assert torch.equal(one[name], two[name]), name


def rows_of(module):
    return {name: storage.state() for name, storage in module._storages.items()}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_goes_on_bitwise(tmp_path, policy, dtype):
    """Through rounds, and with 16 bits, whose rounding depends on where a row lies."""
    width = uq.Width(budget="30%", policy=policy, every=8)
    own = embeddings(width, dtype=dtype)
    train(own, batches(11))
    path = checkpoint.save(tmp_path, 11, {}, {}, embeddings=own)
    other = embeddings(width, dtype=dtype)
    train(other, batches(5, seed=9))  # what was there is gone
    checkpoint.load(path, embeddings=other)
    assert other.step == 11
    assert_same(own.state_dict(), other.state_dict())
    reports = len(other.width_reports)
    for found, wanted in zip(train(other, batches(20, seed=2)), train(own, batches(20, seed=2)), strict=True):
        assert torch.equal(found, wanted)
    assert_same(own.state_dict(), other.state_dict())
    assert own.width_reports[-2:] == other.width_reports[reports:] or policy == "none"


@pytest.mark.parametrize("optimizer", [Adam(lr=0.01), Adagrad(lr=0.1), RowWiseAdam(lr=0.01), uq.SGD(lr=0.002)])
@pytest.mark.parametrize("budget", ["30%", "20 KB", "2 KB", "1.5 KB"])
def test_goes_on_bitwise_with_every_kind_of_state(tmp_path, optimizer, budget):
    width = uq.Width(budget=budget, every=8, start="full" if "%" in budget else "small", ramp=20)
    own, other = embeddings(width, optimizer), embeddings(width, optimizer)
    train(own, batches(11))
    checkpoint.load(checkpoint.save(tmp_path, 11, {}, {}, embeddings=own), embeddings=other)
    for found, wanted in zip(train(other, batches(20, seed=2)), train(own, batches(20, seed=2)), strict=True):
        assert torch.equal(found, wanted)
    assert_same(own.state_dict(), other.state_dict())


def test_unbounded_ids_and_an_empty_table(tmp_path):
    width = uq.Width(budget="30 KB", every=8)
    own, other = embeddings(width, rows=None), embeddings(width, rows=None)
    path = checkpoint.save(tmp_path, 0, {}, {}, embeddings=own)
    checkpoint.load(path, embeddings=other)
    assert other.rows() == {"first": 0, "second.one": 0}
    train(own, batches(11))
    path = checkpoint.save(tmp_path, 11, {}, {}, embeddings=own)
    checkpoint.load(path, embeddings=other)
    assert checkpoint.open(path).tables["first"].rows == own.rows()["first"] > 0
    train(own, batches(9, seed=2))
    train(other, batches(9, seed=2))
    assert_same(own.state_dict(), other.state_dict())


class Held:
    """What checkpoints see of one rank's shards."""

    def __init__(self, tables, optimizer, width, placement, mesh, states=None):
        self.tables, self.optimizer, self.placement, self.mesh, self.step = tables, optimizer, placement, mesh, 0
        how = Rounds(width, tables, dict.fromkeys(tables, optimizer)).how
        self._storages = []
        for shard in placement.shards(mesh.rank):
            own = shard.part, shard.parts
            storage = NarrowShard(tables[shard.table], *own, optimizer, 7, backend(), CPU, how[shard.table])
            if states is not None:
                storage.load(cut(states[shard.table], tables[shard.table], shard))
                self.step = 77
            self._storages.append((shard, storage))

    def shard_storages(self):
        return self._storages


def cut(state, table, shard):
    """A part of the state of a whole table."""
    mine = part_of(state["ids"], shard.parts, table.rows is None) == shard.part
    values = mine.repeat_interleave(state["widths"])
    followed = part_of(state["candidates"], shard.parts, table.rows is None) == shard.part
    found = {}
    for name, part in state.items():
        if name.startswith("candidate"):
            found[name] = part[followed]
        else:
            found[name] = part[mine if part.shape[0] == mine.numel() else values]
    return found


def assert_state(found, expected):
    """Candidates are the same but for those that found no place in their buckets, of which there are few."""
    for name in expected:
        if not name.startswith("candidate"):
            assert torch.equal(found[name], expected[name]), name
    known = dict(zip(expected["candidates"].tolist(), expected["candidate_utilities"].tolist()))
    followed = dict(zip(found["candidates"].tolist(), found["candidate_utilities"].tolist()))
    assert all(known[id_] == worth for id_, worth in followed.items())
    assert len(followed) == len(known)


def trained(policy="water-filling", rows=60, optimizer=None, steps=21, budget="30%", chunk=None):
    width = uq.Width(budget=budget, policy=policy, every=8, chunk=chunk)
    module = embeddings(width, optimizer, rows=rows)
    train(module, batches(steps))
    return module, width


def placed(tables, kinds, world):
    named = zip(tables, kinds * 2)
    return Placement(world, world, {name: place(kind, tables[name], world, world) for name, kind in named})


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    policy=st.sampled_from(["water-filling", "fiited", "frequency"]),
    rows=st.sampled_from([60, None]),
    optimizer=st.sampled_from([RowWiseAdagrad(lr=0.1), Adam(lr=0.01)]),
    worlds=st.lists(
        st.tuples(st.integers(1, 4), st.sampled_from([("row_wise",), ("table_wise",), ("row_wise", "data_parallel")])),
        min_size=1,
        max_size=3,
    ),
    at_once=st.sampled_from([64, 16 << 20]),
)
def test_any_world_is_read_by_any_other(tmp_path_factory, policy, rows, optimizer, worlds, at_once):
    """Each goes on from what the one before has written; in the end one process has everything, bitwise."""
    module, width = trained(policy, rows, optimizer, budget="30%" if rows else "60 KB")
    expected, tables = rows_of(module), module.tables
    folder = tmp_path_factory.mktemp("worlds")
    path = checkpoint.save(folder, 1, {}, {}, embeddings=module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resharding_width, "CHUNK", at_once)
        for step, (world, kinds) in enumerate(worlds, 2):
            placement = placed(tables, kinds, world)

            def go_on(mesh, placement=placement, source=path, step=step):
                held = Held(tables, optimizer, width, placement, mesh)
                checkpoint.load_embeddings(source, held)
                for shard, storage in held.shard_storages():
                    assert_state(storage.state(), cut(expected[shard.table], tables[shard.table], shard))
                return checkpoint.save(folder, step, {}, {}, embeddings=held)

            (path, *_) = good(run_ranks(world, go_on, world))
        other = embeddings(width, optimizer, rows=rows)
        checkpoint.load(path, embeddings=other)
    assert other.step == module.step
    for name, state in rows_of(other).items():
        assert_state(state, expected[name])
    train(other, batches(10, seed=5))


def test_rows_that_are_all_equally_wide(tmp_path):
    """Small tables in few bytes, from one process to 2 ranks, to 3 and back; and not into tables of another width."""
    module, width = trained(budget="1 KB")
    expected, tables = rows_of(module), module.tables
    assert all(state["widths"].tolist() == [1] * 60 for state in expected.values())
    path = checkpoint.save(tmp_path, 1, {}, {}, embeddings=module)
    for step, world in enumerate((2, 3), 2):
        placement = placed(tables, ("row_wise",), world)

        def go_on(mesh, placement=placement, source=path, step=step, world=world):
            held = Held(tables, module.optimizer, width, placement, mesh)
            checkpoint.load_embeddings(source, held)
            for shard, storage in held.shard_storages():
                assert_state(storage.state(), cut(expected[shard.table], tables[shard.table], shard))
                assert sum(storage.memory().values()) == 20 * 8 * 3 / world
            return checkpoint.save(tmp_path, step, {}, {}, embeddings=held)

        (path, *_) = good(run_ranks(world, go_on, world))
    other = embeddings(width)
    checkpoint.load(path, embeddings=other)
    for name, state in rows_of(other).items():
        assert_state(state, expected[name])
    for budget in ("1.2 KB", "30%"):
        with pytest.raises(CheckpointError, match="saved with"):
            checkpoint.load(path, embeddings=embeddings(uq.Width(budget=budget)))


def test_all_ranks_write_and_replicas_once(tmp_path):
    module, width = trained()
    expected, tables = rows_of(module), module.tables
    placement = placed(tables, ("row_wise", "data_parallel"), 3)

    def save(mesh):
        held = Held(tables, module.optimizer, width, placement, mesh, expected)
        return checkpoint.save(tmp_path, 1, {}, {}, embeddings=held)

    (path, *_) = good(run_ranks(3, save, 3))
    saved = checkpoint.open(path)
    first, second = saved.tables["first"], saved.tables["second.one"]
    assert [shard.part for shard in first.shards] == [0, 1, 2] and len(second.shards) == 1
    assert len({shard.file for shard in first.shards}) == 3
    assert first.live == module.rows()["first"] and first.rows == 60
    assert json.loads((path / "state.json").read_text())["format"] == 3
    checkpoint.verify(path)


@pytest.mark.parametrize("optimizer", [RowWiseAdagrad(lr=0.1), Adam(lr=0.01)])
@pytest.mark.parametrize("policy", ["water-filling", "fiited"])
def test_looking_into_one(tmp_path, policy, optimizer):
    """Rows as the model reads them, with zeros for what they lack, without the run."""
    module, _ = trained(policy, optimizer=optimizer)
    saved = checkpoint.open(checkpoint.save(tmp_path, 3, {}, {}, embeddings=module))
    module.eval()
    for name, feature in (("first", "c"), ("second.one", "b")):
        state = module._storages[name].state()
        assert torch.equal(saved.has(name, range(60)), torch.isin(torch.arange(60), state["ids"]))
        seen = list(saved.table(name, at_once=7))
        ids = torch.cat([part for part, _ in seen])
        assert ids.sort().values.equal(state["ids"])
        rows = {part: torch.cat([found[part] for _, found in seen]) for part in seen[0][1]}
        order = ids.argsort()
        assert torch.equal(rows["width"][order], state["widths"])
        wanted = torch.zeros(3 * ids.numel(), dtype=torch.int64)
        at = FEATURES.index(feature)
        wanted[at * ids.numel() : (at + 1) * ids.numel()] = 1
        read = module(uq.Batch(FEATURES, ids, wanted))[feature]
        assert torch.equal(rows["weight"], read if isinstance(read, torch.Tensor) else read.values)
        for state_name, per in optimizer.state:
            if per == "row":
                assert torch.equal(rows[state_name][order], state[state_name])
            else:
                assert rows[state_name].count_nonzero() == state[state_name].count_nonzero()
        some = ids[torch.tensor([5, 0, 5, 3])]
        assert torch.equal(saved.rows(name, some)["weight"], rows["weight"][torch.tensor([5, 0, 5, 3])])
        with pytest.raises(CheckpointError, match="no row for id 1000"):
            saved.rows(name, [1000])


def test_another_budget_holds_from_the_next_step_on(tmp_path):
    """What an old one left for new rows is no more."""
    module, _ = trained(budget="90%", steps=5)  # the next round is after 3 more
    path = checkpoint.save(tmp_path, 1, {}, {}, embeddings=module)
    smaller = embeddings(uq.Width(budget="10%", every=8))
    checkpoint.load(path, embeddings=smaller)
    assert smaller.rows() == module.rows()
    train(smaller, batches(2, seed=7))
    assert smaller.rows() == module.rows()


def test_whole_rows_and_rows_of_different_width_do_not_mix(tmp_path):
    narrow, _ = trained()
    plain = embeddings(None)
    path = checkpoint.save(tmp_path, 1, {}, {}, embeddings=plain)
    with pytest.raises(CheckpointError, match=r"the saved ones are whole.*without a width budget"):
        checkpoint.load(path, embeddings=narrow)
    path = checkpoint.save(tmp_path, 2, {}, {}, embeddings=narrow)
    with pytest.raises(CheckpointError, match=r"differ in width; load it with the width budget.*unequal export"):
        checkpoint.load(path, embeddings=plain)


@pytest.mark.parametrize("policy", ["adaembed", "water-filling", "fiited"])
def test_smaller_chunks(tmp_path, policy):
    """Rows keep their values, their state and what they are worth."""
    module, _ = trained(policy, chunk=4)
    path = checkpoint.save(tmp_path, 1, {}, {}, embeddings=module)
    finer = embeddings(uq.Width(budget="30%", policy=policy, every=8, chunk=2))
    checkpoint.load(path, embeddings=finer)
    module.eval()
    finer.eval()
    (batch,) = batches(1, seed=4)
    assert torch.equal(module(batch).pooled, finer(batch).pooled)
    assert torch.equal(module(batch)["b"].values, finer(batch)["b"].values)
    for name, storage in finer._storages.items():
        own, other = module._storages[name].state(), storage.state()
        assert torch.equal(own["widths"], other["widths"]) and torch.equal(own["sum"], other["sum"])
        torch.testing.assert_close(own["utilities"].norm(dim=1), other["utilities"].norm(dim=1))
        assert own["candidates"].equal(other["candidates"])
    finer.train()
    train(finer, batches(10, seed=5))


def test_larger_chunks_where_rows_end_in_them(tmp_path):
    module, _ = trained("adaembed", chunk=2)
    path = checkpoint.save(tmp_path, 1, {}, {}, embeddings=module)
    coarser = embeddings(uq.Width(budget="30%", policy="adaembed", every=8, chunk=4))
    checkpoint.load(path, embeddings=coarser)  # all rows are whole
    assert coarser.rows() == module.rows()
    module, _ = trained("water-filling", chunk=2)
    path = checkpoint.save(tmp_path, 2, {}, {}, embeddings=module)
    coarser = embeddings(uq.Width(budget="30%", every=8, chunk=4))
    with pytest.raises(
        CheckpointError, match=r"chunks of 4 values, got a row of \d+ values, saved in chunks of 2.*width\.chunk"
    ):
        checkpoint.load(path, embeddings=coarser)


def test_other_policies(tmp_path):
    module, _ = trained("adaembed")
    path = checkpoint.save(tmp_path, 1, {}, {}, embeddings=module)
    masked = embeddings(uq.Width(budget="30%", policy="fiited", every=8))
    checkpoint.load(path, embeddings=masked)  # all its chunks are some of its chunks
    module.eval()
    masked.eval()
    (batch,) = batches(1, seed=4)
    assert torch.equal(module(batch).pooled, masked(batch).pooled)
    by_reads = embeddings(uq.Width(budget="30%", policy="itep", every=8))
    with pytest.raises(CheckpointError, match=r"worth was counted in another way; load it with the width.policy"):
        checkpoint.load(path, embeddings=by_reads)
    module, _ = trained("fiited")
    path = checkpoint.save(tmp_path, 2, {}, {}, embeddings=module)
    with pytest.raises(CheckpointError, match=r"a row without its first ones.*width.policy"):
        checkpoint.load(path, embeddings=embeddings(uq.Width(budget="30%", policy="adaembed", every=8)))


def test_a_state_dict_in_a_checkpoint_says_how_to_load_it(tmp_path):
    module, width = trained()
    state = {f"embeddings.{name}": tensor for name, tensor in module.state_dict().items()}
    path = checkpoint.save(tmp_path, 1, state, {})
    with pytest.raises(CheckpointError, match=r"rows of different width.*load_state_dict"):
        checkpoint.load(path, embeddings=module)
    other = embeddings(width)
    saved = checkpoint.load(path).model_state
    other.load_state_dict({name.removeprefix("embeddings."): tensor for name, tensor in saved.items()})
    assert_same(module.state_dict(), other.state_dict())


@pytest.mark.parametrize("policy", ["water-filling", "fiited"])
def test_goes_on_with_the_kernels_for_gpus_and_without(tmp_path, monkeypatch, policy):
    """In Triton's interpreter. Candidates lie in the same places whichever kernels follow them."""
    pytest.importorskip("unequal.kernels.triton")
    width = uq.Width(budget="30%", policy=policy, every=4)
    monkeypatch.setenv("UNEQUAL_KERNELS", "triton")
    own, same = embeddings(width), embeddings(width)
    data = list(batches(7, size=8))
    train(own, data[:5])
    path = checkpoint.save(tmp_path, 5, {}, {}, embeddings=own)
    monkeypatch.delenv("UNEQUAL_KERNELS")
    other = embeddings(width)
    for module in (same, other):
        checkpoint.load(path, embeddings=module)
        assert_same(own.state_dict(), module.state_dict())
    for module in (own, same, other):
        train(module, data[5:])
    assert_same(own.state_dict(), same.state_dict())
    for name, part in other.state_dict().items():
        torch.testing.assert_close(part, own.state_dict()[name], rtol=1e-4, atol=1e-5)
