"""Runs the command line as a user does, in processes of its own, with ranks that fail on purpose."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

# Python imports this when it starts. In one rank it makes a step fail, in the way and at the step the environment names.
CUSTOMIZE = """
import os

if "FAULT" in os.environ and os.environ.get("RANK") == os.environ.get("FAULT_RANK", "1"):
    how, step = os.environ["FAULT"].split(":")
    once = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if once:
        import atexit
        import signal
        from unequal.errors import UserError
        from unequal.train import trainer

        def fail():
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            atexit.register(os.abort)  # as threads of a communication library may do once the interpreter closes
            if how == "end":
                return
            if how == "mistake":
                raise UserError("the fault that was asked for")
            assert False, "a fault of ours"

        def failing(self, turn, whole=trainer.Trainer._step):
            if self.at.step == int(step):
                fail()
            whole(self, turn)

        trainer.Trainer._step = failing
"""
PATIENCE = 120
"""seconds for a whole command"""


@dataclass
class Command:
    """A command that is running, in a session of its own so that whatever it leaves behind can be found."""

    process: subprocess.Popen
    output: str = ""
    errors: str = ""
    ended: float = 0.0
    folder: Path = field(default_factory=Path)

    @property
    def code(self):
        return self.process.returncode

    def wait(self, seconds=PATIENCE):
        """Its end, after which it must have left no process behind."""
        try:
            self.output, self.errors = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"not done after {seconds} s: {self.output}{self.errors}") from None
        self.ended = time.monotonic()
        return self

    def ranks(self):
        """Process ids of its ranks, by their number."""
        found = {}
        for pid in children(self.process.pid):
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            numbers = [part[5:] for part in environment if part.startswith(b"RANK=")]
            if numbers:
                found[int(numbers[0])] = pid
        return found

    def kill(self):
        for pid in [*children(self.process.pid), self.process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.output, self.errors = self.process.communicate(timeout=10)


def children(pid):
    """All processes below this one."""
    found = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in listing.read_text().split():
            found += [int(child), *children(int(child))]
    return found


def alive(pids):
    """Those that still run; what has ended but was not collected does not count."""
    running = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":
            running.append(pid)
    return running


def start(folder, *arguments, fault=None, rank=1, program=(sys.executable, "-m", "unequal")):
    customize = folder / "customize"
    customize.mkdir(exist_ok=True)
    (customize / "sitecustomize.py").write_text(CUSTOMIZE)
    environment = {**os.environ, "PYTHONPATH": str(customize), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"UNEQUAL_TRACEBACK": "", "COLUMNS": "200"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        environment.pop(name, None)
    if fault is not None:
        environment |= {"FAULT": fault, "FAULT_RANK": str(rank)}
    process = subprocess.Popen(
        [*program, *map(str, arguments)], cwd=folder, env=environment, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    return Command(process, folder=folder)
