"""`unequal simulate`: a cluster that is not here, for a table in words or for a recipe and its profile."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from unequal.cli import app

TABLE = (
    "--rows",
    "20k",
    "--zipf",
    "1.05",
    "--dim",
    "16",
    "--batch",
    "64",
    "--length",
    "20",
    "--nodes",
    "2",
    "--ranks",
    "2",
)


def simulate(*arguments: object, columns: int = 80) -> Result:
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)], env={"COLUMNS": str(columns)})


def test_a_table_in_words(tmp_path: Path) -> None:
    done = simulate(*TABLE, "--json", tmp_path / "numbers.json")
    assert done.exit_code == 0, done.output
    assert max(map(len, done.output.splitlines())) <= 80
    for words in (
        "1 table of 20,000 rows, dim 16; a sample reads 20 by Zipf 1.05",
        "2 nodes of 2 ranks",
        "row-wise, repeated ids",
        "table-wise",
        "column-wise",
        "tiers, unique per node",
        "as 16 bit",
        "tiers, repeated ids: no copy of a row pays",
        "256",
    ):
        assert words in done.output
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert numbers["samples_per_rank"] == 64 and len(numbers["plans"]) == 21
    assert {one["nodes"] for one in numbers["growth"]} == {1, 2, 4, 8, 16, 32, 64, 128, 256}
    assert numbers["plans"][0]["fewer"] == 0 and numbers["plans"][2]["fewer"] > 0.3
    assert done.output.splitlines()[-2].split()[-1].endswith("%"), "no column is cut off"
    done = simulate(*TABLE, "--objective", "bytes")
    assert done.exit_code == 0 and "rows replicated, " in done.output


def test_a_recipe_and_its_profile(shared_clicks: Path, tmp_path: Path) -> None:
    profile = tmp_path / "clicks.profile"
    made = CliRunner().invoke(app, ["profile", str(shared_clicks), "--out", str(profile)])
    assert made.exit_code == 0, made.output
    done = simulate(shared_clicks, "--profile", profile, "--nodes", 2, "--ranks", 4, "--json", tmp_path / "n.json")
    assert done.exit_code == 0, done.output
    assert "2 tables of clicks" in done.output
    assert json.loads((tmp_path / "n.json").read_text())["samples_per_rank"] == 8, "64 in all, as the recipe says"
    done = simulate(shared_clicks, "--profile", profile, "--nodes", 2, "--ranks", 4, "--batch-size", 4096)
    assert "512 samples a rank" in done.output
    done = simulate(shared_clicks, "--profile", profile, "--set", "data.max_length=1")
    assert done.exit_code == 1 and "the profile is of other data" in done.output


def test_machines_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "machines.toml"
    file.write_text('memory_per_rank = "1 MB"\n[across]\nbytes_per_second = "50 MB/s"\nseconds_per_message = 1e-3\n')
    done = simulate(*TABLE, "--topology", file)
    assert done.exit_code == 0, done.output
    assert "50.0 MB/s to others" in done.output and "!: more than the 900.0 kB" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected a recipe with --profile, or a table as --rows"),
        (["--rows", "many"], "--rows many: expected a number such as 10M"),
        (["--rows", "1.5"], "expected a whole number"),
        (["--rows", "0"], "expected 1 to"),
        (["--rows", "5k", "--length", "0"], "--length 0: expected more than 0"),
        (["--rows", "5k", "--profile", "p"], "expected the recipe that it is of"),
        (["--rows", "5k", "--batch", "4", "--batch-size", "4"], "got both"),
        (["--rows", "5k", "--topology", "no.toml"], "no.toml: cannot read the topology"),
        (["--rows", "5k", "--memory-budget", "lots"], "--memory-budget: expected bytes"),
        (["default"], "expected --profile with a recipe"),
        (["default", "--profile", "no.profile"], "no.profile"),
        (["no_such_recipe", "--profile", "p"], "no such recipe file"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = simulate(*arguments, columns=300)
    assert done.exit_code == 1
    assert message in done.output and done.output.count("\n") == 1
