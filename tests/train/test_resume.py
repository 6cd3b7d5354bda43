"""A run that is killed and resumed ends bitwise like one that was not, wherever it was cut."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from unequal.errors import UserError
from unequal.recipe import load_recipe, load_run
from unequal.train import checkpoint, trainer
from unequal.train.trainer import train

SETTINGS = ["run.epochs=3", "run.keep_checkpoints=1", "schedule.kind=cosine", "schedule.warmup_steps=5"]


class Cut(Exception):
    """Stands for a power cut between two steps."""


def cut_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trainer.Trainer._step

    def cut_step(self: trainer.Trainer, batch: object) -> None:
        if self.at.step == step:
            raise Cut
        whole(self, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(trainer.Trainer, "_step", cut_step)


def final_state(run: Path) -> dict[str, torch.Tensor]:
    """Everything in a run's newest checkpoint, whatever ranks it was saved by; rows in the order of their ids."""
    newest = checkpoint.latest(run / "checkpoints")
    assert newest is not None
    saved = checkpoint.open(newest)
    state = dict(saved.dense_state)
    for number, values in saved.other["optimizer"]["state"].items():
        state |= {f"optimizer.{number}.{name}": value for name, value in values.items()}
    for table in saved.tables:
        parts = list(saved.table(table))
        ids, order = torch.cat([ids for ids, _ in parts]).sort()
        state[f"{table}.ids"] = ids
        state |= {f"{table}.{name}": torch.cat([rows[name] for _, rows in parts])[order] for name in parts[0][1]}
    return state | {f"random.{rank}": saved.own(rank)["random"]["torch"] for rank in range(saved.world)}


def losses(run: Path) -> list[tuple]:
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(e["kind"], e["step"], e["epoch"], e.get("loss"), e.get("auc"), e.get("log_loss")) for e in entries]


def assert_same_end(first: Path, second: Path) -> None:
    one, two = final_state(first), final_state(second)
    assert one.keys() == two.keys()
    for name in one:
        assert torch.equal(one[name], two[name]), name
    assert losses(first) == losses(second), "the log has every line once"
    reports = [json.loads((run / "report.json").read_text()) for run in (first, second)]
    for key in ("auc", "log_loss", "calibration", "normalized_entropy", "steps", "best_step", "tasks"):
        assert reports[0][key] == reports[1][key]


@pytest.fixture(scope="module")
def uninterrupted(shared_clicks: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "whole"
    train(load_recipe(shared_clicks, [*SETTINGS, f"run.folder={run}"]), progress=False)
    return run


# 66 steps in 3 epochs of 22, a checkpoint every 10 steps and at each best evaluation
@pytest.mark.parametrize("step", [3, 10, 15, 21, 22, 23, 40, 44, 65])
def test_a_cut_run_ends_the_same(
    shared_clicks: Path, tmp_path: Path, uninterrupted: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "cut"
    with monkeypatch.context() as patch, pytest.raises(Cut):
        cut_after(step, patch)
        train(load_recipe(shared_clicks, [*SETTINGS, f"run.folder={run}"]), progress=False)
    torch.manual_seed(999)
    train(load_run(run), resume=run, progress=False)
    assert_same_end(uninterrupted, run)


def test_a_checkpoint_on_an_epochs_last_batch(
    shared_clicks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [*SETTINGS, "run.checkpoint_every=22"]
    train(load_recipe(shared_clicks, [*settings, f"run.folder={tmp_path / 'whole'}"]), progress=False)
    run = tmp_path / "cut"

    def cut_evaluate(self: trainer.Trainer) -> None:
        raise Cut

    with monkeypatch.context() as patch, pytest.raises(Cut):
        patch.setattr(trainer.Trainer, "_evaluate", cut_evaluate)
        train(load_recipe(shared_clicks, [*settings, f"run.folder={run}"]), progress=False)
    assert checkpoint.list_steps(run / "checkpoints") == [22]
    train(load_run(run), resume=run, progress=False)
    assert_same_end(tmp_path / "whole", run)


def test_a_finished_run_goes_on_for_more_epochs(shared_clicks: Path, tmp_path: Path) -> None:
    constant = ["schedule.kind=constant"]
    train(load_recipe(shared_clicks, ["run.epochs=3", *constant, f"run.folder={tmp_path / 'whole'}"]), progress=False)
    run = tmp_path / "longer"
    train(load_recipe(shared_clicks, ["run.epochs=1", *constant, f"run.folder={run}"]), progress=False)
    train(load_run(run, overrides=["run.epochs=3"]), resume=run, progress=False)
    assert_same_end(tmp_path / "whole", run)


def test_resuming_a_finished_run_changes_nothing(uninterrupted: Path, tmp_path: Path) -> None:
    run = shutil.copytree(uninterrupted, tmp_path / "copy")
    train(load_run(run), resume=run, progress=False)
    assert_same_end(uninterrupted, run)


def test_other_data_is_refused(clicks: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(load_recipe(clicks, [f"run.folder={run}", "run.steps=2"]), progress=False)
    (clicks.parent / "clicks-1.parquet").rename(clicks.parent / "other.parquet")
    with pytest.raises(UserError, match="belongs to other files or data settings"):
        train(load_run(run), resume=run, progress=False)


KILLED = """
import os, signal, sys
from unequal.recipe import load_recipe
from unequal.train import checkpoint, trainer

def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)

where, step, recipe, *settings = sys.argv[1:]
if where == "step":
    trainer.Trainer._step = lambda self, batch, whole=trainer.Trainer._step: (
        kill() if self.at.step == int(step) else whole(self, batch)
    )
else:
    checkpoint._put_in_place = lambda partial, place, whole=checkpoint._put_in_place: (
        kill() if place.name.endswith(step) else whole(partial, place)
    )
trainer.train(load_recipe(recipe, settings), progress=False, device="cpu")
"""


@pytest.mark.parametrize(("where", "step"), [("step", 37), ("save", 40)])
def test_kill_nine(shared_clicks: Path, tmp_path: Path, uninterrupted: Path, where: str, step: int) -> None:
    run = tmp_path / "killed"
    arguments = [where, str(step), str(shared_clicks), *SETTINGS, f"run.folder={run}", "run.workers=2"]
    done = subprocess.run([sys.executable, "-c", KILLED, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert checkpoint.list_steps(run / "checkpoints")[-1] == 30
    train(load_run(run), resume=run, progress=False)
    assert_same_end(uninterrupted, run)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_cut_run_with_a_width_budget_ends_the_same(
    shared_clicks: Path, tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [*SETTINGS, "width.budget=12 KB", "width.every=8", f"tables.dtype={dtype}"]
    train(load_recipe(shared_clicks, [*settings, f"run.folder={tmp_path / 'whole'}"]), progress=False)
    run = tmp_path / "cut"
    with monkeypatch.context() as patch, pytest.raises(Cut):
        cut_after(27, patch)  # the last checkpoint lies between two rounds
        train(load_recipe(shared_clicks, [*settings, f"run.folder={run}"]), progress=False)
    train(load_run(run), resume=run, progress=False)
    assert_same_end(tmp_path / "whole", run)
