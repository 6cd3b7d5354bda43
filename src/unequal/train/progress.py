"""How a run shows itself: a bar on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import math
import sys
import time
from types import TracebackType
from typing import Any

LINE_SECONDS = 10.0
BAR_SECONDS = 0.5


class Progress:
    """Says nothing; also what the other two have in common."""

    interval = math.inf
    """Seconds after which it may want something new. Where a look at the loss waits for a GPU, there is none sooner."""

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def say(self, line: str) -> None:
        """A line that stays."""

    def start(self, total_steps: int, step: int) -> None:
        """Training begins, or goes on, at `step` of `total_steps`."""

    def update(self, step: int, loss: float, samples_per_second: float) -> None:
        """So far so good."""


class Lines(Progress):
    """A line every few seconds: for logs and pipes."""

    interval = LINE_SECONDS / 10

    def __init__(self) -> None:
        self._total, self._last = 0, 0.0
        self._first_step, self._started = 0, 0.0

    def say(self, line: str) -> None:
        print(line, flush=True)

    def start(self, total_steps: int, step: int) -> None:
        self._total, self._first_step = total_steps, step
        self._started = self._last = time.monotonic()

    def update(self, step: int, loss: float, samples_per_second: float) -> None:
        now = time.monotonic()
        if now - self._last < LINE_SECONDS and step != self._total:
            return
        self._last = now
        per_step = (now - self._started) / max(1, step - self._first_step)
        left = per_step * (self._total - step)
        speed = f"{samples_per_second:,.0f} samples/s"
        self.say(f"step {step:,}/{self._total:,}  loss {loss:.4f}  {speed}  {left:,.0f} s left")


class Trial(Progress):
    """A training that only tries something out: how far it is, but none of its lines."""

    def __init__(self, shown: Progress) -> None:
        self._shown, self.interval = shown, shown.interval

    def start(self, total_steps: int, step: int) -> None:
        self._shown.start(total_steps, step)

    def update(self, step: int, loss: float, samples_per_second: float) -> None:
        self._shown.update(step, loss, samples_per_second)


class Bar(Progress):
    """rich's progress bar, with loss, speed and the time left."""

    interval = BAR_SECONDS

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[speed]} samples/s"),
            TimeRemainingColumn(),
        )
        self._task: Any = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, line: str) -> None:
        self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def start(self, total_steps: int, step: int) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task("", total=total_steps, completed=step, loss="–", speed="–")
        self._bar.start()

    def update(self, step: int, loss: float, samples_per_second: float) -> None:
        self._bar.update(self._task, completed=step, loss=f"{loss:.4f}", speed=f"{samples_per_second:,.0f}")


def progress_for(shown: bool) -> Progress:
    if not shown:
        return Progress()
    return Bar() if sys.stdout.isatty() else Lines()
