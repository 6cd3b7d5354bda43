"""Popularity that shifts, on several ranks: all notice it at once, copies follow, and a saved job goes on unbroken."""

import numpy as np
import pytest
import torch

import unequal as uq
from unequal.train import checkpoint

from .problems import outcome, same_bits, share_out, train
from .test_width import WidthProblem, alone, placement_of

BEFORE, AFTER, EVERY = 48, 20, 16


def problem_of(**options):
    """Few of many ids are read at first, and then few others."""
    first, second = uq.Table("first", rows=400, dim=8, init_std=0.1), uq.Table("second", rows=300, dim=4, init_std=0.1)
    features = {"a": uq.Feature(first, "mean"), "b": uq.Feature(second, None), "c": uq.Feature(first, "sum")}
    width = uq.Width(**{"budget": "10%", "every": EVERY, "gradients": "whole", "rate": 1.0, **options})
    problem = WidthProblem(features, [], width=width)
    random = np.random.default_rng(0)
    for step in range(BEFORE + AFTER):
        parts = {}
        for name, feature in features.items():
            ids = (random.random(48) ** 4 * feature.table.rows).astype(np.int64)
            if step >= BEFORE:
                ids = feature.table.rows - 1 - ids
            parts[name] = uq.Jagged(torch.from_numpy(ids), torch.full((24,), 2))
        problem.batches.append(uq.Batch.from_jagged(parts))
    return problem


def shifted(reports):
    return [report.step for report in reports if report.shifted]


def go_on(rank, world, folder, source, problem, placement, half):
    """Trained in one piece, saved on the way; or from what was saved."""
    from unequal.exchange.mesh import Mesh

    mesh = Mesh(ranks_per_node=placement.ranks_per_node)
    module = uq.shard(problem.embeddings("meta"), placement, mesh)
    parts = share_out(problem, None, rank, world)
    if source is None:
        train(module, problem, parts[:half])
        source = checkpoint.save(folder, half, {}, {}, embeddings=module)
    else:
        checkpoint.load(source, embeddings=module)
    rest = train(module, problem, parts[half:])
    module.check_copies()
    return source, outcome(module, rest), module.width_reports, module.watched()


def test_in_one_process():
    _, reports = alone(problem_of())
    assert shifted(reports)[0] in (BEFORE + 1, BEFORE + 2)


@pytest.mark.parametrize("kind", ["row_wise", "tiers"])
def test_all_ranks_notice_it(pool, tmp_path, kind):
    """At once, and saved in a window, loaded by as many ranks or others, at the same step."""
    problem = problem_of()
    placement = placement_of(problem, 2, None, kind, unique="none")
    half = BEFORE + 1 if kind == "row_wise" else BEFORE - 3
    found = pool.run(go_on, tmp_path, None, problem, placement, half, world=2, timeout=120)
    (path, _, reports, _), *_ = found
    assert BEFORE < shifted(reports)[0] <= BEFORE + 2 and len(shifted(reports)) >= 3
    assert all(own == reports for *_, own, _ in found)
    again = pool.run(go_on, tmp_path, path, problem, placement, half, world=2, timeout=120)
    for (_, rest, own, watched), (_, same, later, known) in zip(found, again):
        assert same_bits(rest, same) and own[-len(later) :] == later and watched == known
    other = placement_of(problem, 3, None, "table_wise", unique="none")
    spread = pool.run(go_on, tmp_path, path, problem, other, half, world=3, timeout=120)
    assert all(shifted(own) == [step for step in shifted(reports) if step > half] for *_, own, _ in spread)


def test_distinct_ids_show_it_too(pool, tmp_path):
    problem = problem_of(gradients="norms")
    placement = placement_of(problem, 4, 2, "tiers")
    found = pool.run(go_on, tmp_path, None, problem, placement, 5, world=4, ranks_per_node=2, timeout=120)
    steps = {tuple(shifted(reports)) for *_, reports, _ in found}
    assert len(steps) == 1 and BEFORE < steps.pop()[0] <= BEFORE + 2
