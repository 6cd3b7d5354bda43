"""Rows of a cost array, and the constants that terms of the cost model share."""

from __future__ import annotations

from enum import IntEnum

from .placement import Codec

ID = 8
"""bytes of an id in memory, and of one that may be anything on the wire"""
LINE = 64
"""What finding a row costs beside its own bytes: a cache line and its page. An update finds row and state."""
DEAL = 2
"""Of what it costs to make ids unique: sorting the distinct ones of a table with copies by tier and owner."""
LOCATE = 0.25
"""Of what it costs to make ids unique: finding them in a directory that holds them."""


class Part(IntEnum):
    """Rows of a cost array. Seconds, then bytes on the links, then bytes of memory."""

    READ = 0
    UPDATE = 1
    INDEX = 2
    COPY = 3
    HOST = 4
    ROWS_SENT_INSIDE = 5
    ROWS_RECEIVED_INSIDE = 6
    ROWS_SENT_ACROSS = 7
    ROWS_RECEIVED_ACROSS = 8
    BACK_SENT_INSIDE = 9
    """ids and gradients, which go the other way"""
    BACK_RECEIVED_INSIDE = 10
    BACK_SENT_ACROSS = 11
    BACK_RECEIVED_ACROSS = 12
    PUSH_SENT_INSIDE = 13
    """new rows on their way to copies, beside the rest of the step"""
    PUSH_RECEIVED_INSIDE = 14
    PUSH_SENT_ACROSS = 15
    PUSH_RECEIVED_ACROSS = 16
    WEIGHTS = 17
    OPTIMIZER = 18
    DIRECTORY = 19
    COPIES = 20
    """rows of other owners and the map of their ids"""
    BUFFERS = 21
    INPUTS = 22
    WITH_SUMS = 23
    """how many tables use a way of exchange that has collectives of its own"""
    WITH_REPLICAS = 24
    WITH_STATISTICS = 25
    WITH_NODE_ROWS = 26
    WITH_REPLICATED_ROWS = 27


SECONDS = slice(Part.READ, Part.HOST + 1)
MEMORY = slice(Part.WEIGHTS, Part.INPUTS + 1)


def row_bytes(width: int, codec: Codec) -> float:
    """Of one row on the wire."""
    return {"fp32": 4 * width, "fp16": 2 * width, "bf16": 2 * width, "int8": width + 4}[codec]


def id_bytes(rows: int | None) -> int:
    """Of an id on the wire, where a table has so many rows, or any; also of another number below `rows`."""
    return ID if rows is None else max(1, -(-(rows - 1).bit_length() // 8))
