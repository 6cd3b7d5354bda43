"""Checkpoints of many ranks: written by all at once, read by any number of others, exact."""

import json
import os
import shutil
import zlib
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import unequal as uq
from unequal.errors import CheckpointError
from unequal.kernels import backend
from unequal.optim import LAMB, LARS, SGD, Adagrad, Adam, RowWiseAdagrad, RowWiseAdam
from unequal.plan.placement import KINDS, Piece, Placement, TablePlacement, part_of
from unequal.storage import tables as storage_tables
from unequal.tables import Feature, Table
from unequal.train import checkpoint, resharding, tensorfile

from .worlds import (
    OPTIMIZERS,
    Truth,
    assert_world,
    good,
    hidden,
    hold,
    load_world,
    make_placement,
    make_truths,
    rank_of_thread,
    run_ranks,
    save_world,
)

TRUTHS = make_truths()


@pytest.fixture(scope="module")
def saved_in_every_kind(tmp_path_factory):
    """Kind → the checkpoint of 4 ranks on 2 nodes."""
    folders = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind)
        (path, *_) = good(save_world(folder, 1, TRUTHS, make_placement(TRUTHS, kind, 4, 2)))
        folders[kind] = path
    return folders


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


def inspected(path, truths):
    """Everything again, through what looks into a checkpoint without the run."""
    saved = checkpoint.open(path)
    assert list(saved.tables) == list(truths)
    for name, truth in truths.items():
        table = saved.tables[name]
        assert (table.rows, table.dim, table.dtype) == (truth.ids.numel(), truth.table.dim, truth.table.dtype)
        assert table.hashed == truth.hashed and table.state == dict(truth.optimizer.state)
        seen = []
        for ids, rows in saved.table(name, at_once=7):
            assert 1 <= ids.numel() <= 7 and set(rows) == set(truth.values)
            seen.append((ids, rows))
        everything = torch.cat([ids for ids, _ in seen]) if seen else torch.empty(0, dtype=torch.int64)
        numbers = {int(id_): number for number, id_ in enumerate(truth.ids)}
        assert sorted(everything.tolist()) == sorted(numbers)
        order = torch.tensor([numbers[int(id_)] for id_ in everything], dtype=torch.int64)
        for part in truth.values if seen else ():
            assert torch.equal(torch.cat([rows[part] for _, rows in seen]), truth.values[part][order])
        some = truth.ids[torch.randint(max(1, len(truth.ids)), (len(truth.ids) // 3,))]
        got = saved.rows(name, some)
        for part, values in truth.values.items():
            assert torch.equal(got[part], values[[numbers[int(id_)] for id_ in some]])
        assert saved.has(name, some).all() and not saved.has(name, [2**62 + 5]).any()


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


class Killed(BaseException):
    """Stands for a rank that dies."""


def once_on(rank, call, count, error):
    """`call`, but its count-th call on that rank fails."""
    calls = 0

    def failing(*arguments, **options):
        nonlocal calls
        if rank_of_thread() == rank:
            calls += 1
            if calls == count:
                raise error
        return call(*arguments, **options)

    return failing


POINTS = {
    "listing": (checkpoint, "list_shards", 1),
    "choosing": (checkpoint, "assign", 1),
    "making the file": (tensorfile.os, "open", 1),
    "writing the header": (tensorfile.os, "write", 1),
    "writing a tensor": (tensorfile.os, "write", 5),
    "flushing": (tensorfile.os, "fsync", 1),
    "closing": (tensorfile.os, "close", 1),
    "flushing the folder": (tensorfile.os, "fsync", 2),
}
FIRST_RANK_POINTS = {
    "making the folder": (Path, "mkdir", 2),
    "looking for room": (shutil, "disk_usage", 1),
    "cleaning": (checkpoint, "_clean", 1),
    "writing the index": (checkpoint, "_write_text", 1),
    "flushing the index": (os, "fsync", 3),
    "renaming": (Path, "rename", 1),
}
CASES = [(rank, name, point) for name, point in POINTS.items() for rank in (0, 1, 2)]
CASES += [(0, name, point) for name, point in FIRST_RANK_POINTS.items()]


@pytest.mark.parametrize("died", [False, True], ids=["failed", "died"])
@pytest.mark.parametrize("rank, name, point", CASES, ids=[f"{name}-{rank}" for rank, name, _ in CASES])
def test_whatever_fails_on_one_rank_the_last_checkpoint_stays(tmp_path, monkeypatch, rank, name, point, died):
    placement = make_placement(TRUTHS, KINDS, 3)
    good(save_world(tmp_path, 1, TRUTHS, placement))
    owner, attribute, count = point
    error = Killed() if died else OSError(28, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(owner, attribute, once_on(rank, getattr(owner, attribute), count, error))
        results = save_world(tmp_path, 2, TRUTHS, placement)
    if died:
        assert isinstance(results[rank], Killed)
        assert not any(isinstance(result, Path) for result in results)
    else:
        for result in results:
            assert isinstance(result, CheckpointError), result
            assert f"rank {rank} of 3: " in str(result) and "No space left" in str(result)
            assert "\n" not in str(result)
    if not died:  # while a rank dies the others still write; what they leave is removed by the next checkpoint, below
        assert not hidden(tmp_path), "what was begun is removed"
    assert checkpoint.list_steps(tmp_path) == [1]
    newest = checkpoint.latest(tmp_path)
    checkpoint.verify(newest)
    assert_world(newest, TRUTHS, make_placement(TRUTHS, "row_wise", 2))
    (path, *_) = good(save_world(tmp_path, 2, TRUTHS, placement))
    assert checkpoint.list_steps(tmp_path) == [1, 2] and not hidden(tmp_path)
    assert_world(path, TRUTHS, placement)


def test_a_failure_after_the_rename_leaves_the_new_checkpoint_whole(tmp_path, monkeypatch):
    placement = make_placement(TRUTHS, "row_wise", 3)
    (path, *_) = good(save_world(tmp_path, 1, TRUTHS, placement))
    error = OSError(5, "Input/output error")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", once_on(0, os.fsync, 5, error))
        results = save_world(tmp_path, 1, TRUTHS, placement)
    assert all("rank 0 of 3" in str(result) for result in results)
    assert_world(path, TRUTHS, placement)


def test_a_full_disk_names_what_all_ranks_need(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    placement = make_placement(TRUTHS, "row_wise", 3)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=5000))
    results = save_world(tmp_path, 1, TRUTHS, placement)
    monkeypatch.undo()
    (path, *_) = good(save_world(tmp_path, 2, TRUTHS, placement))
    needed = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    for result in results:
        assert f"needs {needed:,} bytes, 5,000 are free" in str(result)


def test_a_folder_that_ranks_do_not_share(tmp_path):
    placement = make_placement(TRUTHS, "row_wise", 2)
    folders = [tmp_path / "here", tmp_path / "there"]

    def work(mesh):
        return checkpoint.save(folders[mesh.rank], 1, {}, {}, embeddings=hold(TRUTHS, placement, mesh))

    for result in run_ranks(2, work):
        assert isinstance(result, CheckpointError)
        assert "rank 1 of 2" in str(result) and "a file system that all ranks share" in str(result)


def test_shards_that_do_not_make_up_a_table_are_refused(tmp_path):
    placement = make_placement(TRUTHS, "row_wise", 2)

    def work(mesh):
        tables = hold(TRUTHS, placement, mesh)
        if mesh.rank == 1:
            del tables._storages[0]
        return checkpoint.save(tmp_path, 1, {}, {}, embeddings=tables)

    for result in run_ranks(2, work):
        assert "table 'dense': expected shards that make up all of it, got columns 0 to 9 of part 0 of 2" in str(result)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A checkpoint of 3 ranks whose every byte can be tried."""
    truths = make_truths(rows=5, ids=6, dim=4)
    folder = tmp_path_factory.mktemp("small")
    placement = make_placement(truths, ("row_wise", "column_wise"), 3)
    (path, *_) = good(save_world(folder, 3, truths, placement))
    return path, truths, placement


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_byte_in_any_file_is_found_and_named(small, tmp_path_factory, data):
    path, truths, placement = small
    copy = tmp_path_factory.mktemp("damaged") / path.name
    shutil.copytree(path, copy)
    file = data.draw(st.sampled_from(sorted(copy.iterdir())))
    content = bytearray(file.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=str(file)):
        checkpoint.verify(copy)

    def read(mesh):
        checkpoint.load(copy, embeddings=hold(truths, placement, mesh, pour=False))

    for result in run_ranks(3, read):
        assert isinstance(result, CheckpointError) and str(file) in str(result), "every rank hears of it"
        assert "no whole checkpoint before it" in str(result)


@pytest.mark.parametrize("what", ["cut", "gone"])
def test_a_file_that_is_cut_or_gone_is_named(small, tmp_path, what):
    path, truths, placement = small
    copy = tmp_path / path.name
    shutil.copytree(path, copy)
    file = copy / "tensors-00002.safetensors"
    file.unlink() if what == "gone" else file.write_bytes(file.read_bytes()[:-1])
    for result in load_world(copy, truths, placement):
        assert str(file) in str(result) and "is damaged" in str(result)


CHANGED = {
    "dim": (Table("t", 10, dim=5), SGD(), "dim 5, the saved one has 4"),
    "rows": (Table("t", 11, dim=4), SGD(), "rows 11, the saved one has 10"),
    "unbounded": (Table("t", dim=4), SGD(), "rows unbounded, the saved one has 10"),
    "dtype": (Table("t", 10, dim=4, dtype="fp16"), SGD(), "dtype F16, the saved one has F32"),
    "optimizer": (Table("t", 10, dim=4), Adam(), "optimizer Adam, the saved one has SGD"),
    "name": (Table("u", 10, dim=4), SGD(), r"tables \['u'\], the saved ones are \['t'\]"),
}


@pytest.mark.parametrize("table, optimizer, message", CHANGED.values(), ids=CHANGED)
def test_other_tables_are_refused_in_one_line(tmp_path, table, optimizer, message):
    saved = uq.Embeddings({"f": Feature(Table("t", 10, dim=4))}, optimizer=SGD())
    path = checkpoint.save(tmp_path, 1, {}, {}, embeddings=saved)
    other = uq.Embeddings({"f": Feature(table)}, optimizer=optimizer)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(CheckpointError, match=f"expected (the )?{message}; load it with the recipe") as caught:
        checkpoint.load_embeddings(path, other)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value) and "newest whole" not in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items()), "nothing was changed"


def test_a_shared_row_cannot_come_or_go(tmp_path):
    saved = uq.Embeddings({"f": Feature(Table("t", dim=4))}, optimizer=SGD())
    path = checkpoint.save(tmp_path, 1, {}, {}, embeddings=saved)
    other = uq.Embeddings({"f": Feature(Table("t", dim=4, admit_after=3))}, optimizer=SGD())
    with pytest.raises(CheckpointError, match="expected a row for rare ids: True, the saved one has False"):
        checkpoint.load_embeddings(path, other)


def save_in_format_1(folder, step, model_state, other):
    """What the first version wrote: one file with one checksum, tables among the model's state, and no list of them."""
    state, tensors = checkpoint.pack(other)
    tensors |= {f"model/{name}": tensor for name, tensor in model_state.items()}
    path = checkpoint.path_of(folder, step)
    path.mkdir(parents=True)
    tensorfile.write(path / "tensors.safetensors", tensors, {"format": "pt", "step": str(step)})
    content = (path / "tensors.safetensors").read_bytes()
    files = {"tensors.safetensors": {"bytes": len(content), "checksum": f"crc32:{zlib.crc32(content):08x}"}}
    index = {"format": 1, "step": step, "files": files, "state": state}
    compact = json.dumps(index, separators=(",", ":"), allow_nan=False)
    sealed = {"checksum": f"crc32:{zlib.crc32(compact.encode()):08x}"} | index
    (path / "state.json").write_text(json.dumps(sealed, indent=1) + "\n")
    return path


@pytest.fixture(scope="module")
def format_1(tmp_path_factory):
    embeddings = uq.Embeddings({name: Feature(truth.table) for name, truth in TRUTHS.items()}, optimizer=SGD())
    for shard, storage in embeddings.shard_storages():
        TRUTHS[shard.table].pour_into(shard, storage)
    embeddings.step = 77
    state = {f"embeddings.{name}": tensor for name, tensor in embeddings.state_dict().items()}
    other = {"random": {"torch": torch.arange(4)}, "reader": {"epoch": 1}}
    return save_in_format_1(tmp_path_factory.mktemp("old"), 12, state | {"head.bias": torch.ones(2)}, other)


def test_format_1_still_loads(format_1):
    saved = checkpoint.load(format_1)
    embeddings = uq.Embeddings({name: Feature(truth.table) for name, truth in TRUTHS.items()}, optimizer=SGD())
    model = torch.nn.Module()
    model.embeddings, model.head = embeddings, torch.nn.Linear(1, 2)
    with torch.no_grad():
        state = saved.model_state | {"head.weight": model.head.weight.clone()}
    model.load_state_dict(state)
    for shard, storage in embeddings.shard_storages():
        TRUTHS[shard.table].assert_in(shard, storage)
    assert saved.step == 12 and saved.other["reader"] == {"epoch": 1}
    assert torch.equal(saved.own["random"]["torch"], torch.arange(4))
    checkpoint.verify(format_1)


@pytest.mark.parametrize("piece", [1 << 20, 512])
def test_format_1_loads_on_many_ranks(format_1, piece, monkeypatch):
    monkeypatch.setattr(tensorfile, "PIECE", piece)
    assert_world(format_1, TRUTHS, make_placement(TRUTHS, KINDS, 3))
    inspected(format_1, TRUTHS)
    embeddings = uq.Embeddings({name: Feature(truth.table) for name, truth in TRUTHS.items()}, optimizer=SGD())
    saved = checkpoint.load(format_1, embeddings=embeddings)
    assert list(saved.model_state) == ["head.bias"] and saved.world == 1


def test_format_1_with_a_damaged_byte(format_1, tmp_path):
    copy = tmp_path / format_1.name
    shutil.copytree(format_1, copy)
    content = bytearray((copy / "tensors.safetensors").read_bytes())
    content[-5] ^= 1
    (copy / "tensors.safetensors").write_bytes(content)
    for result in load_world(copy, TRUTHS, make_placement(TRUTHS, "row_wise", 2)):
        assert "tensors.safetensors" in str(result) and "is damaged" in str(result)


def test_format_1_of_other_tables(format_1):
    truths = {name: truth for name, truth in TRUTHS.items() if name != "one.row"}
    embeddings = uq.Embeddings({name: Feature(truth.table) for name, truth in truths.items()}, optimizer=SGD())
    with pytest.raises(CheckpointError, match=r"expected the tables .*, the saved ones are .*'one\.row'"):
        checkpoint.load_embeddings(format_1, embeddings)


def test_a_checkpoint_without_tables_says_so(tmp_path):
    path = checkpoint.save(tmp_path, 1, {"head.bias": torch.ones(2)}, {})
    embeddings = uq.Embeddings({"f": Feature(Table("t", 10, dim=4))})
    with pytest.raises(CheckpointError, match=r"expected the tables \['t'\], the saved ones are \[\]"):
        checkpoint.load_embeddings(path, embeddings)
    assert checkpoint.open(path).tables == {}


def test_looking_into_a_checkpoint(saved_in_every_kind):
    for path in saved_in_every_kind.values():
        inspected(path, TRUTHS)
        saved = checkpoint.open(str(path))
        assert (saved.step, saved.world, saved.tables_step, saved.other) == (1, 4, 77, {"n": 1})
        assert saved.tables["counted"].admit_after == 3 and saved.tables["dense"].optimizer == "RowWiseAdagrad"
        assert "SavedCheckpoint" in repr(saved) and "hashed" in repr(saved)
        with pytest.raises(CheckpointError, match=r"table 'hashed' has no row for id 3; ask with has\(\)"):
            saved.rows("hashed", [int(TRUTHS["hashed"].ids[5]), 3])
        with pytest.raises(CheckpointError, match="table 'dense' has no row for id 23"):
            saved.rows("dense", [0, 23])
        with pytest.raises(CheckpointError, match="has no table 'dens'; did you mean 'dense'"):
            saved.rows("dens", [0])
        assert saved.has("dense", [-1, 0, 22, 23]).tolist() == [False, True, True, False]
        assert saved.rows("dense", [])["weight"].shape == (0, 9)


def test_a_few_rows_do_not_read_the_whole_file(tmp_path, monkeypatch):
    embeddings = uq.Embeddings({"f": Feature(Table("t", 50_000, dim=16))}, optimizer=SGD())
    path = checkpoint.save(tmp_path, 1, {}, {}, embeddings=embeddings)
    read = 0
    whole = tensorfile.TensorFile._read_into

    def counted(self, start, out):
        nonlocal read
        read += len(out)
        whole(self, start, out)

    monkeypatch.setattr(tensorfile.TensorFile, "_read_into", counted)
    got = checkpoint.open(path).rows("t", [40_000, 3, 40_001])
    assert torch.equal(got["weight"], embeddings.state_dict()["t.weight"][[40_000, 3, 40_001]])
    assert read <= 3 * tensorfile.BLOCK


def test_ranks_agree_on_the_newest_and_one_prunes(tmp_path):
    placement = make_placement(TRUTHS, "row_wise", 3)
    for step in (1, 2, 3):
        good(save_world(tmp_path, step, TRUTHS, placement))
    assert good(run_ranks(3, lambda mesh: checkpoint.latest(tmp_path, mesh=mesh))) == [tmp_path / "step-00000003"] * 3
    removed = good(run_ranks(3, lambda mesh: checkpoint.prune(tmp_path, 1, mesh=mesh)))
    assert removed == [[tmp_path / "step-00000001", tmp_path / "step-00000002"]] * 3
    assert checkpoint.list_steps(tmp_path) == [3]


def test_the_files_are_plain_safetensors_and_json(small):
    from safetensors.torch import load_file

    path, truths, _ = small
    index = json.loads((path / "state.json").read_text())
    assert (index["format"], index["step"], index["world"], index["tables_step"]) == (2, 3, 3, 77)
    tensors = {}
    for name, entry in index["files"].items():
        content = (path / name).read_bytes()
        assert len(content) == entry["bytes"] and entry["checksums"] == f"{zlib.crc32(content):08x}"
        tensors |= load_file(path / name)
    dense = torch.empty(5, 4)
    for shard in index["tables"]["dense"]["shards"]:
        first, last = shard["columns"]
        dense[shard["part"] :: shard["parts"], first:last] = tensors[shard["tensors"]["weight"]]
    assert torch.equal(dense, truths["dense"].values["weight"])


def test_the_dense_state_is_the_models_without_its_tables():
    model = torch.nn.Module()
    model.embeddings = uq.Embeddings({"f": Feature(Table("t", dim=4))})
    model.head = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    model.head.register_buffer("scratch", torch.zeros(1), persistent=False)
    state = checkpoint.dense_state(model, model.embeddings)
    whole = model.state_dict()
    assert list(state) == [name for name in whole if not name.startswith("embeddings.")]
    assert all(torch.equal(value, whole[name]) for name, value in state.items())
    saved = {name: value.clone() + 1 for name, value in state.items()}
    checkpoint.load_dense_state(model, model.embeddings, saved)
    assert all(
        torch.equal(value, saved[name]) for name, value in checkpoint.dense_state(model, model.embeddings).items()
    )
    del saved["head.0.bias"]
    with pytest.raises(CheckpointError, match=r"another model .*'head\.0\.bias' \(nothing saved, \[2\] expected\)"):
        checkpoint.load_dense_state(model, model.embeddings, saved)


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
