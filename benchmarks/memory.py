"""Peak memory of steps of ours on P and S against a bound: weights + optimizer state + 2 × (inputs + outputs).

Measured from outside, in a fresh process, as the largest resident size the kernel saw. What the interpreter and torch
take before the module is built is measured in the same process and counted apart.

The upstream gradient is as large as the outputs and there beside them. The bound does not count it, so it uses up the
second share of the outputs; `bound_with_gradient` counts it as what it is to a step, an input.

    python -m benchmarks.memory WORKLOAD.npz      the process that is measured
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .processes import Worker, status
from .workloads import FULL, Workload, pooled, small

if TYPE_CHECKING:
    from rich.table import Table

STEPS = 16


def run(quick: bool = False) -> dict[str, Any]:
    cases = []
    with tempfile.TemporaryDirectory() as temporary:
        for name in FULL:
            path = Path(temporary) / f"{name}.npz"
            (small(name) if quick else FULL[name](batches=1)).save(path)
            with ExitStack() as stack:
                worker = Worker("memory", "benchmarks.memory", [str(path)], peer=False, threads=2)
                stack.callback(worker.close)
                worker.read()
                before = status(worker.process.pid, "VmRSS")
                sizes = worker.ask(do="steps")
                peak = status(worker.process.pid, "VmHWM")
            tables = before + sizes["weights"] + sizes["optimizer"]
            bound = tables + 2 * (sizes["inputs"] + sizes["outputs"])
            wider = bound + 2 * sizes["gradient"]
            verdict = {"peak": peak, "bound": bound, "within": peak <= bound}
            verdict |= {"bound_with_gradient": wider, "within_with_gradient": peak <= wider}
            cases.append({"workload": name, "interpreter": before} | sizes | verdict)
    return {"unit": "bytes", "cases": cases}


def table(result: dict[str, Any]) -> Table:
    from rich.table import Table

    view = Table(title="peak memory of a step, MiB")
    names = (
        "interpreter",
        "weights",
        "optimizer",
        "inputs",
        "outputs",
        "gradient",
        "peak",
        "bound",
        "bound_with_gradient",
    )
    view.add_column("workload")
    for name in names:
        view.add_column(name.replace("_", " "), justify="right")
    for case in result["cases"]:
        cells = {name: f"{case[name] / 2**20:.1f}" for name in names}
        for name, within in (("bound", "within"), ("bound_with_gradient", "within_with_gradient")):
            cells[name] += " kept" if case[within] else " EXCEEDED"
        view.add_row(case["workload"], *cells.values())
    return view


def main() -> None:
    from .implementations import Unequal

    # A step of a tiny module loads what torch and we load lazily, and starts the threads: code, not the step's memory.
    tiny = Unequal(pooled(total=500, largest=100, size=8, batches=1))
    tiny.backward(0, tiny.forward(0))
    del tiny
    print(json.dumps({}), flush=True)
    json.loads(sys.stdin.readline())
    workload = Workload.load(Path(sys.argv[1]))
    implementation = Unequal(workload)
    for _ in range(STEPS):
        outputs = implementation.forward(0)
        implementation.backward(0, outputs)
        del outputs
    sizes = implementation.module.memory()
    print(
        json.dumps(
            {
                "weights": sizes["weights"],
                "optimizer": sizes["optimizer"],
                "inputs": workload.ids[0].nbytes + workload.lengths[0].nbytes,
                "outputs": int(np.prod(workload.output_shape(0))) * 4,
                "gradient": implementation.gradient.numel() * 4,
            }
        ),
        flush=True,
    )
    sys.stdin.readline()


if __name__ == "__main__":
    main()
