"""Who of the ranks is still there: every rank holds a connection to rank 0, and its end is an end that is noticed.

Rank 0 listens. A rank that fails says so; one that is killed says nothing, but the system closes its connection. Either way
rank 0 tells all the others, at once and whatever they are doing, which rank it was and why. A collective that hangs because of
it cannot be woken, so a rank that has not ended by itself a little later is ended.
"""

from __future__ import annotations

import json
import secrets
import selectors
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import UserError

HELLO_SECONDS = 60.0
LEAVE_SECONDS = 10.0
LATE_SECONDS = 3.0
"""what a rank has to end by itself after another one failed"""
LONGEST = 2**20
"""bytes of a message"""
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""seconds and tries after which a machine that went silent counts as gone"""


@dataclass(frozen=True, slots=True)
class Failure:
    """The first rank that failed, and what it said; None if it was gone without a word."""

    rank: int
    cause: str | None = None
    interrupted: bool = False


class PeerError(UserError):
    """Another rank has failed, so that this one cannot go on."""

    def __init__(self, failure: Failure, remedy: str = "") -> None:
        self.failure, self.remedy = failure, remedy
        said = (
            "is gone without a word; it was killed, or its machine failed" if failure.cause is None else failure.cause
        )
        between = " " if failure.cause is None else ": "
        super().__init__(f"rank {failure.rank}{between}{said}" + (f"; {remedy}" if remedy else ""))


class Watch:
    """One rank's view. `share` gives every rank what rank 0 has, once, for the address to meet at.

    `on_late` is called, in a thread of its own, when another rank has failed and this one has not left in time.
    """

    def __init__(
        self, rank: int, world: int, host: str, share: Callable[[Any], Any], on_late: Callable[[Failure], None]
    ) -> None:
        self.rank, self._on_late = rank, on_late
        self._failure: Failure | None = None
        self._known, self._ended = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._members: dict[int, _Connection] = {}
        if rank == 0:
            server, token = _listen(host), secrets.token_hex(16)
            share([server.getsockname()[1], token])
            self._accept(server, world, token)
            work = self._serve
        else:
            port, token = share(None)
            try:
                hub = _Connection(socket.create_connection((host, port), timeout=HELLO_SECONDS))
            except OSError as error:
                raise UserError(
                    f"rank {rank} cannot reach rank 0 at {host}, port {port} ({error.strerror or error}); "
                    "let the machines connect to each other on any port"
                ) from error
            hub.keep()
            hub.send({"token": token, "rank": rank})
            self._members = {0: hub}
            work = self._listen
        self._thread = threading.Thread(target=work, daemon=True, name="watch")
        self._thread.start()

    @property
    def failure(self) -> Failure | None:
        return self._failure

    def wait(self, seconds: float) -> Failure | None:
        """The failure of another rank, if one is known or becomes known within so many seconds."""
        self._known.wait(seconds)
        return self._failure

    def tell(self, cause: str, interrupted: bool = False) -> None:
        """Our own last words. Rank 0 passes them on; from there they go out directly."""
        failure = Failure(self.rank, cause, interrupted)
        with self._lock:
            if self._failure is not None:
                return
            self._failure = failure
        self._send(failure)

    def close(self, failed: bool = False) -> None:
        """Leaves. After a failure nobody is waited for; else rank 0 stays until all have left."""
        if self.rank and not failed:
            self._members[0].send({"bye": True})
        if self.rank == 0 and not failed:
            self._thread.join(LEAVE_SECONDS)
        self._ended.set()
        for member in self._members.values():
            member.end()
        self._thread.join(LEAVE_SECONDS)
        for member in self._members.values():
            member.socket.close()

    def _accept(self, server: socket.socket, world: int, token: str) -> None:
        server.settimeout(HELLO_SECONDS)
        with server:
            while len(self._members) < world - 1:
                try:
                    accepted, _ = server.accept()
                except TimeoutError:
                    missing = sorted(set(range(1, world)) - self._members.keys())
                    raise UserError(
                        f"rank 0 waited {HELLO_SECONDS:.0f} s for the connections of ranks {missing}; "
                        "let the machines connect to each other on any port"
                    ) from None
                accepted.settimeout(HELLO_SECONDS)
                member = _Connection(accepted)
                hello = member.read()
                if hello.get("token") != token:  # somebody else's
                    accepted.close()
                    continue
                member.keep()
                self._members[hello["rank"]] = member

    def _serve(self) -> None:
        """Rank 0: hears all, and passes the first failure on."""
        with selectors.DefaultSelector() as selector:
            for rank, member in self._members.items():
                selector.register(member.socket, selectors.EVENT_READ, rank)
            heard = [rank for rank, member in self._members.items() if member.holds_more]
            while selector.get_map():
                for rank in heard or [key.data for key, _ in selector.select()]:
                    said = self._members[rank].read()
                    selector.unregister(self._members[rank].socket)
                    if not said.get("bye") and not self._ended.is_set():
                        self._learn(Failure(**said["failed"]) if "failed" in said else Failure(rank), pass_on=True)
                heard = []

    def _listen(self) -> None:
        """The others: hear rank 0, which speaks only of failures, and whose silence is one."""
        said = self._members[0].read()
        if not self._ended.is_set():
            self._learn(Failure(**said["failed"]) if "failed" in said else Failure(0), pass_on=False)

    def _learn(self, failure: Failure, pass_on: bool) -> None:
        with self._lock:
            if self._failure is not None:
                return
            if pass_on:  # before it is known here: whoever knows it may leave, and close the others' connections
                self._send(failure)
            self._failure = failure
        self._known.set()
        if not self._ended.wait(LATE_SECONDS):
            self._on_late(failure)

    def _send(self, failure: Failure) -> None:
        for rank, member in self._members.items():
            if rank != failure.rank:
                member.send({"failed": asdict(failure)})


def _listen(host: str) -> socket.socket:
    if host in ("localhost", "127.0.0.1"):
        return socket.create_server(("127.0.0.1", 0), backlog=1024)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


class _Connection:
    """Messages as lines of JSON. Its end, or what is none of them, reads as an empty one."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._received = b""

    @property
    def holds_more(self) -> bool:
        """Whether a message has come already, with the one before it."""
        return b"\n" in self._received

    def keep(self) -> None:
        """For as long as the ranks work: no silence is too long, but the system asks whether the other end is there."""
        self.socket.settimeout(None)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":
            for name, value in KEEP_ALIVE.items():
                self.socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, content: dict[str, Any]) -> None:
        """To somebody who may be gone."""
        with suppress(OSError):
            self.socket.sendall(json.dumps(content).encode() + b"\n")

    def read(self) -> dict[str, Any]:
        try:
            while not self.holds_more and len(self._received) < LONGEST:
                part = self.socket.recv(65536)
                if not part:
                    return {}
                self._received += part
            line, _, self._received = self._received.partition(b"\n")
            said = json.loads(line)
        except (OSError, ValueError):
            return {}
        return said if isinstance(said, dict) else {}

    def end(self) -> None:
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
