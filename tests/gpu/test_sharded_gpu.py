"""Sharded tables on a GPU: every kind gives what one process gives, on ranks that share the GPU and exchange through gloo."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import unequal as uq
from tests.distributed.pool import Pool
from tests.distributed.problems import part_of_batch
from unequal.exchange.mesh import Mesh
from unequal.plan.placement import KINDS, UNIQUES, Placement, Tiers, place

ROWS = {"a": 50, "b": 23, "c": 3}


def features(hashed, pooling):
    tables = {
        name: uq.Table(name, None if hashed else rows, dim=dim) for (name, rows), dim in zip(ROWS.items(), (8, 12, 8))
    }
    return {
        "f1": uq.Feature(tables["a"], pooling),
        "f2": uq.Feature(tables["b"], "mean"),
        "f3": uq.Feature(tables["a"], "sum"),
        "f4": uq.Feature(tables["c"], "sum"),
    }


def random_batch(draw, size, described):
    lists = {}
    for name, feature in described.items():
        lengths = draw.integers(0, 5, size)
        ids = draw.integers(0, ROWS[feature.table.name], lengths.sum())
        lists[name] = uq.Jagged(torch.from_numpy(ids), torch.from_numpy(lengths))
    return uq.Batch.from_jagged(lists)


def outputs_of(output, described):
    return [v.values if isinstance(v := output[name], uq.Jagged) else v for name in described]


def loss_of(outputs):
    return sum(((part + 0.1 * (k + 1)) ** 2).sum() for k, part in enumerate(outputs))


def placed(kind, table, world, ranks_per_node, number, sums):
    if kind != "tiers":
        return place(kind, table, world, ranks_per_node, number, sums)
    ids = np.random.default_rng(number).permutation(ROWS[table.name])
    tiers = Tiers(ids[: len(ids) // 4], ids[len(ids) // 4 : len(ids) // 2])
    return replace(place("row_wise", table, world, ranks_per_node), tiers=tiers)


def differences(rank, world, ranks_per_node, device="cuda"):
    """How far this rank's outputs are from one process's, for every case."""
    mesh, found = Mesh(ranks_per_node), {}
    kinds = KINDS if mesh.nodes > 1 else KINDS[:4]
    cases = [(k, s, h, p) for k in kinds for s in (False, True) for h in (False, True) for p in (None, "sum")]
    cases += [("tiers", unique, h, p) for unique in UNIQUES for h in (False, True) for p in (None, "sum")]
    for kind, sums, hashed, pooling in cases:
        for optimizer in (uq.RowWiseAdagrad(lr=0.1), uq.Adam(lr=0.01)):
            described = features(hashed, pooling)
            whole = uq.Embeddings(described, optimizer=optimizer, seed=1, device=device)
            tables = whole.tables.values()
            where = {t.name: placed(kind, t, world, ranks_per_node, k, sums) for k, t in enumerate(tables)}
            source = uq.Embeddings(described, optimizer=optimizer, seed=1, device="meta")
            options = {"unique": sums} if kind == "tiers" else {}
            drift = uq.Drift(mode="on", every=2, sample=1)
            sharded = uq.shard(
                source, Placement(world, ranks_per_node, where, **options), mesh, device=device, drift=drift
            )
            draw, worst = np.random.default_rng(5), 0.0
            for _ in range(3):
                size = int(draw.integers(1, 9))
                batch = random_batch(draw, size, described)
                begin, end = size * rank // world, size * (rank + 1) // world
                mine, spans = part_of_batch(batch, begin, end)
                expected = outputs_of(whole(batch.to(device)), described)
                (loss_of(expected) / size).backward()
                given = outputs_of(sharded(mine.to(device)), described)
                (loss_of(given) * world / size).backward()
                for part, other, (name, feature) in zip(given, expected, described.items()):
                    cut = other[spans[name]] if feature.pooling is None else other[begin:end]
                    worst = max(worst, float((part - cut).detach().abs().max()) if part.numel() else 0.0)
            sharded.check_copies()
            found[kind, sums, hashed, pooling, type(optimizer).__name__] = worst
    return found


@pytest.mark.parametrize(("world", "ranks_per_node"), [(1, 1), (2, 2), (4, 2)])
def test_every_kind(world, ranks_per_node):
    pool = Pool()
    try:
        for found in pool.run(differences, ranks_per_node, world=world, ranks_per_node=ranks_per_node, timeout=240):
            assert max(found.values()) < 2e-5, {case: gap for case, gap in found.items() if gap >= 2e-5}
    finally:
        pool.close()
