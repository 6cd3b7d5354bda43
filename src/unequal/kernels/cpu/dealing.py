"""What a step of spread tables does with the ids of all tables at once: csrc/unique.cpp and csrc/route.cpp."""

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .describe import native_library, pointer, thread_count

Ints = npt.NDArray[np.int64]


def unique_tables(ids: Tensor, spans: Ints, tables: Ints) -> tuple[int | None, list[tuple[Tensor, Tensor]], Tensor]:
    """The first table with a wrong id, or None; distinct ids in the order of their first appearance, and their counts, of every
    table that is asked for them; and of every id the place among those of its table, as ids lie.

    spans: [n, 2], where ids begin and end. tables: [tables, 4], the first of each table's spans and their number, its rows or -1
    where any id is right, and whether its distinct ids are asked for."""
    lengths = np.concatenate([[0], (spans[:, 1] - spans[:, 0]).cumsum()])
    totals = lengths[tables[:, 0] + tables[:, 1]] - lengths[tables[:, 0]]
    asked = tables[:, 3] != 0
    ends = (totals * asked).cumsum()
    described = tables.copy()
    described[:, 3] = np.where(asked, ends - totals, -1)
    room = int(ends[-1]) if ends.size else 0
    distinct, counts, inverse = ids.new_empty(room), ids.new_empty(room), torch.empty_like(ids)
    found, spans = np.zeros(len(tables), np.int64), np.ascontiguousarray(spans)
    wrong = native_library().uq_unique_tables(
        pointer(ids),
        pointer(spans),
        pointer(described),
        ctypes.c_int64(len(tables)),
        pointer(distinct),
        pointer(inverse),
        pointer(counts),
        pointer(found),
        thread_count(ids.numel()),
    )
    if wrong < 0:
        raise MemoryError(f"no memory to make {ids.numel():,} ids unique")
    if wrong < len(tables):
        return wrong, [], inverse
    # Split at once: cutting out tensors one by one takes longer than the rest.
    sizes = np.stack([found, totals - found], 1)[asked].reshape(-1).tolist()
    parts = (torch.split(part, sizes)[::2] if sizes else () for part in (distinct, counts))
    return None, list(zip(*parts)), inverse


Way = tuple[int, int, Ints, bool, int, int]
"""Where the ids of a piece go: parts, divisor, places, hashed, group, bytes. An id's rank is places[part // divisor % their
number]; without places ids go to all ranks. Rows of a group lie in one matrix; -1: no row of the piece travels. An id has so many
bytes in the message."""


class Dealer:
    """Puts together the messages in which the ids of pieces go to the ranks that answer for them."""

    def __init__(self, ways: Sequence[Way], order: Sequence[int], ranks: int) -> None:
        """`order`: of the pieces in a message to a rank."""
        self._ways, self._ranks = list(ways), ranks
        self._order = np.array(order, np.int64)
        self._groups = max((way[4] for way in ways), default=-1) + 1
        self._fixed = np.array(
            [
                (0, 0, parts, divisor, len(places), places.ctypes.data, hashed, group, size)
                for parts, divisor, places, hashed, group, size in self._ways
            ],
            np.int64,
        ).reshape(-1, 9)
        self._bytes = np.array([way[5] * (1 if len(way[2]) else ranks) for way in self._ways], np.int64)
        """of an id of each piece, in the messages to all ranks"""

    def deal(self, distinct: Sequence[Tensor | None]) -> tuple[Tensor, Ints, Ints, list[Tensor | None]]:
        """(message, sent, first, places): the bytes of the ids by rank, then by piece; [ranks, pieces] how many ids each has, and
        where their rows will begin in the matrix of their group; and per piece where each id's row will lie there, or the id's
        number for one that goes to all ranks."""
        kept = [None if ids is None else ids.contiguous() for ids in distinct]
        counts = np.array([0 if ids is None else ids.numel() for ids in kept], np.int64)
        described = self._fixed.copy()
        described[:, 0] = [0 if ids is None else ids.data_ptr() for ids in kept]
        described[:, 1] = counts
        message = torch.empty(int((counts * self._bytes).sum()), dtype=torch.uint8)
        places = torch.empty(int(counts.sum()), dtype=torch.int64)
        sent, first = (np.empty((self._ranks, len(self._ways)), np.int64) for _ in range(2))
        failed = native_library().uq_deal_rows(
            pointer(described),
            ctypes.c_int64(len(self._ways)),
            pointer(self._order),
            ctypes.c_int64(self._ranks),
            ctypes.c_int64(self._groups),
            pointer(sent),
            pointer(first),
            pointer(message),
            pointer(places),
        )
        if failed:
            raise MemoryError(f"no memory to deal out {places.numel():,} ids")
        parts = torch.split(places, counts.tolist())
        return message, sent, first, [part if part.numel() else None for part in parts]


def follow_places(numbers: Tensor, spans: Sequence[tuple[int, int, Tensor | None]], out: Tensor) -> None:
    """out[i] = places[numbers[i]] in every span (begin, end, places); without places the numbers themselves."""
    cut = np.array([(first, last, 0 if p is None else p.data_ptr()) for first, last, p in spans], np.int64)
    native_library().uq_follow_places(pointer(numbers), pointer(cut), ctypes.c_int64(len(spans)), pointer(out))
