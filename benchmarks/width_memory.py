"""Memory of tables whose rows are narrow beside plain ones: what the system says of a fresh process, from outside.

Four tables with a few million rows, row-wise AdaGrad, float32. Every row is read once, so that all of them ask for a place, then
rows are read by a Zipf law while rounds decide. What the interpreter, torch and the batches take is measured in the same process
before the tables are made and taken off; what a step needs besides (outputs, scratch) is counted with the tables. `trimmed` is
what is left when the C library gives back what it keeps of freed memory: beside `resident`, which counts.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .processes import Worker, status
from .workloads import Workload, Zipf

if TYPE_CHECKING:
    from rich.table import Table

KEPT = (1.0, 0.5, 0.1, 0.02, 0.01)
SHARES = (0.5, 0.25, 0.15, 0.1)
"""of the rows that the tables have"""
BARS = {(64, 0.1): 1 / 0.16, (64, 0.01): 40.0, (16, 0.02): 12.0}
"""(dim, kept) → how many times less memory than plain tables, at least"""


def workload(rows: int, dim: int, size: int, after: int) -> Workload:
    """Every id once, in random order; then so many batches by Zipf's law."""
    sizes = [int(rows * share) for share in SHARES]
    draw = np.random.default_rng(5)
    sources = [Zipf(count, seed=300 + table) for table, count in enumerate(sizes)]
    steps = -(-max(sizes) // size)
    orders = [np.resize(draw.permutation(count), (steps, size)) for count in sizes]
    first = [[order[step] for order in orders] for step in range(steps)]
    rest = [[source.draw(size) for source in sources] for _ in range(after)]
    ids = [np.concatenate(parts) for parts in (*first, *rest)]
    lengths = [np.ones(len(sizes) * size, np.int64)] * len(ids)
    return Workload(name="M", pooled=True, rows=sizes, dim=dim, size=size, ids=ids, lengths=lengths)


def measure(path: Path, steps: int, kept: float | None) -> dict[str, Any]:
    with ExitStack() as stack:
        worker = Worker("unequal", "benchmarks.width_worker", [str(path), "2"], peer=False, threads=2)
        stack.callback(worker.close)
        worker.read()
        before = status(worker.process.pid, "VmRSS")
        worker.ask(do="build", width=kept, policy="water-filling", every=200, model=False)
        worker.ask(do="train", steps=steps)
        after, peak = (status(worker.process.pid, field) for field in ("VmRSS", "VmHWM"))
        worker.ask(do="trim")
        trimmed = status(worker.process.pid, "VmRSS")
        sizes = worker.ask(do="sizes")
    memory = {"resident": after, "trimmed": trimmed, "peak": peak}
    return {"budget": kept, "interpreter": before} | {name: n - before for name, n in memory.items()} | sizes


def run(quick: bool = False) -> dict[str, Any]:
    rows, size, after = (20_000, 256, 20) if quick else (3_000_000, 2048, 100)
    cases = []
    for dim in (64, 16):
        with tempfile.TemporaryDirectory() as temporary:
            path = Path(temporary) / "memory.npz"
            made = workload(rows, dim, size, after)
            made.save(path)
            plain = measure(path, len(made.ids), None)
            for kept in (0.1,) if quick else KEPT:
                found = measure(path, len(made.ids), kept)
                found["times_less"] = round(min(plain["resident"], plain["trimmed"]) / max(1, found["resident"]), 3)
                found["times_less_counted"] = round(sum(plain["bytes"].values()) / sum(found["bytes"].values()), 3)
                bar = BARS.get((dim, kept))
                cases.append(
                    {"dim": dim} | found | ({} if bar is None else {"bar": bar, "reached": found["times_less"] >= bar})
                )
            cases.append({"dim": dim} | plain)
    return {"unit": "bytes", "optimizer": "row-wise AdaGrad", "dtype": "fp32", "cases": cases}


def table(result: dict[str, Any]) -> Table:
    from rich.table import Table

    view = Table(title="memory of tables, MiB: the process less what it took before it made them")
    for name in (
        "dim",
        "kept",
        "live rows",
        "resident",
        "peak",
        "weights",
        "optimizer",
        "directory",
        "× less",
        "counted",
        "bar",
    ):
        view.add_column(name, justify="right")
    for case in result["cases"]:
        share = "plain" if case["budget"] is None else f"{100 * case['budget']:g}%"
        sizes = [case["resident"], case["trimmed"], case["peak"], *case["bytes"].values()]
        less = [f"{case[name]:.2f}" if name in case else "" for name in ("times_less", "times_less_counted")]
        bar = f"{case['bar']:.4g} " + ("kept" if case["reached"] else "MISSED") if "bar" in case else ""
        view.add_row(str(case["dim"]), share, f"{case['live']:,}", *(f"{n / 2**20:.1f}" for n in sizes), *less, bar)
    return view
