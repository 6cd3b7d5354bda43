"""Checkpoints of many ranks when something goes wrong: a rank that fails or dies, damaged files, other tables."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import unequal as uq
from unequal import tensorfile
from unequal.errors import CheckpointError
from unequal.optim import SGD, Adam
from unequal.plan.placement import KINDS
from unequal.tables import Feature, Table
from unequal.train import checkpoint

from .worlds import (
    TRUTHS,
    assert_world,
    good,
    hidden,
    hold,
    load_world,
    make_placement,
    rank_of_thread,
    run_ranks,
    save_world,
)


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
