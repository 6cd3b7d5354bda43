"""Recipes: what a file means, and what is said about one that is wrong."""

import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from unequal.data.generate import cardinalities
from unequal.errors import UserError
from unequal.recipe import apply_override, build_embeddings, build_tables, load_recipe, load_run, parse_recipe
from unequal.train.width_config import WidthConfig
from unequal.width import Width

GOOD = """
[data]
files = ["part-*.parquet"]
labels = ["click"]
dense = ["age"]
categorical = ["user", "item_id", "city"]
sequences = ["history", "genres"]
[data.split]
by = "time"
column = "timestamp"
[tables]
dim = 8
admit_after = 2
[tables.item]
columns = ["item_id", "history"]
rows = 1000
dim = 4
[pooling]
genres = "mean"
[model]
kind = "sequence"
history = { history = "item_id" }
[optimizer]
tables = "adam"
tables_lr = 0.01
tables_options = { beta1 = 0.8 }
[run]
epochs = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "clicks.toml"
    path.write_text(GOOD)
    return path


def test_every_field_arrives(file: Path) -> None:
    recipe = load_recipe(file)
    assert recipe.name == "clicks"
    assert recipe.data.files == (str(file.parent / "part-*.parquet"),)
    assert recipe.data.split.column == "timestamp"
    assert recipe.optimizer.build_tables().hyperparameters()[0] == 0.8
    assert recipe.run.epochs == 3 and recipe.run.batch_size == 2048


def test_features_know_their_tables(file: Path) -> None:
    features = build_tables(load_recipe(file))
    assert list(features) == ["user", "item_id", "city", "history", "genres"]
    assert features["item_id"].table is features["history"].table
    assert features["item_id"].table.rows == 1000 and features["item_id"].table.dim == 4
    assert features["item_id"].table.admit_after == 1, "a default for unbounded ids is not one for tables with rows"
    assert features["user"].table.admit_after == 2 and features["user"].table.rows is None
    assert [feature.pooling for feature in features.values()] == ["sum", "sum", "sum", None, "mean"]
    assert build_embeddings(load_recipe(file)).tables["user"].dtype == torch.float32


def test_a_table_without_columns_is_that_of_its_name(file: Path) -> None:
    recipe = load_recipe(file, ["tables.user.rows=10"])
    assert build_tables(recipe)["user"].table.rows == 10


def test_the_resolved_recipe_reads_back_equal(file: Path, tmp_path: Path) -> None:
    recipe = load_recipe(file)
    copy = tmp_path / "elsewhere" / "recipe.toml"
    copy.parent.mkdir()
    copy.write_text(recipe.to_toml())
    assert load_recipe(copy) == recipe
    assert load_recipe(copy).to_toml() == recipe.to_toml()
    assert "keep_checkpoints = 2" in recipe.to_toml(), "defaults are written out"


def test_the_hash_follows_what_is_trained(file: Path) -> None:
    recipe = load_recipe(file)
    assert recipe.hash() == load_recipe(file, ["run.folder=elsewhere"]).hash()
    assert recipe.hash() != load_recipe(file, ["run.seed=1"]).hash()


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("run.folder=runs/a b", "runs/a b"),
        ('run.folder="quoted"', "quoted"),
        ("run.folder=2024-01-01", "2024-01-01"),
        ("run.folder=5", 5),
        ("run.folder=1_000", 1000),
        ("run.folder=1e-3", 1e-3),
        ("run.folder=true", True),
        ("run.folder=[a, b]", ["a", "b"]),
        ("run.folder=[1, 2]", [1, 2]),
        ("run.folder={a = 1}", {"a": 1}),
        ("run.folder=a=b", "a=b"),
        ("run.folder=a\nb = 3", "a\nb = 3"),
    ],
)
def test_override_values(override: str, value: Any) -> None:
    mapping: dict[str, Any] = {}
    apply_override(mapping, override)
    assert mapping == {"run": {"folder": value}}


def test_overrides_reach_names_with_dots() -> None:
    mapping: dict[str, Any] = {"tables": {}}
    apply_override(mapping, 'tables."a.b".rows=3')
    assert mapping == {"tables": {"a.b": {"rows": 3}}}


@pytest.mark.parametrize("override", ["run.epochs", "=3", "run..epochs=3", "a b=3", ""])
def test_an_override_that_is_none(override: str) -> None:
    with pytest.raises(UserError, match=r"^--set: expected section.field=value"):
        apply_override({}, override)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.epoch=3", "run.epoch: expected a field of [run], got 'epoch'; did you mean 'epochs'?"),
        ("rum.epochs=3", "rum: expected a section of the recipe, got 'rum'; did you mean '[run]'?"),
        ("run.epochs=0", "run.epochs: expected 1 or more, got 0"),
        ("run.epochs=many", "run.epochs: expected an integer, got 'many'"),
        ("run.batch_size=-1", "run.batch_size: expected 1 or more, got -1"),
        ("run.folder=runs/{nam}", "run.folder: expected a path in which only {name} is replaced, got 'runs/{nam}'"),
        ("data.dense=age", "data.dense: expected a list of strings, got 'age'; write [\"age\"]"),
        ("data.files=[]", "data.files: expected Parquet files, or a section [data.generate], got []"),
        ("tables.dim=0", "tables.dim: expected 1 to 4096, got 0"),
        ("tables.dtype=fp8", "tables.dtype: expected fp32, fp16 or bf16, got 'fp8'"),
        ("tables.dimm=4", "tables.dimm: expected a field of [tables], got 'dimm'; did you mean 'dim'?"),
        ("tables.named=4", "tables.named: expected a field of [tables], got 'named'"),
        ("tables.item.rows=0", "tables.item.rows: expected 1 to 2³²−1"),
        ("tables.item.row=5", "tables.item.row: expected a field of [tables.item], got 'row'; did you mean 'rows'?"),
        ("tables.item.admit_after=3", "tables.item.admit_after: expected 1 for a table with `rows`, got 3"),
        (
            "tables.item.columns=[item_ids]",
            "tables.item.columns: expected columns of data.categorical or data.sequences",
        ),
        ("tables.userr.dim=4", "got 'userr'; did you mean 'user'? or name the table's columns"),
        ("tables.other.columns=[history]", "tables.other.columns: expected columns of no other table"),
        ("tables.user.columns=[city]", "tables.user.columns: expected also the column 'user'"),
        ("pooling.genre=sum", "pooling.genre: expected a column of data.categorical or data.sequences, got 'genre'"),
        ("pooling.genres=max", "pooling.genres: expected one of sum, mean, none, got 'max'"),
        ("pooling.genres=none", "pooling.genres: expected sum or mean for a column that is no history"),
        ("pooling.history=sum", "pooling.history: expected none for a history of the sequence model, got 'sum'"),
        ("model.history={history = 'item'}", "got 'item'; did you mean 'item_id'?"),
        ("model.history={}", "model.history: expected a history column and its target"),
        ("model.kind=dlrn", "model.kind"),
        ("optimizer.tables=adamm", "did you mean 'adam'?"),
        ("optimizer.dense=lion", "optimizer.dense: expected one of adam, adamw, sgd, adagrad, got 'lion'"),
        ("optimizer.tables_lr=-1", "optimizer.tables_lr: expected a number of 0 or more, got -1"),
        ("optimizer.tables_options={trust = 1}", "optimizer.tables_options.trust: expected a hyperparameter of adam"),
        ("optimizer.tables_options.beta1=2", "optimizer.tables_options.beta1: expected a number below 1, got 2.0"),
        ("schedule.kind=cosin", "schedule.kind: expected one of constant, linear, cosine, inverse_sqrt, got 'cosin'"),
        ("schedule.final=2", "schedule.final: expected a factor between 0 and 1, got 2"),
        ("data.split.by=tim", "data.split.by: expected one of time, column, fraction, got 'tim'"),
        ("data.generate.rows=10", "data.generate: expected no such section where data.files names files"),
    ],
)
def test_a_wrong_field_is_answered_in_one_line(file: Path, override: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe(file, [override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_section_that_is_no_section(file: Path) -> None:
    with pytest.raises(UserError, match=r"'run.epochs' to be a section"):
        load_recipe(file, ["run.epochs.x=3"])
    with pytest.raises(UserError, match=r"^run: expected a table"):
        parse_recipe(tomllib.loads(GOOD) | {"run": 3})
    with pytest.raises(UserError, match=r"^tables: expected a section \[tables\]"):
        parse_recipe(tomllib.loads(GOOD) | {"tables": 3})
    with pytest.raises(UserError, match=r"^data: expected a section \[data\]"):
        parse_recipe({})


def test_syntax_errors_say_where(file: Path) -> None:
    file.write_text(GOOD + "epochs 3\n")
    with pytest.raises(UserError, match=r"clicks.toml: not valid TOML: .*at line \d+, column \d+"):
        load_recipe(file)
    file.write_bytes(b'name = "\xff"\n')
    with pytest.raises(UserError, match="expected a TOML file in UTF-8"):
        load_recipe(file)


def test_a_missing_file_suggests_its_neighbour(file: Path) -> None:
    with pytest.raises(UserError, match=r"no such recipe file; did you mean 'clicks.toml'\?"):
        load_recipe(file.with_name("click.toml"))
    with pytest.raises(UserError, match=r"did you mean 'default'\?"):
        load_recipe("defualt")
    with pytest.raises(UserError, match=r"got a folder without a recipe.toml"):
        load_recipe(file.parent)


def test_a_plain_model_reads_a_history_pooled(file: Path) -> None:
    recipe = load_recipe(file, ["model.kind=dlrm", "model.history={}"])
    assert build_tables(recipe)["history"].pooling == "sum"


def test_a_run_goes_on_longer_but_not_otherwise(file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.toml").write_text(load_recipe(file).to_toml())
    assert load_run(run, None, ["run.epochs=9"]).run.epochs == 9
    assert load_run(run, file, ["run.checkpoint_every=7"]).run.checkpoint_every == 7
    with pytest.raises(UserError, match=r"^tables.dim: expected 8 as in the run .*, got 16"):
        load_run(run, file, ["tables.dim=16"])
    with pytest.raises(UserError, match=r"^run.seed: expected 0 as in the run"):
        load_run(run, None, ["run.seed=1"])
    with pytest.raises(UserError, match="expected the folder of a run, got no such folder"):
        load_run(tmp_path / "none")


@pytest.mark.parametrize(
    "example",
    [path for path in sorted(Path(__file__).parents[1].glob("examples/*.toml")) if path.stem != "topology"],
    ids=lambda path: path.name,
)
def test_the_examples_are_valid(example: Path) -> None:
    assert load_recipe(example).features


def test_the_default_recipe_is_packaged() -> None:
    recipe = load_recipe("default")
    assert recipe.data.generate is not None and recipe.width is not None
    ids = dict(zip([*recipe.data.categorical[:-1], "items"], cardinalities(recipe.data.generate), strict=True))
    assert {name: table.rows for name, table in recipe.tables.named.items()} == ids, "every table has a row for each id"


WIDTH = [
    "width.budget=25%",
    "tables.admit_after=1",
    *(f"tables.{name}.rows=100" for name in ("user", "city", "genres")),
]


def test_a_width_arrives(file: Path, tmp_path: Path) -> None:
    assert load_recipe(file).width is None and "[width]" not in load_recipe(file).to_toml()
    fields_of_width = ["width.every=7", "width.policy=fiited", "width.thresholds=column"]
    recipe = load_recipe(file, [*WIDTH, "width.tables.item='2 MB'", *fields_of_width])
    width = build_embeddings(recipe).width
    assert width is not None and (width.every, width.policy, width.thresholds) == (7, "fiited", "column")
    assert width.common.share == 0.25 and width.budget_of("item").size == 2_000_000
    copy = tmp_path / "copy.toml"
    copy.write_text(recipe.to_toml())
    assert load_recipe(copy) == recipe
    assert recipe.hash() != load_recipe(file, WIDTH).hash()
    assert load_recipe(file, WIDTH).hash() == load_recipe(file, [*WIDTH, "width.tolerance=0.5"]).hash()


def test_every_field_of_a_width_is_one_of_a_recipe() -> None:
    own = {f.name: f.default for f in fields(Width)}
    found = {f.name: f.default for f in fields(WidthConfig)}
    assert own == {name: found[name] for name in own}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("width.budgt=10%", "width.budgt: expected a field of [width], got 'budgt'; did you mean 'budget'?"),
        ("width.budget=ten", "width.budget: expected a share like '10%', a size like '2 GB', or 'auto', got 'ten'"),
        ("width.budget=120%", "width.budget: expected more than 0% and at most 100%, got '120%'"),
        ("width.budget=0.001%", "width.budget: expected at least"),
        ("width.budget=[1]", "width.budget: expected a string or a number, got [1]"),
        ("width.policy=waterfilling", "got 'waterfilling'; did you mean 'water-filling'?"),
        (
            "width.chunk=3",
            "width.chunk for table 'user': expected a divisor of its dim 8 that makes at most 63 chunks: one of [1, 2, 4, 8], "
            "got 3",
        ),
        ("width.every=0", "width.every: expected 1 or more steps, got 0"),
        ("width.every=often", "width.every: expected an integer, got 'often'"),
        ("width.most=2", "width.most: expected more than 0, at most 1, got 2"),
        ("width.thresholds=column", "width.thresholds: expected 'one' or 'table' with policy 'water-filling'"),
        ("width.start=empty", "width.start: expected 'small' or 'full', got 'empty'"),
        ("width.tolerance=-1", "width.tolerance: expected a share of the loss, 0 or more, got -1"),
        ("width.auto_steps=-1", "width.auto_steps: expected 0 or more, got -1"),
        ("width.tables.items=10%", "width.tables.items: expected a table of the recipe, got 'items'; did you mean 'item'?"),
        ("width.tables.item=auto", "only the common budget may be \"auto\""),
        ("tables.city.sharding=data_parallel", "tables.city.sharding: expected one of auto, table_wise, row_wise"),
        ("width.rows.user=0", "width.rows of table 'user': expected how many ids it has, 1 or more, got 0"),
        ("width.rows.users=9", "width.rows: expected tables of the model: user"),
    ],
)  # fmt: skip
def test_a_wrong_width_is_answered_in_one_line(file: Path, override: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe(file, [*WIDTH, override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_width_and_rows_that_rare_ids_share(file: Path) -> None:
    with pytest.raises(UserError, match=r"width: expected no such section where table 'user' has admit_after = 2"):
        load_recipe(file, ["width.budget=2 MB"])


def test_a_run_goes_on_with_the_budget_that_was_found(file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.toml").write_text(load_recipe(file, [*WIDTH, "width.budget=12.5%"]).to_toml())
    again = load_run(run, file, [*WIDTH, "width.budget=auto", "width.tolerance=0.1"])
    assert again.width is not None and again.width.budget == "12.5%"
    with pytest.raises(UserError, match=r"^width.budget: expected '12.5%' as in the run"):
        load_run(run, file, [*WIDTH, "width.budget=50%"])
