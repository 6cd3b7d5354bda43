import itertools

import pytest

from unequal.width.intervals import Intervals


def rounds(intervals, last, rows=0.0):
    return [step for step in range(last + 1) if intervals.is_round(step, lambda: rows)]


def between(steps):
    return [later - sooner for sooner, later in itertools.pairwise(steps)]


def test_rounds_are_closer_together_at_the_start():
    steps = rounds(Intervals.towards(1000), 20_000)
    assert steps[:4] == [16, 32, 47, 63]
    apart = between(steps)
    assert {15, 16} == set(apart[:30]) and {31, 32} == set(apart[33:46])
    assert all(gap <= max(16, sooner / 15) for gap, sooner in zip(apart, steps))
    assert steps[-3:] == [18_000, 19_000, 20_000]
    assert len(steps) < 130


@pytest.mark.parametrize("every", [1, 2, 7, 19, 20, 29])
def test_a_short_interval_is_one_from_its_first_end_on(every):
    steps = rounds(Intervals.towards(every), 200, rows=1e4)
    assert steps == list(range(every, 201, every))


@pytest.mark.parametrize("every", [64, 1000, 1234])
def test_many_rows_have_some_of_the_rounds_of_few(every):
    intervals = Intervals.towards(every)
    few, more, many = (rounds(intervals, 12_000, rows) for rows in (1e5, 5e5, 1e9))
    assert set(few) > set(more) >= set(many)
    first = [-(-every // parts) for parts in (64, 32, 16, 8, 4, 2) if parts <= intervals.parts]
    assert many == [*first, *range(every, 12_001, every)], (
        "the first of parts of every length, and then whole intervals"
    )
    assert min(between([step for step in more if step > every / 4])) >= min(every // 4, 50)


def test_rows_are_counted_at_few_steps():
    asked = []
    for step in range(20_000):
        Intervals.towards(1000).is_round(step, lambda: asked.append(0) or 0.0)
    assert len(asked) < 130


def test_a_long_interval_is_long_at_the_start_too():
    assert rounds(Intervals.towards(10**9), 100_000) == []


def test_rounds_after_a_shift_are_parts_of_the_interval():
    intervals = Intervals.towards(1000)
    assert [since for since in range(2000) if intervals.is_round_after_shift(since)] == [31, 62, 125, 250, 500]
