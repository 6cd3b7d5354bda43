"""Benchmarks as commands."""

import contextlib
import os
import signal
import subprocess
import sys

from benchmarks.report import ROOT


def command(*arguments: str) -> str:
    """What a benchmark prints. It and its processes are ended with the test, whatever happens."""
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, errors = process.communicate(timeout=300)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, errors[-4000:]
    return out
