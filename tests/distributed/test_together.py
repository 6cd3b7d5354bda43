"""Ranks with different numbers of batches, and what they know of each other's."""

import itertools
import os
import time

import pytest
import torch

import unequal as uq
from unequal.batch import Batch, Jagged
from unequal.errors import DataError
from unequal.exchange.mesh import Mesh
from unequal.train.processes import Job, Ranks
from unequal.train.together import together
from unequal.train.watch import PeerError, Watch


def make_batch(size, weighted=True, dense=2):
    return Batch.from_jagged(
        {"a": torch.arange(size), "b": Jagged(torch.arange(2 * size), torch.full((size,), 2))},
        dense=torch.ones(size, dense),
        labels=torch.zeros(size, 1),
        sample_weights=torch.full((size,), 0.5) if weighted else None,
    )


def turns_of(rank, world, counts, ahead):
    """Sizes that this rank got; totals that all know; notes; flags."""
    taken = []

    def batches():
        for number in range(counts[rank]):
            taken.append(number)
            yield make_batch(rank + 1)

    asked = iter(range(1000))
    mesh, found = Mesh(), []
    for turn in together(batches(), mesh, note=lambda: len(taken), flag=lambda: rank == 0 and next(asked) % 2 == 1):
        turn.batch.check()
        found.append((turn.batch.size, turn.weight, turn.samples, turn.note, turn.flag))
        if ahead is not None and len(found) == ahead:
            break
    return found, len(taken)


@pytest.mark.parametrize("counts", [(3, 3), (1, 4), (4, 1), (0, 3), (2, 0, 5), (0, 0)])
def test_ranks_that_run_out_go_on_with_empty_batches(pool, counts):
    world, turns = len(counts), max(counts)
    results = pool.run(turns_of, counts, None, world=world)
    for rank, (found, taken) in enumerate(results):
        assert taken == counts[rank] and len(found) == turns
        assert [size for size, *_ in found] == [rank + 1] * counts[rank] + [0] * (turns - counts[rank])
        for number, (_, weight, samples, note, flag) in enumerate(found):
            expected = sum(r + 1 for r in range(world) if number < counts[r])
            assert (samples, weight) == (expected, expected / 2)
            assert note == min(number + 1, counts[rank]), "as it was when this turn's batch was taken"
            assert flag == (number % 2 == 1), "of rank 0, on every rank"


def test_a_loop_that_is_left_early_leaves_nothing_behind(pool):
    results = pool.run(turns_of, (5, 5), 2, world=2)
    assert [len(found) for found, _ in results] == [2, 2] and [taken for _, taken in results] == [3, 3]
    assert pool.run(turns_of, (2, 1), None, world=2)[1][1] == 1


def test_one_rank_takes_no_batch_ahead(pool):
    found, taken = turns_of(0, 1, (5,), 2)
    assert taken == 2 and [size for size, *_ in found] == [1, 1]


def different(rank, world):
    with pytest.raises(DataError) as refusal:
        for _ in together([make_batch(2, dense=2 + rank)], Mesh()):
            pass
    return str(refusal.value)


def test_batches_of_different_columns_are_refused(pool):
    said = pool.run(different, world=2)
    assert said[0] == said[1] and "rank 0 and rank 1 have different batches" in said[0]


def train_unequal(rank, world, counts):
    """A training loop by hand over a sharded module, as a user would write it."""
    table = uq.Table("t", rows=50, dim=4)
    features = {"a": uq.Feature(table), "b": uq.Feature(table, pooling=None)}
    embeddings = uq.shard(uq.Embeddings(features, device="meta"))
    for turn in together((make_batch(rank + 2) for _ in range(counts[rank])), embeddings.mesh):
        out = embeddings(turn.batch)
        (out["a"].sum() + out["b"].values.sum()).backward()
    return embeddings.step


def test_unequal_ends_of_a_training_loop(pool):
    assert pool.run(train_unequal, (2, 5, 0), world=3) == [5, 5, 5]


def fail_in_context(rank, world, failing, how):
    """What every rank leaves the context with, and when."""
    started = time.monotonic()
    try:
        with Ranks("cpu", lambda: ("at step 3", "go on with --resume run")) as ranks:
            if rank == failing:
                raise how("a cause")
            while ranks._watch.failure is None:  # in a collective it would break, too
                time.sleep(0.01)
            raise RuntimeError("the collective broke")
    except (PeerError, KeyboardInterrupt, UserWarning) as error:
        return type(error).__name__, str(error), time.monotonic() - started


@pytest.mark.parametrize("failing", [0, 1])
def test_the_cause_reaches_the_others(pool, failing):
    for how, name, said in (
        (UserWarning, "PeerError", f"rank {failing}: UserWarning: a cause; go on with --resume run"),
        (KeyboardInterrupt, "KeyboardInterrupt", "at step 3"),
    ):
        results = pool.run(fail_in_context, failing, how, world=3)
        for rank, (kind, text, seconds) in enumerate(results):
            assert seconds < 10
            if rank == failing:
                assert (kind, text) == (how.__name__, "a cause")
            else:
                assert (kind, text) == (name, said)


def test_a_watch_hears_of_a_rank_that_is_gone_without_a_word():
    """Three ranks in one process, and one whose connection is cut as the system does it when a process is killed."""
    import threading

    address, ready, late = [], threading.Event(), []

    def share(value):
        if value is not None:
            address[:] = value
            ready.set()
        assert ready.wait(10)
        return address

    watches = {}

    def join(rank):
        watches[rank] = Watch(rank, 3, "localhost", share, late.append)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    watches[2]._ended.set()
    watches[2]._members[0].end()
    for rank in (0, 1):
        failure = watches[rank].wait(5)
        assert failure is not None and (failure.rank, failure.cause) == (2, None)
        assert str(PeerError(failure)) == "rank 2 is gone without a word; it was killed, or its machine failed"
    until = time.monotonic() + 10
    while len(late) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    assert [failure.rank for failure in late] == [2, 2], "who has not left by itself is ended"


def test_the_environment_says_which_rank_this_is(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "3")
    assert Job.here() == Job(), "a number alone makes no rank"
    for name, value in zip(("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), ("4", "here", "1")):
        monkeypatch.setenv(name, value)
    assert Job.here() == Job(3, 4, 0, 4)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert Job.here() == Job(3, 4, 1, 2)
    for name, value in itertools.product(("RANK", "WORLD_SIZE"), ("x", "-1", "")):
        with monkeypatch.context() as patch, pytest.raises(uq.UserError, match=name):
            patch.setitem(os.environ, name, value)
            Job.here()
    monkeypatch.setenv("RANK", "4")
    with pytest.raises(uq.UserError, match="RANK: expected 0 to WORLD_SIZE"):
        Job.here()
