"""`unequal plan`: prints and saves a plan for machines that need not be here."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from unequal.cli import app
from unequal.plan.plan import Plan

TOPOLOGY = """
nodes = 2
ranks_per_node = 2
device = "cuda"
memory_per_rank = "24 GB"
"""


def plan(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "200"})


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)


def test_a_plan_is_printed_and_saved(shared_clicks: Path, tmp_path: Path) -> None:
    done = plan(shared_clicks, "--json", tmp_path / "numbers.json")
    assert done.exit_code == 0, done.output
    saved = Plan.load(tmp_path / "clicks.plan.json")
    assert (saved.world, saved.ranks_per_node) == (2, 2)
    for words in (
        "2 tables on 2 ranks",
        "user",
        "items",
        "bottleneck: rank ",
        "balance: greedy ",
        "plan: clicks.plan.json",
    ):
        assert words in done.output
    assert json.loads((tmp_path / "numbers.json").read_text()) == saved.to_json()


def test_machines_that_are_not_here(shared_clicks: Path, tmp_path: Path) -> None:
    file = tmp_path / "machines.toml"
    file.write_text(TOPOLOGY)
    done = plan(shared_clicks, "--topology", file, "--out", tmp_path / "a" / "p.json")
    assert done.exit_code == 0, done.output
    saved = Plan.load(tmp_path / "a" / "p.json")
    assert (saved.world, saved.ranks_per_node, saved.forward_codec) == (4, 2, "fp16")
    for options, shape in ((["--ranks", 8], (8, 4)), (["--nodes", 3], (6, 2)), (["--ranks", 3], (3, 3))):
        done = plan(shared_clicks, "--topology", file, "--out", tmp_path / "p.json", *options)
        assert done.exit_code == 0, done.output
        saved = Plan.load(tmp_path / "p.json")
        assert (saved.world, saved.ranks_per_node) == shape


def test_overrides_reach_the_plan(shared_clicks: Path, tmp_path: Path) -> None:
    done = plan(shared_clicks, "--ranks", 4, "--nodes", 2, "--set", "run.batch_size=128", "--out", tmp_path / "p.json")
    assert done.exit_code == 0, done.output
    saved = Plan.load(tmp_path / "p.json")
    assert saved.inputs["batch_size"] == 128 and saved.ranks_per_node == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "3", "--nodes", "2"], "--ranks 3: expected as many on each of the 2 nodes"),
        (["--device", "cuda"], "expected a GPU here or a topology"),
        (["--topology", "no.toml"], "no.toml: cannot read the topology"),
        (["--topology", "machines.toml", "--device", "cpu"], "--device cpu: expected cuda"),
        (["--out", "."], "expected a file, got a folder"),
        (["--set", "run.batch=3"], "did you mean 'batch_size'?"),
    ],
)
def test_mistakes_are_one_line(shared_clicks: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "machines.toml").write_text(TOPOLOGY)
    done = plan(shared_clicks, *arguments)
    assert done.exit_code == 1
    assert message in done.output and done.output.count("\n") == 1
