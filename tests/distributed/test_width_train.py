"""Trainings inside a budget on several ranks: as much is kept as on one, all have one report, and find a budget together."""

import json

import pytest

from tests.distributed.test_train import evaluate_rank, run_rank
from unequal.data.config import GenerateConfig
from unequal.data.generate import cardinalities, generate
from unequal.recipe import load_recipe, load_run
from unequal.train.evaluate import evaluate_run
from unequal.train.trainer import train

CONFIG = GenerateConfig(rows=3000, tables=3, ids=300, dense=2, seed=3)
SETTINGS = [
    "run.epochs=1", "run.batch_size=128", "run.log_every=5", "run.workers=0", "run.threads=1", "tables.dim=8",
    "width.every=8", "width.budget=25%", *(f"tables.C{k + 1}.rows={ids}" for k, ids in enumerate(cardinalities(CONFIG))),
]  # fmt: skip

AS_ALONE = [*SETTINGS, "width.gradients=whole"]
"""rows are then worth what they are in one process"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "made"
    generate(folder, CONFIG)
    return folder / "recipe.toml"


@pytest.mark.parametrize("sharding", ["auto", "row_wise"])
def test_two_ranks_keep_what_one_keeps(pool, made, tmp_path, sharding):
    settings = [*AS_ALONE, f"tables.sharding={sharding}"]
    alone = train(load_recipe(made, [*settings, f"run.folder={tmp_path / 'alone'}"]), progress=False, device="cpu")
    run = tmp_path / "pair"
    reports = pool.run(run_rank, made, [*settings, f"run.folder={run}"], world=2)
    assert reports[0] == reports[1] == json.loads((run / "report.json").read_text())
    pair = reports[0]
    for name in ("full_values", "full_rows", "full_bytes", "rounds", "budget_share"):
        assert pair["width"][name] == alone.width[name]
    assert pair["width"]["kept"] == pytest.approx(alone.width["kept"], abs=0.01)
    assert pair["width"]["kept"] <= 0.25
    assert pair["width"]["pruned"] == pytest.approx(alone.width["pruned"], rel=0.1)
    assert pair["width"]["bytes"] == sum(pair["embedding_bytes"].values())
    assert set(pair["width"]["by_popularity"]) == set(alone.width["by_popularity"])
    assert (run / "width.svg").is_file()
    again = [evaluate_run(load_run(run), run, device="cpu").to_json(), *pool.run(evaluate_rank, run, world=2)]
    assert all(report["log_loss"] == pytest.approx(pair["log_loss"], abs=1e-6) for report in again)
    assert all(report["width"]["values"] == pair["width"]["values"] for report in again)


@pytest.mark.parametrize("sharding", ["auto", "row_wise"])
def test_with_room_for_all_two_ranks_learn_what_one_learns(pool, made, tmp_path, sharding):
    """Where there is not, ranks give the last room between two rounds to other new ids than one process does."""
    settings = [*AS_ALONE, "width.budget=100%", f"tables.sharding={sharding}"]
    alone = train(load_recipe(made, [*settings, f"run.folder={tmp_path / 'alone'}"]), progress=False, device="cpu")
    pair = pool.run(run_rank, made, [*settings, f"run.folder={tmp_path / 'pair'}"], world=2)[0]
    assert pair["log_loss"] == pytest.approx(alone.log_loss, abs=1e-5)
    assert pair["width"]["values"] == alone.width["values"] and pair["width"]["live_rows"] == alone.width["live_rows"]


def test_two_ranks_count_unbounded_ids_together(pool, made, tmp_path):
    none = [f"tables.C{number + 1}.rows=none" for number in range(3)]
    alone = train(
        load_recipe(made, [*AS_ALONE, *none, f"run.folder={tmp_path / 'alone'}"]), progress=False, device="cpu"
    )
    pair = pool.run(run_rank, made, [*AS_ALONE, *none, f"run.folder={tmp_path / 'pair'}"], world=2)[0]
    rows = [load_run(tmp_path / run).width.rows for run in ("alone", "pair")]
    assert rows[0] == rows[1] and rows[0].keys() == {"C1", "C2", "C3"}
    assert pair["width"]["full_rows"] == alone.width["full_rows"] == sum(rows[0].values())
    assert pair["width"]["kept"] == pytest.approx(alone.width["kept"], abs=0.01) and pair["width"]["kept"] <= 0.25


def test_two_ranks_find_a_budget_together(pool, made, tmp_path):
    run = tmp_path / "run"
    more = ["width.budget=auto", "width.tolerance=10", "width.auto_steps=2", "run.steps=4", f"run.folder={run}"]
    reports = pool.run(run_rank, made, [*SETTINGS, *more], world=2)
    assert reports[0] == reports[1]
    assert reports[0]["steps"] == 4 and reports[0]["width"]["budget_share"] == 0.015
    assert len(reports[0]["width"]["search"]) == 7
