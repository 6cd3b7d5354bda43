"""How errors leave the command line: one line on stderr and an exit code, a traceback only where it is asked for."""

import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import typer

from ..errors import UserError
from ..train import lifeline
from ..train.lifeline import INTERRUPTED, LastWords

TRACEBACK_VARIABLE = "UNEQUAL_TRACEBACK"
FAILED = 1


def ask_for_traceback() -> None:
    os.environ[TRACEBACK_VARIABLE] = "1"


def traceback_wanted() -> bool:
    return os.environ.get(TRACEBACK_VARIABLE, "") not in ("", "0")


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turns what the user can mend into `error: …`. Anything else is a fault of ours and keeps its traceback."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        _end("interrupted" + "".join(f" {part}" for part in interrupt.args), INTERRUPTED, interrupt)
    except UserError as error:
        _end(f"error: {error}", FAILED, error)
    except OSError as error:
        _end(f"error: {_describe(error)}", FAILED, error)


@contextmanager
def ranks_end_at_once() -> Iterator[None]:
    """A rank among others ends here, with nothing taken apart on the way.

    Threads of the communication library go on while the interpreter is being closed, and one that wants its lock then aborts the
    process: a rank that was done seemed to have failed, and one that had failed lost its error behind a SIGABRT.
    """
    try:
        yield
    except SystemExit as end:
        if lifeline.joined():
            _leave(end.code if isinstance(end.code, int) else FAILED if end.code else 0)
        raise
    except BaseException as error:
        if lifeline.joined():
            sys.excepthook(type(error), error, error.__traceback__)
            _leave(FAILED)
        raise


def _leave(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or nobody reads it
            stream.flush()
    os._exit(code)


@contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM, which schedulers and torchrun send, stops the work as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) == signal.SIG_IGN:
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _describe(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename is not None else ""
    what = (error.strerror or str(error)).lower()
    remedy = ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "; free some space; whatever was saved before is intact, and --resume continues from it"
    elif isinstance(error, PermissionError) or error.errno == errno.EROFS:
        remedy = "; make it writable or choose another folder"
    return f"{where}{what}{remedy}"


def _end(line: str, code: int, error: BaseException) -> None:
    """A rank that `--ranks` started leaves the line to the process that started it, which prints one for all."""
    line = " ".join(line.split())
    failure = getattr(error, "failure", None)
    words = LastWords(
        line, code, None if failure is None else failure.rank, getattr(error, "remedy", ""), joined=lifeline.joined()
    )
    told = lifeline.tell(words)
    if traceback_wanted():
        raise error
    if not told:
        print(line, file=sys.stderr)
    raise typer.Exit(code) from None
