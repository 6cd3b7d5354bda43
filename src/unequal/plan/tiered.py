"""What one row of a row-wise table costs in each tier: numbers by which its expected reads are multiplied. The cost model adds
them up over rows, the solver compares them row by row, so both mean the same. docs/cost_model.md has every term."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .memory import ID_BYTES, MAP_BYTES, exchange_bytes
from .parts import DEAL, ID, LINE, LOCATE, SECONDS, Part, row_bytes
from .popularity import ALL, LOOKUPS, NODE, RANK

if TYPE_CHECKING:
    from .cost import Setting

Floats = npt.NDArray[np.float64]
PUSH = 0.76
"""Of the time that new rows take to their copies, the share that a step still pays. It runs beside the rest of the step, but
links that are busy with it are not free for others, and what is not through when the next forward begins is waited for.
Measured on the test cluster (benchmarks/tiers.py, "push"): the median of six, 0.38 to 0.82."""
NUMBER = 3
"""Bytes at most by which a row is named on its way to its copies: its number among those that have some, of which there are
hardly ever more than 16 million."""


class Tier(IntEnum):
    GLOBAL = 0
    """at its owner alone"""
    NODE = 1
    """a copy in every other node"""
    REPLICATED = 2
    """a copy on every other rank"""


class Phase(IntEnum):
    """When messages are held: never at the same time."""

    FORWARD = 0
    BACKWARD = 1
    PUSH = 2


@dataclass(frozen=True, slots=True)
class RowKind:
    """What rows of a table have in common."""

    width: int
    item: int
    """bytes of a stored value"""
    state: float
    """bytes of optimizer state of a row"""
    hashed: bool
    id: int
    """bytes of an id on the wire"""

    @property
    def number(self) -> int:
        """bytes of its number among rows with copies"""
        return min(self.id, NUMBER)

    @property
    def row(self) -> int:
        return self.width * self.item


class TierCosts:
    """Of one row in each tier, on the mean rank: owners are spread evenly, so it is every rank's."""

    def __init__(self, setting: Setting, kind: RowKind) -> None:
        self.setting, self.kind = setting, kind
        topology = setting.topology
        self.nodes, self.size, self.world = topology.nodes, topology.ranks_per_node, topology.world
        self.parts = np.zeros((len(Tier), len(Part), 4))
        """[tier, part, reads]"""
        self.moved = np.zeros((len(Tier), len(Phase), 4))
        """[tier, phase, reads]: rows in messages, asked for and answered"""
        self.held = np.zeros(len(Tier))
        """[tier]: bytes of copies and of their place in the map"""
        self._global()
        self._copied(Tier.NODE)
        self._copied(Tier.REPLICATED)
        for phase, codec in zip(Phase, (setting.forward, setting.backward, setting.forward)):
            change = 0.0 if codec == "fp32" else 4 * kind.width + row_bytes(kind.width, codec)
            self.parts[:, Part.COPY] += self.moved[:, phase] * (change / topology.compute.copies)

    def _global(self) -> None:
        """As `Pricer` prices a row-wise table."""
        nodes, size, world = self.nodes, self.size, self.world
        setting, rates, wide = self.setting, self.setting.topology.compute, 4 * self.kind.width
        asks = _unit(LOOKUPS if setting.unique == "none" else RANK)
        if setting.two_hops:
            inside, across = asks * (1 - 1 / size), _unit(NODE) * ((nodes - 1) / world)
            between, answered = asks, _unit(NODE) / size
            asked = asks + answered
        else:
            inside, across = asks * ((size - 1) / world), asks * (1 - 1 / nodes)
            between, answered, asked = asks * 0, asks, asks
        self._link(Tier.GLOBAL, inside, across)
        parts, own = self.parts[Tier.GLOBAL], _unit(ALL) / world
        parts[Part.READ] = self._first_reads(own) + (answered - own) * (self.kind.row / rates.copies)
        parts[Part.READ] += between * (wide / rates.copies)
        parts[Part.UPDATE] = self._update(answered) + between * ((wide + LINE) / rates.updates)
        located = answered * (LOCATE * self.kind.hashed)
        parts[Part.INDEX] = (between + DEAL * asked * (world > 1) + located) * (ID / rates.ids)
        self.moved[Tier.GLOBAL, : Phase.PUSH] = asked + answered + between

    def _copied(self, tier: Tier) -> None:
        """Gradients are summed on the rank, at the lane's rank of the node and at the owner; the new row goes to the copies."""
        nodes, size, world = self.nodes, self.size, self.world
        setting, rates, kind, wide = self.setting, self.setting.topology.compute, self.kind, 4 * self.kind.width
        rank, node, every = _unit(RANK), _unit(NODE), _unit(ALL)
        forward, backward = row_bytes(kind.width, setting.forward), row_bytes(kind.width, setting.backward)
        parts = self.parts[tier]
        through = nodes > 1  # with one node the lane's rank is the owner
        answered = node / size if through else rank
        near = rank * (1 - 1 / size)
        # A node row is asked for and answered inside the node; a replicated one is read where it is.
        asks = tier == Tier.NODE
        _both(parts, Part.ROWS_SENT_INSIDE, near * (forward * asks))
        _both(parts, Part.BACK_SENT_INSIDE, near * (kind.id + backward))
        _both(parts, Part.BACK_SENT_ACROSS, node * ((nodes - 1) / world * (kind.id + backward)))
        lane, fellows = every * ((nodes - 1) / world), every * (0 if asks else 1 - 1 / size)
        _both(parts, Part.PUSH_SENT_ACROSS, lane * (kind.number + forward))
        _both(parts, Part.PUSH_SENT_INSIDE, fellows * (kind.number + forward))

        first = node / size if asks else rank
        parts[Part.READ] = self._first_reads(first) + (rank - first) * (kind.row / rates.copies)
        parts[Part.READ] += every * (kind.row / world / rates.copies)
        written = lane + fellows
        parts[Part.UPDATE] = self._update(answered) + written * ((kind.row + LINE) / rates.updates)
        between = rank if through else rank * 0
        parts[Part.UPDATE] += between * ((wide + LINE) / rates.updates)
        located = answered * (LOCATE * kind.hashed)
        parts[Part.INDEX] = (between + DEAL * (rank + answered * through) + located) * (ID / rates.ids)
        self.moved[tier, Phase.FORWARD] = rank * (2 if asks else 1)
        self.moved[tier, Phase.BACKWARD] = rank + between + answered * (2 if through else 1)
        self.moved[tier, Phase.PUSH] = 2 * written
        # The owner has a copy, too: what is read where it is need not ask which.
        self.held[tier] = kind.row / (size if asks else 1) + MAP_BYTES

    def _first_reads(self, rows: Floats) -> Floats:
        found: Floats = rows * ((self.kind.row + LINE) / self.setting.topology.compute.reads)
        return found

    def _update(self, gradients: Floats) -> Floats:
        """Of the owner: it sums what came and updates each row once."""
        rows, row = _unit(ALL) / self.world, self.kind.row + self.kind.state
        found: Floats = gradients * (4 * self.kind.width) + rows * (2 * row + 2 * LINE)
        return found / self.setting.topology.compute.updates

    def _link(self, tier: Tier, inside: Floats, across: Floats) -> None:
        forward = row_bytes(self.kind.width, self.setting.forward)
        backward = self.kind.id + row_bytes(self.kind.width, self.setting.backward)
        _both(self.parts[tier], Part.ROWS_SENT_INSIDE, inside * forward)
        _both(self.parts[tier], Part.ROWS_SENT_ACROSS, across * forward)
        _both(self.parts[tier], Part.BACK_SENT_INSIDE, inside * backward)
        _both(self.parts[tier], Part.BACK_SENT_ACROSS, across * backward)

    @property
    def seconds(self) -> Floats:
        """[tier, reads]: of a step."""
        inside, across = self.setting.topology.inside, self.setting.topology.across
        links = np.zeros((len(Tier), 4))
        for part, weight in (
            (Part.ROWS_SENT_INSIDE, 1 / inside.bytes_per_second),
            (Part.BACK_SENT_INSIDE, 1 / inside.bytes_per_second),
            (Part.PUSH_SENT_INSIDE, PUSH / inside.bytes_per_second),
            (Part.ROWS_SENT_ACROSS, 1 / across.bytes_per_second),
            (Part.BACK_SENT_ACROSS, 1 / across.bytes_per_second),
            (Part.PUSH_SENT_ACROSS, PUSH / across.bytes_per_second),
        ):
            links += self.parts[:, part] * weight
        found: Floats = self.parts[:, SECONDS].sum(1) + links
        return found

    @property
    def bytes(self) -> Floats:
        """[tier, reads]: sent over the network; where there is one node, inside it."""
        if self.nodes > 1:
            sent = (Part.ROWS_SENT_ACROSS, Part.BACK_SENT_ACROSS, Part.PUSH_SENT_ACROSS)
        else:
            sent = (Part.ROWS_SENT_INSIDE, Part.BACK_SENT_INSIDE, Part.PUSH_SENT_INSIDE)
        found: Floats = self.parts[:, list(sent)].sum(1)
        return found

    def memory(self, reads: Floats) -> Floats:
        """[bins, tier]: bytes of a row beyond its owner's: copies, their place in the map, and messages, which together hold at
        most the sum of what each row's do at most."""
        held = np.einsum("tpr,br->btp", self.moved, reads).max(2)
        messages = exchange_bytes(held, self.kind.width, self.setting.codecs) + ID_BYTES * held
        found: Floats = messages + self.held
        return found

    def buffers(self, reads: Floats) -> float:
        """Rows in messages at a time, at most. `reads`: [tier, 4], of all rows of each."""
        return float(np.einsum("tpr,tr->p", self.moved, reads).max())


def _unit(column: int) -> Floats:
    unit = np.zeros(4)
    unit[column] = 1
    return unit


def _both(parts: Floats, sent: Part, amount: Floats) -> None:
    """What one sends another receives."""
    parts[sent] = amount
    parts[sent + 1] = amount
