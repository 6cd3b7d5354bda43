"""Pooled features whose owners send sums: ids and lengths go out, one vector per sample and owner comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..batch import offsets_of
from ..kernels import Backend
from ..kernels.request import FeatureSpec, FeatureSpecs, Request
from ..plan.parts import ID, id_bytes
from ..plan.placement import Codec
from ..storage import Storage
from .codecs import decode, encode, wire_size
from .hop import WirePiece
from .mesh import Ints, Mesh
from .rows import read

Matrices = list[tuple[int, int]]
"""(samples, rank whose columns they have), one after the other"""


@dataclass(frozen=True, slots=True)
class Bagged:
    """A feature's share of a piece."""

    feature: str
    piece: WirePiece
    column: int
    """where its columns begin in the pooled output"""

    @property
    def width(self) -> int:
        return self.piece.width


@dataclass(slots=True)
class Bags:
    """A step's bags as the owner has them, for their gradients to follow."""

    request: Request
    sizes: Ints
    """samples of each rank"""


@dataclass(slots=True)
class Delivered:
    """What came of them, of all ranks' samples: feature after feature of those that are held here, rank after rank."""

    ids: Tensor
    lengths: Tensor
    bounds: Ints
    """where each feature's ids begin, and where the last one's end"""
    sizes: Ints

    def of_feature(self, f: int) -> Tensor:
        return self.ids[int(self.bounds[f]) : int(self.bounds[f + 1])]


