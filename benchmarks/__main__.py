"""The one runner: `python -m benchmarks [--only NAME …] [--quick] [--output FILE]`.

Prints a table per benchmark and merges the results into benchmarks/results/cpu.json, those of simulate, tiers, drift and width
into simulate.json, cluster.json and width.json beside it. A quick run uses tiny workloads: it shows that everything works, and
writes nothing unless a file is named for it.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .report import BenchmarkError, merge, stamp

NAMES = (
    *("limits", "embedding_step", "memory", "reader", "import_time", "quality", "training"),
    *("distributed", "codecs", "simulate", "tiers", "drift"),
    *(
        "width_quality",
        "width_hindsight",
        "width_columns",
        "width_events",
        "width_memory",
        "width_speed",
        "width_drift",
        "width_exchange",
    ),
)
ASKED = ("width_quality", "width_hindsight", "width_columns", "width_events")
"""that take an hour or more, and are run when they are named"""
RESULTS = Path(__file__).parent / "results" / "cpu.json"
APART = {
    "simulate": RESULTS.with_name("simulate.json"),
    "tiers": RESULTS.with_name("cluster.json"),
    "drift": RESULTS.with_name("cluster.json"),
    "width_exchange": RESULTS.with_name("cluster.json"),
    **dict.fromkeys(
        (name for name in NAMES if name.startswith("width_") and name != "width_exchange"),
        RESULTS.with_name("width.json"),
    ),
}
"""benchmarks whose results do not depend on the machine, or are too many for one file"""


def plain_table(name: str, result: dict[str, Any]) -> Table:
    """For a benchmark without a table of its own: one line per figure."""
    view = Table(title=name)
    view.add_column("figure")
    view.add_column("value", justify="right")

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, part in value.items():
                add(f"{prefix}.{key}" if prefix else str(key), part)
        elif isinstance(value, list) and any(isinstance(part, dict) for part in value):
            for index, part in enumerate(value):
                add(f"{prefix}[{index}]", part)
        else:
            view.add_row(prefix, f"{value:,.4g}" if isinstance(value, float) else str(value))

    add("", result)
    return view


def run(name: str, quick: bool) -> tuple[dict[str, Any], Table]:
    module = import_module(f"benchmarks.{name}")
    takes_quick = "quick" in inspect.signature(module.run).parameters
    result: dict[str, Any] = module.run(quick=quick) if takes_quick else module.run()
    return result, module.table(result) if hasattr(module, "table") else plain_table(name, result)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Runs the benchmarks beside the peers.")
    parser.add_argument("--only", metavar="NAME", action="append", choices=NAMES, help="one of: " + ", ".join(NAMES))
    parser.add_argument("--quick", action="store_true", help="tiny workloads, nothing written unless --output is given")
    parser.add_argument("--output", type=Path, help="the result file (default: benchmarks/results/cpu.json)")
    arguments = parser.parse_args()
    written: set[Path] = set()
    console = Console(width=None if sys.stdout.isatty() else 120)
    failed = False
    for name in arguments.only or [name for name in NAMES if arguments.quick or name not in ASKED]:
        try:
            with console.status(f"running {name}"):
                origin = stamp(arguments.quick)
                result, view = run(name, arguments.quick)
            console.print(view)
            if arguments.output is not None or not arguments.quick:
                output = arguments.output or APART.get(name, RESULTS)
                merge(output, {name: origin | {"results": result}}, NAMES)
                written.add(output)
        except BenchmarkError as error:
            failed = True
            print(f"{name}: {error}", file=sys.stderr)
    if arguments.quick:
        console.print("a quick run shows that the benchmarks work; its figures say nothing about speed or memory")
    if not failed:
        for output in sorted(written):
            console.print(f"written to {output}", highlight=False)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
