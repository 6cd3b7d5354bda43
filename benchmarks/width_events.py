"""Width on events as users have them: `unequal import events`, the recipe that it writes, and `unequal train` with a budget.

Nothing is tuned: learning rate, starting values and optimizer (row-wise AdaGrad) are the recipe's, for whole tables and for
narrow ones. Histories are attended to, which wants wider rows than products of pooled features do. Tables are told how many rows
they have, so that budgets are shares of their values. The epoch is chosen on validation data. Test AUC, and the bytes of the
tables with all that belongs to them.

    python -m benchmarks --only width_events
    python -m benchmarks.width_events --methods water-filling       these alone; other cells stay as results/width.json has them
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .report import ROOT, BenchmarkError, merge, stamp

if TYPE_CHECKING:
    from rich.table import Table

DATA = {"video games": "amazon_videogames_sasrec", "sessions": "sessions_diginetica"}
"""with an order of events: histories are what came before"""
METHODS = ("full", "dim", "water-filling", "fiited", "adaembed", "itep", "frequency")
KEPT = (0.5, 0.25, 0.125, 0.05)
DIM, DIMS = 16, (8, 4, 2, 1)
"""of whole tables; and uniform ones"""
SEEDS = {"video games": 3, "sessions": 2}
EPOCHS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    data: str
    method: str
    """a policy; "dim": all rows narrow; "full": all rows whole"""
    kept: float
    seed: int

    def settings(self, rows: dict[str, int]) -> list[str]:
        chosen = [f"tables.{table}.rows={count}" for table, count in rows.items()]
        if self.method == "dim":
            return [*chosen, f"tables.dim={round(DIM * self.kept)}"]
        if self.method == "full":
            return chosen
        return [*chosen, f'width.budget="{100 * self.kept:g}%"', f'width.policy="{self.method}"']


def unequal(*arguments: str) -> None:
    """With one thread, so that trainings are the same on any machine and as many run as there are cores."""
    command = [sys.executable, "-m", "unequal", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise BenchmarkError(f"{' '.join(arguments[:2])} failed: {done.stderr.strip()[-300:]}")


def imported(source: Path, folder: Path) -> dict[str, int]:
    """Writes samples and a recipe; gives how many rows the tables have."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    unequal("import", "events", str(source), str(folder))
    clicks = pq.read_table(folder / "events-clicks.parquet", columns=["user", "item"])
    users, items = (pc.max(clicks.column(name)).as_py() + 1 for name in ("user", "item"))
    return {"user": users, "items": items}


def trained(job: Job, folder: Path, rows: dict[str, int], epochs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary) / "report.json"
        settings = [f"run.seed={job.seed}", f"run.epochs={epochs}", "run.threads=1", f"run.folder={temporary}/run"]
        flags = [part for setting in (*settings, *job.settings(rows)) for part in ("--set", setting)]
        unequal("train", str(folder / "recipe.toml"), "--json", str(report), *flags)
        found = json.loads(report.read_text())
    size = sum(found["embedding_bytes"].values())
    return {"auc": round(found["auc"], 6), "bytes": size, "step": found["best_step"]}


def jobs(data: str, seeds: int, methods: Sequence[str], kept: Sequence[float]) -> Iterator[Job]:
    shares = {"full": (1.0,), "dim": [dim / DIM for dim in DIMS]}
    for seed in range(seeds):
        for method in methods:
            for share in shares.get(method, kept):
                yield Job(data=data, method=method, kept=share, seed=seed)


def run(quick: bool = False, methods: Sequence[str] = METHODS) -> dict[str, Any]:
    cells: dict[tuple[str, str, float], list[dict[str, Any]]] = {}
    for data, name in DATA.items():
        source = ROOT.parent / "shared/data" / name / "events.parquet"
        if not source.exists():
            raise BenchmarkError(f"real data not found: ../shared/data/{name}")
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "data"
            rows = imported(source, folder)
            wanted = list(jobs(data, SEEDS[data], methods, KEPT))
            if quick:
                wanted = [job for job in wanted if job.seed == 0 and job.kept in (1.0, 0.25)]
                wanted = [job for job in wanted if job.method in ("full", "dim", "water-filling")]
            work = partial(trained, folder=folder, rows=rows, epochs=1 if quick else EPOCHS)
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                for job, line in zip(wanted, pool.map(work, wanted)):
                    cells.setdefault((data, job.method, job.kept), []).append(line)
        if quick:
            break
    return {"dim": DIM, "epochs": EPOCHS, "cells": [summarised(*cell, lines) for cell, lines in cells.items()]}


def summarised(data: str, method: str, kept: float, lines: list[dict[str, Any]]) -> dict[str, Any]:
    areas = [line["auc"] for line in lines]
    deviation = statistics.stdev(areas) if len(areas) > 1 else 0.0
    means = {"auc": round(statistics.fmean(areas), 6), "deviation": round(deviation, 6)}
    size = round(statistics.fmean(line["bytes"] for line in lines))
    return {"data": data, "method": method, "kept": kept, **means, "bytes": size, "seeds": lines}


def table(result: dict[str, Any]) -> Table:
    from rich.table import Table

    kept = sorted({cell["kept"] for cell in result["cells"]}, reverse=True)
    view = Table(title="width on events: test AUC (MB) by share of the values")
    for name in ("data", "method", *(f"{100 * share:g}%" for share in kept)):
        view.add_column(name, justify="left" if name in ("data", "method") else "right")
    by_cell = {(cell["data"], cell["method"], cell["kept"]): cell for cell in result["cells"]}
    for data, method in dict.fromkeys((cell["data"], cell["method"]) for cell in result["cells"]):
        found = [by_cell.get((data, method, share)) for share in kept]
        cells = ["" if cell is None else f"{cell['auc']:.4f} ({cell['bytes'] / 1e6:.2f})" for cell in found]
        view.add_row(data, method, *cells)
    return view


def main() -> None:
    from rich.console import Console

    from .__main__ import NAMES, RESULTS

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.width_events", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, required=True, metavar="METHOD")
    methods = parser.parse_args().methods
    path, origin = RESULTS.with_name("width.json"), stamp(quick=False)
    before = json.loads(path.read_text())["width_events"]["results"]
    fresh = {(cell["data"], cell["method"], cell["kept"]): cell for cell in run(methods=methods)["cells"]}
    cells = [fresh.get((cell["data"], cell["method"], cell["kept"]), cell) for cell in before["cells"]]
    result = before | {"cells": cells}
    merge(path, {"width_events": origin | {"of_this_run": methods, "results": result}}, NAMES)
    Console(width=120).print(table(result))


if __name__ == "__main__":
    main()
