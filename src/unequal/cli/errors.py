"""How errors leave the command line: one line on stderr and an exit code, a traceback only where it is asked for."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from ..errors import UserError

TRACEBACK_VARIABLE = "UNEQUAL_TRACEBACK"
FAILED, INTERRUPTED = 1, 130


def ask_for_traceback() -> None:
    os.environ[TRACEBACK_VARIABLE] = "1"


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
    if os.environ.get(TRACEBACK_VARIABLE, "") not in ("", "0"):
        raise error
    print(" ".join(line.split()), file=sys.stderr)
    raise typer.Exit(code) from None
