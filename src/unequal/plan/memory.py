"""The memory model: bytes of a table's shards and of what a step holds for it, per rank. docs/cost_model.md has every term."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .placement import Codec

Floats = npt.NDArray[np.float64]
ENTRY = 12
"""bytes of an entry of a directory, which is at most 3/4 full and doubles"""
FIRST_DIRECTORY = 64
FIRST_SLAB_BYTES = 64 << 10
LOOKUP_BYTES = 100
"""of every id that a rank reads: the id, its place among the distinct ones, offsets, and what the update sorts"""
ID_BYTES = 40
"""of every distinct id that is asked for or answered: the id, how often it was read, its place, its slot"""
MESSAGES = {"fp32": 1.3, "fp16": 2.4, "bf16": 2.4, "int8": 3.0}
"""Times the float32 bytes of what is asked for and answered that messages hold at once: as rows are read, put together,
on the wire, as they came. Measured."""
MAP_BYTES = 48
"""of every id that has copies, on every rank, at most: an entry of a map that is 3/8 to 3/4 full, the id and its slot"""
STATISTICS = 6
"""Times the float32 bytes of the distinct rows of column pieces that an update with statistics holds: gradients, rows, state."""


def slab_rows(rows: Floats, row_bytes: Floats) -> Floats:
    """Rows that a growing table's slabs have room for: each is twice the one before. On the CPU they take memory as they fill."""
    first = 2.0 ** np.maximum(4, np.floor(np.log2(FIRST_SLAB_BYTES / row_bytes)))
    slabs = np.ceil(np.log2(np.maximum(rows, first) / first + 1))
    room: Floats = first * (2.0**slabs - 1)
    return room


def directory_bytes(entries: Floats) -> Floats:
    """Of a directory with so many entries, and of the half as large one that it was made from. Of none there is no directory."""
    capacity = 2.0 ** np.ceil(np.log2(np.maximum(entries * 4 / 3, FIRST_DIRECTORY)))
    held: Floats = np.where(entries > 0, capacity * ENTRY * 1.5, 0.0)
    return held


def exchange_bytes(rows: Floats, width: int, codecs: Sequence[Codec]) -> Floats:
    """Of rows or vectors that a rank asks for and answers with."""
    held: Floats = rows * (4 * width * max(MESSAGES[codec] for codec in codecs))
    return held
