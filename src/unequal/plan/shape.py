"""What all tables that are placed alike have in common: who holds how much, and who must tell whom."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .placement import Piece

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Cut:
    """Pieces of one width over as many ranks each, taken together: what they cost is linear in who holds them."""

    width: int
    parts: int
    pieces: int
    owners: Floats
    """[ranks]: how many of the pieces each rank holds a part of"""
    held: Floats
    """[ranks]: rows that each rank holds, in whole pieces"""


@dataclass(frozen=True, slots=True)
class Told:
    """Of column pieces, per rank: rows whose statistics it takes part in, and how many it tells others, as shares of all rows."""

    rows: Floats
    inside: Floats
    across: Floats


class Shapes:
    """Cuts and tellings of pieces, each found once."""

    def __init__(self, nodes: int, size: int) -> None:
        self.nodes, self.size, self.world = nodes, size, nodes * size
        self._known: dict[tuple[Piece, ...], tuple[list[Cut], Told | None]] = {}

    def of(self, pieces: tuple[Piece, ...]) -> tuple[list[Cut], Told | None]:
        found = self._known.get(pieces)
        if found is None:
            found = self._known[pieces] = (self._cut(pieces), self._tell(pieces) if len(pieces) > 1 else None)
        return found

    def of_node(self, by_rank: Floats) -> Floats:
        """[…, ranks]: the sum over each rank's node."""
        by_node = by_rank.reshape(*by_rank.shape[:-1], self.nodes, self.size).sum(-1)
        return np.repeat(by_node, self.size, axis=-1)

    def of_lane(self, by_rank: Floats) -> Floats:
        """[ranks]: the sum over the ranks that have the same number in their nodes."""
        return np.tile(by_rank.reshape(self.nodes, self.size).sum(0), self.nodes)

    def _cut(self, pieces: tuple[Piece, ...]) -> list[Cut]:
        groups: dict[tuple[int, int], list[Piece]] = {}
        for piece in pieces:
            groups.setdefault((piece.width, len(piece.ranks)), []).append(piece)
        cuts = []
        for (width, parts), members in groups.items():
            ranks = [rank for piece in members for rank in piece.ranks]
            owners = np.bincount(ranks, minlength=self.world).astype(np.float64)
            cuts.append(Cut(width, parts, len(members), owners, owners / parts))
        return cuts

    def _tell(self, pieces: tuple[Piece, ...]) -> Told:
        owns = np.zeros((len(pieces), self.world))
        for k, piece in enumerate(pieces):
            owns[k, list(piece.ranks)] = 1
        others = owns.sum(0) - owns
        of_node = self.of_node(others)
        parts = owns.sum(1, keepdims=True)
        rows = owns / parts
        # Of the owners of another piece, as many as this one has, one has the same rows.
        inside = (rows / parts * (of_node - others)).sum(0)
        across = (rows / parts * (others.sum(1, keepdims=True) - of_node)).sum(0)
        return Told(rows.sum(0), inside, across)