class SumExchange:
    """All such features, in one hop over all ranks. What an owner has for a rank is one matrix, [samples, its columns]: the owner
    pools into the message and updates from it."""

    def __init__(
        self, mesh: Mesh, parts: Sequence[Bagged], kernels: Backend, device: torch.device,
        forward_codec: Codec, backward_codec: Codec,
    ) -> None:  # fmt: skip
        self.mesh, self.parts, self.kernels, self.device = mesh, list(parts), kernels, device
        self.forward_codec, self.backward_codec = forward_codec, backward_codec
        self.held_by = [
            [j for j, part in enumerate(parts) if rank in part.piece.piece.ranks] for rank in range(mesh.world)
        ]
        self.held = self.held_by[mesh.rank]
        # What goes nowhere stays as it is.
        self._id_bytes = np.array([id_bytes(part.piece.rows) if mesh.world > 1 else ID for part in parts], np.int64)
        self.tables = list(dict.fromkeys((parts[j].piece.table, parts[j].piece.piece) for j in self.held))
        """which shards are read here"""
        self._widths = [[parts[j].width for j in held] for held in self.held_by]
        self._columns = [np.cumsum([0, *widths]).tolist() for widths in self._widths]
        """by rank: where the columns of each feature begin in what it sends"""
        columns = self._columns[mesh.rank]
        self.columns = int(columns[-1])
        self.specs = FeatureSpecs(
            FeatureSpec(
                parts[j].feature, self.tables.index((parts[j].piece.table, parts[j].piece.piece)), "sum", parts[j].width,
                columns[k],
            )
            for k, j in enumerate(self.held)
        )  # fmt: skip

    def ask(self, ids: dict[str, Tensor], lengths: dict[str, Tensor], size: int) -> Delivered:
        """Brings every bag's ids to their owners. `ids` and `lengths` by feature."""
        world = self.mesh.world
        pieces = [self._deal(j, ids[part.feature], lengths[part.feature]) for j, part in enumerate(self.parts)]
        counts = np.array([[size, *(piece[2][k] for piece in pieces)] for k in range(world)], np.int64)
        came = self.mesh.everyone.all_to_all_counts(counts)
        sizes, received = came[:, 0], came[:, 1:][:, self.held]
        blocks: list[tuple[Tensor, int]] = []
        sent = np.zeros(world, np.int64)
        for k, held in enumerate(self.held_by):
            runs = self._runs_of_ids(size, counts[k, 1:][held], held)
            of_rank = [pieces[j][1][k] for j in held] + [pieces[j][0][k] for j in held]
            blocks += zip(of_rank, runs[:, 1].tolist())
            sent[k] = runs.prod(1).sum()
        expected = [self._runs_of_ids(size_of, of_rank, self.held) for size_of, of_rank in zip(sizes, received)]
        message = self.kernels.narrow_ids(blocks, self.device)
        landed = self.mesh.everyone.all_to_all(
            message, sent, np.array([runs.prod(1).sum() for runs in expected], np.int64)
        )
        landed = self.kernels.widen_ids(landed, np.concatenate(expected))
        return self._arrange(landed, sizes, received)

    def _runs_of_ids(self, size: int, counts: Ints, held: Sequence[int]) -> Ints:
        """[blocks, 2]: how many numbers the blocks of a message have, and the bytes of one: of each feature the lengths, which
        are no more than the ids it has in all, then of each the ids."""
        lengths = [(size, id_bytes(int(count) + 1) if self.mesh.world > 1 else ID) for count in counts]
        ids = zip(counts.tolist(), self._id_bytes[held].tolist())
        return np.array([*lengths, *ids], np.int64).reshape(-1, 2)

    def _arrange(self, landed: Tensor, sizes: Ints, received: Ints) -> Delivered:
        """By feature what came by rank: first the lengths of all features, then their ids. `received`: [ranks, features]."""
        held = len(self.held)
        if not held:
            return Delivered(landed, landed, np.zeros(1, np.int64), sizes)
        cuts = np.concatenate([np.broadcast_to(sizes[:, None], received.shape), received], 1)
        blocks = torch.split(landed, cuts.reshape(-1).tolist())
        lengths, ids = (
            torch.cat([blocks[k * 2 * held + h] for h in range(first, first + held) for k in range(len(cuts))])
            for first in (0, held)
        )
        bounds = np.concatenate([[0], received.sum(0).cumsum()])
        return Delivered(ids, lengths, bounds, sizes)

    def locate(self, came: Delivered, storages: Sequence[Storage], insert: bool) -> Bags:
        """`storages`: of `tables`."""
        slots = came.ids
        # All of a table's ids at once: admission counts them, then looks them up.
        for t, storage in enumerate(storages):
            asked = self.asked_of(came, t)
            found = storage.locate(asked, insert)
            if found is asked and slots is came.ids:
                continue
            slots = came.ids.clone() if slots is came.ids else slots
            mine = [f for f, spec in enumerate(self.specs) if spec.table == t]
            spans = [slice(int(came.bounds[f]), int(came.bounds[f + 1])) for f in mine]
            for span, part in zip(spans, torch.split(found, [span.stop - span.start for span in spans])):
                slots[span] = part
        index = np.arange(len(self.specs), dtype=np.int64)
        rows, size, offsets = [storage.rows for storage in storages], int(came.sizes.sum()), offsets_of(came.lengths)
        return Bags(Request(rows, self.specs, size, index, slots, slots, offsets, None, came.bounds), came.sizes)

    def asked_of(self, came: Delivered, t: int) -> Tensor:
        """All ids that one of `tables` was asked for."""
        parts = [came.of_feature(f) for f, spec in enumerate(self.specs) if spec.table == t]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _deal(self, j: int, ids: Tensor, lengths: Tensor) -> tuple[list[Tensor], list[Tensor], Ints]:
        """Per rank: ids, lengths and the number of ids."""
        world, piece = self.mesh.world, self.parts[j].piece
        ranks = piece.piece.ranks
        if len(ranks) == 1:
            of_rank = {ranks[0]: (ids, lengths)}
        else:
            dealt, shares, sizes = self.kernels.deal_bags(ids, lengths, len(ranks), piece.hashed)
            of_rank = dict(zip(ranks, zip(torch.split(dealt, sizes.tolist()), shares.unbind(0))))
        nothing = ids[:0], torch.zeros_like(lengths)
        by_rank = [of_rank.get(k, nothing) for k in range(world)]
        counts = np.array([part.numel() for part, _ in by_rank], np.int64)
        return [part for part, _ in by_rank], [part for _, part in by_rank], counts

    def pool(self, bags: Bags) -> Tensor:
        """The sums over the rows that are held here, of all ranks' bags."""
        out = self.mesh.empty((bags.request.size, self.columns), torch.empty(0, device=self.device))
        if self.columns:
            read(self.kernels, bags.request, out, [])
        return out

    def fetch(self, bags: Bags, sums: Tensor, pooled: Tensor) -> None:
        """Sends what `pool` gave to whom it belongs, and fills the features' columns of the pooled output."""
        asked = [pooled.shape[0]] * self.mesh.world
        filled: set[int] = set()
        for k, came in enumerate(
            self._exchange(sums.view(-1), self._owned(bags), self._asked(asked), self.forward_codec)
        ):
            for j, first in zip(self.held_by[k], self._columns[k]):
                part = self.parts[j]
                target, block = pooled[:, part.column : part.column + part.width], came[:, first : first + part.width]
                if j in filled:
                    target.add_(block)
                else:
                    target.copy_(block)
                    filled.add(j)

    def _owned(self, bags: Bags) -> Matrices:
        return [(int(size), self.mesh.rank) for size in bags.sizes]

    def _asked(self, sizes: Sequence[int]) -> Matrices:
        return [(size, k) for k, size in enumerate(sizes)]

    def send_back(self, bags: Bags, gradient: Tensor, factors: dict[str, Tensor | float]) -> Tensor:
        """The gradients of all ranks' bags, as the owner's pooled output lies. `gradient`: of this rank's pooled output;
        `factors`: by feature, what it is multiplied by, one number or [samples, 1]."""
        size = gradient.shape[0]
        asked = self._asked([size] * self.mesh.world)
        flat = self.mesh.empty((size * sum(columns[-1] for columns in self._columns),), gradient)
        for k, message in enumerate(self._matrices(flat, asked)):
            for j, first in zip(self.held_by[k], self._columns[k]):
                part = self.parts[j]
                own = gradient[:, part.column : part.column + part.width]
                torch.mul(own, factors[part.feature], out=message[:, first : first + part.width])
        owned = self._owned(bags)
        if self.mesh.world == 1:
            return flat.view(size, self.columns)
        return self._swap(flat, asked, owned, self.backward_codec).view(bags.request.size, self.columns)

    def _matrices(self, flat: Tensor, shapes: Matrices) -> list[Tensor]:
        parts = torch.split(flat, [size * self._columns[k][-1] for size, k in shapes])
        return [part.view(size, self._columns[k][-1]) for part, (size, k) in zip(parts, shapes)]

    def _exchange(self, flat: Tensor, sent: Matrices, received: Matrices, codec: Codec) -> list[Tensor]:
        if self.mesh.world > 1:
            flat = self._swap(flat, sent, received, codec)
        return self._matrices(flat, received)

    def _swap(self, flat: Tensor, sent: Matrices, received: Matrices, codec: Codec) -> Tensor:
        """What a rank sends to each, and what comes from each: matrices, one after the other."""
        by_feature = codec == "int8"  # every vector has a scale of its own, and vectors of one width lie together
        runs = [[self._runs(*shape, by_feature) for shape in side] for side in (sent, received)]
        if by_feature:
            flat = self._by_feature(flat, sent)
        wire = encode(flat, [run for part in runs[0] for run in part], codec)
        sizes = [np.array([sum(wire_size(*run, codec) for run in part) for part in side], np.int64) for side in runs]
        came = decode(self.mesh.everyone.all_to_all(wire, *sizes), [run for part in runs[1] for run in part], codec)
        return self._by_sample(came, received) if by_feature else came

    def _runs(self, size: int, k: int, by_feature: bool) -> list[tuple[int, int]]:
        return [(size, width) for width in (self._widths[k] if by_feature else self._columns[k][-1:])]

    def _by_feature(self, flat: Tensor, shapes: Matrices) -> Tensor:
        blocks = [
            block.reshape(-1)
            for matrix, (_, k) in zip(self._matrices(flat, shapes), shapes)
            for block in torch.split(matrix, self._widths[k], 1)
        ]
        return torch.cat(blocks) if blocks else flat

    def _by_sample(self, flat: Tensor, shapes: Matrices) -> Tensor:
        blocks = torch.split(flat, [size * width for size, k in shapes for width in self._widths[k]])
        out, at = torch.empty_like(flat), 0
        for matrix, (size, k) in zip(self._matrices(out, shapes), shapes):
            for width, first in zip(self._widths[k], self._columns[k]):
                matrix[:, first : first + width] = blocks[at].view(size, width)
                at += 1
        return out
