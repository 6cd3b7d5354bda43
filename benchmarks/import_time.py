"""What `import unequal` costs on top of `import torch`: medians over fresh processes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from .processes import run_ours
from .report import cell, spread

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
        printed = run_ours("import_time", 1, "-c", SCRIPT)
        # The first process reads the files from disk for all others.
        if attempt:
            samples.append(json.loads(printed))
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
