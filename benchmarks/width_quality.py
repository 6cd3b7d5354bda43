"""Quality × memory × policy: test AUC of the same DLRM by every policy, by uniform narrow dims, by hashing, and whole.

For every data set, method and kept share the learning rate is tuned on validation data with two seeds, for the full model weight
decay too; the winner is trained with the other seeds. All of it is some 1,500 trainings of half a minute on a core, so it can be
done in pieces and elsewhere: each training appends a line to a file, and what has its line is not done again.

    python -m benchmarks.width_quality --prepare FOLDER     real data as arrays (generated data is made where it is used)
    python -m benchmarks.width_quality --lines FILE --data FOLDER --workers 16 --seconds 500
    python -m benchmarks.width_quality --lines FILE --summarise     results/width.json, tables and the picture in docs

With --extend what results/width.json has counts as done: its cells keep their settings, and get the seeds that they lack; cells
of which seed 0 is in FILE are made of FILE alone.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .report import ROOT, BenchmarkError, merge, stamp
from .width_data import STUDIES, Study, generated, prepared
from .width_summary import best_of, recalled, summarised, table
from .width_training import KEPT, METHODS, Job, Setting, train

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["run", "table"]
RESULTS = ROOT / "benchmarks/results/width.json"
PICTURE = ROOT / "docs/width_quality.svg"
SEEDS, TUNED_WITH = 5, 2
"""of a cell, and of those the ones by which its setting is chosen"""
DIMS = tuple(keep for keep in KEPT if keep >= 1 / 16)
"""shares that whole dims of 16 can be"""
FEW = ("dim", "in_bytes")
"""methods that are tried with these alone: smaller tables cannot be followed in fewer bytes"""
RATES = (0.1, 0.2, 0.4)
SETTINGS = tuple(Setting(lr=lr, weight_decay=1e-5) for lr in RATES)
OF_FULL = {
    "full": tuple(Setting(lr=lr) for lr in RATES),
    "full_decay": (
        *SETTINGS,
        *(Setting(lr=lr, weight_decay=3e-5) for lr in (0.2, 0.4)),
        Setting(lr=0.2, weight_decay=3e-4),
    ),
}
"""the full model is tuned without and with weight decay, each for itself"""
TUNED_ONCE = {"adaembed": 0.125, "itep": 0.125, "frequency": 0.125, "hash": 0.125}
"""whole rows are trained like at this share at all shares: what a row needs does not depend on how many there are; one seed
tunes them"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """What is to be trained."""

    data: Sequence[str] = tuple(STUDIES)
    methods: Sequence[str] = METHODS
    kept: Sequence[float] = KEPT
    settings: Sequence[Setting] = SETTINGS
    seeds: int = SEEDS

    def cells(self) -> Iterator[tuple[str, str, float]]:
        for data in self.data:
            for method in self.methods:
                kept = [1.0] if method.startswith("full") else [k for k in self.kept if method not in FEW or k in DIMS]
                yield from ((data, method, keep) for keep in kept)

    def settings_of(self, method: str) -> Sequence[Setting]:
        return OF_FULL.get(method, self.settings)

    def tuning(self, data: str, method: str, keep: float) -> list[Job]:
        """The trainings whose best one says how those of this cell are done."""
        keep = TUNED_ONCE.get(method, keep) if TUNED_ONCE.get(method) in self.kept else keep
        return [
            Job(data=data, method=method, keep=keep, setting=setting, seed=seed)
            for seed in range(1 if method in TUNED_ONCE else min(TUNED_WITH, self.seeds))
            for setting in self.settings_of(method)
        ]

    def pending(self, lines: Sequence[Mapping[str, Any]]) -> list[Job]:
        """Tuning first; the seeds of a cell when its tuning is done, or its setting is known from results."""
        done = {Job.of(line).key(): line for line in lines}
        known = {cell_of(line): Job.of(line).setting for line in lines if "tried" in line}
        tuning: dict[str, Job] = {}
        rest = []
        for data, method, keep in self.cells():
            jobs = self.tuning(data, method, keep)
            best = known.get((data, method, keep))
            missing = {job.key(): job for job in jobs if job.key() not in done and best is None}
            if missing:
                tuning |= missing
                continue
            if best is None:
                tried = {s: [done[job.key()] for job in jobs if job.setting == s] for s in self.settings_of(method)}
                best = best_of(tried)
            seeds = [Job(data=data, method=method, keep=keep, setting=best, seed=seed) for seed in range(self.seeds)]
            rest += [job for job in seeds if job.key() not in done]
        return [*tuning.values(), *sorted(rest, key=lambda job: job.seed)]


def read(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """All lines of trainings, and where the last ones were made."""
    whole = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    stamps = [line["stamp"] for line in whole if "stamp" in line]
    return [line for line in whole if "job" in line], stamps[-1] if stamps else None


def cell_of(line: Mapping[str, Any]) -> tuple[str, str, float]:
    job = line["job"]
    return job["data"], job["method"], job["keep"]


def extended(lines: Sequence[dict[str, Any]], results: Path) -> list[dict[str, Any]]:
    """With the trainings of the results, but for cells that were trained from the start."""
    anew = {cell_of(line) for line in lines if line["job"]["seed"] == 0}
    before = recalled(json.loads(results.read_text())["width_quality"]["results"])
    return [*(line for line in before if cell_of(line) not in anew), *lines]


@cache
def _study(name: str, folder: Path) -> Study:
    return prepared(name, folder)


def _train(job: Job, folder: Path) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    return train(_study(job.data, folder), job)


def go_on(
    grid: Grid,
    data: Path,
    lines: Path,
    workers: int,
    seconds: float = float("inf"),
    quick: bool = False,
    results: Path | None = None,
) -> int:
    """Trains what has no line yet, each on a core; starts none after so many seconds. Gives how many are left. `results`: whose
    cells count as done."""

    def pending() -> list[Job]:
        trained = read(lines)[0]
        return grid.pending(trained if results is None else extended(trained, results))

    end = time.monotonic() + seconds
    for name in grid.data:
        prepared(name, data)
    lines.parent.mkdir(parents=True, exist_ok=True)
    # Not forked: a process that has computed with several threads must not be.
    with lines.open("a") as file, ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        file.write(json.dumps({"stamp": stamp(quick)}) + "\n")
        running: dict[Future[dict[str, Any]], str] = {}
        while True:
            ready = [job for job in pending() if job.key() not in running.values()] if time.monotonic() < end else []
            for job in ready[: workers - len(running)]:
                running[pool.submit(_train, job, data)] = job.key()
            if not running:
                break
            for one in wait(running, return_when=FIRST_COMPLETED).done:
                del running[one]
                file.write(json.dumps(one.result()) + "\n")
                file.flush()
    return len(pending())


def run(quick: bool = False) -> dict[str, Any]:
    """The whole grid, which takes a machine of two cores half a day; what a run before has done is not done again."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, grid = ROOT / "runs/width_quality", Grid()
        if quick:
            folder = Path(temporary)
            generated("generated", rows=20_000, ids=20_000).save(folder / "generated.npz")
            grid = Grid(data=("generated",), kept=(0.25,), settings=SETTINGS[:1], seeds=2)
        lines = folder / "lines.jsonl"
        left = go_on(grid, folder, lines, len(os.sched_getaffinity(0)), quick=quick)
        assert not left
        return summarised(read(lines)[0])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.width_quality", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--prepare", type=Path, metavar="FOLDER", help="write real data as arrays into the folder")
    parser.add_argument("--lines", type=Path, metavar="FILE", help="a line for each training that is done")
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER", default=ROOT / "runs/width_quality", help="prepared data"
    )
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no training after so many")
    parser.add_argument("--only", nargs="+", choices=tuple(STUDIES), default=tuple(STUDIES), metavar="DATA")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, metavar="METHOD")
    parser.add_argument("--kept", nargs="+", type=float, default=KEPT)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument(
        "--summarise", action="store_true", help="no training: results, tables and picture from the lines"
    )
    parser.add_argument("--extend", action="store_true", help="what the results have counts as done")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    chosen = parser.parse_args()
    if chosen.prepare is not None:
        for name in chosen.only:
            if not name.startswith("generated"):
                prepared(name, chosen.prepare)
    elif chosen.lines is None:
        parser.error("one of --prepare and --lines is needed")
    elif chosen.summarise:
        summarise(chosen.lines, chosen.output, chosen.picture, chosen.extend)
    else:
        grid = Grid(data=chosen.only, methods=chosen.methods, kept=chosen.kept, seeds=chosen.seeds)
        results = chosen.output if chosen.extend else None
        left = go_on(grid, chosen.data, chosen.lines, chosen.workers, chosen.seconds, results=results)
        print(f"{left} trainings are left")


def summarise(lines: Path, output: Path, picture: Path, extend: bool) -> None:
    from rich.console import Console

    from .__main__ import NAMES
    from .width_plot import plot

    trained, origin = read(lines)
    if not trained or origin is None:
        raise BenchmarkError(f"{lines} holds no training")
    if origin["commit"] == "not a git checkout":  # trained on a copy of this tree
        origin |= {name: stamp(False)[name] for name in ("commit", "dirty")}
    result = summarised(extended(trained, output) if extend else trained)
    merge(output, {"width_quality": origin | {"results": result}}, NAMES)
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.write_text(plot(result))
    Console(width=130).print(table(result))


if __name__ == "__main__":
    main()
