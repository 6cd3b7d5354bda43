"""Worker processes for tests of many ranks: started on first use, kept for the whole session, killed on the first failure.

    results = pool.run(function, argument, world=3)    # function(rank, world, argument) on every rank

The function is found by its name in the workers, so it must be at the top of a module. Every task has a process group (gloo) of
its own. When a rank fails, dies or is late, all workers are killed, and new ones start for the next task.
"""

import ctypes
import importlib
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import wait
from operator import attrgetter
from pathlib import Path

MOST = 4
GATHER = 0.3
"""seconds in which the other ranks can say what happened to them, after the first failure"""
PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux


class WorkerError(AssertionError):
    """A rank that failed, died or was late; the message has the rank and its traceback."""


class Pool:
    def __init__(self):
        # Workers are forked from a server that has imported torch once, and no more than that.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "torch.distributed", "unequal.embeddings", __name__])
        self._folder = Path(tempfile.mkdtemp(prefix="unequal-pool-"))
        self._workers = []
        self._tasks = 0

    @property
    def pids(self):
        return [process.pid for process, _ in self._workers]

    def run(self, function, *arguments, world, ranks_per_node=None, timeout=60):
        """What function(rank, world, *arguments) gives on every rank, by rank."""
        assert 1 <= world <= MOST
        self._start(world)
        self._tasks += 1
        store = self._folder / f"task-{self._tasks}"
        name, given = (function.__module__, function.__qualname__), pickle.dumps(arguments)
        failures = {}
        for rank, (_, pipe) in enumerate(self._workers[:world]):
            try:
                pipe.send_bytes(pickle.dumps((*name, rank, world, ranks_per_node, store, timeout, given)))
            except OSError:
                failures[rank] = f"died before the task{self._exit(rank)}"
        results = [None] * world
        self._collect(results, failures, set(range(world)) - failures.keys(), time.monotonic() + timeout, timeout)
        store.unlink(missing_ok=True)
        if failures:
            self.kill()
            raise WorkerError("\n".join(f"rank {rank} of {world} {text}" for rank, text in failures.items()))
        return results

    def _collect(self, results, failures, waiting, deadline, timeout):
        gathering = False
        while waiting:
            if failures and not gathering:
                gathering, deadline = True, min(deadline, time.monotonic() + GATHER)
            pipes = {self._workers[rank][1]: rank for rank in waiting}
            ready = wait(list(pipes), max(0.0, deadline - time.monotonic()))
            if not ready and not gathering:
                failures.update(dict.fromkeys(sorted(waiting), f"was not done after {timeout} s"))
            if not ready:
                return
            for pipe in ready:
                rank = pipes[pipe]
                waiting.discard(rank)
                try:
                    good, value = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    failures[rank] = f"died{self._exit(rank)}"
                    continue
                if good:
                    results[rank] = value
                else:
                    failures[rank] = f"failed:\n{value}"

    def _exit(self, rank):
        process = self._workers[rank][0]
        process.join(1)
        code = process.exitcode
        if code is None:
            return ""
        return f" by {signal.Signals(-code).name}" if code < 0 else f" with exit code {code}"

    def _start(self, world):
        while len(self._workers) < world:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def kill(self):
        for process, pipe in self._workers:
            process.kill()
            pipe.close()
        for process, _ in self._workers:
            process.join(10)
        self._workers = []

    def close(self):
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


def _work(pipe):
    """The life of a worker: tasks until the pipe closes."""
    if sys.platform == "linux":  # the server that forked this process ends when the tests' process does
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests' process says when to stop
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")

    import torch

    from tests.poison import poison_memory

    torch.set_num_threads(1)
    poison_memory()
    with suppress(EOFError, OSError):
        while True:
            pipe.send_bytes(_answer(*pickle.loads(pipe.recv_bytes())))


def _answer(module, name, rank, world, ranks_per_node, store, timeout, arguments):
    import torch
    import torch.distributed as dist

    before = dict(os.environ)
    try:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(ranks_per_node or world))
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
        )
        dist.barrier()  # a rank that is done at once would close its connections while others still make theirs
        function = attrgetter(name)(importlib.import_module(module))
        answer = pickle.dumps((True, function(rank, world, *pickle.loads(arguments))))
    except BaseException:
        # The group stays: its end would make the other ranks fail, too, perhaps before this failure is read.
        return pickle.dumps((False, traceback.format_exc()))
    dist.destroy_process_group()
    torch.set_num_threads(1)
    os.environ.clear()
    os.environ.update(before)
    return answer
