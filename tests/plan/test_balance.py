"""Balance: both methods place everything once, never do worse than they must, and agree with brute force on small cases."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unequal.plan.balance import Bins, Item, differencing, greedy

METHODS = (greedy, differencing)


def fullest(items: list[Item], bins: Bins, chosen: list[int]) -> float:
    seconds = bins.seconds.copy()
    for item, rank in zip(items, chosen):
        seconds[rank] += item.seconds
    return float(seconds.max())


def empty(count: int, limit: float = float("inf")) -> Bins:
    return Bins(np.zeros(count), np.zeros(count), limit)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=60, deadline=None)
@given(
    times=st.lists(st.integers(0, 50), min_size=0, max_size=7),
    base=st.lists(st.integers(0, 30), min_size=1, max_size=3),
)
def test_near_the_best_there_is(method, times: list[int], base: list[int]) -> None:
    items = [Item(float(time), 0.0) for time in times]
    bins = Bins(np.array(base, float), np.zeros(len(base)), float("inf"))
    chosen = method(items, bins)
    assert len(chosen) == len(items) and all(0 <= rank < len(base) for rank in chosen)
    best = min(fullest(items, bins, list(each)) for each in product(range(len(base)), repeat=len(items)))
    # What is there before cannot be moved, so the bound of 4/3 holds for what is added to it.
    assert fullest(items, bins, chosen) <= max(best * 4 / 3, best + max(times, default=0) / 3) + 1e-9


def test_differencing_is_better_on_the_textbook_case() -> None:
    items = [Item(float(time), 0.0) for time in (8, 7, 6, 5, 4)]
    assert fullest(items, empty(2), greedy(items, empty(2))) == 17
    assert fullest(items, empty(2), differencing(items, empty(2))) == 16


def test_greedy_keeps_to_the_memory() -> None:
    items = [Item(1.0, 6.0), Item(1.0, 5.0), Item(9.0, 1.0), Item(1.0, 4.0), Item(1.0, 4.0)]
    chosen = greedy(items, empty(2, limit=10))
    held = np.zeros(2)
    np.add.at(held, chosen, [item.memory for item in items])
    assert held.max() <= 10


@pytest.mark.parametrize("method", METHODS)
def test_many_items_are_even(method) -> None:
    random = np.random.default_rng(0)
    items = [Item(float(time), 0.0) for time in random.exponential(1, 2000)]
    bins = empty(128)
    mean = sum(item.seconds for item in items) / 128
    assert fullest(items, bins, method(items, bins)) < 1.01 * mean


def test_pieces_of_one_table_go_to_different_ranks() -> None:
    items = [Item(1.0, 1.0, group=0) for _ in range(4)] + [Item(0.1, 1.0)]
    assert len(set(greedy(items, empty(4))[:4])) == 4
