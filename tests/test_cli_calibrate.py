"""`unequal calibrate`: measures, shows and writes; mistakes are one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.distributed.commands import Command, start
from unequal.cli import app
from unequal.cli.calibrate import duration, speed, with_quartiles
from unequal.plan.topology import LINKS, Topology
from unequal.train.calibrate import Quartiles


def test_two_ranks_are_measured_shown_and_written(tmp_path: Path, shared_clicks: Path) -> None:
    done = start(tmp_path, "calibrate", "--out", "here.toml", "--ranks", 2, "--seconds", 1).wait()
    assert done.code == 0, done.errors
    for words in (
        "measuring 2 ranks for about 1 s",
        "inside a node",
        "all-to-all",
        "reduce-scatter",
        "rows read at random places",
        "between nodes: not measured, there is one node",
        "topology: here.toml",
    ):
        assert words in done.output
    found = Topology.load(tmp_path / "here.toml")
    assert (found.nodes, found.ranks_per_node) == (1, 2)
    assert found.inside != LINKS["cpu"]["inside"] and found.across == LINKS["cpu"]["across"]
    planned = CliRunner().invoke(
        app, ["plan", str(shared_clicks), "--topology", str(tmp_path / "here.toml"), "--out", str(tmp_path / "p.json")]
    )
    assert planned.exit_code == 0, planned.output


def test_under_torchrun_the_first_rank_writes(tmp_path: Path) -> None:
    program = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--log-dir", str(tmp_path))
    done = start(tmp_path, "-m", "unequal", "calibrate", "--out", "here.toml", "--seconds", 1, program=program).wait()
    assert done.code == 0, done.errors
    assert done.output.count("topology: here.toml") == 1 and Topology.load(tmp_path / "here.toml").world == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "."], "--out .: expected a file, got a folder; name the file"),
        (["--out", "no/such/t.toml"], "expected a file in a folder that exists and is writable"),
        (["--out", "t.toml", "--device", "tpu"], "--device: expected auto"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["calibrate", "--ranks", "1", *arguments])
    assert done.exit_code == 1 and message in done.output and done.output.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    done = CliRunner().invoke(app, ["calibrate", "--ranks", "1", "--out", str(tmp_path / "t.toml")])
    assert done.exit_code == 1 and "writable; choose another" in done.output


def test_a_rank_that_cannot_start_ends_the_command(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nif os.environ.get('RANK') == '2': os._exit(9)\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    program = [sys.executable, "-m", "unequal", "calibrate", "--out", "t.toml", "--ranks", "3", "--seconds", "1"]
    process = subprocess.Popen(
        program, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    done = Command(process).wait()
    assert done.code == 1 and "rank 2 ended with exit code 9" in done.errors and done.errors.count("\n") == 1
    assert not (tmp_path / "t.toml").exists()


def test_numbers_are_short() -> None:
    assert [speed(value) for value in (12.5e6, 1.234e9, 3e12, 5e3)] == ["12.5 MB/s", "1.23 GB/s", "3 TB/s", "5 kB/s"]
    assert [duration(value) for value in (2e-3, 85e-6, 1.5, 0.0)] == ["2 ms", "85 µs", "1.5 s", "0 µs"]
    assert with_quartiles(Quartiles(0.9e9, 1e9, 1.5e9), speed) == "1 GB/s (0.9–1.5)"
    assert with_quartiles(Quartiles(400e6, 700e6, 1.06e9), speed) == "700 MB/s (400–1,060)"
