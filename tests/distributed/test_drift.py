"""Rows move between tiers while training goes on, and nothing changes but where they are read."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import unequal as uq
from unequal.embeddings.drift import Drift
from unequal.errors import RecipeError
from unequal.plan.moves import Moves
from unequal.plan.placement import Placement, Tiers, place

from .problems import Problem, differences, one_process, outcome, same_bits, share_out, train

STEPS, SIZE = 24, 24


def shifting_problem():
    """Ids are drawn from a few popular ones, which are others in the second half."""
    tables = {
        "dense": uq.Table("dense", rows=300, dim=6, init_std=0.1),
        "hashed": uq.Table("hashed", dim=4, init_std=0.1, optimizer=uq.Adam(lr=0.02)),
    }
    features = {
        "list": uq.Feature(tables["dense"], None),
        "sum": uq.Feature(tables["dense"], "sum"),
        "far": uq.Feature(tables["hashed"], None),
    }
    generator = torch.Generator().manual_seed(4)
    batches = []
    for step in range(STEPS):
        parts = {}
        for name, feature in features.items():
            lengths = torch.randint(1, 9, (SIZE,), generator=generator)
            ids = (torch.rand(int(lengths.sum()), generator=generator) ** 4 * 300).long()
            ids = (ids * 7 + (0 if step < STEPS // 2 else 150)) % 300
            parts[name] = uq.Jagged(ids if feature.table.rows else ids * 1_000_003, lengths)
        batches.append(uq.Batch.from_jagged(parts))
    return Problem(features, batches)


def placement(problem, unique):
    """Copies of what is popular in the first half."""
    read = torch.cat([batch["far"].values for batch in problem.batches]).numpy() // 1_000_003
    hot = np.array([id_ for id_ in np.arange(60) * 7 % 300 if id_ in read])[:40]
    tables = {
        name: replace(place("row_wise", table, 4, 2), tiers=Tiers(ids[:8], ids[8:]))
        for (name, table), ids in zip(problem.tables.items(), (hot, hot * 1_000_003))
    }
    return Placement(4, 2, tables, unique=unique)


def many_drifting(rank, world, runs):
    found = []
    for problem, placed, drift in runs:
        module = uq.shard(problem.embeddings("meta"), placed, drift=drift)
        first = {name: copies.ids.tolist() for name, copies in module.copies.items()}
        before = module.mesh.traffic.copy()
        results = train(module, problem, share_out(problem, None, rank, world))
        module.check_copies()
        last = {name: copies.ids.tolist() for name, copies in module.copies.items()}
        found.append(
            (outcome(module, results), first, last, module.tier_reports, module.mesh.traffic.since(before).across)
        )
    return found


@pytest.mark.parametrize("unique", ["node", "rank", "none"])
def test_a_run_with_moving_rows_equals_one_process(pool, unique):
    problem = shifting_problem()
    moving = Drift(mode="on", every=3, most=16, sample=1)
    runs = [
        (problem, placement(problem, unique), moving),
        (problem, placement(problem, unique), Drift(mode="report", every=3, sample=1)),
        (problem, placement(problem, unique), moving),
    ]
    results = pool.run(many_drifting, runs, world=4, ranks_per_node=2, timeout=120)
    expected = one_process(problem)
    for number in range(len(runs)):
        outcomes = [one[number][0] for one in results]
        assert not differences(problem, expected, outcomes)
    for moved, static, again in results:
        assert same_bits(moved[0], again[0]) and moved[2] == again[2]
        if unique == "node":
            assert same_bits(moved[0].outputs, static[0].outputs)
        assert static[1] == static[2], "a report moves nothing"
        for name in problem.tables:
            assert moved[1][name] != moved[2][name] and len(set(moved[2][name])) == 40
            ours, plan = moved[3][name], static[3][name]
            assert [report.step for report in ours] == list(range(3, STEPS, 3))
            assert sum(report.moved for report in ours) > 0 and not any(report.moved for report in plan)
            assert plan[2].age < 0.05 < plan[-1].age, "the plan has aged"
            assert ours[-1].replicated + ours[-1].node > plan[-1].replicated + plan[-1].node + 0.1
    assert results[0][0][3] == results[1][0][3], "all ranks have the same reports"


def move_between(rank, world, problem, placed):
    """Rows move after a forward pass and before its backward."""
    module = uq.shard(problem.embeddings("meta"), placed)
    parts = share_out(problem, None, rank, world)
    for number, part in enumerate(parts):
        loss = (part.pooled * module(part.batch).pooled.exp()).sum() * part.weight
        numbers, ids = np.array([number % 3, 2 + number % 4]), np.array([100 + number, 200 + number])
        module.move_rows({"t": Moves(numbers, ids)})
        loss.backward()
        module.check_copies()
    return outcome(module, ([], [], []))


@pytest.mark.parametrize("unique", ["node", "none"])
def test_rows_may_move_between_forward_and_backward(pool, unique):
    table = uq.Table("t", rows=300, dim=4, init_std=0.1)
    problem = Problem({"f": uq.Feature(table, "sum")}, [])
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        ids = torch.randint(0, 300, (400,), generator=generator)
        problem.batches.append(uq.Batch.from_jagged({"f": uq.Jagged(ids, torch.full((40,), 10))}))
    placed = replace(place("row_wise", table, 4, 2), tiers=Tiers(np.array([1, 2, 3]), np.array([11, 12, 13, 14])))
    plan = Placement(4, 2, {"t": placed}, unique=unique)
    results = pool.run(move_between, problem, plan, world=4, ranks_per_node=2, timeout=60)
    expected = one_process(problem)
    expected.outputs, expected.losses = [], []
    assert not differences(problem, expected, results)


@pytest.mark.parametrize(("field", "value"), [("mode", "maybe"), ("every", 0), ("most", 0), ("sample", -1)])
def test_wrong_settings_are_refused(field, value):
    with pytest.raises(RecipeError, match=f"drift.{field}"):
        Drift(**{field: value})
