"""Which device a run takes, and the loop that reads losses now and then only, as it does on a GPU."""

import json
import math
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from unequal.errors import UserError
from unequal.recipe import load_recipe, load_run
from unequal.train import checkpoint, device, trainer
from unequal.train.build import build_dense_optimizer, load_dense_optimizer
from unequal.train.config import OptimizerConfig
from unequal.train.evaluate import evaluate_run
from unequal.train.progress import Progress
from unequal.train.trainer import train

from .test_resume import Cut, assert_same_end, cut_after

SETTINGS = ["run.epochs=3", "run.keep_checkpoints=1", "schedule.kind=cosine", "run.log_every=7"]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch says that there are two."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


def treat_as_gpu(patch: pytest.MonkeyPatch) -> None:
    """The CPU, like a GPU that nobody should wait for."""
    patch.setattr(device, "backend", lambda _: SimpleNamespace(on_device=True))


@pytest.fixture
def deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    treat_as_gpu(monkeypatch)


def losses(run: Path) -> list[tuple]:
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(entry["kind"], entry["step"], entry.get("loss"), entry.get("log_loss")) for entry in entries]


def test_a_gpu_is_taken_where_there_is_one(gpus: None) -> None:
    assert device.choose_device("auto") == device.choose_device("cuda") == torch.device("cuda", 1)
    assert device.choose_device("cuda:0") == torch.device("cuda", 0)
    assert device.choose_device("cpu") == torch.device("cpu")
    with pytest.raises(UserError, match=r"expected a GPU that is here \(cuda:0 to cuda:1\), got 'cuda:2'"):
        device.choose_device("cuda:2")


