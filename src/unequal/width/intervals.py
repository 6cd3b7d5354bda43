"""When rounds come. At the start rows have nothing to show yet and take what they need step by step, so rounds are close
together; the longer training has gone on, the less one more of them changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

LEAST = 15
"""steps between rounds"""
PARTS = 64
"""of an interval, at the start"""
SHARE = 16
"""of the steps so far that lie between rounds at the most"""
ROWS = 5_000
"""that live, for each of which steps between rounds are one more at least: a round of many takes as long as several steps do"""


@dataclass(frozen=True, slots=True)
class Intervals:
    """`every`: steps between rounds in the long run. At first it is its 64th, if that is not too few; then its 32nd, its
    16th and so on. Intervals begin where those of half the length do, so that rounds that are further apart are some of them."""

    every: int
    parts: int
    """of an interval, at the start: a power of two"""

    @classmethod
    def towards(cls, every: int) -> Intervals:
        parts = PARTS
        while parts > 1 and every < LEAST * parts:
            parts //= 2
        return cls(every, parts)

    def is_round(self, step: int, rows: Callable[[], float] = lambda: 0.0) -> bool:
        """After so many steps. None before the first part has ended: what is known of rows by then is noise, and rows that are
        wide by it lose again what they learn meanwhile. `rows`: how many live, on all ranks; asked at few steps, by all alike."""
        parts = self.parts
        while parts > 1 and 2 * SHARE * self.every <= parts * step:
            parts //= 2
        ended = step * parts // self.every
        first = ended & (ended - 1) == 0  # of these parts, of twice as long ones, or of longer: that costs little
        if self._ends(step, parts) and not first:
            live = rows()
            while parts > 1 and ROWS * self.every < parts * live:
                parts //= 2
        return self._ends(step, parts)

    def has_begun(self, step: int) -> bool:
        """Whether the first round is over after so many."""
        return step * self.parts >= self.every

    def _ends(self, step: int, parts: int) -> bool:
        """Whether such a part of an interval does."""
        return step > 0 and step * parts // self.every > (step - 1) * parts // self.every

    def is_round_after_shift(self, since: int) -> bool:
        """So many steps after popularity has shifted."""
        return any(since == max(1, self.every >> k) for k in range(1, 6))


NEVER = Intervals(1 << 40, 1)
"""where rows are to stay as they are"""
