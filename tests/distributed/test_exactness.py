"""Tables spread over ranks train as they do in one process: outputs, losses, weights and optimizer state."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch

import unequal as uq
from unequal.optim import LARS, OPTIMIZERS
from unequal.plan.placement import KINDS, place

from .problems import (
    Problem,
    differences,
    many_processes,
    one_process,
    placement_of,
    random_batch,
    same_bits,
    table_images,
    with_batches,
)

FLAT, NODES = KINDS[:4], KINDS[4:]
MESHES = {
    "1": (1, None, {}),
    "2": (2, None, {}),
    "3": (3, None, {}),
    "4": (4, None, {}),
    "2x2": (4, 2, {}),
    "2x2_one_hop": (4, 2, {"unique": "rank"}),
    "3x1": (3, 1, {}),
}
# On one node a kind with nodes places as the one without does, and in one hop nodes do not matter: see the first test.
CASES = [(mesh, kind) for mesh in ("1", "2", "3", "4") for kind in FLAT]
CASES += [("2x2", kind) for kind in KINDS] + [("2x2_one_hop", kind) for kind in NODES]
STEPS = 20


def optimizer_of(name):
    kind = OPTIMIZERS[name]
    options = {"trust": 0.2} if kind is LARS else {}
    return kind(lr=0.05, weight_decay=0.01, **options)


def matrix_problem():
    """Every way to read a table × every optimizer, with mixed dims and both kinds of ids. Tables named 'sums …' are to be summed
    by their owners."""
    ways = {"pooled": ["sum", "mean"], "sums": ["sum", "mean"], "sequence": [None], "mixed": [None, "sum", "mean"]}
    dims, features, number = [4, 20, 6, 9, 12], {}, 0
    for way, poolings in ways.items():
        for name in OPTIMIZERS:
            number += 1
            table = uq.Table(
                f"{way} {name}", rows=50 + number if number % 2 else None, dim=dims[number % len(dims)], init_std=0.1,
                optimizer=optimizer_of(name),
            )  # fmt: skip
            for pooling in poolings:
                features[f"{table.name} {pooling}"] = uq.Feature(table, pooling)
    return with_batches(Problem(features, []), STEPS, 14)


def test_kinds_with_nodes_are_those_without_on_one_node():
    table = uq.Table("t", rows=10, dim=10)
    for world in (1, 2, 3, 4):
        for kind, flat in zip(NODES, ("row_wise", "column_wise", "row_wise", "column_wise")):
            assert place(kind, table, world).pieces == place(flat, table, world).pieces
    for kind in FLAT:
        assert place(kind, table, 4, 2).pieces == place(kind, table, 4).pieces


@pytest.fixture(scope="module")
def matrix():
    problem = matrix_problem()
    return problem, one_process(problem)


def test_the_matrix_trains_something(matrix):
    """Otherwise nothing would be compared."""
    problem, expected = matrix
    assert len(problem.tables) == 4 * 7 and {
        o.__class__ for o in (t.optimizer for t in problem.tables.values())
    } == set(OPTIMIZERS.values())
    fresh = table_images(problem, [one_process(replace(problem, batches=[]))])
    for name, image in table_images(problem, [expected]).items():
        if problem.tables[name].rows is not None:
            moved = (image["weight"] - fresh[name]["weight"]).abs()
            assert moved.max() > 0.05 and (moved > 0).float().mean() > 0.5, name
        assert all(part.abs().max() > 1e-6 for key, part in image.items() if key not in ("ids", "seen", "weight")), name


def run_kinds(pool, problem, mesh, kinds):
    world, ranks_per_node, options = MESHES[mesh]
    summed = [name for name in problem.tables if name.startswith("sums")]
    runs = [(problem, placement_of(problem, world, ranks_per_node, kind, summed, **options), None) for kind in kinds]
    results = pool.run(many_processes, runs, world=world, ranks_per_node=ranks_per_node, timeout=120)
    return {kind: [outcomes[number] for outcomes in results] for number, kind in enumerate(kinds)}


@pytest.mark.parametrize("mesh", dict.fromkeys(mesh for mesh, _ in CASES))
def test_every_kind_equals_one_process(pool, matrix, mesh):
    problem, expected = matrix
    results = run_kinds(pool, problem, mesh, [kind for where, kind in CASES if where == mesh])
    wrong = [f"{kind}: {line}" for kind, own in results.items() for line in differences(problem, expected, own)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("mesh", ["3", "2x2"])
def test_every_kind_repeats_bitwise(pool, matrix, mesh):
    problem = replace(matrix[0], batches=matrix[0].batches[:2])
    kinds = FLAT if mesh == "3" else KINDS
    assert same_bits(*(run_kinds(pool, problem, mesh, kinds) for _ in range(2)))


@cache
def random_problem(seed):
    """A few tables of any shape, and what may come in a batch: no ids, few samples, weights. With its outcome in one process."""
    draw = drawing(seed)
    tables = [
        uq.Table(
            f"t{k}", rows=None if draw(3) == 0 else 1 + draw(60), dim=1 + draw(13), init_std=0.1,
            optimizer=optimizer_of(list(OPTIMIZERS)[draw(7)]) if draw(2) else None,
        )
        for k in range(1 + draw(4))
    ]  # fmt: skip
    features = {
        f"f{k} of {t.name}": uq.Feature(t, ("sum", "mean", None)[draw(3)]) for t in tables for k in range(1 + draw(3))
    }
    schedule = uq.Schedule(kind="linear", warmup_steps=2, total_steps=6, final=0.2) if draw(2) else None
    silent = [name for name in features if draw(6) == 0]
    weights = draw(3) == 0
    batches = [random_batch(features, 1000 * seed + k, draw(16) + 1, weights=weights, silent=silent) for k in range(5)]
    problem = Problem(features, batches, optimizer=uq.Adam(lr=0.02), schedule=schedule, seed=seed)
    return problem, one_process(problem)


def random_placement(problem, seed, world, ranks_per_node, options):
    """Any kind for any table, and shares cut anywhere: ranks may have no samples."""
    draw = drawing(seed + 1)
    kinds = {name: KINDS[draw(len(KINDS))] for name in problem.tables}
    summed = [name for name in problem.tables if draw(2)]
    cuts = [sorted([0, *(draw(b.size + 1) for _ in range(world - 1)), b.size]) for b in problem.batches]
    shares = [[high - low for low, high in pairwise(cut)] for cut in cuts]
    return placement_of(problem, world, ranks_per_node, kinds, summed, **options), shares


def drawing(seed):
    generator = torch.Generator().manual_seed(seed)
    return lambda high: int(torch.randint(high, (), generator=generator))


@pytest.mark.parametrize("mesh", MESHES)
def test_any_mixture_equals_one_process(pool, mesh):
    """Mixed kinds and dims, several features on one table, uneven and empty shares, features without ids, weights, schedules."""
    world, ranks_per_node, options = MESHES[mesh]
    problems = [random_problem(seed) for seed in range(20)]
    runs = [
        (problem, *random_placement(problem, seed, world, ranks_per_node, options))
        for seed, (problem, _) in enumerate(problems)
    ]
    results = pool.run(many_processes, runs, world=world, ranks_per_node=ranks_per_node, timeout=120)
    wrong = []
    for seed, (problem, expected) in enumerate(problems):
        found = differences(problem, expected, [outcomes[seed] for outcomes in results])
        wrong += [f"seed {seed}: {line}" for line in found]
    assert not wrong, "\n".join(wrong)
