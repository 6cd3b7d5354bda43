"""A training step with narrow rows over the same step with plain tables, on workloads P and S, and what rounds cost.

Plain tables, all rows kept and 10% kept are processes of their own that take turns, block by block; ratios are taken round by
round, as in embedding_step. Only the rows that the batches read are ever made, so 10% is meant of their values. Rows have come
to their widths before the clock starts. A round's cost is what a step that ends in one takes longer than others; its share is
that of a round every 1,000 steps.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .embedding_step import PAUSE
from .processes import Worker
from .report import cell, spread
from .workloads import FULL, Workload, small

if TYPE_CHECKING:
    from rich.table import Table

SIDES: dict[str, float | None] = {"plain": None, "100%": 1.0, "10%": 0.1}
BARS = {"100%": 1.3, "10%": 1.0}
ROUND_BAR = 0.01
INTERVAL = 1000
"""steps between rounds, as a recipe has it by default"""
BATCHES, WARM_UP, STEPS, ROUNDS = 24, 260, 12, 8
"""warm-up: in the first 256 steps what values save is looked at in every step, later in one of 4 and less"""
EVERY = 50
"""steps between rounds here, so that some of them are timed"""


def read_share(workload: Workload) -> float:
    """Of all rows, those that the batches read."""
    parts = [np.split(ids, np.cumsum(workload.counts(batch))[:-1]) for batch, ids in enumerate(workload.ids)]
    return sum(len(np.unique(np.concatenate(of_table))) for of_table in zip(*parts)) / sum(workload.rows)


def measure(path: Path, threads: int, model: bool, warm_up: int, rounds: int) -> dict[str, Any]:
    share = read_share(Workload.load(path))
    blocks: dict[str, list[dict[str, list[float]]]] = {name: [] for name in SIDES}
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        workers = {}
        for name, width in SIDES.items():
            worker = Worker(
                "unequal", "benchmarks.width_worker", [str(path), str(threads)], peer=False, threads=threads
            )
            stack.callback(worker.close)
            worker.read()
            narrow = width if width is None or width == 1 else width * share
            worker.ask(do="build", width=narrow, policy="water-filling", every=EVERY, model=model)
            worker.ask(do="train", steps=warm_up)
            workers[name] = worker
        order = list(workers)
        for _ in range(rounds):
            for name in order:
                time.sleep(PAUSE)
                blocks[name].append(workers[name].ask(do="block", steps=STEPS))
            order = order[1:] + order[:1]
        for name, worker in workers.items():
            found[name] = worker.ask(do="sizes")
    middles = {name: [statistics.median(block["step"]) for block in parts] for name, parts in blocks.items()}
    for name, parts in blocks.items():
        found[name]["step_ms"] = spread([seconds for block in parts for seconds in block["step"]], 1000)
        if SIDES[name] is None:
            continue
        found[name]["times_plain"] = spread(mine / plain for mine, plain in zip(middles[name], middles["plain"]))
        more = [s - middle for block, middle in zip(parts, middles[name]) for s in block["with_round"]]
        if more:
            found[name]["round_ms"] = spread(more, 1000)
            found[name]["round_share"] = round(
                statistics.median(more) / (INTERVAL * statistics.median(middles[name])), 5
            )
    return found


def run(quick: bool = False) -> dict[str, Any]:
    cases = []
    with tempfile.TemporaryDirectory() as temporary:
        for name in FULL:
            path = Path(temporary) / f"{name}.npz"
            (small(name) if quick else FULL[name](batches=BATCHES)).save(path)
            for threads in (1, 2) if not quick else (1,):
                for model in (name == "S",) if quick else (False, True):
                    sides = measure(path, threads, model, 2 * EVERY if quick else WARM_UP, 5 if quick else ROUNDS)
                    step = "whole model" if model else "embeddings"
                    cases.append({"workload": name, "threads": threads, "step": step, "sides": sides})
            path.unlink()
    return {
        "steps_per_block": STEPS,
        "every": EVERY,
        "interval": INTERVAL,
        "bars": BARS,
        "round_bar": ROUND_BAR,
        "cases": cases,
    }


def table(result: dict[str, Any]) -> Table:
    from rich.table import Table

    view = Table(title="a training step, plain and narrow: medians (quartiles)")
    for heading in ("workload", "threads", "step", "kept", "ms", "× plain", "bar", "round ms", "share"):
        view.add_column(heading, justify="left" if heading in ("workload", "step") else "right", no_wrap=True)
    for case in result["cases"]:
        for name, side in case["sides"].items():
            cells = [case["workload"], str(case["threads"]), case["step"], name, cell(side["step_ms"], 2)]
            if "times_plain" in side:
                bar = result["bars"][name]
                verdict = "kept" if side["times_plain"]["median"] <= bar else "MISSED"
                cells += [cell(side["times_plain"], 2), f"{bar} {verdict}"]
            if "round_ms" in side:
                cells += [cell(side["round_ms"], 1), f"{side['round_share']:.2%}"]
            view.add_row(*cells)
        view.add_section()
    return view
