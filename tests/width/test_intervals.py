import pytest

from unequal.width.intervals import Intervals


def rounds(intervals, last):
    return [step for step in range(last + 1) if intervals.is_round(step)]


def test_rounds_are_closer_together_at_the_start():
    steps = rounds(Intervals(1000), 24_000)
    assert steps[:6] == [1, 2, 5, 10, 20, 40]
    apart = [later - sooner for sooner, later in zip(steps, steps[1:])]
    assert apart[4:51] == [20] * 31 + [40] * 16  # to step 640, and to 1,280
    assert all(gap <= max(20, sooner / 16) for gap, sooner in zip(apart, steps))
    assert steps[-4:] == [21_000, 22_000, 23_000, 24_000]
    assert len(steps) < 140


@pytest.mark.parametrize("every", [1, 2, 7, 19, 20])
def test_a_short_interval_is_one_from_its_first_end_on(every):
    steps = rounds(Intervals(every, rows=1e9), 200)
    assert [step for step in steps if step >= every] == list(range(every, 201, every))


def test_many_rows_have_fewer_rounds_at_the_start():
    assert Intervals(1000, rows=300_000).first == 60
    many = Intervals(1000, rows=10**8)
    assert rounds(many, 3000) == [31, 62, 125, 250, 500, 1000, 2000, 3000]


def test_a_long_interval_is_long_at_the_start_too():
    assert rounds(Intervals(10**9), 100_000) == []


def test_rounds_after_a_shift_are_parts_of_the_interval():
    assert [since for since in range(2000) if Intervals(1000).is_round_after_shift(since)] == [31, 62, 125, 250, 500]
