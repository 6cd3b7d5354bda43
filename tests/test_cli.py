"""The command line as a user meets it: what it prints, what it writes, how it fails."""

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner, Result

from unequal.cli import app, commands
from unequal.cli.show import explanation
from unequal.train import trainer
from unequal.train.run import Report, RunLog

KEYS = {
    "auc", "normalized_entropy", "log_loss", "calibration", "samples_per_second", "steps", "seed", "peak_memory_bytes",
    "embedding_bytes",
}  # fmt: skip


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def failure(*arguments: object) -> str:
    """The one line a failing command says."""
    result = call(*arguments)
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    assert "Traceback" not in result.output
    return result.stderr.strip()


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UNEQUAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("UNEQUAL_TRACEBACK", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # the same on every machine; tests/gpu is for GPUs


def test_train_then_evaluate(clicks: Path, tmp_path: Path) -> None:
    trained = call("train", clicks, "--set", "run.folder=run", "--set", "run.seed=3", "--json", "report.json")
    assert trained.exit_code == 0, trained.output
    for words in (
        "AUC",
        "normalized entropy",
        "log loss",
        "calibration",
        "samples/s",
        "embedding memory",
        "device",
        "run: run",
    ):
        assert words in trained.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(report) >= KEYS and report["seed"] == 3 and report["steps"] == 44
    assert report["peak_memory_bytes"] > 10**8 and report["embedding_bytes"]["weights"] > 0

    scored = call("evaluate", "run", "--json", "score.json")
    assert scored.exit_code == 0, scored.output
    score = json.loads((tmp_path / "score.json").read_text())
    assert set(score) >= KEYS and [score[key] for key in ("auc", "log_loss")] == [report["auc"], report["log_loss"]]

    every = call("evaluate", "run", clicks.parent / "clicks-1.parquet", "--json", "every.json")
    assert every.exit_code == 0, every.output
    assert json.loads((tmp_path / "every.json").read_text())["samples"] == 800
    bare = pq.read_table(clicks.parent / "clicks-1.parquet").drop_columns(["time"])
    pq.write_table(bare, tmp_path / "bare.parquet")
    without = call("evaluate", "run", "bare.parquet", "--json", "bare.json")
    assert without.exit_code == 0, without.output
    assert (
        json.loads((tmp_path / "bare.json").read_text())["auc"]
        == json.loads((tmp_path / "every.json").read_text())["auc"]
    )
    folder = call("evaluate", "run", clicks.parent, "--part", "validation", "--json", "part.json")
    assert folder.exit_code == 0, folder.output
    assert json.loads((tmp_path / "part.json").read_text())["samples"] == 200


def test_resume_needs_no_recipe(clicks: Path, tmp_path: Path) -> None:
    assert call("train", clicks, "--set", "run.folder=run", "--set", "run.steps=5").exit_code == 0
    result = call("train", "--resume", "run", "--set", "run.steps=9", "--json", "report.json")
    assert result.exit_code == 0 and "resumed run at step 5" in result.output
    assert json.loads((tmp_path / "report.json").read_text())["steps"] == 9
    assert "already holds a run" in failure("train", clicks, "--set", "run.folder=run")
    assert failure("train", clicks, "--resume", "run", "--set", "tables.dim=4").startswith(
        "error: tables.dim: expected 8"
    )
    assert "expected the folder of a run" in failure("train", "--resume", "rum")


def test_generate_and_train_with_a_ceiling(tmp_path: Path) -> None:
    made = call("generate", "made", "--rows", 3000, "--tables", 4, "--ids", 100, "--length", 3, "--json", "made.json")
    assert made.exit_code == 0, made.output
    assert json.loads((tmp_path / "made.json").read_text())["config"]["rows"] == 3000
    result = call("train", "made/recipe.toml", "--set", "run.epochs=1", "--json", "report.json")
    assert result.exit_code == 0, result.output
    assert "ceiling" in result.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert 0.7 < report["ceiling"]["auc"] < 1
    assert "data.generate.rows: expected 1 or more, got 0" in failure("generate", "other", "--rows", 0)


def test_the_default_recipe_in_small(tmp_path: Path) -> None:
    small = ["data.generate.rows=3000", "data.generate.ids=200", "run.epochs=1"]
    result = call("train", "default", *[part for setting in small for part in ("--set", setting)])
    assert result.exit_code == 0, result.output
    assert "generating 3,000 rows" in result.output and "run: runs/default-1" in result.output
    assert "values kept" in result.output and "instead of 5.2 MB" in " ".join(result.output.split())
    again = call("train", "default", *[part for setting in small for part in ("--set", setting)])
    assert "generating" not in again.output and "run: runs/default-2" in again.output


@pytest.mark.parametrize("name", ["criteo", "avazu"])
def test_import_and_train_without_a_line_by_hand(name: str, tmp_path: Path) -> None:
    folder = {"criteo": "criteo_kaggle_small", "avazu": "avazu_small"}[name]
    source = Path(__file__).resolve().parents[1] / "../shared/data" / folder
    if not source.is_dir():
        pytest.skip(f"sample data not found: {source}")
    imported = call("import", name, source, "out", "--json", "import.json")
    assert imported.exit_code == 0, imported.output
    assert json.loads((tmp_path / "import.json").read_text())["rows"] > 7000
    trained = call("train", "out/recipe.toml", "--set", "run.epochs=1", "--json", "report.json")
    assert trained.exit_code == 0, trained.output
    assert json.loads((tmp_path / "report.json").read_text())["auc"] > 0.55


def test_mistakes_in_a_recipe(clicks: Path) -> None:
    assert failure("train", clicks, "--set", "run.epoch=3").endswith("did you mean 'epochs'?")
    assert "did you mean 'clicks.toml'?" in failure("train", clicks.with_name("click.toml"))
    assert "did you mean 'user'?" in failure("train", clicks, "--set", "data.categorical=[usr, item]")
    clicks.write_text("[data\n")
    assert "not valid TOML" in failure("train", clicks) and "line 1" in failure("train", clicks)
    assert "expected a recipe file or --resume RUN" in failure("train")


def test_devices(clicks: Path, tmp_path: Path) -> None:
    assert "expected auto (a GPU where there is one), cpu, cuda or cuda:N such as cuda:0, got 'tpu'" in failure(
        "train", "default", "--device", "tpu"
    )
    assert "--device cuda: expected a GPU" in failure("train", clicks, "--device", "cuda")
    few = ("--set", "run.folder=run", "--set", "run.steps=2")
    trained = call("train", clicks, *few, "--device", "cpu", "--json", "report.json")
    assert trained.exit_code == 0 and "peak device memory" not in trained.output
    assert any("device" in line and "cpu" in line for line in trained.output.splitlines())
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["device"] == "cpu" and report["peak_device_memory_bytes"] is None
    assert "--device cuda:3: expected a GPU" in failure("evaluate", "run", "--device", "cuda:3")
    assert call("evaluate", "run", "--device", "cpu").exit_code == 0


def test_broken_files(clicks: Path) -> None:
    first = clicks.parent / "clicks-0.parquet"
    whole = first.read_bytes()
    first.write_bytes(whole[: len(whole) // 2])
    assert "clicks-0.parquet" in failure("train", clicks)
    first.write_bytes(b"")
    assert "clicks-0.parquet" in failure("train", clicks)
    first.write_bytes(whole)
    table = pq.read_table(first)
    pq.write_table(table.rename_columns(["clck", *table.column_names[1:]]), first)
    assert "column 'click'" in failure("train", clicks)
    assert not Path("runs").exists(), "what cannot be read leaves no run folder behind"
    assert "no file matches" in failure("train", clicks, "--set", "data.files=[none-*.parquet]")


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_folder_that_cannot_be_written(clicks: Path, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    assert "cannot make the run folder" in failure("train", clicks, "--set", f"run.folder={locked / 'run'}")


def test_a_file_in_the_place_of_the_run_folder(clicks: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    assert "cannot make the run folder" in failure("train", clicks, "--set", "run.folder=taken")
    assert "cannot make the run folder" in failure("train", clicks, "--set", "run.folder=taken/run")
    assert "--json" in failure("train", clicks, "--json", "nowhere/report.json")


def test_a_full_disk(clicks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call("train", clicks, "--set", "run.folder=run", "--set", "run.steps=10").exit_code == 0
    before = {path: path.read_bytes() for path in Path("run/checkpoints").rglob("*") if path.is_file()}

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "write", full)
        assert "no space left on device" in failure("train", "--resume", "run", "--set", "run.steps=20")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert "no space left on device" in failure("train", "--resume", "run", "--set", "run.steps=20").lower()
    assert {path: path.read_bytes() for path in Path("run/checkpoints").rglob("*") if path.is_file()} == before
    assert call("evaluate", "run").exit_code == 0


def test_an_interrupt_says_how_to_go_on(clicks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trainer.Trainer._step

    def interrupted(self: trainer.Trainer, batch: object) -> None:
        if self.at.step == 12:
            raise KeyboardInterrupt
        whole(self, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(trainer.Trainer, "_step", interrupted)
    result = call("train", clicks, "--set", "run.folder=run")
    assert result.exit_code == 130
    assert result.stderr == "interrupted at step 12; go on with --resume run\n"


def test_ranks_are_started_with_the_same_command(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[list[str], int]] = []
    monkeypatch.setattr(commands, "launch", lambda arguments, ranks: started.append((arguments, ranks)) or 7)
    options = ["--set", "run.epochs=2", "--set", "run.seed=1", "--resume", "old", "--json", "r.json", "--device", "cpu"]
    assert call("train", "a.toml", *options, "--plan", "plan.json", "--ranks", 3).exit_code == 7
    assert call("evaluate", "run", "b.parquet", "--part", "all", "--ranks", 2).exit_code == 7
    assert started == [
        (["train", "a.toml", *options, "--plan", "plan.json"], 3),
        (["evaluate", "run", "b.parquet", "--part", "all", "--device", "auto"], 2),
    ]
    assert call("train", "a.toml", "--ranks", 0).exit_code == 2
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    assert "--ranks 3: expected no such option where torchrun starts the ranks (4 of them)" in failure(
        "train", "a.toml", "--ranks", 3
    )


def test_what_ranks_saved_is_said_in_plain_words() -> None:
    report = Report(
        **dict.fromkeys(("auc", "normalized_entropy", "log_loss", "calibration", "part", "best_step"), None),
        samples_per_second=1.0, steps=10, seed=0, peak_memory_bytes=10**9, embedding_bytes={"weights": 3 * 10**9},
        samples=0, tasks={}, seconds=1.0, dropped={}, ceiling={}, run="run", recipe_hash="", device="cpu",
        peak_device_memory_bytes=None, world=4, ranks_per_node=2, embedding_bytes_per_rank=10**9,
        exchange={
            "inside_bytes_per_step": 1e6, "across_bytes_per_step": 3e6, "repeated_ids_bytes_per_step": 16e6, "time_share": 0.2,
        },
        plan=["row-wise: users, items"],
    )  # fmt: skip
    assert explanation(report) == [
        "tables are spread row-wise: users, items",
        "each row travels once for all ids that read it: 4.0 MB a step between ranks instead of 16.0 MB, 75% less",
        "3.0 MB of it cross the network between nodes",
        "no rank holds more than 1.0 GB of the 3.0 GB that tables take on all ranks",
    ]
    alone = replace(report, world=1, exchange={}, plan=[], embedding_bytes_per_rank=3 * 10**9)
    assert explanation(alone) == []


def test_a_traceback_only_where_asked_for(clicks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = call("--traceback", "train", clicks, "--set", "run.epoch=3")
    assert asked.exit_code == 1 and type(asked.exception).__name__ == "RecipeError"
    monkeypatch.setenv("UNEQUAL_TRACEBACK", "1")
    assert type(call("train", clicks, "--set", "run.epoch=3").exception).__name__ == "RecipeError"


def test_usage() -> None:
    for arguments, hint in (
        (["trian"], "train"),
        (["train", "default", "--resum", "x"], "--resume"),
        (["import", "criteoo", "a", "b"], "criteo"),
        (["evaluate", "run", "--part", "tset"], "test"),
    ):
        result = call(*arguments)
        assert result.exit_code == 2 and hint in result.stderr, result.stderr
    assert call("--version").output.startswith("unequal ")
    for command in ("train", "evaluate", "import", "generate"):
        assert command in call("--help").output
        assert call(command, "--help").exit_code == 0


def test_the_module_runs() -> None:
    done = subprocess.run([sys.executable, "-m", "unequal", "--version"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith("unequal "), done.stderr
