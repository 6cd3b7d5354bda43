"""Rows change their tier when others are surely read more often."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from unequal.plan.moves import DOUBT, MARGIN, choose_moves

COUNTS = st.lists(st.integers(0, 10_000), max_size=30)


@given(counts=COUNTS, others=COUNTS, first=st.integers(0, 30), most=st.integers(1, 40))
def test_popular_rows_take_the_place_of_others(counts, others, first, most):
    ids, count = np.arange(len(counts)) * 2, np.array(counts, np.int64)
    outside, outside_counts = np.arange(len(others)) * 2 + 1, np.array(others, np.int64)
    cuts = (min(first, len(counts)), len(counts))
    moves = choose_moves(ids, count, cuts, outside, outside_counts, most)
    reads = dict(zip([*ids.tolist(), *outside.tolist()], [*counts, *others]))
    after = ids.copy()
    after[moves.numbers] = moves.ids
    assert len(set(after.tolist())) == len(ids), "every id once"
    assert np.array_equal(np.flatnonzero(after != ids), moves.numbers)
    came, gone = sorted(set(after.tolist()) - set(ids.tolist())), sorted(set(ids.tolist()) - set(after.tolist()))
    assert len(came) == len(gone) <= most
    for new, old in zip(sorted(came, key=reads.get), sorted(gone, key=reads.get, reverse=True)):
        assert reads[new] > MARGIN * reads[old] and reads[new] - reads[old] > DOUBT * (reads[new] + reads[old]) ** 0.5

    def total(chosen):
        return sum(reads[i] for i in chosen.tolist())

    assert total(after) >= total(ids) and (
        not cuts[0] or cuts[0] == cuts[1] or total(after[: cuts[0]]) >= total(ids[: cuts[0]])
    )


def test_all_tiers_are_renewed_in_one_round():
    """A row that was not known at all becomes the most popular one: into every node first, then to every rank."""
    ids, counts = np.array([1, 2, 3, 4]), np.array([50, 900, 100, 80])
    moves = choose_moves(ids, counts, (2, 4), np.array([9, 8]), np.array([1000, 2]), 10)
    after = ids.copy()
    after[moves.numbers] = moves.ids
    assert after.tolist() == [9, 2, 3, 1]


def test_nothing_moves_for_chance():
    counts = np.array([100, 100])
    assert not choose_moves(np.array([1, 2]), counts, (0, 2), np.array([3]), np.array([115]), 10).count
    assert not choose_moves(np.array([1, 2]), np.zeros(2, np.int64), (1, 2), np.array([3]), np.array([0]), 10).count
