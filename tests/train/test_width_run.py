"""A run inside a budget: what it tells, what it leaves behind, how it is evaluated and resumed, and how a budget is found."""

import json
import math
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from unequal.cli.show import show_report, size, width_lines
from unequal.data.config import GenerateConfig
from unequal.data.generate import cardinalities, generate
from unequal.errors import UserError
from unequal.exchange.mesh import Mesh
from unequal.plan.placement import WHOLE_ROWS
from unequal.plan.plan import predict_memory
from unequal.recipe import build_embeddings, load_recipe, load_run
from unequal.train import trainer
from unequal.train.evaluate import evaluate_run
from unequal.train.parallel import tensors_of
from unequal.train.planning import plan_recipe
from unequal.train.processes import Ranks
from unequal.train.session import open_data, training_reader
from unequal.train.trainer import train
from unequal.train.width_plot import picture
from unequal.train.width_report import Held, by_popularity
from unequal.train.width_search import Outcome, found_before, search_budget

CONFIG = GenerateConfig(rows=3000, tables=3, ids=300, dense=2, seed=3)
IDS = 300


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The recipe of generated data, each table with as many rows as there are ids."""
    folder = tmp_path_factory.mktemp("data") / "made"
    generate(folder, CONFIG)
    path = folder / "recipe.toml"
    rows = [f"C{number + 1} = {{ rows = {ids} }}" for number, ids in enumerate(cardinalities(CONFIG))]
    text = path.read_text()
    assert text.count("[tables]\ndim = 16\n") == 1
    path.write_text(text.replace("[tables]\ndim = 16\n", "\n".join(["[tables]", "dim = 8", *rows, ""])))
    return path


def recipe_of(made: Path, folder: Path, *more: str):
    few = ["run.epochs=1", "run.batch_size=64", "run.log_every=5", "run.workers=0", "run.threads=1", "width.every=8"]
    return load_recipe(made, [f"run.folder={folder}", *few, "width.budget=25%", *more])


def log(folder: Path, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def test_a_run_tells_what_it_kept(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    report = train(recipe_of(made, run), progress=False)
    rounds = log(run, "width")
    assert [line["step"] for line in rounds] == [8, 16, 24, 32]
    assert all({"pruned", "regained", "kept", "live_rows", "bytes", "net_compression"} <= set(line) for line in rounds)
    assert all(0 < line["kept"] <= 0.25 for line in rounds)
    assert all(line["width_kept"] <= 0.25 for line in log(run, "train"))
    width = report.width
    assert width["rounds"] == 4 and width["pruned"] == sum(line["pruned"] for line in rounds) > 0
    assert width["regained"] == sum(line["regained"] for line in rounds) > 0
    assert width["full_values"] == 8 * IDS and width["full_rows"] == IDS
    assert width["full_bytes"] == IDS * (8 * 4 + 4), "row-wise AdaGrad keeps a number per row"
    assert width["kept"] == width["values"] / (8 * IDS) <= 0.25
    assert math.isclose(width["gross_compression"], 1 / width["kept"])
    assert width["bytes"] == sum(report.embedding_bytes.values())
    assert math.isclose(width["net_compression"], width["full_bytes"] / width["bytes"])
    assert json.loads((run / "report.json").read_text())["width"] == width
    show_report(report)
    shown = capsys.readouterr().out
    assert f"{width['kept']:.1%}" in shown and "values pruned" in shown and "rows that live" in shown
    assert f"the tables take {size(width['bytes'])} instead of {size(width['full_bytes'])}" in " ".join(shown.split())


def test_a_run_inside_very_few_bytes(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All rows are equally wide: it is told, evaluated, exported and goes on like any other."""
    run = tmp_path / "run"
    report = train(recipe_of(made, run, "width.budget=3 kB"), progress=False)
    width = report.width
    assert width["uniform"] == ["C1", "C2", "C3"] and width["live_rows"] == IDS and width["bytes"] <= 3000
    assert report.embedding_bytes["directory"] == 0 and width["pruned"] == width["regained"] == 0
    show_report(report)
    shown = " ".join(capsys.readouterr().out.split())
    assert "rows of C1, C2, C3 are all equally wide" in shown and "uniform" in shown
    assert "equally wide" in (run / "width.svg").read_text()
    again = evaluate_run(load_run(run), run)
    assert (again.auc, again.log_loss, again.width) == (report.auc, report.log_loss, width)


