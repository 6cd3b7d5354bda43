"""Every way in which a table could be spread over the ranks, before it is known over which: kinds, splits of columns, sums."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .placement import KINDS, WHOLE_ROWS, Kind, Piece, TablePlacement, Tiers, even
from .topology import Topology
from .workload import TableLoad

Floats = npt.NDArray[np.float64]
NARROWEST = 4
"""columns of a piece: 16 bytes of float32"""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kind with its numbers of pieces. `put` says where they go."""

    kind: Kind
    groups: int = 1
    """pieces over nodes (hierarchical kinds) or over ranks"""
    inner: int = 1
    """pieces of each of them inside its node, where the kind splits columns there"""
    sums: bool = False
    tiers: Tiers | None = None
    """rows of a row-wise table that have copies"""

    @property
    def label(self) -> str:
        pieces = self.groups * self.inner
        tiers = ", tiers" if self.tiers is not None else ""
        return self.kind + (f" in {pieces}" if pieces > 1 else "") + (", sums" if self.sums else "") + tiers

    @property
    def fixed(self) -> bool:
        """Whether there is nothing to choose: all ranks have the same part of it."""
        return self.kind in ("row_wise", "data_parallel")

    def columns(self, dim: int) -> list[list[tuple[int, int]]]:
        """Of each group, of each of its pieces."""
        outer = even(dim, self.groups)
        return [[(low + a, low + b) for a, b in even(high - low, self.inner)] for low, high in outer]

    def pieces(self, dim: int, ranks: list[list[tuple[int, ...]]]) -> TablePlacement:
        """With the ranks of every piece."""
        found = [
            Piece(first, last, owners)
            for columns, group in zip(self.columns(dim), ranks)
            for (first, last), owners in zip(columns, group)
        ]
        return TablePlacement(self.kind, tuple(join(found)), self.sums, self.tiers)

    def put(self, dim: int, topology: Topology, load: Floats) -> TablePlacement:
        """Where the load is least. `load`: [ranks]."""
        size, world = topology.ranks_per_node, topology.world
        match self.kind:
            case "row_wise" | "data_parallel":
                return self.pieces(dim, [[tuple(range(world))]])
            case "table_wise" | "column_wise":
                order = np.argsort(load, kind="stable")
                return self.pieces(dim, [[(int(order[k % world]),)] for k in range(self.groups)])
        by_node = load.reshape(topology.nodes, size)
        nodes = np.argsort(by_node.max(1) + by_node.mean(1), kind="stable")
        ranks: list[list[tuple[int, ...]]] = []
        for k in range(self.groups):
            node = int(nodes[k % topology.nodes])
            if self.kind in ("table_row_wise", "column_row_wise"):
                ranks.append([tuple(range(node * size, (node + 1) * size))])
            else:
                order = np.argsort(by_node[node], kind="stable")
                ranks.append([(node * size + int(order[j % size]),) for j in range(self.inner)])
        return self.pieces(dim, ranks)


def join(pieces: list[Piece]) -> list[Piece]:
    """Neighbours that the same rank holds are one piece."""
    joined: list[Piece] = []
    for piece in pieces:
        if joined and joined[-1].ranks == piece.ranks and joined[-1].last == piece.first:
            piece = Piece(joined.pop().first, piece.last, piece.ranks)
        joined.append(piece)
    return joined


def _splits(most: int, dim: int) -> list[int]:
    """2, 4, 8 … pieces, at most so many, none narrower than NARROWEST. Of many, the first two and the last."""
    counts = [1 << k for k in range(1, 13) if 1 << k <= min(most, dim // NARROWEST)]
    return counts if len(counts) <= 3 else [*counts[:2], counts[-1]]


def _of_kind(kind: Kind, dim: int, topology: Topology) -> Iterator[Candidate]:
    nodes, size, world = topology.nodes, topology.ranks_per_node, topology.world
    match kind:
        case "table_wise":
            yield Candidate(kind)
        case "row_wise" | "data_parallel":
            if world > 1:
                yield Candidate(kind)
        case "column_wise":
            yield from (Candidate(kind, count) for count in _splits(world, dim))
        case "table_row_wise":
            if nodes > 1 and size > 1:
                yield Candidate(kind)
        case "table_column_wise":
            if nodes > 1 and size > 1:
                yield from (Candidate(kind, 1, count) for count in _splits(size, dim))
        case "column_row_wise":
            if nodes > 1 and size > 1:
                yield from (Candidate(kind, count) for count in _splits(nodes, dim))
        case "column_column_wise":
            if nodes > 1 and size > 1:
                for outer in _splits(nodes, dim):
                    yield from (Candidate(kind, outer, inner) for inner in _splits(size, dim // outer))


def _whole(kind: Kind, dim: int, topology: Topology) -> Candidate:
    """A kind that was asked for on a mesh or a table too small for it: as much of it as there is."""
    nodes, size, world = topology.nodes, topology.ranks_per_node, topology.world
    match kind:
        case "column_wise":
            return Candidate(kind, min(world, dim))
        case "table_column_wise":
            return Candidate(kind, 1, min(size, dim))
        case "column_row_wise":
            return Candidate(kind, min(nodes, dim))
        case "column_column_wise":
            outer = min(nodes, dim)
            return Candidate(kind, outer, min(size, dim // outer))
    return Candidate(kind)


def candidates(load: TableLoad, topology: Topology) -> list[Candidate]:
    """All that this table may be on these ranks, with and without sums. Tiers are not among them: where they are cut depends on
    all tables."""
    dim, found = load.table.dim, []
    asked: Kind | None = None if load.sharding == "auto" else "row_wise" if load.sharding == "tiers" else load.sharding
    every = WHOLE_ROWS if load.whole_rows else KINDS
    for kind in every if asked is None else (asked,):
        own = list(_of_kind(kind, dim, topology))
        if not own and asked == kind:
            own = [_whole(kind, dim, topology)]
        for candidate in own:
            found.append(candidate)
            if load.sharding != "tiers" and load.may_sum and _sums_pay(candidate, load, topology):
                found.append(Candidate(kind, candidate.groups, candidate.inner, True))
    return found


def _sums_pay(candidate: Candidate, load: TableLoad, topology: Topology) -> bool:
    """Whether sums can be fewer than the ids they are of: every part of the rows sends its own."""
    parts = {
        "row_wise": topology.world,
        "table_row_wise": topology.ranks_per_node,
        "column_row_wise": topology.ranks_per_node,
    }
    return (
        candidate.kind != "data_parallel"
        and topology.world > 1
        and parts.get(candidate.kind, 1) * load.pooled < load.ids
    )
