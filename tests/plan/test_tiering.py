"""Plans with tiers: when tables get them, that they are worth it and fit, what is said of them, and that they are read back."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from unequal.batch import Batch, Jagged
from unequal.errors import UserError
from unequal.plan.allocate import counted, repeated_ids_memory
from unequal.plan.cost import Pricer, Setting
from unequal.plan.explain_tiers import tiers_text
from unequal.plan.placement import UNIQUES, Unique
from unequal.plan.plan import Plan
from unequal.plan.planner import PROCESS_BYTES, make_plan
from unequal.plan.profiled import loads_from_profile
from unequal.plan.rowsfile import rows_path
from unequal.plan.tiering import with_popularity
from unequal.plan.topology import LinkRates, Topology
from unequal.stats.profile import Profile
from unequal.tables import Feature, Table

from .cases import Module

SAMPLES, LENGTH, ROWS = 4000, 30, 5000
Array = np.ndarray[Any, Any]


def slow(nodes: int = 2, size: int = 2, gigabytes: float = 4) -> Topology:
    """Links between nodes on which a byte that is saved counts."""
    return Topology.make(
        nodes=nodes, ranks_per_node=size, memory_per_rank=int(gigabytes * 1e9),
        inside=LinkRates(bytes_per_second=1e9, seconds_per_message=1e-5),
        across=LinkRates(bytes_per_second=1e7, seconds_per_message=1e-5),
    )  # fmt: skip


def zipf(random: np.random.Generator, count: int, rows: int, skew: float) -> Array:
    weights = np.arange(1, rows + 1) ** -skew
    drawn = np.searchsorted(np.cumsum(weights) / weights.sum(), random.random(count))
    return np.random.default_rng(5).permutation(rows)[drawn]


@pytest.fixture(scope="module")
def module() -> Module:
    return Module(
        {
            "history": Feature(Table("items", ROWS, dim=32), None),
            "user": Feature(Table("users", 100, dim=8), "sum"),
            "word": Feature(Table("words", dim=16, admit_after=3), None),
        }
    )


@pytest.fixture(scope="module")
def profile(module: Module) -> Profile:
    random = np.random.default_rng(1)
    lists = {
        "history": (zipf(random, SAMPLES * LENGTH, ROWS, 1.1), LENGTH),
        "user": (random.integers(0, 100, SAMPLES), 1),
        "word": (zipf(random, SAMPLES * 5, 300, 1.0), 5),
    }
    batches = []
    for first in range(0, SAMPLES, 500):
        parts = {
            name: Jagged(
                torch.from_numpy(ids[first * length : (first + 500) * length].astype(np.int64)),
                torch.full((500,), length),
            )
            for name, (ids, length) in lists.items()
        }
        batches.append(Batch.from_jagged(parts))
    return Profile.of(module.features, batches)


def planned(module: Module, profile: Profile, topology: Topology | None = None, **rest: Any) -> Plan:
    return make_plan(module, topology or slow(), batch_size=512, load=profile, **rest)


@pytest.mark.parametrize("unique", UNIQUES)
def test_hot_rows_get_copies_where_the_step_is_faster_for_it(module: Module, profile: Profile, unique: Unique) -> None:
    topology = slow()
    plan = planned(module, profile, topology, unique=unique)
    without = planned(module, profile, topology, unique=unique, sharding=dict.fromkeys(module.tables, "row_wise"))
    assert not without.tiers and without.copying is None
    plan.check(module.tables)
    assert plan.step_seconds <= without.step_seconds
    choice = plan.tiers["items"]
    tiers = plan.tables["items"].tiers
    assert tiers is not None and plan.tables["items"].kind == "row_wise" and plan.copying is not None
    assert (len(tiers.replicated), len(tiers.node)) == (choice.replicated, choice.node)
    ranked = profile.tables["items"].top(choice.replicated + choice.node)
    np.testing.assert_array_equal(np.concatenate([tiers.replicated, tiers.node]), ranked)
    assert plan.step_seconds < plan.copying.step_seconds
    assert plan.choices["items"].label == "row_wise, tiers"


def test_a_plan_with_copies_is_as_the_cost_model_has_it(module: Module, profile: Profile) -> None:
    topology = slow()
    plan = planned(module, profile, topology, unique="none")
    pricer = Pricer(Setting(topology=topology, batch_size=512, unique="none"))
    loads = with_popularity(loads_from_profile(profile, module.features, module.optimizer), profile)
    total = sum(pricer.price(loads[name], placed) for name, placed in plan.tables.items())
    np.testing.assert_allclose(pricer.seconds(total), [rank.total_seconds for rank in plan.ranks])
    assert max(rank.memory["copies"] for rank in plan.ranks) > 0


def test_no_more_memory_than_without(module: Module, profile: Profile) -> None:
    """By default all that a rank takes is within what row-wise exchange of repeated ids takes; a budget may say otherwise."""
    topology = slow()
    setting = Setting(topology=topology, batch_size=512, fixed={"process": PROCESS_BYTES["cpu"]})
    loads = with_popularity(loads_from_profile(profile, module.features, module.optimizer), profile)
    base = repeated_ids_memory(list(loads.values()), setting)
    plan = planned(module, profile, topology)
    assert plan.copying is not None and plan.copying.budget == base == plan.copying.repeated_ids_memory
    assert max(rank.total_memory for rank in plan.ranks) <= base
    free = planned(module, profile, topology, memory_budget=float("inf"))
    assert free.copying is not None and free.copying.budget == topology.usable_memory and not free.copying.price
    used = max(rank.total_memory for rank in free.ranks)
    rows = free.tiers["items"].replicated + free.tiers["items"].node
    tight = planned(module, profile, topology, memory_budget=used - 0.5 * free.ranks[0].memory["copies"])
    assert tight.copying is not None and tight.copying.price > 0
    assert 0 < tight.tiers["items"].replicated + tight.tiers["items"].node < rows
    assert max(rank.total_memory for rank in tight.ranks) <= tight.copying.budget + 8
    assert "memory full" in (tight.tiers["items"].copied_why, tight.tiers["items"].replicated_why)
    none = planned(module, profile, topology, memory_budget=1.0)
    assert not none.tiers


def test_tiers_can_be_asked_for_and_forbidden(module: Module, profile: Profile) -> None:
    fast = Topology.make(nodes=2, ranks_per_node=2, memory_per_rank=4 * 10**9)
    assert not planned(module, profile, fast).tiers, "on fast links with slow messages nothing is gained"
    asked = planned(module, profile, fast, sharding={"items": "tiers"}, unique="none")
    assert set(asked.tiers) == {"items"} and "asked for as tiers" in asked.choices["items"].reason
    for kind in ("row_wise", "table_wise"):
        plan = planned(module, profile, slow(), unique="none", sharding={"items": kind})
        assert "items" not in plan.tiers and plan.tables["items"].kind == kind


def test_one_rank_needs_no_copies(module: Module, profile: Profile) -> None:
    plan = planned(module, profile, slow(1, 1), sharding={"items": "tiers"})
    assert plan.tables["items"].tiers is None and plan.tables["items"].kind == "row_wise"


def test_one_node_has_no_node_tier(module: Module, profile: Profile) -> None:
    topology = replace(slow(1, 4), inside=LinkRates(bytes_per_second=1e7, seconds_per_message=1e-5))
    plan = planned(module, profile, topology, unique="none", sharding={"items": "tiers"})
    assert plan.tiers["items"].node == 0 and plan.tiers["items"].replicated > 0


def test_rare_ids_that_share_a_row_have_none(module: Module, profile: Profile) -> None:
    plan = planned(module, profile, slow(), unique="none")
    assert "words" not in plan.tiers and "no tiers: rare ids share a row (admit_after)" in plan.choices["words"].reason
    with pytest.raises(UserError, match=r"tables.words.sharding: expected tiers of a table that gives every id a row"):
        planned(module, profile, slow(), sharding={"words": "tiers"})


def test_tiers_without_a_profile(module: Module) -> None:
    with pytest.raises(
        UserError, match=r"tables.items.sharding: expected tiers with a profile.*unequal plan --profile"
    ):
        make_plan(module, slow(), batch_size=64, sharding={"items": "tiers"})


def test_bytes_instead_of_time(module: Module, profile: Profile) -> None:
    """With ids unique per node no copy saves a byte; with repeated ids fewer rows are copied than where time counts."""
    sharding = {"items": "tiers"}
    none = planned(module, profile, unique="node", objective="bytes", sharding=sharding)
    assert not none.tiers and "no copy of a row would gain anything" in none.choices["items"].reason
    by_bytes = planned(module, profile, unique="none", objective="bytes", sharding=sharding)
    by_time = planned(module, profile, unique="none", sharding=sharding)
    assert by_bytes.tiers["items"].after.bytes_across <= by_time.tiers["items"].after.bytes_across


def test_too_little_memory_is_said_with_remedies(module: Module, profile: Profile) -> None:
    with pytest.raises(UserError, match=r"no plan fits: .* are short on rank .*half the run.batch_size saves"):
        planned(module, profile, slow(gigabytes=0.2))


def test_plans_repeat(module: Module, profile: Profile) -> None:
    first, second = (planned(module, profile, unique="none") for _ in range(2))
    assert first.to_json() == second.to_json()


def test_tiers_in_words(module: Module, profile: Profile) -> None:
    plan = planned(module, profile, unique="none")
    text = tiers_text(plan)
    assert text in str(plan)
    choice = plan.tiers["items"]
    for words in (
        f"{sum(each.node for each in plan.tiers.values()):,} in every node",
        "table 'items'",
        "a copy on every rank",
        "at its owner alone",
        f"rows up to {choice.replicated + choice.node:,} are copied at all",
        "the last one saves",
        "sent over the network",
        "memory",
    ):
        assert words in text
    assert max(len(line) for line in text.split("\n\n", 1)[1].splitlines()) <= 80
    assert "no tiers" in tiers_text(planned(module, profile, sharding=dict.fromkeys(module.tables, "row_wise")))


def test_rows_are_saved_beside_the_plan(module: Module, profile: Profile, tmp_path: Path) -> None:
    plan = planned(module, profile, unique="none")
    file = tmp_path / "sub" / "job.plan.json"
    plan.save(file)
    assert sorted(path.name for path in file.parent.iterdir()) == ["job.plan.json", "job.plan.rows"]
    again = Plan.load(file)
    assert again.tiers == plan.tiers and again.copying == plan.copying and again.to_json() == plan.to_json()
    for name, placed in plan.tables.items():
        tiers, read = placed.tiers, again.tables[name].tiers
        assert (tiers is None) == (read is None)
        if tiers is not None and read is not None:
            np.testing.assert_array_equal(tiers.replicated, read.replicated)
            np.testing.assert_array_equal(tiers.node, read.node)
    again.check(module.tables)
    assert rows_path(Path("a/plan")) == Path("a/plan.rows")
    moved = tmp_path / "moved.json"
    moved.write_text(file.read_text())
    with pytest.raises(UserError, match=r"moved.json: the plan's rows are missing: expected .*job.plan.rows beside it"):
        Plan.load(moved)


def test_wrong_rows_are_refused(module: Module, profile: Profile, tmp_path: Path) -> None:
    file = tmp_path / "job.plan.json"
    planned(module, profile, unique="none").save(file)
    rows, content = tmp_path / "job.plan.rows", json.loads(file.read_text())
    good = rows.read_bytes()

    def refused(match: str) -> None:
        with pytest.raises(UserError, match=match) as caught:
            Plan.load(file)
        assert str(file) in str(caught.value) and "\n" not in str(caught.value)
        assert "again" in str(caught.value)

    rows.write_bytes(good[:-8])
    refused("not the rows of this plan: .*bytes where")
    rows.write_bytes(good[:-8] + bytes(8))
    refused("not the rows of this plan")
    rows.write_bytes(good)
    file.write_text(json.dumps({key: value for key, value in content.items() if key != "rows"}))
    refused("names its rows' file")
    fewer = json.loads(json.dumps(content))
    fewer["tables"]["items"]["tiers"]["node"] -= 1
    file.write_text(json.dumps(fewer))
    refused("expected .* ids of table 'items'")


def test_counted_rows_take_no_memory() -> None:
    tiers = counted(10**9, 10**10)
    assert len(tiers.replicated) == 10**9 and len(tiers.node) == 10**10 and tiers.node.strides == (0,)