def test_the_cpu_is_taken_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.choose_device("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(UserError, match=r"--device cuda:1: expected a GPU, but torch \S+ is built for the CPU alone"):
        device.choose_device("cuda:1")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(UserError, match=r"--device cuda: expected a GPU, but torch finds no GPU here; .*--device cpu"):
        device.choose_device("cuda")


@pytest.mark.parametrize("asked", ["tpu", "", "CPU", "cuda:", "cuda:-1", "cuda:x", "mps", "cpu:0", "cuda:0 "])
def test_a_wrong_device_is_answered_with_the_valid_ones(asked: str, gpus: None) -> None:
    with pytest.raises(UserError, match=r"expected auto .*, cpu, cuda or cuda:N such as cuda:0, got"):
        device.choose_device(asked)


def test_a_wrong_device_leaves_no_run_behind(clicks: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--device"):
        train(load_recipe(clicks, [f"run.folder={tmp_path / 'run'}"]), progress=False, device="tpu")
    assert not (tmp_path / "run").exists()


def test_reading_losses_later_changes_nothing(
    shared_clicks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    at_once = train(load_recipe(shared_clicks, [*SETTINGS, f"run.folder={tmp_path / 'a'}"]), progress=False)
    assert at_once.device == "cpu" and at_once.peak_device_memory_bytes is None
    request.getfixturevalue("deferred")
    reads = []
    settle = trainer.Trainer._settle
    monkeypatch.setattr(trainer.Trainer, "_settle", lambda self: (reads.append(self.at.step), settle(self)))
    later = train(load_recipe(shared_clicks, [*SETTINGS, f"run.folder={tmp_path / 'b'}"]), progress=False)
    assert_same_end(tmp_path / "a", tmp_path / "b")
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    every = {*range(7, 67, 7), *range(10, 67, 10), 22, 44, 66}
    assert set(reads) == every, "only where something is written"
    assert later.samples_per_second > 0 and later.seconds > 0


@pytest.fixture(scope="module")
def whole(shared_clicks: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A deferred run that nothing cut, for all tests to compare with."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        treat_as_gpu(patch)
        train(load_recipe(shared_clicks, [*SETTINGS, f"run.folder={run}"]), progress=False)
    return run


@pytest.mark.parametrize("step", [3, 13, 22, 40, 65])
def test_a_cut_run_ends_the_same(
    shared_clicks: Path, tmp_path: Path, step: int, whole: Path, deferred: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(Cut):
        cut_after(step, patch)
        train(load_recipe(shared_clicks, [*SETTINGS, f"run.folder={tmp_path / 'cut'}"]), progress=False)
    train(load_run(tmp_path / "cut"), resume=tmp_path / "cut", progress=False)
    assert_same_end(whole, tmp_path / "cut")


def test_divergence_is_noticed_at_the_next_look(
    clicks: Path, tmp_path: Path, deferred: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    before = train(load_recipe(clicks, [f"run.folder={run}", "run.steps=10"]), progress=False)
    whole, seen = trainer.weighted_loss, []

    def breaking(logits: torch.Tensor, batch: object) -> torch.Tensor:
        seen.append(None)
        return whole(logits, batch) * (math.nan if len(seen) == 3 else 1.0)  # type: ignore[arg-type]

    monkeypatch.setattr(trainer, "weighted_loss", breaking)
    wrong = r"between steps 11 and 15 the loss became nan; lower .* the checkpoint step-00000010 is intact"
    with pytest.raises(UserError, match=wrong):
        train(load_run(run, overrides=["run.steps=20"]), resume=run, progress=False)
    assert checkpoint.list_steps(run / "checkpoints") == [10]
    assert evaluate_run(load_run(run), run).log_loss == before.log_loss
    seen.clear()
    with pytest.raises(UserError, match=r"the loss of step 13 is nan"):
        train(load_run(run, overrides=["run.steps=20", "run.log_every=1"]), resume=run, progress=False)


def test_progress_is_shown_at_its_own_pace(
    clicks: Path, tmp_path: Path, deferred: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Recorder(Progress):
        def __init__(self, interval: float) -> None:
            self.interval, self.steps = interval, []

        def update(self, step: int, loss: float, samples_per_second: float) -> None:
            assert 0 < loss < 10 and (samples_per_second > 0) == (step > 1), "the first step is not timed"
            self.steps.append(step)

    for interval, expected in ((math.inf, [22]), (0.0, list(range(1, 23)))):
        shown = Recorder(interval)
        monkeypatch.setattr(trainer, "progress_for", lambda _, shown=shown: shown)
        train(load_recipe(clicks, [f"run.folder={tmp_path / str(interval)}", "run.epochs=1"]))
        assert shown.steps == expected


def test_the_state_of_an_optimizer_does_not_bring_its_implementation() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    fused = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    model(torch.randn(4, 3)).sum().backward()
    fused.step()
    plain = build_dense_optimizer(OptimizerConfig(), model.parameters())
    load_dense_optimizer(plain, fused.state_dict())
    assert plain.param_groups[0]["fused"] is None and fused.param_groups[0]["fused"] is True
    assert plain.param_groups[0]["lr"] == 0.1
    for parameter in model.parameters():
        assert torch.equal(plain.state[parameter]["exp_avg"], fused.state[parameter]["exp_avg"])
    plain.step()
    load_dense_optimizer(fused, plain.state_dict())
    assert fused.param_groups[0]["fused"] is True and float(fused.state[model.bias]["step"]) == 2
    fused.step()


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="Triton's interpreter is off: tests/gpu runs instead"
)
def test_training_with_the_kernels_for_gpus(
    shared_clicks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="the kernels for GPUs need Triton")
    small = ["run.steps=4", "run.batch_size=16", "run.log_every=2", "run.checkpoint_every=2"]
    small += ["data.split.validation=0.01", "data.split.test=0.01"]
    train(load_recipe(shared_clicks, [*small, f"run.folder={tmp_path / 'cpu'}"]), progress=False)
    with monkeypatch.context() as patch:
        patch.setenv("UNEQUAL_KERNELS", "triton")
        report = train(load_recipe(shared_clicks, [*small, f"run.folder={tmp_path / 'triton'}"]), progress=False)
    for one, other in zip(losses(tmp_path / "cpu"), losses(tmp_path / "triton"), strict=True):
        assert one[:2] == other[:2]
        assert one[2:] == pytest.approx(other[2:], abs=1e-5)
    again = evaluate_run(load_run(tmp_path / "triton"), tmp_path / "triton")
    assert again.log_loss == pytest.approx(report.log_loss, abs=1e-5), "its checkpoint loads on the CPU"
