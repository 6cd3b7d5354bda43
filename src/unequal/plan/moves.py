"""Which rows change their tier when others have become popular: by counts alone, so that every rank decides alike."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
MARGIN = 1.1
"""how many times as often as the row it takes the place of a row must be read"""
DOUBT = 2.0
"""and by how many standard deviations of the difference of both counts"""


@dataclass(frozen=True, slots=True)
class Moves:
    """Numbers of rows with copies that get another id."""

    numbers: Ints
    ids: Ints

    @property
    def count(self) -> int:
        return len(self.numbers)


def choose_moves(
    ids: Ints, counts: Ints, cuts: tuple[int, int], others: Ints, other_counts: Ints, most: int
) -> Moves:  # fmt: skip
    """`ids` and `counts`: of the rows with copies, by number; numbers below cuts[0] are replicated, below cuts[1] in every node.
    `others`: popular ids without copies. The sizes of the tiers stay. At most `most` rows change their tier in each direction."""
    ids, counts = ids.copy(), counts.copy()
    before = ids.copy()
    first, last = cuts
    left = most
    order = np.lexsort((others, -other_counts))
    outside, outside_counts = others[order], other_counts[order]
    tiers = [(first, last)] if last > first else [(0, first)]
    for low, high in tiers:
        weak = low + np.lexsort((ids[low:high], counts[low:high]))
        swaps = _better(counts[weak], outside_counts, left)
        ids[weak[:swaps]], counts[weak[:swaps]] = outside[:swaps], outside_counts[:swaps]
        left -= swaps
    if last > first > 0 and left > 0:
        weak = np.lexsort((ids[:first], counts[:first]))
        strong = first + np.lexsort((ids[first:last], -counts[first:last]))
        swaps = _better(counts[weak], counts[strong], left)
        low_numbers, high_numbers = weak[:swaps], strong[:swaps]
        ids[low_numbers], ids[high_numbers] = ids[high_numbers], ids[low_numbers]
    changed = np.flatnonzero(ids != before)
    return Moves(changed, ids[changed])


def _better(weak: Ints, strong: Ints, most: int) -> int:
    """How many of the strongest are surely above as many of the weakest; both come in order."""
    count = min(len(weak), len(strong), most)
    one, other = weak[:count].astype(np.float64), strong[:count].astype(np.float64)
    above = (other > MARGIN * one) & (other - one > DOUBT * np.sqrt(one + other))
    return count if above.all() else int(np.argmin(above))
