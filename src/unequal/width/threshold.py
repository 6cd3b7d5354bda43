"""The threshold at which a budget is spent, from a sample of all rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from .parts import SAMPLE, Sample

THIN = 8
"""every so many rows of the sample tell about where the threshold is"""
LOWEST, HIGHEST = -80.0, 80.0
"""logarithms of thresholds"""
PRECISE = 2e-6
"""a threshold is not looked for more closely than that"""
CLOSE = 5e-4
"""share of a budget that may be left over by the threshold: the sample says no more, and new rows take it"""

Sum = Callable[[float], float]


def threshold_of(samples: Sequence[Sample], budget: float, hysteresis: float, total: Sum) -> float:
    """The lowest at which no more than the budget is spent, growth and shrinking held back by hysteresis. `total`: sums a number
    over all ranks."""
    guess = None
    if total(float(sum(len(sample.old) for sample in samples))) > SAMPLE / 4:
        guess = search([sample.thin(THIN) for sample in samples], budget, hysteresis, total, None, 0.02)
    return math.exp(search(samples, budget, hysteresis, total, guess, CLOSE))


def search(
    samples: Sequence[Sample], budget: float, hysteresis: float, total: Sum, guess: float | None, close: float
) -> float:
    """A threshold's logarithm, at which the budget is spent but for such a share. Each try is a sum over all ranks."""

    def spent_at(threshold: float) -> float:
        return total(sum(sample.values(math.exp(threshold), hysteresis) for sample in samples))

    low, high = LOWEST, HIGHEST
    spent = too_much = spent_at(low)
    too_little = 0.0  # not known, or nothing
    if too_much <= budget:
        return low
    away, slow = close, 0
    while high - low > PRECISE:
        span, middle = high - low, (low + high) / 2
        if guess is not None and (low == LOWEST or high == HIGHEST):
            middle = guess if span == HIGHEST - LOWEST else low + away if spent > budget else high - away
            away *= 4
            if not low < middle < high:
                guess, middle = None, (low + high) / 2
        elif too_little and span < 2 and slow < 3:
            # Spending is about a power of the threshold, unless it is a few large steps.
            share = math.log(budget * (1 - close / 2) / too_much) / math.log(too_little / too_much)
            middle = low + span * min(max(share, 0.01), 0.99)
        spent = spent_at(middle)
        if spent > budget:
            low, too_much = middle, spent
        else:
            high, too_little = middle, spent
            if spent >= budget * (1 - close):
                break
        slow += span < 2 and high - low > span / 2
    return high
