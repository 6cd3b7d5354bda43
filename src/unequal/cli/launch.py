"""`--ranks N`: starts N processes of the same command as ranks of one job, and ends with all of them. Needs no torch.

The first rank's output is the command's. That of the others is kept, and shown where one of them ends without a word of its
own. Whatever happens, no process stays behind: when one rank fails the others are ended within seconds, and ranks end by
themselves when this process is gone.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import IO, Any

from ..train.lifeline import INTERRUPTED, LISTENER, SHOW_CURSOR, VARIABLE, LastWords
from .errors import FAILED, traceback_wanted

LAUNCHED = "UNEQUAL_LAUNCHED"
WORDS_SECONDS = 5.0
"""after the first failure: how long the other ranks have to learn its cause and end by themselves"""
TERMINATE_SECONDS = 3.0
"""and after they were told to"""
LOOK_SECONDS = 0.1
TAIL_LINES = 100
LOOPBACK = "127.0.0.1"
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(slots=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    line: socket.socket
    output: IO[bytes] | None
    received: bytes = b""
    ended_at: float = 0.0
    forced: bool = False
    """Whether it was ended because of another."""

    @property
    def words(self) -> LastWords | None:
        return LastWords.parse(self.received.partition(b"\n")[0])

    @property
    def failed(self) -> bool:
        return self.process.poll() not in (None, 0)

    def tail(self) -> list[str]:
        """The last lines it wrote."""
        if self.output is None:
            return []
        self.output.seek(0, os.SEEK_END)
        self.output.seek(max(0, self.output.tell() - 2**16))
        lines = self.output.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
        return [re.sub(rf"^\[rank{self.number}\]: ?", "", line) for line in lines]  # torch's own mark on tracebacks

    def outcome(self) -> str:
        """How it ended, in words."""
        code = self.process.returncode
        if code < 0:
            names = {number.value: number.name for number in signal.Signals}
            hint = " (often: the machine ran out of memory)" if -code == signal.SIGKILL else ""
            return f"was killed by {names.get(-code, f'signal {-code}')}{hint}"
        return f"ended with exit code {code}"


@dataclass(slots=True)
class _Job:
    ranks: list[_Rank] = field(default_factory=list)
    interrupted: int = 0
    """How often the user asked to stop."""
    stopped_at: float = 0.0


def launch(arguments: Sequence[str], ranks: int) -> int:
    """Runs `unequal` with these arguments as so many ranks; gives the exit code. What failed is said in one line."""
    job = _Job()
    with _forwarding(job):
        try:
            _start(job, arguments, ranks)
            _watch(job)
        finally:
            _end(job)
    code = _explain(job)
    if code and sys.stdout.isatty():
        print(SHOW_CURSOR, end="", flush=True)
    return code


def _start(job: _Job, arguments: Sequence[str], ranks: int) -> None:
    listener = socket.create_server((LOOPBACK, 0), backlog=max(128, 2 * ranks))
    environment = {
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(listener.getsockname()[1]),
        LAUNCHED: "1",
    }
    environment.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // ranks)))
    if os.path.exists("/sys/class/net/lo"):  # what stays on this machine needs no other interface
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with listener:
        for number in range(ranks):
            ours, theirs = socket.socketpair()
            passed = [theirs.fileno()]
            own = {"RANK": str(number), "LOCAL_RANK": str(number), VARIABLE: str(theirs.fileno())}
            output: IO[bytes] | None = None
            if number == 0:
                passed.append(listener.fileno())
                own[LISTENER] = str(listener.fileno())
            else:
                output = tempfile.TemporaryFile()  # noqa: SIM115
            process = subprocess.Popen(
                [sys.executable, "-m", "unequal", *arguments],
                env=environment | own,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=passed,
                process_group=0,  # so that Ctrl-C reaches them through us, once
            )
            theirs.close()
            ours.setblocking(False)
            job.ranks.append(_Rank(number, process, ours, output))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _watch(job: _Job) -> None:
    """Returns when all ranks have ended, or when those that have not must be made to."""
    with selectors.DefaultSelector() as selector:
        for rank in job.ranks:
            selector.register(rank.line, selectors.EVENT_READ, rank)
        failed_at = None
        while any(rank.process.poll() is None for rank in job.ranks):
            for key, _ in selector.select(LOOK_SECONDS):
                if not _hear(key.data):
                    selector.unregister(key.data.line)
            for rank in job.ranks:
                if not rank.ended_at and rank.process.poll() is not None:
                    rank.ended_at = time.monotonic()
            begun = [rank.ended_at for rank in job.ranks if rank.failed]
            begun += [job.stopped_at] if job.interrupted else []
            failed_at = min(begun) if begun else None
            if failed_at is not None and (time.monotonic() > failed_at + WORDS_SECONDS or job.interrupted > 1):
                return


def _hear(rank: _Rank) -> bool:
    """Whether its end of the line is still open."""
    with suppress(BlockingIOError):
        try:
            while part := rank.line.recv(65536):
                rank.received += part
        except ConnectionResetError:
            pass
        return False
    return True


def _end(job: _Job) -> None:
    """Ends whatever is left: first by asking, then for good."""
    for stop, seconds in ((signal.SIGTERM, TERMINATE_SECONDS), (signal.SIGKILL, TERMINATE_SECONDS)):
        left = [rank for rank in job.ranks if rank.process.poll() is None]
        for rank in left:
            rank.forced = True
            rank.process.send_signal(stop)
        until = time.monotonic() + seconds
        while any(rank.process.poll() is None for rank in left) and time.monotonic() < until:
            time.sleep(LOOK_SECONDS / 5)
    for rank in job.ranks:
        rank.process.wait()
        _hear(rank)
        rank.line.close()


@contextmanager
def _forwarding(job: _Job) -> Iterator[None]:
    """A signal to stop that reaches this process is passed on, unless it is to be ignored; asked twice, the ranks are ended."""

    def forward(number: int, frame: FrameType | None) -> None:
        job.interrupted, job.stopped_at = job.interrupted + 1, job.stopped_at or time.monotonic()
        for rank in job.ranks:
            if rank.process.poll() is None:
                rank.process.send_signal(signal.SIGTERM)

    heeded = [number for number in FORWARDED if signal.getsignal(number) != signal.SIG_IGN]
    before: dict[int, Any] = {number: signal.signal(number, forward) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _explain(job: _Job) -> int:
    """One line for all ranks: of the one that failed first by itself, as far as that can be known."""
    if job.interrupted:
        said = [rank.words.line for rank in job.ranks if rank.words is not None and rank.words.code == INTERRUPTED]
        print(said[0] if said else "interrupted", file=sys.stderr)
        return INTERRUPTED
    failed = [rank for rank in job.ranks if rank.failed]
    if not failed:
        return 0
    first, line = _cause(failed)
    words = first.words
    if words is None or traceback_wanted():
        for text in first.tail():
            print(f"[rank {first.number}] {text}", file=sys.stderr)
    print(line, file=sys.stderr)
    return words.code if words is not None else FAILED


def _cause(failed: list[_Rank]) -> tuple[_Rank, str]:
    own = [rank for rank in failed if rank.words is not None and rank.words.origin is None]
    silent = [rank for rank in failed if rank.words is None and not rank.forced]
    others = [rank.words for rank in failed if rank.words is not None and rank.words.origin is not None]
    if silent:  # nobody fails before one that is killed can say anything
        first = min(silent, key=lambda rank: rank.ended_at)
        accused = {words.origin for words in others}
        first = next((rank for rank in silent if rank.number in accused), first)
        remedy = next((f"; {words.remedy}" for words in others if words.remedy), "")
        last = next((f": {text}" for text in reversed(first.tail()) if text.strip()), "")
        return (
            first,
            f"error: rank {first.number} {first.outcome()}{last if first.process.returncode > 0 else ''}{remedy}",
        )
    if own:
        first = min(own, key=lambda rank: rank.ended_at)
        words = first.words
        assert words is not None
        lines = {rank.words.line for rank in own if rank.words is not None}
        if words.code == INTERRUPTED or not words.joined or len(lines) == 1 < len(own):
            return first, words.line
        return first, f"error: rank {first.number}: {words.line.removeprefix('error: ')}"
    first = failed[0]
    return first, first.words.line if first.words is not None else f"error: rank {first.number} {first.outcome()}"
