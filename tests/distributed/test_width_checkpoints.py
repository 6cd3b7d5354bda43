"""Checkpoints of spread tables whose rows differ in width: the same ranks go on bitwise, others train as one process would."""

import pytest

import unequal as uq
from unequal.train import checkpoint

from .problems import outcome, same_bits, share_out, train
from .test_width import alone, differences, placement_of, problem_of

HALF, STEPS = 9, 20


def go_on(rank, world, folder, source, problem, placement):
    """From a checkpoint, or from the beginning until half of it, which is saved: (path, the rest of the steps)."""
    from unequal.exchange.mesh import Mesh

    mesh = Mesh(ranks_per_node=placement.ranks_per_node)
    module = uq.shard(problem.embeddings("meta"), placement, mesh)
    parts = share_out(problem, None, rank, world)
    if source is None:
        train(module, problem, parts[:HALF])
        source = checkpoint.save(folder, HALF, {}, {}, embeddings=module)
    else:
        checkpoint.load(source, embeddings=module)
    assert module.step == HALF
    results = train(module, problem, parts[HALF:])
    module.check_copies()
    return source, outcome(module, results), module.width_reports


@pytest.mark.parametrize("kind", ["row_wise", "table_wise", "tiers"])
@pytest.mark.parametrize("policy", ["water-filling", "fiited"])
def test_goes_on(pool, tmp_path, kind, policy):
    problem = problem_of(policy, steps=STEPS, dtype="fp32")
    first = placement_of(problem, 2, None, kind)
    whole = pool.run(go_on, tmp_path, None, problem, first, world=2, timeout=120)
    path = whole[0][0]
    again = pool.run(go_on, tmp_path, path, problem, first, world=2, timeout=120)
    for (_, before, reports), (_, after, rest) in zip(whole, again):
        assert same_bits(before, after)
        assert reports[-len(rest) :] == rest and len(rest) >= 2
    expected, _ = alone(problem)
    expected.outputs, expected.losses = expected.outputs[HALF:], expected.losses[HALF:]
    other = placement_of(problem, 3, None, "row_wise" if kind == "table_wise" else "table_wise")
    spread = pool.run(go_on, tmp_path, path, problem, other, world=3, timeout=120)
    wrong = differences(expected, [result for _, result, _ in spread])
    assert not wrong, "\n".join(wrong[:20])
