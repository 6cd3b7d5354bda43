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


SLOW = """
nodes = 2
ranks_per_node = 2
memory_per_rank = "4 GB"
[across]
bytes_per_second = "100 kB/s"
seconds_per_message = 1e-6
"""
TIERED = ("--set", "tables.items.sharding=tiers", "--set", "exchange.unique=none")


@pytest.fixture
def profile(shared_clicks: Path, tmp_path: Path) -> Path:
    file = tmp_path / "clicks.profile"
    done = CliRunner().invoke(app, ["profile", str(shared_clicks), "--out", str(file)])
    assert done.exit_code == 0, done.output
    return file


def test_tiers_are_explained_and_saved(shared_clicks: Path, tmp_path: Path, profile: Path) -> None:
    (tmp_path / "slow.toml").write_text(SLOW)
    given = (shared_clicks, "--profile", profile, "--topology", "slow.toml", *TIERED)
    done = plan(*given, "--explain")
    assert done.exit_code == 0, done.output
    for words in (
        "row_wise, tiers", "tiers of 1 table: ", "table 'items'", "copies per rank", "sent over the network", "are copied at all",
        "the last one saves", "a rank uses", "row-wise it would use",
    ):  # fmt: skip
        assert words in done.output
    saved = Plan.load(tmp_path / "clicks.plan.json")
    assert (tmp_path / "clicks.plan.rows").is_file() and saved.tables["items"].tiers is not None
    brief = plan(*given)
    assert brief.exit_code == 0 and "--explain" in brief.output and "table 'items'" not in brief.output
    none = plan(*given, "--memory-budget", "none", "--objective", "bytes")
    assert none.exit_code == 0 and Plan.load(tmp_path / "clicks.plan.json").inputs["load.copying.budget"] == "none"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--set", "data.max_length=1"],
            "the profile is of other data than the recipe: data.max_length was None and is 1",
        ),
        (["--memory-budget", "much"], "--memory-budget: expected bytes"),
        (["--topology", "small.toml"], "no plan fits: "),
        (["--profile", "small.toml"], "small.toml"),
        (["--profile", "no.profile"], "no.profile"),
    ],
)
def test_mistakes_with_profiles(
    shared_clicks: Path, tmp_path: Path, profile: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "small.toml").write_text('nodes = 1\nranks_per_node = 2\nmemory_per_rank = "300 MB"\n')
    done = plan(shared_clicks, "--profile", profile, *arguments)
    assert done.exit_code == 1
    assert message in done.output and done.output.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--explain"], "expected --profile with them"),
        (list(TIERED), "tables.items.sharding: expected tiers with a profile"),
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
