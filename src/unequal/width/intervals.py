"""When rounds come. At the start rows have nothing to show yet and take what they need step by step, so rounds are close together;
the longer training has gone on, the less one more of them changes."""

from __future__ import annotations

from dataclasses import dataclass

LEAST, SHARE = 20, 50
"""steps between rounds at the start; or so many times fewer than in the long run, where that is more"""
ROWS = 5_000
"""that may live, for each of which steps at the start are one more: a round of many takes as long as several steps do"""
PART = 16
"""of the steps so far that lie between rounds at the most"""


@dataclass(frozen=True, slots=True)
class Intervals:
    """`every`: steps between rounds in the long run; `rows`: that may live, on all ranks."""

    every: int
    rows: float = 0.0

    @property
    def first(self) -> int:
        """Steps between rounds at the start."""
        return min(self.every, max(LEAST, self.every // SHARE, int(self.rows / ROWS)))

    def after(self, step: int) -> int:
        """Steps between rounds after so many: twice as many each time that training has gone on for twice as long."""
        doubled = (step // (PART * self.first)).bit_length() - 1
        return min(self.every, self.first << max(0, doubled))

    def is_round(self, step: int) -> bool:
        return step > 0 and (step % self.after(step) == 0 or halved(self.first, step))

    def is_round_after_shift(self, since: int) -> bool:
        """So many steps after popularity has shifted."""
        return halved(self.every, since)


def halved(interval: int, step: int) -> bool:
    """Whether it is 1/32, 1/16, … or 1/2 of the interval."""
    return any(step == max(1, interval >> k) for k in range(1, 6))
