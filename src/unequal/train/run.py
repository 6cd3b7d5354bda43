"""The run folder: the resolved recipe, metrics.jsonl, TensorBoard events, checkpoints and report.json, side by side."""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import CheckpointError, UserError
from .config import Recipe

RECIPE, PLAN, METRICS, REPORT = "recipe.toml", "plan.json", "metrics.jsonl", "report.json"
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a training or an evaluation comes to. The first nine are the keys that scripts may rely on."""

    auc: float | None
    normalized_entropy: float | None
    log_loss: float | None
    calibration: float | None
    samples_per_second: float
    """Of training, or of scoring a finished run; without a GPU's first training step, which compiles kernels."""
    steps: int
    seed: int
    peak_memory_bytes: int
    embedding_bytes: dict[str, int]
    part: str | None
    """The part of the data that was scored: test, or what there was instead of it."""
    samples: int
    """How many samples were scored."""
    tasks: dict[str, Any]
    """The four metrics per label."""
    best_step: int | None
    """The step whose weights were scored, where the best evaluation chose them."""
    seconds: float
    dropped: dict[str, dict[str, int]]
    """Bad rows left out, by part and cause."""
    ceiling: dict[str, float]
    """Of generated data: what the true probabilities themselves reach."""
    run: str
    recipe_hash: str
    device: str
    """cpu, or the GPU's name."""
    peak_device_memory_bytes: int | None
    """The most that tensors took on a rank's GPU; None on the CPU."""
    world: int = 1
    """Ranks. What is given in bytes is that of the rank with most of it, but for `embedding_bytes`: of all together."""
    ranks_per_node: int = 1
    embedding_bytes_per_rank: int = 0
    exchange: dict[str, float] = field(default_factory=dict)
    """Of several ranks, per training step and over all of them: bytes inside nodes and across, what ids that are not made unique
    would have taken, and the share of the time spent in collectives of the tables."""
    plan: list[str] = field(default_factory=list)
    """How the tables are spread, a line per kind."""
    tiers: dict[str, dict[str, float]] = field(default_factory=dict)
    """Of every table with tiers: rows in each, the share of reads they serve, and how that would be were they chosen anew."""
    width: dict[str, Any] = field(default_factory=dict)
    """With a budget: kept share, gross and net compression, bytes, live rows, rounds, values pruned and regained, width by
    popularity, and the budgets that were tried where it was looked for. What is not known of unbounded ids is not there."""
    seconds_to_first_step: float | None = None
    """From the command to the end of the first step."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def peak_memory_bytes() -> int:
    """The most memory this process has had resident so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def write_json(path: Path, content: dict[str, Any]) -> None:
    """In one piece: a reader sees the old file or the new one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot write the report: {error.strerror}; choose another file") from error


def create_run_folder(recipe: Recipe) -> Path:
    """A fresh folder for the run; one that already holds a run is refused."""
    try:
        if not recipe.run.folder:
            return _next_free(Path("runs"), recipe.name)
        folder = chosen_folder(recipe)
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or recipe.run.folder}: cannot make the run folder: {error.strerror}; "
            "choose another with --set run.folder=…"
        ) from error


def chosen_folder(recipe: Recipe) -> Path:
    """The folder that the recipe names, if it holds no run yet."""
    folder = Path(recipe.run.folder.replace("{name}", recipe.name)).expanduser()
    if any((folder / name).exists() for name in (RECIPE, METRICS, CHECKPOINTS)):
        raise UserError(
            f"{folder}: this folder already holds a run; continue it with --resume {folder}, "
            "or choose another with --set run.folder=…"
        )
    return folder


def _next_free(parent: Path, name: str) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    taken = [found.name.removeprefix(f"{name}-") for found in parent.glob(f"{name}-*")]
    number = max((int(rest) for rest in taken if rest.isdigit()), default=0) + 1
    while True:
        try:
            (parent / f"{name}-{number}").mkdir()
            return parent / f"{name}-{number}"
        except FileExistsError:
            number += 1


@dataclass(slots=True)
class RunLog:
    """Metrics, one JSON object a line, and TensorBoard events. Opened at a byte position: what lies behind is cut."""

    folder: Path
    start: int = 0
    start_step: int = 0
    _file: Any = field(init=False, repr=False)
    _events: _Events | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        try:
            self._file = (self.folder / METRICS).open("ab")
            self._file.truncate(self.start)
            self._events = _Events(self.folder, self.start_step)
        except OSError as error:
            raise CheckpointError(
                f"{self.folder}: cannot write into the run folder: {error.strerror}; "
                "make it writable or choose another with --set run.folder=…"
            ) from error

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()

    def write(self, kind: str, step: int, epoch: int, values: dict[str, Any]) -> None:
        line = json.dumps({"kind": kind, "step": step, "epoch": epoch, **values}, allow_nan=False)
        self._file.write(line.encode() + b"\n")
        self._file.flush()
        if self._events is not None:
            self._events.write(kind, step, values)

    def position(self) -> int:
        """How many bytes are safely on disk: what a checkpoint remembers."""
        os.fsync(self._file.fileno())
        return int(os.fstat(self._file.fileno()).st_size)


class NoLog:
    """What a rank that writes nothing has instead."""

    def __enter__(self) -> NoLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def write(self, kind: str, step: int, epoch: int, values: dict[str, Any]) -> None:
        return None

    def position(self) -> int:
        return 0


def open_log(folder: Path, start: int, start_step: int, *, write: bool) -> RunLog | NoLog:
    return RunLog(folder, start, start_step) if write else NoLog()


class _Events:
    """A TensorBoard event file, written record by record with tensorboard's own writer and messages."""

    def __init__(self, folder: Path, start_step: int) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        name = f"events.out.tfevents.{time.time_ns() // 10**9:010d}.{socket.gethostname()}.{os.getpid()}.{start_step}"
        self._writer = RecordWriter((folder / name).open("wb"))
        self._add(self._event(wall_time=time.time(), file_version="brain.Event:2"))
        if start_step:
            # tells TensorBoard to forget what an interrupted run wrote from this step on
            log = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(self._event(wall_time=time.time(), step=start_step + 1, session_log=log))

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        scalars = [
            self._summary.Value(tag=f"{kind}/{name}", simple_value=value)
            for name, value in values.items()
            if isinstance(value, int | float)
        ]
        self._add(self._event(wall_time=time.time(), step=step, summary=self._summary(value=scalars)))

    def _add(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
