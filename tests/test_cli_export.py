"""`unequal export`: from a trained run to a file, or a folder with its loader, that needs nothing else."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from unequal.cli import app
from unequal.exported import load
from unequal.recipe import load_run
from unequal.train import checkpoint


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})


@pytest.fixture(autouse=True, scope="module")
def no_gpu():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield


@pytest.fixture(scope="module", params=["whole rows", "rows of different width"])
def run(shared_clicks: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    width = () if request.param == "whole rows" else ("--set", "width.budget=40 KB", "--set", "width.every=8")
    done = invoke("train", shared_clicks, "--set", f"run.folder={folder}", *width)
    assert done.exit_code == 0, done.output
    return folder


def test_a_folder_with_its_loader(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "a" / "model"
    done = invoke("export", run, "--out", out, "--json", tmp_path / "numbers.json")
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in out.iterdir()) == ["load.py", "model.safetensors"]
    spec = importlib.util.spec_from_file_location("exported_loader", out / "load.py")
    assert spec is not None and spec.loader is not None
    loader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loader)
    model, recipe = loader.load(out), load_run(run)
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert numbers["bytes"] == (out / "model.safetensors").stat().st_size
    assert set(model.features) == set(recipe.features) and set(model.tables) == set(numbers["tables"])
    assert model.description["model"]["kind"] == recipe.model.kind and model.description["labels"] == ["click"]
    saved = checkpoint.open(checkpoint.path_of(run / "checkpoints", numbers["step"]))
    assert all(torch.equal(model.dense[name], tensor) for name, tensor in saved.dense_state.items())
    for name, table in model.tables.items():
        for ids, rows in saved.table(name):
            assert torch.equal(table.lookup(ids), rows["weight"].float())
    for words in ("rows", "dense part", "export: ", "load it with: load() of "):
        assert words in done.output


def test_a_file(run: Path, tmp_path: Path) -> None:
    done = invoke("export", run, "--out", tmp_path / "model.safetensors")
    assert done.exit_code == 0, done.output
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert load(tmp_path / "model.safetensors").tables
    assert "load it with: unequal.exported.load" in done.output


def test_a_run_is_scored_as_it_is(run: Path) -> None:
    done = invoke("evaluate", run)
    assert done.exit_code == 0, done.output
    report = json.loads((run / "report.json").read_text())
    assert f"{report['auc']:.4f}" in done.output


def test_what_is_wrong_is_one_line(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for arguments, words in (
        ([tmp_path, "--out", tmp_path / "m"], "expected the folder of a run"),
        ([run, "--out", tmp_path / "file" / "m.safetensors"], "cannot be written"),
    ):
        done = invoke("export", *arguments)
        assert done.exit_code == 1 and words in done.output and "Traceback" not in done.output
