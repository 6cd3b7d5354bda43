"""Checkpoints of many ranks: written by all at once, read by any number of others, exact."""

import json
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import unequal as uq
from unequal import tensorfile
from unequal.kernels import backend
from unequal.optim import LAMB, LARS, SGD, Adagrad, Adam, RowWiseAdagrad, RowWiseAdam
from unequal.plan.placement import KINDS, Piece, Placement, TablePlacement, part_of
from unequal.storage import tables as storage_tables
from unequal.tables import Feature, Table
from unequal.train import checkpoint, resharding

from .worlds import (
    OPTIMIZERS,
    TRUTHS,
    Truth,
    assert_world,
    good,
    hold,
    inspected,
    load_world,
    make_placement,
    make_truths,
    rank_of_thread,
    run_ranks,
    save_world,
)


@pytest.mark.parametrize("after", KINDS)
@pytest.mark.parametrize("before", KINDS)
def test_every_kind_is_read_by_every_other(saved_in_every_kind, before, after):
    world, ranks_per_node = (4, 2) if "_row" in after or "_column" in after else (3, 3)
    assert_world(saved_in_every_kind[before], TRUTHS, make_placement(TRUTHS, after, world, ranks_per_node))


@pytest.mark.parametrize("turn", range(len(OPTIMIZERS)))
@pytest.mark.parametrize("kind", KINDS)
def test_four_ranks_then_two_then_three_then_one(tmp_path, kind, turn):
    """Each world goes on from what the one before has written; in the end one process has everything, bitwise."""
    truths = make_truths(OPTIMIZERS[turn:] + OPTIMIZERS[:turn])
    numbers = KINDS.index(kind)
    (path, *_) = good(save_world(tmp_path, 1, truths, make_placement(truths, kind, 4, 2)))
    for step, (world, ranks_per_node) in enumerate([(2, 1), (3, 3), (1, 1)], 2):
        kinds = KINDS[(numbers + step) % len(KINDS) :] + KINDS[: (numbers + step) % len(KINDS)]
        placement = make_placement(truths, kinds, world, ranks_per_node)
        source = path

        def go_on(mesh, placement=placement, source=source, step=step):
            tables = hold(truths, placement, mesh, pour=False)
            checkpoint.load_embeddings(source, tables)
            return checkpoint.save(tmp_path, step, {}, {}, embeddings=tables)

        (path, *_) = good(run_ranks(world, go_on, ranks_per_node))
    assert_world(path, truths, make_placement(truths, "table_wise", 1))


OPTIMIZER = st.sampled_from([SGD(), Adagrad(), RowWiseAdagrad(), Adam(), RowWiseAdam(), LAMB(), LARS()])


@st.composite
def spread(draw, dim, world):
    """Any placement of a table: pieces of columns at any bounds, each on any ranks in any order."""
    if draw(st.integers(0, 5)) == 0:
        return TablePlacement("data_parallel", (Piece(0, dim, tuple(range(world))),))
    inner = sorted(draw(st.sets(st.integers(1, dim - 1), max_size=3))) if dim > 1 else []
    bounds = [0, *inner, dim]
    ranks = st.permutations(range(world)).flatmap(lambda order: st.integers(1, world).map(lambda n: tuple(order[:n])))
    pieces = tuple(Piece(a, b, draw(ranks)) for a, b in pairwise(bounds))
    return TablePlacement("column_row_wise", pieces)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_placement_is_read_by_any_other(tmp_path_factory, data):
    truths = {}
    for number in range(data.draw(st.integers(1, 3))):
        optimizer, name = data.draw(OPTIMIZER), f"t{number}"
        dim, dtype = data.draw(st.integers(1, 12)), data.draw(st.sampled_from(["fp32", "fp16", "bf16"]))
        if data.draw(st.booleans()):
            admit_after = data.draw(st.sampled_from([1, 2, 4]))
            table = Table(name, dim=dim, dtype=dtype, optimizer=optimizer, admit_after=admit_after)
        else:
            table = Table(name, data.draw(st.integers(1, 50)), dim=dim, dtype=dtype, optimizer=optimizer)
        truths[name] = Truth(table, optimizer, data.draw(st.integers(0, 60)), seed=data.draw(st.integers(0, 99)))

    def placement():
        world = data.draw(st.integers(1, 4))
        return Placement(
            world, world, {name: data.draw(spread(truth.table.dim, world)) for name, truth in truths.items()}
        )

    before, after = placement(), placement()
    folder = tmp_path_factory.mktemp("any")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensorfile, "BLOCK", 256)
        patch.setattr(tensorfile, "LARGEST_COPY", 300)
        patch.setattr(resharding, "CHUNK", data.draw(st.sampled_from([64, 400, 16 << 20])))
        (path, *_) = good(save_world(folder, 1, truths, before))
        assert_world(path, truths, after)
        inspected(path, truths)


def test_the_same_ranks_get_their_slots_back(saved_in_every_kind):
    """What is drawn per slot, as in stochastic rounding, goes on as it would have."""
    placement = make_placement(TRUTHS, "row_wise", 4, 2)
    before = good(run_ranks(4, lambda mesh: hold(TRUTHS, placement, mesh)))
    after = good(load_world(saved_in_every_kind["row_wise"], TRUTHS, placement))
    for one, two in zip(before, after):
        for (_, a), (_, b) in zip(one.shard_storages(), two.shard_storages()):
            assert a.state().keys() == b.state().keys()
            assert all(torch.equal(value, b.state()[name]) for name, value in a.state().items())


