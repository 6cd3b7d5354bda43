"""Rows with copies train as they do in one process, whatever the cuts, and every copy has its owner's bits."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import unequal as uq
from unequal.errors import UserError
from unequal.optim import OPTIMIZERS
from unequal.plan.placement import Placement, Tiers, place

from .problems import Problem, differences, one_process, outcome, same_bits, share_out, train, with_batches
from .test_exactness import drawing, optimizer_of, random_problem

MESHES = {
    "2": (2, None, "node"),
    "3_none": (3, None, "none"),
    "2x2": (4, 2, "node"),
    "2x2_rank": (4, 2, "rank"),
    "2x2_none": (4, 2, "none"),
    "3x1": (3, 1, "node"),
}


def tiers_problem():
    """Every optimizer × pooled, sequence and both, dense and unbounded ids."""
    features, number = {}, 0
    for way, poolings in {"pooled": ["sum"], "sequence": [None], "mixed": [None, "mean"]}.items():
        for name in OPTIMIZERS:
            number += 1
            table = uq.Table(
                f"{way} {name}", rows=50 + number if number % 2 else None, dim=(4, 20, 6)[number % 3], init_std=0.1,
                optimizer=optimizer_of(name),
            )  # fmt: skip
            for pooling in poolings:
                features[f"{table.name} {pooling}"] = uq.Feature(table, pooling)
    return with_batches(Problem(features, []), 20, 14)


def ids_read(problem, table):
    parts = [
        batch[name].values for batch in problem.batches for name, f in problem.features.items() if f.table.name == table
    ]
    return torch.cat(parts).unique().numpy() if parts else np.empty(0, np.int64)


def tiered(problem, world, ranks_per_node, seed, unique, chosen=None, **options):
    """Random rows in every tier; of unbounded ids those that are read, since rows with copies are live from the start."""
    generator = np.random.default_rng(seed)
    tables = {}
    for name, table in problem.tables.items():
        placed = place("row_wise", table, world, ranks_per_node)
        ids = generator.permutation(ids_read(problem, name) if table.rows is None else np.arange(table.rows))
        first, last = sorted(generator.integers(0, len(ids) + 1, 2)) if len(ids) else (0, 0)
        tiers = Tiers(ids[:first].copy(), ids[first:last].copy())
        tables[name] = replace(placed, tiers=tiers) if chosen is None or name in chosen else placed
    return Placement(world, ranks_per_node or world, tables, unique=unique, **options)


def many_tiered(rank, world, runs):
    from unequal.exchange.mesh import Mesh

    meshes, found = {}, []
    for problem, placement, shares in runs:
        size = placement.ranks_per_node
        mesh = meshes[size] = meshes.get(size) or Mesh(ranks_per_node=size)
        module = uq.shard(problem.embeddings("meta"), placement, mesh)
        results = train(module, problem, share_out(problem, shares, rank, world))
        module.check_copies()
        found.append(outcome(module, results))
    return found


@pytest.fixture(scope="module")
def matrix():
    problem = tiers_problem()
    return problem, one_process(problem)


@pytest.mark.parametrize("mesh", MESHES)
def test_equals_one_process(pool, matrix, mesh):
    problem, expected = matrix
    world, size, unique = MESHES[mesh]
    placement = tiered(problem, world, size, list(MESHES).index(mesh), unique)  # other cuts on every mesh
    results = pool.run(many_tiered, [(problem, placement, None)], world=world, ranks_per_node=size, timeout=120)
    wrong = differences(problem, expected, [own for (own,) in results])
    assert not wrong, "\n".join(wrong)


def test_has_the_bits_of_row_wise(pool, matrix):
    """In two hops the gradients of all tiers take the same way to the same owner, so that sums have one order."""
    problem = replace(matrix[0], batches=matrix[0].batches[:4])
    with_tiers = tiered(problem, 4, 2, 5, "node")
    without = Placement(4, 2, {name: replace(placed, tiers=None) for name, placed in with_tiers.tables.items()})
    runs = [(problem, with_tiers, None), (problem, without, None), (problem, with_tiers, None)]
    results = pool.run(many_tiered, runs, world=4, ranks_per_node=2, timeout=120)
    for own, plain, again in results:
        assert same_bits(own, again)
        assert same_bits(own.outputs, plain.outputs) and own.losses == plain.losses
        for (shard, state), (_, other) in zip(own.shards, plain.shards):
            if problem.tables[shard.table].rows is not None:
                assert same_bits(state, other), shard


@pytest.mark.parametrize("mesh", MESHES)
def test_any_mixture_equals_one_process(pool, mesh):
    """Tables with and without tiers, any kind beside them, uneven and empty shares, features without ids, weights, schedules."""
    world, size, unique = MESHES[mesh]
    runs, problems = [], [random_problem(seed) for seed in range(16)]
    for seed, (problem, _) in enumerate(problems):
        draw = drawing(seed + 7)
        chosen = [name for name in problem.tables if draw(3)]
        placement = tiered(problem, world, size, seed, unique, chosen)
        others = {
            name: place(("row_wise", "table_wise", "data_parallel", "column_wise")[draw(4)], table, world, size)
            for name, table in problem.tables.items()
            if name not in chosen
        }
        cuts = [sorted([0, *(draw(b.size + 1) for _ in range(world - 1)), b.size]) for b in problem.batches]
        shares = [[high - low for low, high in pairwise(cut)] for cut in cuts]
        runs.append((problem, replace(placement, tables={**placement.tables, **others}), shares))
    results = pool.run(many_tiered, runs, world=world, ranks_per_node=size, timeout=120)
    wrong = []
    for seed, (problem, expected) in enumerate(problems):
        found = differences(problem, expected, [outcomes[seed] for outcomes in results])
        wrong += [f"seed {seed}: {line}" for line in found]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8"])
def test_copies_agree_in_every_precision(pool, matrix, codec):
    problem = replace(matrix[0], batches=matrix[0].batches[:2])
    placement = tiered(problem, 4, 2, 1, "node", forward_codec=codec, backward_codec=codec)
    pool.run(many_tiered, [(problem, placement, None)], world=4, ranks_per_node=2, timeout=120)


def spoil_a_copy(rank, world, problem, placement):
    module = uq.shard(problem.embeddings("meta"), placement)
    module.check_copies()
    if rank == 1:
        next(iter(module.copies.values())).rows.weights[0][0, 0] += 1
    try:
        module.check_copies()
    except UserError as error:
        return str(error)
    return ""


def test_a_copy_that_differs_is_named(pool):
    table = uq.Table("t", rows=9, dim=4, init_std=1.0)
    problem = Problem({"f": uq.Feature(table, None)}, [])
    placed = replace(place("row_wise", table, 2), tiers=Tiers(np.array([6, 3]), np.array([], np.int64)))
    told = pool.run(spoil_a_copy, problem, Placement(2, 2, {"t": placed}), world=2)
    assert all("table 't': the copy of row 6 on rank 1 differs from its owner's, rank 0" in text for text in told)


def bytes_of_two_steps(rank, world, ids_of, placement):
    """Bytes of a step whose rows have copies, and of the push that follows; copies are brought before."""
    table = uq.Table("t", rows=64, dim=8)
    module = uq.shard(uq.Embeddings({"f": uq.Feature(table, None)}, device="meta"), placement)
    module.check_copies()
    ids = torch.tensor(ids_of[rank], dtype=torch.int64)
    batch = uq.Batch.from_jagged({"f": uq.Jagged(ids, torch.tensor([ids.numel()]))})
    before = module.mesh.traffic.copy()
    module(batch)["f"].values.sum().backward()
    module.wait_for_copies()
    spent = module.mesh.traffic.since(before)
    return spent.inside, spent.across


def traffic(pool, ids, unique):
    table = uq.Table("t", rows=64, dim=8)
    tiers = Tiers(np.array([2, 6]), np.array([3, 7]))
    placed = replace(place("row_wise", table, 4, 2), tiers=tiers)
    placement = Placement(4, 2, {"t": placed}, unique=unique)
    return np.array(pool.run(bytes_of_two_steps, ids, placement, world=4, ranks_per_node=2)).sum(0)


@pytest.mark.parametrize("unique", ["node", "rank", "none"])
def test_bytes_of_rows_with_copies(pool, unique):
    """Rows 2 and 3 are those of ranks 2 and 3 on node 1. Exact figures, beyond those of a step without ids."""
    nothing, row, id_, number = [], 4 * 8, 1, 4  # numbers of one row's bytes, filled up to a value's
    idle = traffic(pool, [nothing] * 4, unique)

    def spent(*ids):
        return (traffic(pool, list(ids), unique) - idle).tolist()

    # Replicated, read on node 0: its gradient goes to its owner, who sends the new row to node 0, and both pass it on.
    assert spent([2] * 5, nothing, nothing, nothing) == [2 * (number + row), id_ + row + number + row]
    assert spent(nothing, [2], nothing, nothing) == [id_ + row + 2 * (number + row), id_ + row + number + row]
    assert spent([2], [2] * 3, [2], [2]) == [2 * (id_ + row) + 2 * (number + row), id_ + row + number + row]
    # In every node: rank 0 asks rank 1, which has the copy; the gradient goes on to rank 3 and the new row comes back.
    assert spent([3] * 5, nothing, nothing, nothing) == [id_ + row + row, id_ + row + number + row]
    assert spent(nothing, [3], nothing, nothing) == [0, id_ + row + number + row]
    assert spent(nothing, nothing, nothing, [3]) == [0, number + row]
    # Neither: as often as it is read, or once.
    times = 5 if unique == "none" else 1
    assert spent([10] * 5, nothing, nothing, nothing) == [0, times * (id_ + row + row)]


def copies_of(rank, world=4, size=2, rows=None):
    from unequal.kernels import backend
    from unequal.storage.copies import Copies

    table = uq.Table("t", rows=rows, dim=3)
    ids = torch.arange(100, 110), torch.arange(200, 240)
    return Copies(
        table, *ids, rank=rank, world=world, ranks_per_node=size, kernels=backend("cpu"), device=torch.device("cpu")
    )  # fmt: skip


@pytest.mark.parametrize("rows", [None, 10_000])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_renamed_copies_stay_where_they_are(rows, data):
    """A model of what every number holds, through any renames: values of ids that stay are kept, slots are never shared."""
    copies = copies_of(data.draw(st.integers(0, 3)), rows=rows)
    values = {id_: float(k) for k, id_ in enumerate(copies.ids.tolist())}

    def write(numbers):
        wanted = torch.tensor([[values[id_]] * 3 for id_ in copies.ids[numbers].tolist()]).view(-1, 3)
        copies.write(numbers, wanted)

    write(torch.arange(copies.count))
    for turn in range(4):
        numbers = data.draw(st.lists(st.integers(0, 49), max_size=30, unique=True))
        ids = [10_000 * (turn + 1) + data.draw(st.integers(0, 99)) * 50 + k for k in range(len(numbers))]
        values |= {id_: float(id_) for id_ in ids}
        copies.rename(torch.tensor(numbers, dtype=torch.int64), torch.tensor(ids, dtype=torch.int64))
        write(torch.tensor(numbers, dtype=torch.int64))
        mine = copies.owners(copies.ids) % 2 == copies.rank % 2
        assert copies.held.tolist() == [k < 10 or bool(lane) for k, lane in enumerate(mine)]
        held = copies.ids[copies.held]
        slots = copies.locate(held)
        assert slots.unique().numel() == slots.numel() and (copies.slots[~copies.held] == -1).all()
        assert copies.rows.weights[0][slots][:, 0].tolist() == [values[id_] for id_ in held.tolist()]
