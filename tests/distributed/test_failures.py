"""What happens to the other ranks, and what is said, when one rank fails, dies, hangs or is interrupted."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.train.test_resume import assert_same_end
from unequal.recipe import load_recipe, load_run
from unequal.train import checkpoint
from unequal.train.evaluate import evaluate_run
from unequal.train.trainer import train

from .commands import alive, children, start
from .test_train import run_rank

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
    pytest.mark.alone,
]
SECONDS = 10
"""in which all ranks must be gone after one of them is"""
LONG = ("--set", "run.epochs=100000", "--set", "run.checkpoint_every=5", "--set", "run.folder=run")


@pytest.fixture
def command(tmp_path):
    """Starts commands, and kills whatever they leave behind."""
    started = []

    def run(*arguments, **options):
        started.append(start(tmp_path, *arguments, **options))
        return started[-1]

    yield run
    for one in started:
        if one.process.poll() is None:
            one.kill()


def wait_for(condition, seconds=90):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.05)


def training(running, folder: Path, ranks: int):
    """Waits until the ranks train and have saved something; gives their process ids."""

    def saved() -> bool:
        assert running.process.poll() is None, running.process.communicate()
        return checkpoint.latest(folder / "run" / "checkpoints") is not None

    wait_for(saved)
    found = running.ranks()
    assert sorted(found) == list(range(ranks))
    return found


def test_a_rank_that_is_killed(shared_clicks, tmp_path, command):
    running = command("train", shared_clicks, "--ranks", 2, *LONG)
    pids = training(running, tmp_path, 2)
    everything = children(running.process.pid)
    killed = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    running.wait()
    assert running.ended - killed < SECONDS and running.code == 1
    assert running.errors.count("\n") == 1, running.errors
    assert running.errors.startswith("error: rank 1 was killed by SIGKILL")
    assert running.errors.endswith("go on with --resume run\n")
    assert alive(everything) == []


def test_the_first_rank_is_killed(shared_clicks, tmp_path, command):
    running = command("train", shared_clicks, "--ranks", 2, *LONG)
    pids = training(running, tmp_path, 2)
    killed = time.monotonic()
    os.kill(pids[0], signal.SIGKILL)
    running.wait()
    assert running.ended - killed < SECONDS and running.code == 1
    assert running.errors.count("\n") == 1 and running.errors.startswith("error: rank 0 was killed by SIGKILL")
    assert alive(pids.values()) == []


def test_a_rank_that_fails_by_itself(shared_clicks, command):
    done = command("train", shared_clicks, "--ranks", 2, "--set", "run.folder=run", fault="mistake:7").wait()
    assert done.code == 1
    assert done.errors == "error: rank 1: the fault that was asked for\n"


def test_a_rank_that_is_done_takes_nothing_apart(shared_clicks, command):
    settings = ("--set", "run.epochs=1", "--set", "run.folder=run")
    done = command("train", shared_clicks, "--ranks", 2, *settings, "--json", "report.json", fault="end:7").wait()
    assert done.code == 0 and done.errors == ""
    assert (done.folder / "report.json").exists() and (done.folder / "run" / "report.json").exists()


def test_a_fault_of_ours_keeps_its_traceback(shared_clicks, command):
    done = command("train", shared_clicks, "--ranks", 2, "--set", "run.folder=run", fault="assert:12").wait()
    lines = done.errors.splitlines()
    assert done.code == 1 and lines[0].startswith("[rank 1] ")
    assert any("Traceback" in line for line in lines[:-1])
    assert lines[-1].startswith("error: rank 1 ended with exit code 1: AssertionError: a fault of ours")
    assert lines[-1].endswith("go on with --resume run")


def test_an_interrupt_stops_all_and_says_how_to_go_on_once(shared_clicks, tmp_path, command):
    running = command("train", shared_clicks, "--ranks", 2, *LONG)
    everything = list(training(running, tmp_path, 2).values())
    running.process.send_signal(signal.SIGINT)
    running.wait(SECONDS)
    assert running.code == 130
    assert running.errors.count("\n") == 1, running.errors
    assert running.errors.startswith("interrupted at step ") and "go on with --resume run" in running.errors
    assert alive(everything) == []


def test_no_rank_outlives_the_command(shared_clicks, tmp_path, command):
    running = command("train", shared_clicks, "--ranks", 2, *LONG)
    everything = list(training(running, tmp_path, 2).values())
    os.kill(running.process.pid, signal.SIGKILL)
    running.process.communicate(timeout=SECONDS)
    wait_for(lambda: alive(everything) == [], SECONDS)


def test_a_mistake_in_the_recipe_is_said_once(shared_clicks, command):
    done = command("train", shared_clicks, "--ranks", 2, "--set", "run.epoch=3").wait()
    assert done.code == 1 and done.output == ""
    assert done.errors.startswith("error: run.epoch: ") and done.errors.endswith("did you mean 'epochs'?\n")
    assert done.errors.count("\n") == 1


def test_a_killed_run_is_resumed_bitwise_and_scored_by_one_process(pool, shared_clicks, tmp_path, command):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    report = pool.run(run_rank, shared_clicks, ["run.epochs=1", f"run.folder={whole}"], world=2)[0]
    settings = ("--set", "run.epochs=1", "--set", "run.folder=cut")
    killed = command("train", shared_clicks, "--ranks", 2, *settings, fault="kill:19").wait()
    assert killed.code == 1 and "rank 1 was killed by SIGKILL" in killed.errors
    assert checkpoint.list_steps(cut / "checkpoints") == [10]
    resumed = command("train", "--resume", "cut", "--ranks", 2, "--json", "report.json").wait()
    assert resumed.code == 0 and resumed.errors == ""
    assert "resumed cut at step 10" in resumed.output and resumed.output.count("run: cut\n") == 1
    for words in (
        "ranks",
        "peak memory of a rank",
        "exchanged per step",
        "tables are spread",
        "no rank holds more than",
    ):
        assert words in resumed.output
    assert_same_end(whole, cut)
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["world"] == 2 and 0 < written["seconds_to_first_step"] < 120
    score = evaluate_run(load_run(cut), cut, device="cpu")
    assert score.auc == pytest.approx(report["auc"], abs=1e-9) and score.world == 1


def test_torchrun_starts_a_rank_that_died_again_and_the_job_resumes(shared_clicks, tmp_path, command):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    job = ("-m", "unequal", "train", str(shared_clicks), "--set", "run.epochs=1", "--json", "report.json")
    done = command("--max-restarts", 1, *job, fault="kill:19", program=torchrun).wait()
    assert done.code == 0, done.errors
    runs = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert runs == ["clicks-1"], "it went on with the run it had begun"
    assert "runs/clicks-1 at step 10" in done.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["steps"], report["world"]) == (22, 2)
    steps = [json.loads(line)["step"] for line in (tmp_path / "runs/clicks-1/metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps) and len(set(steps)) == len(steps), "every line once"


def test_torchrun_never_resumes_a_run_that_the_job_did_not_begin(shared_clicks, tmp_path, command):
    train(load_recipe(shared_clicks, [f"run.folder={tmp_path / 'run'}", "run.steps=5"]), progress=False, device="cpu")
    few = ("--set", "run.folder=run", "--set", "run.steps=5")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = command("--max-restarts", 1, "-m", "unequal", "train", shared_clicks, *few, program=torchrun).wait()
    assert done.code != 0
    assert done.errors.count("error: run: this folder already holds a run") == 4, "two ranks, two starts"
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
