"""Whole trainings by the command line, on a GPU where there is one: samples a second and what they reach, seed 0.

The default recipe, and MovieLens-1M split by time where its data lies beside the repository."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from .quality import DATA, ROOT, unequal

KEYS = (
    "auc",
    "log_loss",
    "samples_per_second",
    "steps",
    "seed",
    "device",
    "peak_memory_bytes",
    "peak_device_memory_bytes",
)


def run(quick: bool = False) -> dict[str, Any]:
    results = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        recipes = {"default": ["default"]}
        if not quick and (DATA / "ml1m").is_dir():
            unequal("import", "movielens", str(DATA / "ml1m"), str(folder / "ml1m"))
            files = f'data.files=["{folder / "ml1m"}/ratings.parquet"]'
            recipes["ml1m_time"] = [str(ROOT / "examples/ml1m_time.toml"), "--set", files]
        for name, arguments in recipes.items():
            report = folder / f"{name}.json"
            settings = [f'run.folder="{folder / "runs" / name}"', *(["run.steps=20"] if quick else [])]
            chosen = [part for value in settings for part in ("--set", value)]
            unequal("train", *arguments, *chosen, "--json", str(report))
            values = json.loads(report.read_text())
            results[name] = {key: values[key] for key in KEYS}
    return results