def test_one_process_reads_what_four_ranks_trained(saved_in_every_kind):
    features = {name: Feature(truth.table) for name, truth in TRUTHS.items()}
    for path in saved_in_every_kind.values():
        embeddings = uq.Embeddings(features, optimizer=SGD())
        saved = checkpoint.load(path, embeddings=embeddings)
        assert embeddings.step == 77 and saved.world == 4
        assert list(saved.model_state) == ["head.bias"]
        for shard, storage in embeddings.shard_storages():
            TRUTHS[shard.table].assert_in(shard, storage)


@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_other_kernels_keep_other_directories(saved_in_every_kind, kernels, monkeypatch):
    monkeypatch.setenv("UNEQUAL_KERNELS", kernels)
    assert backend().name == kernels
    # One rank alone: Triton's interpreter does not work in several threads.
    assert_world(saved_in_every_kind["column_row_wise"], TRUTHS, make_placement(TRUTHS, "row_wise", 1), backend())


def test_training_after_resharding_goes_on_as_in_one_process(tmp_path):
    """What is loaded is not only equal, it works: rows grow, directories find, optimizers go on."""
    table = Table("t", dim=4, admit_after=2)

    def fresh():
        return uq.Embeddings({"f": Feature(table)}, optimizer=Adam(), seed=3)

    def step(embeddings, seed):
        ids = torch.randint(40, (30,), generator=torch.Generator().manual_seed(seed))
        out = embeddings({"f": uq.Jagged(ids, torch.full((10,), 3))})["f"]
        (out * torch.arange(4.0)).sum().backward()

    one = fresh()
    for seed in range(5):
        step(one, seed)
    path = checkpoint.save(tmp_path, 5, {}, {}, embeddings=one)
    two = fresh()
    checkpoint.load_embeddings(path, two)
    for seed in range(5, 9):
        step(one, seed)
        step(two, seed)
    assert all(torch.equal(value, two.state_dict()[name]) for name, value in one.state_dict().items())


def test_every_rank_keeps_its_own(saved_in_every_kind):
    path = saved_in_every_kind["row_wise"]
    loaded = good(run_ranks(4, lambda mesh: checkpoint.load(path, mesh=mesh)))
    for rank, saved in enumerate(loaded):
        assert saved.own["rank"] == rank and torch.equal(saved.own["random"]["torch"], torch.arange(rank, rank + 4))
        assert saved.other == {"n": 1} and torch.equal(saved.model_state["head.bias"], torch.arange(3.0))
    assert checkpoint.open(path).own(4) is None


def test_a_data_parallel_table_is_written_once_and_the_work_is_shared(tmp_path):
    optimizer = SGD()
    truths = {f"t{n}": Truth(Table(f"t{n}", 400, dim=8), optimizer, seed=n) for n in range(4)}
    (path, *_) = good(save_world(tmp_path, 1, truths, make_placement(truths, "data_parallel", 4)))
    sizes = [file.stat().st_size for file in sorted(path.glob("*.safetensors"))]
    assert len(sizes) == 4 and max(sizes) < 1.2 * min(sizes)
    assert sum(sizes) < 1.2 * 4 * 400 * 8 * 4
    index = json.loads((path / "state.json").read_text())
    assert {table["kind"] for table in index["tables"].values()} == {"data_parallel"}
    assert all(len(table["shards"]) == 1 for table in index["tables"].values())


def test_nothing_is_joined_in_memory(tmp_path, monkeypatch):
    """Rows are written slab by slab, and each part is asked for when it is its turn."""

    def refuse(*_):
        pytest.fail("a whole table was put together")

    truths = {"t": Truth(Table("t", dim=8), SGD(), 5000)}
    monkeypatch.setattr(storage_tables.HashedStorage, "FIRST_SLAB_BYTES", 1 << 10)
    placement = make_placement(truths, "row_wise", 2)
    with monkeypatch.context() as patch:
        patch.setattr(storage_tables.Storage, "state", refuse)
        patch.setattr(storage_tables.Storage, "_joined", refuse)
        (path, *_) = good(save_world(tmp_path, 1, truths, placement))
    held = assert_world(path, truths, placement)
    assert len(held[0].shard_storages()[0][1].rows.weights) > 5


def test_a_rank_reads_only_the_files_that_have_rows_of_its_own(tmp_path, monkeypatch):
    truths = {"d": Truth(Table("d", 100, dim=4), SGD()), "h": Truth(Table("h", dim=4), SGD(), 100)}
    (path, *_) = good(save_world(tmp_path, 1, truths, make_placement(truths, "row_wise", 4)))
    read = {0: set(), 1: set()}
    whole = tensorfile.TensorFile.read

    def noted(self, name, *arguments):
        read[rank_of_thread()].add(self.path.name[:13])
        return whole(self, name, *arguments)

    monkeypatch.setattr(tensorfile.TensorFile, "read", noted)
    assert_world(path, truths, make_placement(truths, "row_wise", 2))
    assert read == {0: {"tensors-00000", "tensors-00002"}, 1: {"tensors-00001", "tensors-00003"}}


@settings(max_examples=100, deadline=None)
@given(p=st.integers(1, 12), q=st.integers(1, 12), ids=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=50))
def test_shards_that_cannot_share_an_id_are_passed_over(p, q, ids):
    """_meets never says no where an id is on both sides."""
    from unequal.plan.placement import Shard
    from unequal.train.saved import SavedShard

    for hashed in (True, False):
        values = torch.tensor(ids if hashed else [abs(id_) % 2**32 for id_ in ids], dtype=torch.int64)
        for a, b in zip(part_of(values, p, hashed).tolist(), part_of(values, q, hashed).tolist()):
            source = SavedShard("", 0, 1, a, p, 0, 0, {})
            assert resharding._meets(source, Shard("t", 0, 1, b, q, 0))
