"""Quality on real data: the recipes under examples/, three seeds each, trained and scored by the command line.

The data lies beside the repository (../shared/data); where it is absent there is nothing to report. Criteo's and Avazu's
samples are imported and trained with the recipe the import wrote, without a hand-written line.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .processes import ROOT, run_ours
from .report import BenchmarkError

if TYPE_CHECKING:
    from rich.table import Table

DATA = ROOT / "../shared/data"
SEEDS = (0, 1, 2)
# Recipe → (what is imported first, the AUC to reach): a plain PyTorch DLRM's figure less its noise.
EXAMPLES: dict[str, tuple[list[str] | None, float]] = {
    "frappe": (None, 0.945),
    "ml1m_random": (["movielens", "ml1m", "--split", "random"], 0.800),
    "ml1m_time": (["movielens", "ml1m"], 0.744),
}
SAMPLES = {"criteo": "criteo_kaggle_small", "avazu": "avazu_small"}
KEYS = ("auc", "normalized_entropy", "log_loss", "calibration", "samples_per_second", "steps", "peak_memory_bytes")


def unequal(*arguments: str) -> None:
    run_ours("unequal", 2, "-m", "unequal", *arguments)


def train(recipe: Path, folder: Path, seed: int, *settings: str) -> dict[str, Any]:
    name = f"{recipe.parent.name}-{recipe.stem}-{seed}"
    report = folder / f"{name}.json"
    chosen = [f"run.seed={seed}", f'run.folder="{folder / name}"', *settings]
    unequal("train", str(recipe), "--json", str(report), *(part for value in chosen for part in ("--set", value)))
    numbers = json.loads(report.read_text())
    return {"seed": seed} | {key: numbers[key] for key in KEYS}


def run(quick: bool = False) -> dict[str, Any]:
    if not DATA.is_dir():
        raise BenchmarkError("real data not found: ../shared/data")
    seeds = SEEDS[:1] if quick else SEEDS
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, (source, target) in EXAMPLES.items():
            settings = []
            if source is not None:
                kind, data, *options = source
                unequal("import", kind, str(DATA / data), str(folder / name), *options)
                settings = [f'data.files=["{folder / name}/ratings.parquet"]']
            if quick:
                settings.append("run.steps=20")
            runs = [train(ROOT / f"examples/{name}.toml", folder, seed, *settings) for seed in seeds]
            scores = [part["auc"] for part in runs]
            deviation = statistics.stdev(scores) if len(scores) > 1 else None
            results[name] = {"target": target, "mean": statistics.mean(scores), "deviation": deviation, "runs": runs}
        for name, data in SAMPLES.items():
            unequal("import", name, str(DATA / data), str(folder / name))
            runs = [train(folder / name / "recipe.toml", folder, seed) for seed in seeds[:1]]
            results[f"{name} sample"] = {"target": None, "mean": runs[0]["auc"], "deviation": None, "runs": runs}
    return results


def table(result: dict[str, Any]) -> Table:
    from rich.table import Table

    view = Table(title="quality on real data: AUC of the test part")
    for heading in ("recipe", "seeds", "mean", "deviation", "target", "samples/s"):
        view.add_column(heading, justify="left" if heading == "recipe" else "right")
    for name, values in result.items():
        rate = statistics.median(part["samples_per_second"] for part in values["runs"])
        deviation, target = ("–" if values[key] is None else f"{values[key]:.4f}" for key in ("deviation", "target"))
        view.add_row(name, str(len(values["runs"])), f"{values['mean']:.4f}", deviation, target, f"{rate:,.0f}")
    return view
