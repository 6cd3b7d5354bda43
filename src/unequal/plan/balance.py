"""Balance: which rank gets which item, so that the fullest is as little full as can be. Two methods: the better one counts."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Item:
    """Something that goes into one bin: seconds and bytes that it takes there."""

    seconds: float
    memory: float
    group: int = -1
    """items of one group go to different bins, as far as there are bins"""


@dataclass(frozen=True, slots=True)
class Bins:
    """What is in the bins before, and how much memory each has."""

    seconds: Floats
    memory: Floats
    limit: float

    @property
    def count(self) -> int:
        return len(self.seconds)


def greedy(items: Sequence[Item], bins: Bins) -> list[int]:
    """The largest first, each to the least loaded bin that has room; where none has, to the one with most room.

    Large is what takes much of the time or of the memory, whichever is the scarcer for it."""
    seconds, memory = bins.seconds.copy(), bins.memory.copy()
    time_scale = max(sum(item.seconds for item in items) + float(seconds.sum()), 1e-30)
    room = max(bins.limit * bins.count, 1.0)
    order = sorted(
        range(len(items)), key=lambda k: (-max(items[k].seconds / time_scale, items[k].memory / room), k)
    )  # fmt: skip
    chosen = [0] * len(items)
    used: dict[int, set[int]] = {}
    for k in order:
        item = items[k]
        load = seconds.copy()
        taken = used.setdefault(item.group, set()) if item.group >= 0 else set()
        if taken and len(taken) < bins.count:
            load[list(taken)] = np.inf
        fits = memory + item.memory <= bins.limit
        if (fits & np.isfinite(load)).any():
            load[~fits] = np.inf
            best = int(load.argmin())
        else:
            best = int(np.where(np.isfinite(load), memory, np.inf).argmin())
        chosen[k] = best
        taken.add(best)
        seconds[best] += item.seconds
        memory[best] += item.memory
    return chosen


def differencing(items: Sequence[Item], bins: Bins) -> list[int]:
    """Karmarkar and Karp's largest differencing for any number of bins: the two partial solutions whose bins differ most are
    laid over each other, fullest on emptiest, until one is left. Memory is not looked at: the caller does."""
    count = bins.count
    ranks = list(range(count))
    base = np.argsort(-bins.seconds, kind="stable")
    # A partial solution: how full its bins are, fullest first, and what is in them; of the first one, which ranks they are.
    start: tuple[Floats, list[list[int]], list[int] | None] = (
        bins.seconds[base], [[] for _ in ranks], [int(rank) for rank in base],
    )  # fmt: skip
    heap: list[tuple[float, int, tuple[Floats, list[list[int]], list[int] | None]]] = []
    heapq.heappush(heap, (-float(start[0][0] - start[0][-1]), -1, start))
    for k, item in enumerate(items):
        sums = np.zeros(count)
        sums[0] = item.seconds
        contents: list[list[int]] = [[k], *([] for _ in range(count - 1))]
        heapq.heappush(heap, (-item.seconds if count > 1 else 0.0, k, (sums, contents, None)))
    number = len(items)
    while len(heap) > 1:
        _, _, (a, in_a, ranks_a) = heapq.heappop(heap)
        _, _, (b, in_b, ranks_b) = heapq.heappop(heap)
        merged = a + b[::-1]
        order = np.argsort(-merged, kind="stable")
        both = [x + y for x, y in zip(in_a, reversed(in_b))]
        named = ranks_a if ranks_a is not None else ranks_b[::-1] if ranks_b is not None else None
        solution = (
            merged[order],
            [both[k] for k in order],
            None if named is None else [named[k] for k in order],
        )
        heapq.heappush(heap, (-float(solution[0][0] - solution[0][-1]), number, solution))
        number += 1
    _, contents, last = heap[0][2]
    assert last is not None
    chosen = [0] * len(items)
    for rank, inside in zip(last, contents):
        for k in inside:
            chosen[k] = rank
    return chosen
