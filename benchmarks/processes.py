"""Worker processes in the two environments, driven over pipes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .report import BenchmarkError

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / ".venv-peers" / "bin" / "python"
OURS = ROOT / ".venv" / "bin" / "python"

KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_TOP_PAD_": str(2**28),
}
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
# Fresh pages for every output cost the peers up to half of a step, so their allocator keeps what it frees. A switch of
# torch that is off by default puts large tensors on 2 MiB pages; `unequal train` sets it for itself, and FBGEMM is measured
# without and with it.
ENVIRONMENTS = {
    "unequal": HUGE_PAGES,
    "fbgemm": KEEP_FREED_MEMORY,
    "fbgemm_huge_pages": KEEP_FREED_MEMORY | HUGE_PAGES,
    "torchrec": KEEP_FREED_MEMORY | HUGE_PAGES,
    "torch_sparse": KEEP_FREED_MEMORY | HUGE_PAGES,
}


def interpreter(peer: bool) -> Path:
    path = PEERS if peer else OURS
    if not path.exists():
        target = "peers" if peer else "native"
        raise BenchmarkError(f"{path.relative_to(ROOT)} not found: run `make {target}` first")
    return path


def environment(name: str, threads: int) -> dict[str, str]:
    mine = {
        name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "THP_", "OMP_", "GLIBC_"))
    }
    mine |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)}
    return mine | ENVIRONMENTS.get(name, {})


def run_ours(name: str, threads: int, *arguments: str) -> str:
    """What this interpreter prints when it is run with the arguments, in a process of its own."""
    mine = environment(name, threads)
    # Where the package is not installed it is found the way this process found it.
    mine["PYTHONPATH"] = os.pathsep.join([mine["PYTHONPATH"], *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, env=mine)
    if done.returncode:
        raise BenchmarkError(f"{name} {' '.join(arguments)} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout


def status(pid: int, field: str) -> int:
    """A size in bytes that the system keeps about a process: VmRSS, resident now; VmHWM, its peak so far."""
    path = Path(f"/proc/{pid}/status")
    lines = path.read_text().splitlines() if path.exists() else []
    sizes = [int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")]
    if not sizes:
        raise BenchmarkError(f"{path} has no {field}: memory is measured on Linux only")
    return sizes[0]


class Worker:
    """A running worker. It sleeps in a read of its pipe whenever it is not asked for anything."""

    def __init__(self, name: str, module: str, arguments: list[str], *, peer: bool, threads: int) -> None:
        self.name = name
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  lives as long as the worker
        self.process = subprocess.Popen(
            [str(interpreter(peer)), "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            cwd=ROOT,
            env=environment(name, threads),
        )

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            self.errors.seek(0)
            said = self.errors.read().strip()[-2000:]
            raise BenchmarkError(f"the worker '{self.name}' ended with exit code {code}:\n{said}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, **command: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self.read()

    def close(self) -> None:
        """Ends the worker: by closing its input, or, where it does not listen, by force."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.errors.close()
