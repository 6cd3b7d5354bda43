"""Checkpoints of sharded modules in real processes: 4 ranks, then 2, then 3, then 1, and what a rank that fails or dies does."""

import errno
import os
import signal
from pathlib import Path

import pytest
import torch

import unequal as uq
from unequal.exchange.mesh import Mesh
from unequal.optim import Adam, RowWiseAdagrad
from unequal.plan.placement import KINDS, Placement, place
from unequal.tables import Feature, Table
from unequal.train import checkpoint

from .pool import WorkerError

TABLES = [
    Table("dense", 50, dim=12),
    Table("half", 30, dim=8, dtype="fp16", optimizer=Adam()),
    Table("hashed", dim=12, optimizer=Adam()),
    Table("counted", dim=4, admit_after=2),
]
GLOBAL = 24


def module(device="cpu"):
    features = {table.name: Feature(table, pooling) for table, pooling in zip(TABLES, ("sum", "mean", None, "sum"))}
    return uq.Embeddings(features, optimizer=RowWiseAdagrad(lr=0.1), seed=5, device=device)


def sharded(kinds, world, ranks_per_node=None):
    mesh = Mesh(ranks_per_node)
    placed = {
        table.name: place(kinds[number % len(kinds)], table, world, mesh.ranks_per_node, first=number)
        for number, table in enumerate(TABLES)
    }
    return uq.shard(module("meta"), Placement(world, mesh.ranks_per_node, placed), mesh)


def train_step(embeddings, step, rank, world):
    """This rank's share of a batch that depends on the step alone."""
    generator = torch.Generator().manual_seed(step)
    lists = {table.name: torch.randint(0, 30, (GLOBAL, 3), generator=generator) for table in TABLES}
    share = slice(GLOBAL * rank // world, GLOBAL * (rank + 1) // world)
    size = share.stop - share.start
    batch = {name: uq.Jagged(ids[share].reshape(-1), torch.full((size,), 3)) for name, ids in lists.items()}
    out = embeddings(batch)
    loss = out.pooled.square().sum() + (out["hashed"].values + 1).square().sum()
    (loss * world / GLOBAL).backward()


def go_on(rank, world, folder, source, kinds, steps, ranks_per_node):
    embeddings = sharded(kinds, world, ranks_per_node)
    first = 0
    if source is not None:
        first = checkpoint.load(source, embeddings=embeddings).step
    for step in range(first, first + steps):
        train_step(embeddings, step, rank, world)
    other = {"reader": {"batch": first + steps}}
    own = {"rank": rank}
    return str(checkpoint.save(folder, first + steps, {}, other, embeddings=embeddings, own=own))


def contents(path):
    """Every table's rows by id."""
    saved, found = checkpoint.open(path), {}
    for name in saved.tables:
        for ids, rows in saved.table(name):
            for number, id_ in enumerate(ids.tolist()):
                found[name, id_] = {part: values[number] for part, values in rows.items()}
    return found


@pytest.mark.parametrize("first", range(0, len(KINDS), 2))
def test_a_checkpoint_is_handed_from_world_to_world(pool, tmp_path, first):
    kinds = KINDS[first:] + KINDS[:first]
    (path, *others) = pool.run(go_on, tmp_path, None, kinds, 3, 2, world=4, ranks_per_node=2)
    assert others == [path] * 3
    before = contents(Path(path))
    assert len(before) > 100
    for world in (2, 3, 1):
        # Nothing is trained: the step is the same, so that each world replaces what the one before has written.
        (path, *_) = pool.run(go_on, tmp_path, Path(path), kinds[world:] + kinds[:world], 0, None, world=world)
        after = contents(Path(path))
        assert after.keys() == before.keys()
        for key, rows in after.items():
            assert all(torch.equal(value, before[key][part]) for part, value in rows.items()), key
    whole = module()
    saved = checkpoint.load(Path(path), embeddings=whole)
    assert (saved.step, saved.world, saved.other, saved.own) == (3, 1, {"reader": {"batch": 3}}, {"rank": 0})
    assert whole.step == 3


def test_training_goes_on_with_other_ranks_as_if_nothing_had_changed(pool, tmp_path):
    """4 ranks, then 2, then 3 end where one process does; only the order of sums differs."""
    path = None
    for world in (4, 2, 3):
        (path, *_) = pool.run(go_on, tmp_path, path and Path(path), ("row_wise", "column_wise"), 2, None, world=world)
    alone = module()
    for step in range(6):
        train_step(alone, step, 0, 1)
    expected = contents(checkpoint.save(tmp_path / "alone", 6, {}, {}, embeddings=alone))
    got = contents(Path(path))
    assert got.keys() == expected.keys()
    for key, rows in got.items():
        # Half-precision rows are rounded stochastically, by where they lie: they may differ by a rounding each step.
        close = {"rtol": 1e-2, "atol": 2e-3} if key[0] == "half" else {"rtol": 1e-4, "atol": 1e-6}
        for part, value in rows.items():
            torch.testing.assert_close(value, expected[key][part], **close, msg=lambda text, key=key: f"{key}: {text}")


def save_on_a_full_disk(rank, world, folder):
    embeddings = sharded(("row_wise",), world)
    real = os.write

    def write(file, data):
        if rank == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, data)

    checkpoint.save(folder, 1, {}, {}, embeddings=embeddings)
    os.write = write
    try:
        checkpoint.save(folder, 2, {}, {}, embeddings=embeddings)
    except uq.CheckpointError as error:
        return str(error)
    finally:
        os.write = real
    return "no error"


def test_all_ranks_hear_of_one_whose_disk_is_full(pool, tmp_path):
    for message in pool.run(save_on_a_full_disk, tmp_path, world=3):
        assert message.startswith("rank 1 of 3: ") and "No space left on device" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001"]
    checkpoint.load_embeddings(checkpoint.latest(tmp_path), module())


def save_and_die(rank, world, folder):
    embeddings = sharded(("row_wise",), world)
    checkpoint.save(folder, 1, {}, {}, embeddings=embeddings)
    real = os.fsync

    def fsync(file):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        real(file)

    os.fsync = fsync
    checkpoint.save(folder, 2, {}, {}, embeddings=embeddings)


def test_a_rank_that_is_killed_while_it_writes_leaves_the_last_checkpoint(pool, tmp_path):
    with pytest.raises(WorkerError, match="rank 1 of 3 died by SIGKILL"):
        pool.run(save_and_die, tmp_path, world=3)
    newest = checkpoint.latest(tmp_path)
    assert newest is not None and newest.name == "step-00000001"
    checkpoint.verify(newest)
    checkpoint.load_embeddings(newest, module())
    (path, *_) = pool.run(go_on, tmp_path, newest, ("row_wise",), 1, None, world=2)
    assert Path(path).name == "step-00000002", "what the dead rank left is cleaned"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]
