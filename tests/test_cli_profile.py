"""`unequal profile`: counts, merges, and says what is wrong."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from unequal.cli import app
from unequal.cli.profile import parse_bytes
from unequal.errors import UserError
from unequal.stats.profile import Profile

from .distributed.commands import start


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["profile", *map(str, arguments)], env={"COLUMNS": "200"})


def failure(*arguments: object) -> str:
    result = call(*arguments)
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    return result.stderr.strip()


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UNEQUAL_TRACEBACK", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def same(one: Profile, other: Profile) -> None:
    assert one.samples == other.samples and one.source == other.source and one.recipe == other.recipe
    for name, table in one.tables.items():
        assert table.top(table.kept).tolist() == other.tables[name].top(table.kept).tolist()
        assert np.array_equal(table.top_reads(table.kept), other.tables[name].top_reads(table.kept))


def test_a_profile_is_shown_and_written(shared_clicks: Path) -> None:
    done = call(shared_clicks, "--out", "a/clicks.profile", "--json", "numbers.json")
    assert done.exit_code == 0, done.output
    for words in (
        "1,400 samples in ",
        "samples/s",
        "user",
        "items",
        "all ids",
        "rows/step",
        "profile: a/clicks.profile",
    ):
        assert words in done.output
    profile = Profile.load("a/clicks.profile")
    assert (profile.samples, profile.sampled, profile.recipe) == (1400, False, "clicks")
    numbers = json.loads(Path("numbers.json").read_text())
    assert numbers["samples"] == 1400 and numbers["batch_size"] == 64
    items = numbers["tables"]["items"]
    assert items["rows_seen"] == 30 and items["exact"] and items["feature_ids"]["item"] == 1
    assert items["distinct_per_step"] == pytest.approx(profile.tables["items"].distinct(64))
    assert 0.1 < items["share_of_reads"]["10%"] < 0.3


def test_a_sample_and_settings(shared_clicks: Path) -> None:
    done = call(shared_clicks, "--out", "p", "--samples", 500, "--set", "data.max_length=1")
    assert done.exit_code == 0, done.output
    assert "500 of 1,400 samples" in done.output
    profile = Profile.load("p")
    assert profile.sampled and profile.tables["items"].feature_ids["history"] <= 1
    done = call(shared_clicks, "--out", "p", "--share", 0.1)
    assert Profile.load("p").samples == 140


def test_few_bytes_give_a_sketch(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["generate", "data", "--rows", "20000", "--tables", "2", "--ids", "60000", "--dense", "0"]
    )
    assert done.exit_code == 0, done.output
    for name, size in (("exact", "64MiB"), ("sketch", "64KiB")):
        done = call("data/recipe.toml", "--out", name, "--sketch-bytes", size)
        assert done.exit_code == 0, done.output
    assert "most-read ones; others are known from a sample" in done.output
    exact, sketch = Profile.load("exact"), Profile.load("sketch")
    table = max(exact.tables.values(), key=lambda table: table.rows_seen)
    other = sketch.tables[table.name]
    assert table.exact and not other.exact and Path("sketch").stat().st_size < 2 * 65536 + 10_000
    assert other.rows_seen == pytest.approx(table.rows_seen, rel=4 * other.rows_seen_error)
    assert other.top(20).tolist() == table.top(20).tolist()


def test_parts_merge(shared_clicks: Path) -> None:
    folder = shared_clicks.parent
    split = ["--set", "data.split.by=fraction", "--set", "data.split.validation=0", "--set", "data.split.test=0"]
    assert call(shared_clicks, "--out", "whole", *split).exit_code == 0
    for number in range(2):
        file = f'data.files=["{folder}/clicks-{number}.parquet"]'
        assert call(shared_clicks, "--out", f"p{number}", "--set", file, *split).exit_code == 0
    done = call("--merge", "p0", "p1", "--out", "both")
    assert done.exit_code == 0, done.output
    same(Profile.load("both"), Profile.load("whole"))
    assert "2,000 samples" in done.output
    assert "expected parts that have none in common" in failure("--merge", "whole", "whole", "--out", "x")
    assert "expected two profiles or more, got 1" in failure("--merge", "whole", "--out", "x")
    assert "leave the other options out" in failure("--merge", "p0", "p1", "--out", "x", "--share", 0.5)
    Path("p1").write_bytes(Path("p1").read_bytes()[:-9])
    assert "p1: the file has" in failure("--merge", "p0", "p1", "--out", "x")
    assert not Path("x").exists()


def test_mistakes(shared_clicks: Path, tmp_path: Path) -> None:
    assert "expected a file, got a folder" in failure(shared_clicks, "--out", tmp_path)
    assert "expected one recipe, got 2; to merge profiles, add --merge" in failure("a", "b", "--out", "p")
    both = failure(shared_clicks, "--out", "p", "--share", 0.1, "--samples", 5)
    assert "expected a number of samples or a share of them, got both" in both
    assert "expected more than 0 and at most 1" in failure(shared_clicks, "--out", "p", "--share", 1.5)
    assert "expected a number of bytes" in failure(shared_clicks, "--out", "p", "--sketch-bytes", "many")
    assert "at least 65,536 bytes" in failure(shared_clicks, "--out", "p", "--sketch-bytes", "1k")
    assert "no such recipe file" in failure("nothing.toml", "--out", "p")
    assert not Path("p").exists()


def test_sizes() -> None:
    assert [parse_bytes(text) for text in ("65536", "64MiB", "1.5 GB", "200k")] == [
        65536,
        64 << 20,
        1_500_000_000,
        200_000,
    ]
    with pytest.raises(UserError, match="expected a number of bytes"):
        parse_bytes("-5")


@pytest.mark.parametrize("torchrun", [False, True])
def test_ranks_share_the_work(shared_clicks: Path, tmp_path: Path, torchrun: bool) -> None:
    assert call(shared_clicks, "--out", "one").exit_code == 0
    program = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "-m", "unequal")
    options = {"program": program} if torchrun else {}
    ranks = [] if torchrun else ["--ranks", "3"]
    done = start(tmp_path, "profile", shared_clicks, "--out", "many", *ranks, **options).wait()
    assert done.code == 0, done.errors
    assert done.output.count("1,400 samples in") == 1 and done.output.count("profile: many") == 1
    same(Profile.load("many"), Profile.load("one"))
    curve, alone = (Profile.load(name).tables["items"].distinct for name in ("many", "one"))
    assert curve(64) == pytest.approx(alone(64), rel=0.1)


def test_a_rank_that_cannot_read_ends_all(shared_clicks: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in shared_clicks.parent.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    path = broken / "clicks-1.parquet"
    content = bytearray(path.read_bytes())
    content[4:2000] = os.urandom(1996)
    path.write_bytes(content)
    done = start(tmp_path, "profile", broken / "clicks.toml", "--out", "many", "--ranks", "2").wait()
    assert done.code == 1 and not (tmp_path / "many").exists()
    assert "clicks-1.parquet" in done.errors and done.errors.count("\n") == 1, done.errors
