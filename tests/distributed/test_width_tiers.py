"""Rows that are as wide as they deserve and have copies: these change no bit, and are as wide as their owners' rows."""

from dataclasses import replace

import numpy as np
import pytest

import unequal as uq
from unequal.plan.moves import Moves
from unequal.plan.placement import Tiers

from .problems import outcome, same_bits, share_out, train
from .test_width import alone, differences, many, placement_of, problem_of


def test_tiers_change_no_bit_and_spare_rows(pool):
    """With copies of all rows nothing is asked for but what has no copy, and results are those of rows dealt out."""
    problem = problem_of(steps=12)
    plain = placement_of(problem, 4, 2, "row_wise")
    tables = {
        name: replace(placed, tiers=Tiers(np.arange(problem.tables[name].rows), np.empty(0, np.int64)))
        for name, placed in plain.tables.items()
    }
    results = pool.run(
        many, [(problem, plain), (problem, replace(plain, tables=tables))], world=4, ranks_per_node=2, timeout=120
    )
    for (own, _, _), (copied, _, copies) in results:
        assert same_bits(own, copied)
        assert all(copies.values())


def move_in_between(rank, world, problem, placement):
    """Other rows get copies: wide ones, narrow ones, and some that have no value at all."""
    from unequal.exchange.mesh import Mesh

    module = uq.shard(problem.embeddings("meta"), placement, Mesh(ranks_per_node=2))
    parts = share_out(problem, None, rank, world)
    first = train(module, problem, parts[:7])
    without = np.setdiff1d(np.arange(60), module.copies["first"].ids.numpy())[:9]
    module.move_rows({"first": Moves(np.array([0, 3, 14, 15, 20, 21, 30, 40, 41]), without)})
    module.check_copies()
    second = train(module, problem, parts[7:])
    module.check_copies()
    return outcome(module, [a + b for a, b in zip(first, second)])


@pytest.mark.parametrize(("policy", "gradients"), [("water-filling", "whole"), ("fiited", "whole"), ("none", "norms")])
def test_rows_that_move_between_tiers(pool, policy, gradients):
    problem = problem_of(policy, steps=14, gradients=gradients)
    placement = placement_of(problem, 4, 2, "tiers")
    results = pool.run(move_in_between, problem, placement, world=4, ranks_per_node=2, timeout=120)
    wrong = differences(alone(problem)[0], results)
    assert not wrong, "\n".join(wrong[:20])
