"""What `import unequal` costs on top of `import torch`: medians over fresh processes."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any

from .processes import ROOT, environment, interpreter
from .report import BenchmarkError, cell, spread

if TYPE_CHECKING:
    from rich.table import Table

SCRIPT = """
import json, time
start = time.perf_counter()
import torch
middle = time.perf_counter()
import unequal; unequal.Embeddings  # names are imported when first used
print(json.dumps([middle - start, time.perf_counter() - middle]))
"""


def run(quick: bool = False) -> dict[str, Any]:
    samples = []
    for attempt in range(4 if quick else 12):
        done = subprocess.run(
            [str(interpreter(peer=False)), "-c", SCRIPT],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environment("import_time", threads=1),
        )
        if done.returncode:
            raise BenchmarkError(f"`import unequal` failed:\n{done.stderr.strip()[-2000:]}")
        # The first process reads the files from disk for all others.
        if attempt:
            samples.append(json.loads(done.stdout))
    return {
        "torch_seconds": spread([torch for torch, _ in samples]),
        "unequal_seconds": spread([ours for _, ours in samples]),
    }


def table(result: dict[str, Any]) -> Table:
    from rich.table import Table

    view = Table(title="import time")
    view.add_column("what")
    view.add_column("seconds", justify="right")
    view.add_row("import torch", cell(result["torch_seconds"], 3))
    view.add_row("import unequal, on top of it", cell(result["unequal_seconds"], 3))
    return view
