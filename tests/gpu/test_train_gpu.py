"""Training on a GPU: as on the CPU, repeatable, resumable there and elsewhere, and without a wait in a step."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from unequal.errors import UserError
from unequal.recipe import load_recipe, load_run
from unequal.train import checkpoint, trainer
from unequal.train.evaluate import evaluate_run
from unequal.train.trainer import train

from ..train.test_resume import Cut, assert_same_end, cut_after, final_state

SMALL = ["data.generate.rows=20000", "data.generate.ids=500", "run.epochs=1", "run.batch_size=512", "run.log_every=1"]
ENCODERS = ["model.encoder=attention", "model.encoder=transformer"]
RESUMED = ["run.epochs=3", "run.keep_checkpoints=1", "schedule.kind=cosine", "run.log_every=7"]
PLAIN = """
[data]
files = ["plain.parquet"]
labels = ["click"]
dense = ["age"]
categorical = ["user", "item"]
[tables]
dim = 16
[tables.user]
rows = 500
[tables.item]
rows = 300
[run]
batch_size = 256
workers = 0
log_every = 100000
checkpoint_every = 0
"""


def losses(run: Path) -> list[float]:
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [entry["loss"] for entry in entries if entry["kind"] == "train"]


def both(recipe: Path | str, folder: Path, settings: list[str]) -> tuple[object, object]:
    """Reports of the same training on the CPU and on the GPU, in run folders of these names."""
    cpu, gpu = (
        train(load_recipe(recipe, [*settings, f"run.folder={folder / device}"]), progress=False, device=device)
        for device in ("cpu", "cuda")
    )
    return cpu, gpu


def test_the_default_recipe_trains_as_on_the_cpu(tmp_path: Path) -> None:
    cpu, gpu = both("default", tmp_path, SMALL)
    assert losses(tmp_path / "cpu")[:10] == pytest.approx(losses(tmp_path / "cuda")[:10], abs=1e-3)
    assert gpu.log_loss == pytest.approx(cpu.log_loss, abs=0.01) and gpu.auc == pytest.approx(cpu.auc, abs=0.01)
    assert gpu.device == torch.cuda.get_device_name() and cpu.device == "cpu"
    assert cpu.peak_device_memory_bytes is None and gpu.peak_device_memory_bytes > 10**5
    assert gpu.samples == cpu.samples and gpu.steps == cpu.steps and gpu.samples_per_second > 0


@pytest.mark.parametrize("encoder", ENCODERS)
def test_a_sequence_model_trains_as_on_the_cpu(clicks: Path, tmp_path: Path, encoder: str) -> None:
    settings = [encoder, "model.max_positions=3", "model.dropout=0", "run.log_every=1"]
    cpu, gpu = both(clicks, tmp_path, settings)
    assert losses(tmp_path / "cpu")[:10] == pytest.approx(losses(tmp_path / "cuda")[:10], abs=1e-3)
    assert gpu.log_loss == pytest.approx(cpu.log_loss, abs=0.02)


@pytest.mark.parametrize("encoder", ENCODERS)
def test_a_run_repeats_bitwise(clicks: Path, tmp_path: Path, encoder: str) -> None:
    for name in ("a", "b"):
        train(load_recipe(clicks, [encoder, f"run.folder={tmp_path / name}"]), progress=False, device="cuda")
    assert_same_end(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("step", [3, 15, 22, 40])
def test_a_cut_run_ends_the_same(
    shared_clicks: Path, tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bitwise, dropout included."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(load_recipe(shared_clicks, [*RESUMED, f"run.folder={whole}"]), progress=False, device="cuda")
    with monkeypatch.context() as patch, pytest.raises(Cut):
        cut_after(step, patch)
        train(load_recipe(shared_clicks, [*RESUMED, f"run.folder={cut}"]), progress=False, device="cuda")
    torch.manual_seed(999)
    train(load_run(cut), resume=cut, progress=False, device="cuda")
    assert_same_end(whole, cut)


@pytest.mark.parametrize(("first", "then"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_checkpoint_goes_on_on_the_other_device(clicks: Path, tmp_path: Path, first: str, then: str) -> None:
    settings = ["model.dropout=0", "run.log_every=1"]
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    train(load_recipe(clicks, [*settings, f"run.folder={whole}"]), progress=False, device=first)
    train(load_recipe(clicks, [*settings, f"run.folder={moved}", "run.steps=20"]), progress=False, device=first)
    scores = [evaluate_run(load_run(moved), moved, device=device) for device in (first, then)]
    assert scores[0].log_loss == pytest.approx(scores[1].log_loss, abs=1e-4)
    assert scores[0].samples == scores[1].samples
    report = train(load_run(moved, overrides=["run.steps=0"]), resume=moved, progress=False, device=then)
    assert report.steps == 44
    assert losses(moved)[:20] == losses(whole)[:20]
    assert losses(moved)[20:30] == pytest.approx(losses(whole)[20:30], abs=1e-3)
    state, expected = final_state(moved), final_state(whole)
    assert state.keys() == expected.keys()
    # Slots are given out in another order, so tables are compared through what they predict and not row by row.
    for name in state:
        assert state[name].shape == expected[name].shape and state[name].dtype == expected[name].dtype, name


def test_divergence_is_named_and_harms_no_checkpoint(
    clicks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    train(load_recipe(clicks, [f"run.folder={run}", "run.steps=10"]), progress=False, device="cuda")
    monkeypatch.setattr(trainer, "weighted_loss", lambda logits, batch: logits.sum() * math.nan)
    with pytest.raises(UserError, match=r"between steps 11 and 15 the loss became nan.*step-00000010 is intact"):
        train(load_run(run, overrides=["run.steps=20"]), resume=run, progress=False, device="cuda")
    assert checkpoint.list_steps(run / "checkpoints") == [10]


def test_no_step_of_a_dlrm_waits_for_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows, random = 256 * 40, np.random.default_rng(0)
    columns = {"user": random.integers(0, 500, rows), "item": random.integers(0, 300, rows)}
    columns |= {"click": random.integers(0, 2, rows), "age": random.normal(size=rows).astype(np.float32)}
    pq.write_table(pa.table(columns), tmp_path / "plain.parquet")
    (tmp_path / "plain.toml").write_text(PLAIN)
    whole, strict = trainer.Trainer._step, []

    def step(self: trainer.Trainer, batch: object) -> None:
        # the first steps compile kernels and take memory; the last one is read for the progress
        watched = 3 <= self.at.step < self.total_steps - 1
        torch.cuda.set_sync_debug_mode("error" if watched else "default")
        try:
            whole(self, batch)  # type: ignore[arg-type]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        strict.append(watched)

    monkeypatch.setattr(trainer.Trainer, "_step", step)
    settings = [f"run.folder={tmp_path / 'run'}", "data.split.test=0", "data.split.validation=0"]
    settings += ["schedule.kind=cosine", "schedule.warmup_steps=5"]
    report = train(load_recipe(tmp_path / "plain.toml", settings), progress=False, device="cuda")
    assert report.steps == 40 and sum(strict) == 36


def test_the_command_line(clicks: Path, tmp_path: Path) -> None:
    source = Path(__file__).resolve().parents[2] / "src"
    environment = {**os.environ, "PYTHONPATH": str(source)}

    def call(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "unequal", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=environment)

    name = torch.cuda.get_device_name()
    few = ("--set", "run.folder=run", "--set", "run.steps=12")
    trained = call("train", clicks, *few, "--device", "cuda", "--json", "report.json")
    assert trained.returncode == 0, trained.stderr
    assert name in trained.stdout and "peak device memory" in trained.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["device"] == name and report["peak_device_memory_bytes"] > 0
    scored = call("evaluate", "run", "--device", "cpu", "--json", "score.json")
    assert scored.returncode == 0, scored.stderr
    score = json.loads((tmp_path / "score.json").read_text())
    assert score["log_loss"] == pytest.approx(report["log_loss"], abs=1e-4) and score["device"] == "cpu"
    by_itself = call("evaluate", "run", "--json", "auto.json")
    assert by_itself.returncode == 0, by_itself.stderr
    assert json.loads((tmp_path / "auto.json").read_text())["device"] == name
    absent = call("train", clicks, "--device", "cuda:99")
    assert absent.returncode == 1 and "expected a GPU that is here" in absent.stderr
