"""Plans of recipes: measured on the data, the same every time, refused where the recipe changed."""

from pathlib import Path

import pytest

from unequal.data.reader import Reader
from unequal.errors import UserError
from unequal.exchange.mesh import Mesh
from unequal.plan.plan import predict_memory
from unequal.plan.topology import LinkRates, Topology
from unequal.recipe import Recipe, load_recipe, load_run
from unequal.stats.profile import Profile
from unequal.train.planning import dense_bytes, load_plan, plan_recipe, recipe_inputs
from unequal.train.profiling import profile_recipe
from unequal.train.session import open_data


def machines(nodes: int = 1, size: int = 2) -> Topology:
    return Topology.make(nodes=nodes, ranks_per_node=size, memory_per_rank=16 * 10**9)


def test_the_load_is_that_of_the_data(shared_clicks: Path) -> None:
    plan = plan_recipe(load_recipe(shared_clicks), machines())
    assert plan.inputs["load.user.rows"] == 50 and plan.inputs["load.items.rows"] == 30
    assert plan.inputs["load.items.ids_per_sample"] == pytest.approx(3, rel=0.1), "one item and two of its history"
    assert plan.inputs["load.user.source"] == "measured on 1,400 samples"
    assert set(plan.tables) == {"user", "items"} and plan.world == 2


def test_the_same_plan_every_time(shared_clicks: Path) -> None:
    first, second = (plan_recipe(load_recipe(shared_clicks), machines(2, 2)) for _ in range(2))
    assert first.to_json() == second.to_json()


def test_ranks_of_this_machine(shared_clicks: Path) -> None:
    plan = plan_recipe(load_recipe(shared_clicks), world=4, ranks_per_node=2)
    assert (plan.world, plan.ranks_per_node) == (4, 2)
    resized = plan_recipe(load_recipe(shared_clicks), machines(2, 8), world=3)
    assert (resized.world, resized.ranks_per_node) == (3, 3)
    with pytest.raises(UserError, match="expected a divisor"):
        plan_recipe(load_recipe(shared_clicks), machines(2, 2), world=3)
    with pytest.raises(UserError, match="expected a topology or the number of ranks"):
        plan_recipe(load_recipe(shared_clicks))


def test_a_recipe_may_ask_for_kinds(shared_clicks: Path) -> None:
    recipe = load_recipe(shared_clicks, ["tables.sharding=row_wise", "tables.items.sharding=table_wise"])
    plan = plan_recipe(recipe, machines())
    assert plan.tables["user"].kind == "row_wise" and plan.tables["items"].kind == "table_wise"
    known = load_recipe(shared_clicks, ["tables.user.expected_rows=5_000_000"])
    assert plan_recipe(known, machines()).inputs["load.user.rows"] == 5_000_000


