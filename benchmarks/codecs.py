"""What fewer bits on the wire cost: quality on real data with rows and gradients sent in reduced precision, on 2 ranks.

Frappe and MovieLens-1M split by time, trained and scored by the command line over three seeds with each pair of codecs. The data
lies beside the repository (../shared/data); where it is absent there is nothing to report.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .processes import ROOT, run_ours
from .quality import DATA, EXAMPLES, SEEDS
from .report import BenchmarkError

if TYPE_CHECKING:
    from rich.table import Table

RANKS = 2
RECIPES = ("frappe", "ml1m_time")
CODECS = (("fp32", "fp32"), ("fp16", "bf16"), ("int8", "int8"))


def train(recipe: Path, folder: Path, seed: int, forward: str, backward: str, settings: list[str]) -> dict[str, Any]:
    name = f"{recipe.stem}-{forward}-{backward}-{seed}"
    report = folder / f"{name}.json"
    chosen = [
        f"run.seed={seed}",
        f'run.folder="{folder / name}"',
        f'exchange.forward="{forward}"',
        f'exchange.backward="{backward}"',
        *settings,
    ]
    arguments = [part for value in chosen for part in ("--set", value)]
    run_ours(
        "unequal", 1, "-m", "unequal", "train", str(recipe), "--ranks", str(RANKS), *arguments, "--json", str(report)
    )
    numbers = json.loads(report.read_text())
    sent = sum(numbers["exchange"][f"{link}_bytes_per_step"] for link in ("inside", "across"))
    kept = {key: numbers[key] for key in ("seed", "auc", "log_loss", "samples_per_second")}
    return kept | {"exchange_bytes_per_step": sent}


def run(quick: bool = False) -> dict[str, Any]:
    if not DATA.is_dir():
        raise BenchmarkError("real data not found: ../shared/data")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in RECIPES:
            source, _ = EXAMPLES[name]
            settings = ["run.steps=20"] if quick else []
            if source is not None:
                kind, data, *options = source
                run_ours("unequal", 2, "-m", "unequal", "import", kind, str(DATA / data), str(folder / name), *options)
                settings.append(f'data.files=["{folder / name}/ratings.parquet"]')
            recipe = ROOT / f"examples/{name}.toml"
            results[name] = {
                f"{forward}/{backward}": score(
                    [
                        train(recipe, folder, seed, forward, backward, settings)
                        for seed in (SEEDS[:1] if quick else SEEDS)
                    ]
                )
                for forward, backward in CODECS
            }
            check_fewer_bytes(name, results[name])
    return {"ranks": RANKS, "recipes": results}


def check_fewer_bytes(name: str, codecs: dict[str, Any]) -> None:
    """Raises unless each pair of codecs sent less than the one before: it would be the quality of something else."""
    sent = {codec: values["exchange_bytes_per_step"] for codec, values in codecs.items()}
    if sorted(sent.values(), reverse=True) != list(sent.values()) or len(set(sent.values())) < len(sent):
        raise BenchmarkError(f"{name}: expected ever fewer bytes per step, got {sent}; the codecs were not used")


def score(runs: list[dict[str, Any]]) -> dict[str, Any]:
    scores = [part["auc"] for part in runs]
    return {
        "mean": statistics.mean(scores),
        "deviation": statistics.stdev(scores) if len(scores) > 1 else None,
        "exchange_bytes_per_step": statistics.mean(part["exchange_bytes_per_step"] for part in runs),
        "runs": runs,
    }


def table(result: dict[str, Any]) -> Table:
    from rich.table import Table

    view = Table(title="reduced precision on the wire: AUC of the test part, 2 ranks")
    for heading in ("recipe", "forward/backward", "seeds", "mean", "deviation", "kB sent per step"):
        view.add_column(heading, justify="left" if heading in ("recipe", "forward/backward") else "right")
    for name, codecs in result["recipes"].items():
        for codec, values in codecs.items():
            deviation = "–" if values["deviation"] is None else f"{values['deviation']:.4f}"
            sent = f"{values['exchange_bytes_per_step'] / 1e3:,.0f}"
            view.add_row(name, codec, str(len(values["runs"])), f"{values['mean']:.4f}", deviation, sent)
        view.add_section()
    return view
