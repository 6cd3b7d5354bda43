"""Scoring: the report at the end of a run, and of a finished run on its own or other data."""

from __future__ import annotations

import json
from pathlib import Path

from ..data.dataset import Dataset
from ..data.reader import Part, Reader
from ..embeddings import Embeddings
from ..errors import CheckpointError, DataError
from ..exchange.mesh import Mesh
from . import checkpoint
from .config import Recipe
from .device import Device
from .processes import Ranks
from .run import CHECKPOINTS, Report, peak_memory_bytes
from .session import Score, load_weights, make_model, open_data, score, scoring_reader
from .width_report import width_report

TRUTH_TEST_SHARE = 0.2
"""truth.json knows two sets of rows: all of them, and this last share by time."""
OUT_OF_MEMORY = "lower run.evaluation_batch_size in the run's recipe.toml, or choose --device cpu"
METRICS = ("auc", "normalized_entropy", "log_loss", "calibration")


def evaluate_run(recipe: Recipe, folder: Path, *, part: Part = "test", device: str = "auto") -> Report:
    """Scores a run's result: the best evaluation's weights where the recipe says so, else the last ones.

    `device`: cpu, cuda, cuda:N, or auto for a GPU where there is one; not necessarily the one that trained the run. By one
    process or by several ranks, however many trained it.
    """
    with Ranks(device) as ranks, ranks.device.explained(OUT_OF_MEMORY):
        return _evaluate(recipe, folder, part, ranks.device, ranks.mesh)


def _evaluate(recipe: Recipe, folder: Path, part: Part, device: Device, mesh: Mesh) -> Report:
    newest = checkpoint.latest(folder / CHECKPOINTS, mesh=mesh)
    if newest is None:
        raise CheckpointError(f"{folder}: the run has no checkpoint yet; train it further with --resume {folder}")
    best_step = None
    if recipe.run.select_best:
        saved = checkpoint.open(newest)
        best_step = saved.other["position"]["best_step"]
        if best_step not in (None, saved.step):
            newest = checkpoint.path_of(folder / CHECKPOINTS, best_step)
    data = open_data(recipe, mesh)
    model, embeddings = make_model(recipe, device.torch, mesh)
    loaded = load_weights(model, embeddings, newest, mesh)
    statistics = {name: (mean, deviation) for name, (mean, deviation) in loaded.other["reader"]["statistics"].items()}
    reader = scoring_reader(recipe, data, part, statistics, mesh)
    if not reader.rows:
        raise DataError(f"the {part} part has no rows", remedy="choose another with --part, or change data.split")
    scored = score(model, embeddings, reader, recipe.data.labels, device, mesh)
    return make_report(
        recipe,
        data,
        folder,
        embeddings,
        device,
        mesh,
        part,
        scored,
        readers=(reader,),
        samples_per_second=scored.samples / scored.seconds,
        seconds=scored.seconds,
        steps=loaded.step,
        best_step=best_step,
    )


def make_report(
    recipe: Recipe,
    data: Dataset,
    folder: Path,
    embeddings: Embeddings,
    device: Device,
    mesh: Mesh,
    part: str | None,
    scored: Score | None,
    *,
    readers: tuple[Reader, ...],
    samples_per_second: float,
    seconds: float,
    steps: int,
    best_step: int | None,
    exchange: dict[str, float] | None = None,
    tiers: dict[str, dict[str, float]] | None = None,
    plan: list[str] | None = None,
    seconds_to_first_step: float | None = None,
) -> Report:
    """All ranks call it, and get the same: sums and maxima of what each holds, and rank 0's clock."""
    metrics = scored.metrics if scored is not None else {}
    held = mesh.gather([embeddings.memory(), peak_memory_bytes(), device.peak_memory_bytes])
    timed = [samples_per_second, seconds, seconds_to_first_step, exchange or {}]
    samples_per_second, seconds, seconds_to_first_step, exchange = mesh.share(timed)
    memories = [memory for memory, _, _ in held]
    on_device = [peak for _, _, peak in held if peak is not None]
    return Report(
        **{name: metrics.get(name) for name in METRICS},
        samples_per_second=samples_per_second,
        steps=steps,
        seed=recipe.run.seed,
        peak_memory_bytes=max(peak for _, peak, _ in held),
        embedding_bytes={kind: sum(memory[kind] for memory in memories) for kind in memories[0]},
        part=part,
        samples=scored.samples if scored is not None else 0,
        tasks=metrics.get("tasks", {}),
        best_step=best_step,
        seconds=seconds,
        dropped={reader.part: dict(reader.dropped) for reader in readers if reader.dropped},
        ceiling=ceiling(recipe, data, part),
        run=str(folder),
        recipe_hash=recipe.hash(),
        device=device.name,
        peak_device_memory_bytes=max(on_device) if on_device else None,
        world=mesh.world,
        ranks_per_node=mesh.ranks_per_node,
        embedding_bytes_per_rank=max(sum(memory.values()) for memory in memories),
        exchange=exchange or {},
        tiers=tiers or {},
        plan=plan or [],
        width=width_report(embeddings, mesh, folder, steps),
        seconds_to_first_step=seconds_to_first_step,
    )


def ceiling(recipe: Recipe, data: Dataset, part: str | None) -> dict[str, float]:
    """Of generated data: what the true probabilities reach on the rows that were scored, where that is known."""
    path = data.files[0].parent / "truth.json"
    if not path.is_file() or any(file.parent != path.parent for file in data.files):
        return {}
    truth = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(truth, dict) or truth.get("all", {}).get("rows") != data.rows:
        return {}
    split = recipe.data.split
    by_default = (split.by, split.column, split.test) == ("time", "time", TRUTH_TEST_SHARE)
    known = truth["all"] if part == "all" else truth["test"] if part == "test" and by_default else {}
    return {name: known[name] for name in METRICS if known.get(name) is not None}
