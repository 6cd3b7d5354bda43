"""Forward, backward and update of the embedding module on the workloads P and S, beside the peers.

Every implementation is a process of its own, in its own environment. They take turns, block by block, so that a slow
spell of the machine falls on all alike; ratios are taken round by round. Nothing is timed unless ours and FBGEMM agree.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .processes import ENVIRONMENTS, Worker, status
from .report import BenchmarkError, cell, spread
from .workloads import FULL, small

if TYPE_CHECKING:
    from rich.table import Table

NAMES = ("unequal", "fbgemm", "fbgemm_huge_pages", "torchrec", "torch_sparse")
REFERENCES = ("fbgemm", "fbgemm_huge_pages")
STEPS = 10
SITTINGS = 3
RELATIVE, ABSOLUTE = 1e-5, 1e-6
PAUSE = 0.02
"""Seconds between two blocks: threads of the last worker that still spin for work have gone to sleep by then."""


def start(name: str, workload: Path, threads: int) -> Worker:
    return Worker(
        name, "benchmarks.worker", [name, str(workload), str(threads)], peer=name != "unequal", threads=threads
    )


def check_agreement(ours: Path, theirs: Path) -> float:
    """Raises unless outputs and weights of both files agree; gives the largest difference."""
    largest = 0.0
    with np.load(ours, allow_pickle=False) as a, np.load(theirs, allow_pickle=False) as b:
        if sorted(a.files) != sorted(b.files):
            raise BenchmarkError(f"ours gave {sorted(a.files)}, FBGEMM {sorted(b.files)}")
        for name in a.files:
            if a[name].shape != b[name].shape:
                raise BenchmarkError(f"{name}: ours has the shape {a[name].shape}, FBGEMM's {b[name].shape}")
            difference = np.abs(a[name] - b[name])
            # Written so that a NaN on either side is a disagreement too.
            wrong = ~(difference <= ABSOLUTE + RELATIVE * np.abs(b[name]))
            if wrong.any():
                raise BenchmarkError(
                    f"{name}: {int(wrong.sum())} of {wrong.size} values differ from FBGEMM's, the worst by "
                    f"{float(np.nanmax(difference)):.3g}; no time is reported on a wrong result"
                )
            largest = max(largest, float(difference.max()))
    return largest


def gate(name: str, threads: int, folder: Path) -> float:
    """Three steps of ours and of FBGEMM from equal weights, on a small version of the workload."""
    path = folder / f"small_{name}.npz"
    small(name).save(path)
    files = {}
    for implementation in ("unequal", "fbgemm"):
        files[implementation] = folder / f"state_{name}_{implementation}.npz"
        with ExitStack() as stack:
            worker = start(implementation, path, threads)
            stack.callback(worker.close)
            worker.read()
            worker.ask(do="state", steps=3, path=str(files[implementation]))
    return check_agreement(files["unequal"], files["fbgemm"])


def measure(workload: Path, threads: int, rounds: int) -> dict[str, Any]:
    """Several sittings, each with fresh processes started in another order: where in physical memory a process's tables
    come to lie can make all its steps half as slow again, so one start of each decides nothing."""
    result: dict[str, Any] = {}
    times: dict[str, Blocks] = {}
    for sitting in range(SITTINGS):
        start_order = NAMES[sitting:] + NAMES[:sitting]
        with ExitStack() as stack:
            workers: dict[str, Worker] = {}
            for name in start_order:
                worker = start(name, workload, threads)
                stack.callback(worker.close)
                hello = worker.read()
                result.setdefault(name, hello)
                if "unsupported" not in hello:
                    workers[name] = worker
                    worker.ask(do="block", steps=STEPS)
            order = list(workers)
            for _ in range(-(-rounds // SITTINGS)):
                for name in order:
                    time.sleep(PAUSE)
                    times.setdefault(name, []).append(workers[name].ask(do="block", steps=STEPS))
                order = order[1:] + order[:1]
            for name, worker in workers.items():
                peak = status(worker.process.pid, "VmHWM")
                result[name]["peak_memory_bytes"] = max(peak, result[name].get("peak_memory_bytes", 0))
    for name, blocks in times.items():
        result[name] |= summary(blocks, {reference: times[reference] for reference in REFERENCES})
    return {name: result[name] for name in NAMES}


Blocks = list[dict[str, list[float]]]


def summary(blocks: Blocks, references: dict[str, Blocks]) -> dict[str, Any]:
    """Milliseconds over all steps, and how many times faster than FBGEMM, from the medians of each round."""
    result: dict[str, Any] = {}
    for part in ("forward", "step"):
        result[f"{part}_ms"] = spread([seconds for block in blocks for seconds in block[part]], 1000)
    for name, reference in references.items():
        for part in ("forward", "step"):
            ratios = [float(np.median(theirs[part]) / np.median(mine[part])) for mine, theirs in zip(blocks, reference)]
            result[f"{part}_times_{name}"] = spread(ratios)
    return result


def run(quick: bool = False) -> dict[str, Any]:
    cases = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in FULL:
            differences = {threads: gate(name, threads, folder) for threads in (1, 2)}
            workload = small(name) if quick else FULL[name]()
            path = folder / f"{name}.npz"
            workload.save(path)
            lookups = float(np.mean([len(ids) for ids in workload.ids]))
            for threads in (1, 2):
                cases.append(
                    {
                        "workload": name,
                        "threads": threads,
                        "rows": sum(workload.rows),
                        "lookups_per_step": round(lookups),
                        "largest_difference_to_fbgemm": differences[threads],
                        "implementations": measure(path, threads, rounds=2 if quick else 12),
                    }
                )
            path.unlink()
    return {"steps_per_block": STEPS, "environments": ENVIRONMENTS, "cases": cases}


def table(result: dict[str, Any]) -> Table:
    from rich.table import Table

    view = Table(title="embedding step: medians (quartiles)")
    for heading in (
        "workload",
        "threads",
        "implementation",
        "forward ms",
        "step ms",
        "× FBGEMM",
        "× with 2 MiB pages",
        "peak GiB",
    ):
        view.add_column(heading, justify="left" if heading in ("workload", "implementation") else "right")
    for case in result["cases"]:
        for name, values in case["implementations"].items():
            cells = [case["workload"], str(case["threads"]), name]
            if "unsupported" in values:
                view.add_row(*cells, "not supported")
                continue
            memory = f"{values['peak_memory_bytes'] / 2**30:.2f}"
            times = [cell(values["forward_ms"], 2), cell(values["step_ms"], 2), cell(values["step_times_fbgemm"], 2)]
            times.append(cell(values["step_times_fbgemm_huge_pages"], 2))
            view.add_row(*cells, *times, memory)
        view.add_section()
    return view