def test_a_share_of_unbounded_ids(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are counted, once: what is kept is a share of the values of those that the training part has."""
    run = tmp_path / "run"
    none = [f"tables.C{number + 1}.rows=none" for number in range(3)]
    recipe = recipe_of(made, run, *none, "tables.C2.expected_rows=80", "run.steps=20", "run.checkpoint_every=20")
    report = train(recipe)
    assert "2 of 'C1', 255 of 'C3'" in " ".join(capsys.readouterr().out.split())
    rows = load_run(run).width.rows
    seen = [set(), set(), set()]
    for batch in training_batches(recipe):
        for number, ids in enumerate(seen):
            ids |= set(batch[f"C{number + 1}"].values.tolist())
    assert rows == {"C1": len(seen[0]), "C2": 80, "C3": len(seen[2])}
    width = report.width
    assert width["full_rows"] == sum(rows.values()) and 0.1 < width["kept"] <= 0.25
    assert width["net_compression"] == pytest.approx(width["full_bytes"] / width["bytes"])
    train(replace(load_run(run), run=replace(load_run(run).run, steps=30)), resume=run)
    assert "counted" not in capsys.readouterr().out, "what is known is not counted again"
    assert evaluate_run(load_run(run), run).width["full_rows"] == width["full_rows"]
    assert plan_recipe(recipe, world=2).tables.keys() == rows.keys(), "a plan takes about how many there are"


def test_tables_of_which_few_rows_are_read(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The share is of what is declared, so that all rows that are read may be whole in it; then they learn as whole ones do."""
    run = tmp_path / "run"
    many = [f"tables.C{number + 1}.rows={rows}" for number, rows in enumerate(cardinalities(CONFIG))]
    many[2] = "tables.C3.rows=5000"
    recipe = recipe_of(made, run, *many, "width.budget=10%", "run.steps=20", "run.checkpoint_every=20")
    report = train(recipe)
    assert "ids were counted: 255 of 'C3' (5,000 rows)" in " ".join(capsys.readouterr().out.split())
    assert load_run(run).width.rows == {"C3": 255}, "of the others all are read"
    width = report.width
    assert set(width["rates"].values()) == {1.0} and width["mean_width"] == 1
    assert width["full_rows"] == sum(cardinalities(CONFIG)[:2]) + 5000 and width["kept"] < 0.1
    train(replace(load_run(run), run=replace(load_run(run).run, steps=30)), resume=run)
    assert "counted" not in capsys.readouterr().out
    train(replace(recipe, run=replace(recipe.run, steps=40)), resume=run)  # as a restarted rank does
    assert load_run(run).width.rows == {"C3": 255}


def training_batches(recipe):
    with Ranks("cpu") as ranks:
        data = open_data(recipe, ranks.mesh)
        yield from training_reader(recipe, data, ranks.mesh)


def test_a_run_without_a_budget_says_nothing_of_it(clicks: Path, tmp_path: Path) -> None:
    report = train(load_recipe(clicks, [f"run.folder={tmp_path / 'run'}", "run.steps=6"]), progress=False)
    assert report.width == {} and not (tmp_path / "run" / "width.svg").exists()
    assert not any("width" in name for line in log(tmp_path / "run", "train") for name in line)


def test_unbounded_ids_say_what_is_known(clicks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = load_recipe(
        clicks, [f"run.folder={tmp_path / 'run'}", "width.budget=8 MB", "width.every=8", "run.steps=20"]
    )
    report = train(recipe, progress=False)
    assert report.width["budget_bytes"] == 8_000_000 and report.width["live_rows"] > 0
    rows = load_run(tmp_path / "run").width.rows
    assert rows and report.width["full_rows"] == sum(rows.values()), "as many as the training part has"
    show_report(report)
    assert "the tables take" in " ".join(capsys.readouterr().out.split())
    found = json.loads((tmp_path / "run" / "report.json").read_text())["width"]
    del found["kept"], found["gross_compression"], found["net_compression"]
    found |= {"full_rows": None, "full_values": None, "full_bytes": None}
    show_report(replace(report, width=found))  # of a run from before they were counted
    assert "ids are unbounded" in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "run" / "width.svg").read_text().startswith("<svg")


def test_a_saved_run_is_evaluated_as_it_is(made: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    report = train(recipe_of(made, run), progress=False)
    again = evaluate_run(load_run(run), run)
    assert (again.auc, again.log_loss) == (report.auc, report.log_loss)
    assert again.width == report.width


def test_a_resumed_run_goes_on_alike(made: Path, tmp_path: Path) -> None:
    whole = train(recipe_of(made, tmp_path / "whole"), progress=False)
    run = tmp_path / "run"
    train(recipe_of(made, run, "run.steps=12", f"schedule.total_steps={whole.steps}"), progress=False)
    resumed = train(load_run(run, overrides=["run.steps=0"]), resume=run, progress=False)
    assert resumed.steps == whole.steps and resumed.width["rounds"] == whole.width["rounds"]
    assert resumed.log_loss == whole.log_loss
    assert resumed.width == whole.width


def test_values_that_are_not_finite_are_found(made: Path, tmp_path: Path) -> None:
    recipe = recipe_of(made, tmp_path / "run")
    embeddings = build_embeddings(recipe)
    model = torch.nn.Linear(1, 1)
    model.embeddings = embeddings
    storage = embeddings._storages["C3"]
    storage.locate(torch.arange(20), insert=True)
    found = dict(tensors_of(model, embeddings))
    assert found["embeddings.C3.weight"].numel() > 0 and "embeddings.C3.sum" in found
    assert all(tensor.isfinite().all() for tensor in found.values())
    state = storage.state()
    state["weight"][3] = math.nan
    storage.load(state)
    wrong = [name for name, part in tensors_of(model, embeddings) if not part.isfinite().all()]
    assert wrong == ["embeddings.C3.weight"]


def test_a_plan_knows_the_budget(made: Path, tmp_path: Path) -> None:
    narrow = recipe_of(made, tmp_path / "run", "tables.C3.rows=2000000", "data.window=1000")
    plans = [plan_recipe(recipe, world=2) for recipe in (replace(narrow, width=None), narrow)]
    whole, less = ([rank["weights"] + rank["optimizer"] for rank in predict_memory(plan)] for plan in plans)
    assert all(placed.kind in WHOLE_ROWS for placed in plans[1].tables.values())
    assert sum(whole) >= 2_000_000 * (8 * 4 + 4) and sum(less) < 0.3 * sum(whole)


def test_wide_rows_are_the_useful_ones(made: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    report = train(recipe_of(made, run), progress=False)
    curves = report.width["by_popularity"]
    assert set(curves) == {"", "C1", "C2", "C3"}
    places, widths = zip(*curves[""])
    assert list(places) == sorted(places) and all(0 <= width <= 1 for width in widths)
    assert widths[0] > 2 * widths[-1]
    none = build_embeddings(recipe_of(made, run, "width.policy=none"))
    assert by_popularity(none, Mesh()) == {}, "where nothing is followed nothing is known"
    assert Held.of(build_embeddings(load_recipe(made)), Mesh()) is None


def test_the_picture_is_drawn(made: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(recipe_of(made, run, "run.evaluate_every=10"), progress=False)
    drawn = ElementTree.parse(run / "width.svg").getroot()
    lines = [element for element in drawn.iter() if element.tag.endswith("polyline")]
    assert len(lines) == 2 + 4, "AUC and memory; all tables and three of them"
    words = " ".join(element.text or "" for element in drawn.iter() if element.tag.endswith("text"))
    assert "validation AUC" in words and "memory of the tables" in words and "all tables" in words
    for line in lines:
        for pair in line.attrib["points"].split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= 1000 and 0 <= y <= 400


@pytest.mark.parametrize("name", ["<&>", "a" * 50])
def test_a_picture_of_odd_names_and_little_data(name: str) -> None:
    width = {"policy": "itep", "bytes": 10, "live_rows": 1, "mean_width": 1.0, "full_rows": None}
    lines = [{"kind": "width", "step": 1, "bytes": 10}, {"kind": "train", "step": 1, "loss": 0.5, "width_bytes": 10}]
    for curves in ({}, {name: [[1.0, 1.0]]}):
        for some in (lines, lines[:1], []):
            ElementTree.fromstring(picture(some, {**width, "by_popularity": curves}))


class Losses:
    """Trainings whose losses are known beforehand, by their budget."""

    def __init__(self, **losses: float) -> None:
        self.losses, self.tried = losses, []

    def __call__(self, recipe) -> Outcome:
        budget = "whole" if recipe.width is None else recipe.width.budget
        self.tried.append((budget, recipe.run.steps))
        return Outcome(self.losses[budget.replace(".", "_").rstrip("%")] if budget != "whole" else 1.0, 10_800)


def losses_of(*values: float) -> Losses:
    return Losses(**dict(zip(("50", "25", "12_5", "6_25", "3", "1_5"), values)))


def test_the_smallest_budget_that_holds_is_found(made: Path, tmp_path: Path) -> None:
    recipe = recipe_of(made, tmp_path / "run", "width.budget=auto", "width.tolerance=0.01", "width.auto_steps=7")
    attempt, said = losses_of(1.0, 1.02, 1.009, 1.5, 1.2, 1.0), []
    found = search_budget(recipe, attempt, said.append)
    assert attempt.tried == [(name, 7) for name in ("whole", "50%", "25%", "12.5%", "6.25%", "3%")]
    assert found.recipe == replace(recipe, width=replace(recipe.width, budget="12.5%"))
    assert [entry.holds for entry in found.tried] == [True, True, False, True, False, False]
    assert "at most 1.00% higher" in said[0] and "7 steps" in said[0] and "12.5%" in said[-1]
    none = search_budget(recipe, losses_of(1.1, 1.2), said.append)
    assert none.recipe == replace(recipe, width=None) and "all rows stay whole" in said[-1]
    all_hold = search_budget(recipe, losses_of(1, 1, 1, 1, 1, 1), said.append)
    assert all_hold.recipe.width.budget == "1.5%"


def test_a_budget_that_is_too_small_ends_the_search(made: Path, tmp_path: Path) -> None:
    recipe = recipe_of(made, tmp_path / "run", "width.budget=auto", "width.chunk=8")
    attempt, said = losses_of(1, 1, 1, 1, 1, 1), []
    assert search_budget(recipe, attempt, said.append).recipe.width.budget == "1.5%"
    small = recipe_of(made, tmp_path / "run", "width.budget=auto", "width.chunk=8", "width.tables.C3=50%")
    found = search_budget(small, losses_of(1, 1, 1, 1, 1, 1), said.append)
    assert found.recipe.width.budget != "1.5%" and any("not tried, too small" in line for line in said)


def test_unbounded_tables_are_tried_with_bytes(clicks: Path) -> None:
    recipe = load_recipe(clicks, ["width.budget=auto"])
    tried = []

    def attempt(narrow) -> Outcome:
        tried.append(None if narrow.width is None else narrow.width.budget)
        return Outcome(1.0, 10_000_000)

    assert search_budget(recipe, attempt, lambda line: None).recipe.width.budget == "150000 B"
    assert tried[:3] == [None, "5000000 B", "2500000 B"]


def test_a_search_and_then_the_run(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    recipe = recipe_of(made, run, "width.budget=auto", "width.tolerance=10", "width.auto_steps=3", "run.steps=9")
    report = train(recipe)
    said = capsys.readouterr().out
    assert "training without a budget" in said and 'found width.budget = "1.5%"' in said and "best so far" in said
    assert report.steps == 9 and report.width["budget_share"] == 0.015
    assert [entry["budget"] for entry in report.width["search"]] == [
        "none",
        "50%",
        "25%",
        "12.5%",
        "6.25%",
        "3%",
        "1.5%",
    ]
    assert any("budgets that were tried" in line for line in width_lines(report.width))
    assert load_run(run).width.budget == "1.5%" and found_before(recipe, run).width.budget == "1.5%"
    assert train(load_run(run, overrides=["run.steps=11"]), resume=run, progress=False).steps == 11


def test_a_search_does_not_begin_for_a_folder_that_is_taken(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    train(recipe_of(made, run, "run.steps=1"), progress=False)
    monkeypatch.setattr(trainer, "attempt", lambda *given, **more: pytest.fail("it began"))
    with pytest.raises(UserError, match=r"already holds a run; continue it with --resume"):
        train(recipe_of(made, run, "width.budget=auto"), progress=False)


def test_a_search_needs_a_validation_part(made: Path, tmp_path: Path) -> None:
    recipe = recipe_of(made, tmp_path / "run", "width.budget=auto", "data.split.validation=0")
    with pytest.raises(UserError, match=r"width.budget: expected a validation part to find a budget"):
        train(recipe, progress=False)
    assert not (tmp_path / "run").exists()


def test_a_trial_leaves_nothing_behind(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = recipe_of(made, tmp_path / "run", "run.steps=4", "run.checkpoint_every=1")
    before = sorted(tmp_path.rglob("*"))
    with trainer.Ranks("cpu") as ranks:
        outcome = trainer.attempt(recipe, shown=trainer.Progress(), ranks=ranks, plan=None)
    assert 0.1 < outcome.loss < 2 and outcome.bytes > 0
    assert sorted(tmp_path.rglob("*")) == before
