"""The ranks of a job: how a process finds the others, and how all end together when one of them fails.

A process is a rank where RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set, as torchrun and `unequal train --ranks` do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.rendezvous import rendezvous

from ..errors import UserError
from ..exchange.mesh import Mesh
from . import lifeline
from .device import Device
from .lifeline import INTERRUPTED, LISTENER, SHOW_CURSOR, LastWords
from .watch import Failure, PeerError, Watch

MEET_SECONDS = 300
COLLECTIVE_SECONDS = 3600
"""a rank may write a large checkpoint or score much data while others wait; one that dies is noticed otherwise"""
CAUSE_SECONDS = 3.0
"""after a collective failed: how long its cause may take to arrive"""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Job:
    """Which rank of how many this process is, by its environment."""

    rank: int = 0
    world: int = 1
    local: int = 0
    """Its number on its node."""
    per_node: int = 1
    restarts: int = 0
    """How often torchrun has started the ranks anew."""
    elastic: bool = False
    """Whether torchrun started it."""

    @classmethod
    def here(cls) -> Job:
        if not all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
            return cls()
        world = _number("WORLD_SIZE")
        job = cls(
            _number("RANK"),
            world,
            _number("LOCAL_RANK", 0),
            _number("LOCAL_WORLD_SIZE", world),
            _number("TORCHELASTIC_RESTART_COUNT", 0),
            "TORCHELASTIC_RUN_ID" in os.environ,
        )
        if not 0 <= job.rank < job.world:
            raise UserError(
                f"RANK: expected 0 to WORLD_SIZE − 1 = {job.world - 1}, got {job.rank}; start all ranks alike"
            )
        return job


def _number(name: str, otherwise: int | None = None) -> int:
    text = os.environ.get(name, "" if otherwise is None else str(otherwise))
    if not text.isdecimal():
        raise UserError(
            f"the environment variable {name}: expected a number, got {text!r}; start the ranks with torchrun"
        )
    return int(text)


class Ranks:
    """The ranks of this job while they work together: a context, in which a process that is alone is a world of one.

    When another rank fails, this one leaves the context with one line that names the rank and its cause: a collective that
    breaks is turned into it, and a process that hangs in one is ended.
    """

    mesh: Mesh
    device: Device

    def __init__(self, device: str = "auto", describe: Callable[[], tuple[str, str]] = lambda: ("", "")) -> None:
        """`describe` says where the work stands and how to go on, for the last line; it may be set later."""
        self.job, self.describe = Job.here(), describe
        self._asked = device
        self._watch: Watch | None = None
        self._store: Any = None
        self._own_group = False

    @property
    def rank(self) -> int:
        return self.mesh.rank

    @property
    def world(self) -> int:
        return self.mesh.world

    def __enter__(self) -> Ranks:
        job = self.job
        if dist.is_available() and dist.is_initialized():  # by the program that calls us
            self.device = Device(self._asked, job.local, job.per_node)
        else:
            if job.world > 1 or job.elastic:
                self._store = self._meet()
            self.device = Device(self._asked, job.local, job.per_node)
            if job.world > 1:
                self._make_group()
        self.mesh = Mesh()
        if self.mesh.world > 1:
            host = os.environ.get("MASTER_ADDR", "localhost")
            self._watch = Watch(self.rank, self.world, host, self.mesh.share, self._end_late)
            lifeline.join()
        return self

    def _meet(self) -> Any:
        job, listener = self.job, os.environ.pop(LISTENER, None)
        timeout = timedelta(seconds=MEET_SECONDS)
        try:
            if listener is not None:
                return TCPStore(
                    os.environ["MASTER_ADDR"], _number("MASTER_PORT"), is_master=True, timeout=timeout,
                    wait_for_workers=False, master_listen_fd=int(listener),
                )  # fmt: skip
            store, _, _ = next(iter(rendezvous("env://", job.rank, job.world, timeout=timeout)))
        except (dist.DistError, TimeoutError) as error:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise UserError(f"rank {job.rank} cannot meet the others at {where}: {_one_line(error)}") from error
        return store

    def _make_group(self) -> None:
        job, device = self.job, self.device
        # Of its own for every start: the keys of ranks that are gone may still be in torchrun's store.
        store = PrefixStore(f"unequal/{job.restarts}", self._store)
        store.set(f"device/{job.rank}", "cpu" if not device.is_gpu else "own" if device.alone else "shared")
        kinds = {kind.decode() for kind in store.multi_get([f"device/{rank}" for rank in range(job.world)])}
        if "cpu" in kinds and len(kinds) > 1:
            raise UserError("some ranks have a GPU and some have none; choose --device cpu, or give every rank one")
        # NCCL cannot join two ranks that share a GPU. Beside it gloo carries what is on the host.
        backend = "cpu:gloo,cuda:nccl" if kinds == {"own"} else "gloo"
        dist.init_process_group(
            backend, store=store, rank=job.rank, world_size=job.world, timeout=timedelta(seconds=COLLECTIVE_SECONDS)
        )
        self._own_group = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            try:
                self.mesh.barrier()
            except RuntimeError as broken:
                self._leave(broken)
                raise
            if self._watch is not None:
                self._watch.close()
            if self._own_group:
                dist.destroy_process_group()
        else:
            self._leave(error)

    def _leave(self, error: BaseException) -> None:
        """After a failure: finds out whether it was another rank's, else tells the others that it is ours."""
        watch = self._watch
        if watch is None:
            return
        failure = watch.failure
        if failure is None and isinstance(error, RuntimeError):
            failure = watch.wait(CAUSE_SECONDS)
        if failure is None:
            interrupted = isinstance(error, KeyboardInterrupt)
            watch.tell("interrupted" if interrupted else _one_line(error), interrupted)
        watch.close(failed=True)
        if failure is None or isinstance(error, UserError | KeyboardInterrupt):
            return
        where, remedy = self.describe()
        if failure.interrupted:
            raise KeyboardInterrupt(where) from error
        raise PeerError(failure, remedy) from error

    def _end_late(self, failure: Failure) -> None:
        """Another rank has failed, and this one hangs where nothing can wake it."""
        where, remedy = self.describe()
        error = PeerError(failure, remedy)
        words = LastWords(f"error: {error}", 1, failure.rank, remedy, joined=True)
        if failure.interrupted:
            words = LastWords(f"interrupted {where}".strip(), INTERRUPTED, failure.rank, remedy, joined=True)
        if not lifeline.tell(words):
            print(words.line, file=sys.stderr, flush=True)
        if sys.stdout.isatty():
            print(SHOW_CURSOR, end="", flush=True)
        os._exit(words.code)

    def first(self, work: Callable[[], T]) -> T:
        """What rank 0's work gives, which JSON must be able to hold, on every rank. A mistake found there is raised on all."""
        if self.world == 1:
            return work()
        result, problem = None, None
        if self.rank == 0:
            try:
                result = work()
            except UserError as error:
                problem = str(error)
        shared, problem = self.mesh.share([result, problem])
        if problem is not None:
            raise UserError(problem)
        given: T = shared
        return given

    def remember(self, folder: Path) -> None:
        """Rank 0: notes the run's folder where torchrun's next start of this very job finds it, and nobody else."""
        if self._keeps_notes and self.rank == 0:
            self._store.set("unequal/folder", str(folder.absolute()))

    def remembered(self) -> Path | None:
        """The folder of the run that this job began before torchrun started its ranks anew."""
        if not (self._keeps_notes and self.job.restarts and self._store.check(["unequal/folder"])):
            return None
        return Path(self._store.get("unequal/folder").decode())

    @property
    def _keeps_notes(self) -> bool:
        """torchrun's own store outlives the ranks; one that rank 0 made does not."""
        return self._store is not None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"
