"""The trainer: what a run leaves behind, when it stops, and what it refuses."""

import json
import math
from pathlib import Path

import pytest
import torch

from unequal.batch import Batch
from unequal.errors import UserError
from unequal.recipe import load_recipe, load_run
from unequal.train import checkpoint, trainer
from unequal.train.evaluate import evaluate_run
from unequal.train.session import Score
from unequal.train.trainer import train, weighted_loss

KEYS = {
    "auc", "normalized_entropy", "log_loss", "calibration", "samples_per_second", "steps", "seed", "peak_memory_bytes",
    "embedding_bytes",
}  # fmt: skip


def settings(folder: Path, *more: str) -> list[str]:
    return [f"run.folder={folder}", *more]


def log(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steps_saved(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))


def test_a_run_learns_and_leaves_everything_behind(clicks: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    report = train(load_recipe(clicks, settings(run, "run.epochs=4")), progress=False)
    assert report.auc > 0.65 and report.part == "test" and report.samples == 400
    assert report.steps == 4 * 22 and report.samples_per_second > 0
    assert set(report.embedding_bytes) == {"weights", "optimizer", "directory"}
    written = json.loads((run / "report.json").read_text())
    assert written == report.to_json() and set(written) >= KEYS
    assert load_recipe(run / "recipe.toml").run.folder == str(run)
    assert len(list(run.glob("events.out.tfevents.*"))) == 1
    entries = log(run)
    assert [entry["step"] for entry in entries if entry["kind"] == "train"] == list(range(5, 89, 5))
    assert [entry["step"] for entry in entries if entry["kind"] == "validation"] == [22, 44, 66, 88]
    assert 88 in steps_saved(run) and report.best_step in steps_saved(run)


def test_tensorboard_reads_the_events(clicks: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(load_recipe(clicks, settings(tmp_path / "run", "run.epochs=1")), progress=False)
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    assert {"train/loss", "validation/auc"} <= set(events.Tags()["scalars"])
    assert [scalar.step for scalar in events.Scalars("train/loss")] == [5, 10, 15, 20]


def test_the_same_seed_repeats_bitwise_and_another_does_not(clicks: Path, tmp_path: Path) -> None:
    reports = [
        train(load_recipe(clicks, settings(tmp_path / name, f"run.seed={seed}")), progress=False)
        for name, seed in (("a", 3), ("b", 3), ("c", 4))
    ]
    assert reports[0].log_loss == reports[1].log_loss != reports[2].log_loss


def evaluations_seem(monkeypatch: pytest.MonkeyPatch, *values: float) -> None:
    """The order of good and bad evaluations, which a training of a few seconds leaves to chance."""
    rest = iter(values)
    monkeypatch.setattr(Score, "value", property(lambda self: next(rest)))


def test_the_best_evaluation_is_what_is_scored(clicks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluations_seem(monkeypatch, 0.5, 0.9, 0.6, 0.7, 0.5, 0.9, 0.6, 0.7)
    run, settled = tmp_path / "run", ["run.epochs=4", "run.keep_checkpoints=1"]
    report = train(load_recipe(clicks, settings(run, *settled)), progress=False)
    assert report.steps == 88 and report.best_step == 44
    assert steps_saved(run) == [44, 88]
    again = evaluate_run(load_run(run), run)
    assert (again.auc, again.log_loss, again.best_step) == (report.auc, report.log_loss, 44)
    validation = evaluate_run(load_run(run), run, part="validation")
    assert [validation.auc] == [
        entry["auc"] for entry in log(run) if entry["kind"] == "validation" and entry["step"] == 44
    ]
    more = [*settled, "run.select_best=false"]
    last = train(load_recipe(clicks, settings(tmp_path / "last", *more)), progress=False)
    assert last.best_step is None and last.log_loss != report.log_loss


def test_early_stop(clicks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluations_seem(monkeypatch, 0.5, 0.6, 0.4, 0.6, 0.9)
    more = ("run.epochs=50", "run.early_stop=2", "run.evaluate_every=11")
    report = train(load_recipe(clicks, settings(tmp_path / "run", *more)), progress=False)
    assert report.best_step == 22 and report.steps == 44
    with pytest.raises(UserError, match=r"run.early_stop: expected a validation part"):
        more = ("run.early_stop=2", "data.split.validation=0")
        train(load_recipe(clicks, settings(tmp_path / "b", *more)), progress=False)


def test_a_limit_of_steps(clicks: Path, tmp_path: Path) -> None:
    report = train(load_recipe(clicks, settings(tmp_path / "run", "run.steps=7")), progress=False)
    assert report.steps == 7 and steps_saved(tmp_path / "run") == [7]


def test_no_test_part_scores_validation_and_none_scores_nothing(clicks: Path, tmp_path: Path) -> None:
    report = train(load_recipe(clicks, settings(tmp_path / "a", "data.split.test=0", "run.steps=3")), progress=False)
    assert report.part == "validation" and report.auc is not None
    more = ("data.split.test=0", "data.split.validation=0", "run.steps=3")
    report = train(load_recipe(clicks, settings(tmp_path / "b", *more)), progress=False)
    assert report.part is None and report.auc is None and report.samples == 0


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_schedule_ends_with_the_run(clicks: Path, tmp_path: Path, kind: str) -> None:
    run = tmp_path / "run"
    train(load_recipe(clicks, settings(run, f"schedule.kind={kind}", "run.steps=20")), progress=False)
    factors = [entry["learning_rate_factor"] for entry in log(run) if entry["kind"] == "train"]
    assert factors == sorted(factors, reverse=True) and factors[-1] < 0.1
    assert load_recipe(run / "recipe.toml").schedule.total_steps == 20


def test_a_run_folder_is_not_used_twice(clicks: Path, tmp_path: Path) -> None:
    recipe = load_recipe(clicks, settings(tmp_path / "run", "run.steps=2"))
    train(recipe, progress=False)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"already holds a run; continue it with --resume"):
        train(recipe, progress=False)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_run_folders_are_numbered(clicks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = [train(load_recipe(clicks, ["run.steps=1"]), progress=False).run for _ in range(2)]
    assert names == ["runs/clicks-1", "runs/clicks-2"]


def test_divergence_is_named_and_harms_no_checkpoint(
    clicks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    before = train(load_recipe(clicks, settings(run, "run.steps=10")), progress=False)
    monkeypatch.setattr(trainer, "weighted_loss", lambda logits, batch: logits.sum() * math.nan)
    with pytest.raises(UserError, match=r"loss of step 11 is nan; lower .* the checkpoint step-00000010 is intact"):
        train(load_run(run, overrides=["run.steps=20"]), resume=run, progress=False)
    assert evaluate_run(load_run(run), run).log_loss == before.log_loss


def test_weights_that_are_not_finite_are_never_saved(clicks: Path, tmp_path: Path) -> None:
    more = ("optimizer.dense=sgd", "optimizer.dense_lr=1e30", "run.checkpoint_every=1", "run.keep_checkpoints=99")
    with pytest.raises(UserError, match=r"step \d+.*; lower optimizer.dense_lr"):
        train(load_recipe(clicks, settings(tmp_path / "run", *more)), progress=False)
    for step in steps_saved(tmp_path / "run"):
        saved = checkpoint.load(checkpoint.path_of(tmp_path / "run" / "checkpoints", step))
        assert all(tensor.isfinite().all() for tensor in saved.model_state.values())


def test_dropped_rows_are_counted(clicks: Path, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    first = clicks.parent / "clicks-0.parquet"
    table = pq.read_table(first)
    age = table["age"].to_pylist()
    age[7] = math.nan
    pq.write_table(table.set_column(table.schema.get_field_index("age"), "age", pa.array(age, pa.float32())), first)
    with pytest.raises(UserError, match=r"clicks-0.parquet, column 'age', row 7"):
        train(load_recipe(clicks, settings(tmp_path / "a")), progress=False)
    report = train(load_recipe(clicks, settings(tmp_path / "b", "data.bad_rows=drop")), progress=False)
    assert sum(report.dropped["train"].values()) == 1


def test_weights_scale_the_loss() -> None:
    logits, labels = torch.tensor([[0.3], [-1.0], [2.0]]), torch.tensor([[1.0], [0.0], [0.0]])
    batch = Batch((), torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64), labels=labels)
    each = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none").squeeze(1)
    assert torch.equal(weighted_loss(logits, batch), each.mean())
    batch.sample_weights = torch.tensor([1.0, 0.0, 3.0])
    torch.testing.assert_close(weighted_loss(logits, batch), (each[0] + 3 * each[2]) / 4)
    batch.sample_weights = torch.zeros(3)
    assert weighted_loss(logits, batch) == 0