def test_a_plan_is_refused_when_the_recipe_changed(shared_clicks: Path, tmp_path: Path) -> None:
    recipe, file = load_recipe(shared_clicks), tmp_path / "plan.json"
    plan = plan_recipe(recipe, machines())
    plan.save(file)
    assert load_plan(file, recipe, world=2) == plan
    assert load_plan(file, load_recipe(shared_clicks, ["run.epochs=9", "optimizer.dense_lr=1"]), world=2) == plan
    for overrides, world, message in (
        (["run.batch_size=128"], 2, "batch_size: planned with 64, now 128"),
        (["tables.dim=16"], 2, "tables.user.dim: planned with 8, now 16"),
        (["optimizer.tables=adam"], 2, "tables.user.optimizer: planned with 'RowWiseAdagrad', now 'Adam'"),
        (["exchange.forward=fp16"], 2, "exchange.forward: planned with 'fp32', now 'fp16'"),
        (["tables.user.sharding=row_wise"], 2, "tables.user.sharding: planned with 'auto', now 'row_wise'"),
        ([], 4, "world: planned with 2, now 4"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            load_plan(file, load_recipe(shared_clicks, overrides), world=world)
        assert str(file) in str(caught.value) and "unequal plan" in str(caught.value)


def test_what_machines_were_is_no_reason_to_refuse(shared_clicks: Path, tmp_path: Path) -> None:
    recipe, file = load_recipe(shared_clicks), tmp_path / "plan.json"
    plan_recipe(recipe, machines(2, 2)).save(file)
    assert load_plan(file, recipe, world=4, ranks_per_node=2).world == 4
    assert not any(name.startswith("topology.") for name in recipe_inputs(recipe, world=4))


def test_memory_has_every_part(shared_clicks: Path) -> None:
    plan = plan_recipe(load_recipe(shared_clicks), machines())
    for parts in predict_memory(plan):
        named = {"process", "dense part", "activations", "evaluation", "reader"}
        assert named | {"weights", "optimizer", "directory", "copies", "buffers", "inputs"} == set(parts)
        assert all(amount >= 0 for amount in parts.values()) and parts["process"] > 10**8


def test_activations_grow_with_the_model(shared_clicks: Path) -> None:
    recipe = load_recipe(shared_clicks)
    data = open_data(recipe, Mesh())
    batch = next(iter(Reader(data, part="train", batch_size=64)))
    few, many = dense_bytes(recipe, batch), dense_bytes(load_recipe(shared_clicks, ["model.top=[512, 512]"]), batch)
    assert many[0] > few[0] + 4 * 512 * 512 and many[1] > few[1] + 2 * 512 * 4


def test_sharding_is_free_to_change(shared_clicks: Path, tmp_path: Path) -> None:
    recipe = load_recipe(shared_clicks)
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.toml").write_text(recipe.to_toml())
    changed = ["tables.sharding=row_wise", "tables.items.sharding=table_wise", "tables.user.expected_rows=9"]
    other = load_run(run, None, [*changed, "exchange.forward=fp16", "exchange.unique=rank"])
    assert other.sharding_of() == {"user": "row_wise", "items": "table_wise"} and other.expected_rows() == {"user": 9}
    assert load_recipe(shared_clicks, changed).hash() == recipe.hash()
    assert load_recipe(shared_clicks, ["exchange.forward=fp16"]).hash() != recipe.hash()
    with pytest.raises(UserError, match=r"tables.user.dim: expected it to be left out, as in the run"):
        load_run(run, None, ["tables.user.dim=4"])


TIERED = ["tables.items.sharding=tiers", "exchange.unique=none"]


def profiled(recipe: Recipe) -> Profile:
    found = profile_recipe(recipe)
    assert found is not None
    return found


def slow() -> Topology:
    across = LinkRates(bytes_per_second=1e5, seconds_per_message=1e-6)
    return Topology.make(nodes=2, ranks_per_node=2, memory_per_rank=16 * 10**9, across=across)


def test_a_profile_gives_the_load_and_tiers(shared_clicks: Path, tmp_path: Path) -> None:
    """As many ids per sample as are measured on all samples; the file of the plan brings the tiers to training."""
    recipe, file = load_recipe(shared_clicks, TIERED), tmp_path / "job.plan.json"
    profile = profiled(recipe)
    plan = plan_recipe(recipe, slow(), profile=profile)
    assert plan.inputs["load.items.source"].startswith("profile of 1,400 samples")
    assert plan.inputs["load.items.ids_per_sample"] == pytest.approx(3, rel=0.1)
    assert plan.inputs["load.copying.budget"] == "row-wise of repeated ids"
    tiers = plan.tables["items"].tiers
    assert tiers is not None and len(tiers.node) + len(tiers.replicated) > 0
    plan.save(file)
    loaded = load_plan(file, recipe, world=4, ranks_per_node=2).tables["items"].tiers
    assert loaded is not None and loaded.node.tolist() == tiers.node.tolist()
    with pytest.raises(UserError, match=r"exchange.unique: planned with 'none', now 'node'"):
        load_plan(file, load_recipe(shared_clicks, TIERED[:1]), world=4, ranks_per_node=2)
    # Where the rows of the file are not the model's: said, and not a wrong training.
    rows = load_recipe(shared_clicks, [*TIERED, "tables.items.rows=2"])
    with pytest.raises(UserError, match=r"tables.items.rows: planned with nothing, now 2"):
        load_plan(file, rows, world=4, ranks_per_node=2)


def test_a_profile_of_other_data_is_refused(shared_clicks: Path) -> None:
    profile = profiled(load_recipe(shared_clicks))
    for override in ("data.max_length=1", "data.split.test=0.5"):
        with pytest.raises(UserError, match=r"the profile is of other data than the recipe.*`unequal profile`"):
            plan_recipe(load_recipe(shared_clicks, [override]), slow(), profile=profile)


def test_tiers_need_a_profile(shared_clicks: Path) -> None:
    with pytest.raises(UserError, match=r"tables.items.sharding: expected tiers with a profile"):
        plan_recipe(load_recipe(shared_clicks, TIERED), slow())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("tables.sharding=rowwise", "tables.sharding: expected one of auto, table_wise, row_wise"),
        ("tables.items.sharding=tabel_wise", "did you mean 'table_wise'?"),
        ("tables.items.expected_rows=0", "tables.items.expected_rows: expected 1 or more, got 0"),
        ("exchange.forward=fp8", "exchange.forward: expected one of auto, fp32, fp16, bf16, int8, got 'fp8'"),
        ("exchange.forwards=fp16", "did you mean 'forward'?"),
        ("exchange.unique=true", "exchange.unique: expected one of none, rank, node, got True"),
    ],
)
def test_wrong_fields_are_answered(shared_clicks: Path, override: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe(shared_clicks, [override])
    assert message in str(caught.value)


def test_expected_rows_are_for_unbounded_tables(shared_clicks: Path) -> None:
    with pytest.raises(UserError, match="no such line for a table with `rows`"):
        load_recipe(shared_clicks, ["tables.user.rows=50", "tables.user.expected_rows=9"])


def test_codecs_follow_the_device(shared_clicks: Path) -> None:
    exchange = load_recipe(shared_clicks).exchange
    assert exchange.codecs("cpu") == ("fp32", "fp32") and exchange.codecs("cuda") == ("fp16", "bf16")
    chosen = load_recipe(shared_clicks, ["exchange.forward=int8"]).exchange
    assert chosen.codecs("cuda") == ("int8", "bf16")
