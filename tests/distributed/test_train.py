"""Whole trainings on several ranks: the same numbers as on one, the same bits every time, cut and resumed on any number."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.train.test_resume import assert_same_end, final_state, losses
from unequal.errors import UserError
from unequal.recipe import load_recipe, load_run
from unequal.train import checkpoint, trainer
from unequal.train.evaluate import evaluate_run
from unequal.train.planning import plan_recipe
from unequal.train.trainer import train

# Dropout draws other numbers on every rank.
SETTINGS = [
    "run.epochs=2", "model.dropout=0", "run.keep_checkpoints=1", "schedule.kind=cosine", "tables.sharding=row_wise",
]  # fmt: skip


class Cut(UserError):
    """Stands for a power cut between two steps, on all ranks at once."""


def run_rank(rank, world, recipe, settings, cut=None, resume=None, plan=None):
    """A training on a rank of the pool; gives the report."""
    whole = trainer.Trainer._step

    def cut_step(self, turn):
        if self.at.step == cut:
            raise Cut
        whole(self, turn)

    trainer.Trainer._step = cut_step
    try:
        loaded = load_recipe(recipe, settings) if resume is None else load_run(resume, overrides=settings)
        return train(loaded, resume=resume, progress=False, device="cpu", plan=plan).to_json()
    except Cut:
        return None
    finally:
        trainer.Trainer._step = whole


def evaluate_rank(rank, world, run):
    return evaluate_run(load_run(run), run, device="cpu").to_json()


@pytest.fixture(scope="module")
def alone(shared_clicks, tmp_path_factory):
    """The run of one rank that the others are compared with."""
    run = tmp_path_factory.mktemp("runs") / "alone"
    train(load_recipe(shared_clicks, [*SETTINGS, f"run.folder={run}"]), progress=False, device="cpu")
    return run


@pytest.fixture(scope="module")
def pair(pool, shared_clicks, tmp_path_factory):
    """The run of two ranks."""
    run = tmp_path_factory.mktemp("runs") / "pair"
    reports = pool.run(run_rank, shared_clicks, [*SETTINGS, f"run.folder={run}"], world=2)
    assert reports[0] == reports[1] == json.loads((run / "report.json").read_text())
    return run


def lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_close_runs(one: Path, other: Path) -> None:
    assert [entry[:3] for entry in losses(one)] == [entry[:3] for entry in losses(other)]
    for first, second in zip(lines(one), lines(other)):
        for key in ("loss", "auc", "log_loss", "samples", "learning_rate_factor"):
            if key in first:
                assert first[key] == pytest.approx(second[key], rel=2e-4), (first["step"], key)
    first, second = final_state(one), final_state(other)
    for name in first:
        if not name.startswith("random"):
            torch.testing.assert_close(first[name], second[name], rtol=2e-3, atol=2e-4, msg=name)


def test_two_ranks_train_what_one_does(alone, pair):
    assert_close_runs(alone, pair)
    one, two = (json.loads((run / "report.json").read_text()) for run in (alone, pair))
    for key in ("auc", "log_loss", "normalized_entropy", "calibration"):
        assert one[key] == pytest.approx(two[key], rel=1e-3)
    for key in ("steps", "samples", "part", "recipe_hash"):
        assert one[key] == two[key]
    assert (two["world"], two["ranks_per_node"]) == (2, 2)
    assert sum(two["embedding_bytes"].values()) > two["embedding_bytes_per_rank"] > 0
    assert two["embedding_bytes"]["weights"] == one["embedding_bytes"]["weights"]


def test_the_log_says_what_was_exchanged(pair):
    entries = [entry for entry in lines(pair) if entry["kind"] == "train"]
    for entry in entries:
        assert entry["exchange_inside_bytes_per_step"] > 0 == entry["exchange_across_bytes_per_step"]
        assert 0 < entry["exchange_time_share"] < 1
    exchange = json.loads((pair / "report.json").read_text())["exchange"]
    mean = sum(entry["exchange_inside_bytes_per_step"] for entry in entries) / len(entries)
    assert exchange["inside_bytes_per_step"] == pytest.approx(mean, rel=0.2)
    assert exchange["repeated_ids_bytes_per_step"] > exchange["inside_bytes_per_step"]


def test_two_ranks_repeat_bitwise(pool, shared_clicks, tmp_path, pair):
    run = tmp_path / "again"
    pool.run(run_rank, shared_clicks, [*SETTINGS, f"run.folder={run}"], world=2)
    assert_same_end(pair, run)


@pytest.mark.parametrize("step", [7, 22, 30])
def test_a_cut_run_of_two_ranks_ends_the_same(pool, shared_clicks, tmp_path, pair, step):
    run = tmp_path / "cut"
    assert pool.run(run_rank, shared_clicks, [*SETTINGS, f"run.folder={run}"], step, world=2) == [None, None]
    pool.run(run_rank, shared_clicks, [], None, run, world=2)
    assert_same_end(pair, run)


def test_three_ranks_with_dropout_and_empty_shares_repeat_and_resume_bitwise(pool, shared_clicks, tmp_path):
    # 1,400 rows in batches of 699: the last batch of an epoch has 2 rows for 3 ranks
    settings = ["run.epochs=4", "run.batch_size=699", "run.checkpoint_every=2", "run.log_every=3", "model.dropout=0.2"]
    runs = [tmp_path / name for name in ("whole", "cut")]
    pool.run(run_rank, shared_clicks, [*settings, f"run.folder={runs[0]}"], world=3)
    pool.run(run_rank, shared_clicks, [*settings, f"run.folder={runs[1]}"], 7, world=3)
    pool.run(run_rank, shared_clicks, [], None, runs[1], world=3)
    assert_same_end(*runs)


@pytest.mark.parametrize("model", [["model.encoder=transformer"], ["model.interaction=cross"]])
def test_empty_shares_go_through_every_model(pool, shared_clicks, tmp_path, model):
    settings = ["run.steps=6", "run.batch_size=699", "run.epochs=4", "model.dropout=0", "run.log_every=1", *model]
    runs = [tmp_path / name for name in ("one", "four")]
    train(load_recipe(shared_clicks, [*settings, f"run.folder={runs[0]}"]), progress=False, device="cpu")
    pool.run(run_rank, shared_clicks, [*settings, f"run.folder={runs[1]}"], world=4)
    assert_close_runs(*runs)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
def test_a_run_goes_on_with_another_number_of_ranks(pool, shared_clicks, tmp_path, alone, before, after):
    run = tmp_path / "run"
    settings = [*SETTINGS, f"run.folder={run}"]
    pool.run(run_rank, shared_clicks, settings, 25, world=before)
    assert checkpoint.list_steps(run / "checkpoints") == [22]
    pool.run(run_rank, shared_clicks, [], None, run, world=after)
    assert_close_runs(alone, run)


def test_a_run_is_scored_by_any_number_of_ranks(pool, pair):
    trained = json.loads((pair / "report.json").read_text())
    for world in (1, 2, 3):
        scores = pool.run(evaluate_rank, pair, world=world)
        for score in scores:
            assert score["auc"] == pytest.approx(trained["auc"], abs=1e-9)
            assert score["log_loss"] == pytest.approx(trained["log_loss"], rel=1e-6)
            assert (score["samples"], score["world"]) == (trained["samples"], world)
    here = evaluate_run(load_run(pair), pair, device="cpu")
    assert here.auc == pytest.approx(trained["auc"], abs=1e-9)


def test_sample_weights_and_standardized_columns(pool, clicks, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    for file in sorted(clicks.parent.glob("*.parquet")):
        table = pq.read_table(file)
        weights = [0.0 if k % 3 else float(k % 7) for k in range(len(table))]
        pq.write_table(table.append_column("weight", pa.array(weights)), file)
    # SGD: attention does not depend on its last bias, and Adam would scale the rounding errors of a gradient of 0 up to its rate.
    settings = [
        "data.sample_weight=weight", "data.dense_transform=standardize", "model.dropout=0", "run.epochs=1",
        "run.batch_size=10", "run.steps=60", "optimizer.dense=sgd", "optimizer.dense_lr=0.1",
    ]  # fmt: skip
    runs = [tmp_path / name for name in ("one", "two")]
    train(load_recipe(clicks, [*settings, f"run.folder={runs[0]}"]), progress=False, device="cpu")
    pool.run(run_rank, clicks, [*settings, f"run.folder={runs[1]}"], world=3)
    assert_close_runs(*runs)


def test_a_plan_that_is_given_is_followed_and_kept(pool, shared_clicks, tmp_path):
    path, run = tmp_path / "plan.json", tmp_path / "run"
    settings = ["run.steps=6", "run.checkpoint_every=3", "run.keep_checkpoints=9", f"run.folder={run}"]
    recipe = load_recipe(shared_clicks, [*settings, "tables.sharding=table_wise"])
    plan_recipe(recipe, world=2, device="cpu").save(path)
    report = pool.run(run_rank, shared_clicks, [*settings, "tables.sharding=table_wise"], None, None, path, world=2)[0]
    assert report["plan"] == ["table-wise: user, items"]
    assert (run / "plan.json").read_text() == path.read_text()
    said = pool.run(refused, shared_clicks, ["run.batch_size=65", "tables.sharding=table_wise"], path, world=2)
    assert said[0] == said[1] and "batch_size: planned with 64, now 65" in said[0]
    with pytest.raises(UserError, match="world: planned with 2, now 1"):
        train(recipe, progress=False, device="cpu", plan=path)


def refused(rank, world, recipe, settings, plan=None):
    with pytest.raises(UserError) as refusal:
        run_rank(rank, world, recipe, settings, plan=plan)
    return str(refusal.value)


def test_a_mistake_is_refused_by_all_ranks_alike(pool, shared_clicks, tmp_path, pair):
    said = pool.run(refused, shared_clicks, [f"run.folder={pair}"], world=2)
    assert said[0] == said[1] and "already holds a run" in said[0]


def diverge(rank, world, recipe, settings):
    if rank == 1:
        part_of_loss = trainer.part_of_loss
        trainer.part_of_loss = lambda *arguments: part_of_loss(*arguments) * float("nan")
    try:
        return refused(rank, world, recipe, settings)
    finally:
        if rank == 1:
            trainer.part_of_loss = part_of_loss


def test_divergence_of_one_rank_is_everybodys(pool, shared_clicks, tmp_path):
    said = pool.run(diverge, shared_clicks, [f"run.folder={tmp_path / 'run'}"], world=2)
    assert said[0] == said[1] and "between steps 1 and 5 the loss became nan" in said[0]
    assert "no checkpoint was written yet" in said[0]


def other_files(rank, world, recipe, settings, elsewhere):
    return refused(rank, world, recipe if rank == 0 else elsewhere, settings)


def test_ranks_that_see_different_files_are_told(pool, shared_clicks, tmp_path):
    elsewhere = shutil.copytree(shared_clicks.parent, tmp_path / "elsewhere") / shared_clicks.name
    (elsewhere.parent / "clicks-1.parquet").rename(elsewhere.parent / "clicks-2.parquet")
    said = pool.run(other_files, shared_clicks, [f"run.folder={tmp_path / 'run'}"], elsewhere, world=2)
    assert ["see different files" in line for line in said] == [True, True]
