"""What binds a rank that `unequal train --ranks` started to the process that started it: one socket.

The rank says through it how it ended, so that one line about all ranks can be printed; and when the other end closes, because
the process that started it is gone, the rank ends, too. Needs no torch.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass

VARIABLE = "UNEQUAL_LIFELINE"
"""the number of the socket's descriptor"""
LISTENER = "UNEQUAL_LISTENER"
"""of rank 0: the descriptor of the socket on which the ranks meet, which nobody can take away"""
SHOW_CURSOR = "\x1b[?25h"
"""what a bar that was not ended leaves to be done on a terminal"""
INTERRUPTED = 130
LONGEST = 8000
"""characters of a last line: it must fit the socket's buffer, because nobody may read before this process has ended"""
ORPHAN_SECONDS = 3.0
"""how long a rank may take to end by itself when nobody is left who would end it"""


@dataclass(frozen=True, slots=True)
class LastWords:
    """How a rank ended."""

    line: str
    code: int
    origin: int | None = None
    """Another rank whose end was the cause."""
    remedy: str = ""
    joined: bool = False
    """Whether the ranks were together already. Before that they all do the same, and fail in the same way."""

    @classmethod
    def parse(cls, received: bytes) -> LastWords | None:
        return cls(**json.loads(received)) if received else None


_socket: socket.socket | None = None
_joined = False


def attach() -> None:
    """To be called early in a process that may have been started as a rank."""
    global _socket
    number = os.environ.pop(VARIABLE, None)
    if number is None:
        return
    _socket = socket.socket(fileno=int(number))
    _socket.set_inheritable(False)
    threading.Thread(target=_watch, args=(_socket,), daemon=True, name="lifeline").start()


def join() -> None:
    """The ranks are together now: from here on each may fail in its own way."""
    global _joined
    _joined = True


def joined() -> bool:
    return _joined


def tell(words: LastWords) -> bool:
    """Whether somebody listens, who then prints the line."""
    if _socket is None:
        return False
    try:
        _socket.sendall(json.dumps(asdict(words) | {"line": words.line[:LONGEST]}).encode() + b"\n")
    except OSError:
        return False
    return True


def _watch(line: socket.socket) -> None:
    with suppress(OSError):
        while line.recv(1):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_SECONDS)
    os._exit(1)
