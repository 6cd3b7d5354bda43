"""The workers that the other tests of many ranks run in."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from .pool import Pool, WorkerError

pytestmark = pytest.mark.alone


def add_up(rank, world, values):
    total = values[rank].clone()
    dist.all_reduce(total)
    return rank, world, os.environ["LOCAL_WORLD_SIZE"], total


def fail(rank, world, culprit):
    if rank == culprit:
        raise ValueError(f"nothing works on {rank}")
    dist.barrier()


def die(rank, world, culprit):
    if rank == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang(rank, world):
    if rank == 1:
        time.sleep(1000)


def uninitialised(rank, world):
    return torch.empty(3), torch.zeros(1).new_empty(3), torch.get_num_threads()


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_runs_on_every_rank(pool, world):
    values = torch.arange(8.0).view(4, 2)
    results = pool.run(add_up, values, world=world, ranks_per_node=1)
    assert [result[:3] for result in results] == [(rank, world, "1") for rank in range(world)]
    assert all(torch.equal(result[3], values[:world].sum(0)) for result in results)


def test_ranks_that_have_nothing_to_do_wait_until_all_are_connected(pool):
    for _ in range(50):
        pool.run(uninitialised, world=4)


def test_a_failing_rank_is_named_and_all_workers_are_replaced(pool):
    pool.run(add_up, torch.zeros(4, 2), world=3)
    before = pool.pids
    with pytest.raises(WorkerError, match=r"(?s)rank 1 of 3 failed:.*in fail.*ValueError: nothing works on 1"):
        pool.run(fail, 1, world=3)
    assert not any(map(alive, before))
    assert pool.run(add_up, torch.ones(4, 2), world=3)[2][3].tolist() == [3, 3]


def test_a_dead_rank_is_named(pool):
    with pytest.raises(WorkerError, match=r"rank 2 of 3 died by SIGKILL"):
        pool.run(die, 2, world=3)


def test_a_rank_that_is_late_is_named(pool):
    pool.run(add_up, torch.zeros(4, 2), world=2)
    before, started = pool.pids, time.monotonic()
    with pytest.raises(WorkerError, match=r"^rank 1 of 2 was not done after 1 s$"):
        pool.run(hang, world=2, timeout=1)
    assert time.monotonic() - started < 5 and not any(map(alive, before))


def test_memory_is_poisoned_in_workers(pool):
    fresh, new, threads = pool.run(uninitialised, world=1)[0]
    assert fresh.isnan().all() and new.isnan().all() and threads == 1


def test_no_worker_outlives_the_process_that_started_it(tmp_path):
    script = (
        "import os, signal, torch\n"
        "from tests.distributed.pool import Pool\n"
        "from tests.distributed.test_pool import add_up\n"
        "pool = Pool()\n"
        "pool.run(add_up, torch.zeros(4, 2), world=2)\n"
        "print(*pool.pids, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60,
        cwd=Path(__file__).parents[2], env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    pids = [int(pid) for pid in done.stdout.split()]
    assert done.returncode == -signal.SIGKILL and len(pids) == 2, done.stderr
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, pids))


def test_workers_end_with_their_pool():
    workers = Pool()
    workers.run(add_up, torch.zeros(4, 2), world=2)
    pids = workers.pids
    workers.close()
    assert not any(map(alive, pids))
