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
from ..plan.placement import Codec
from ..storage import Storage
from .codecs import decode, encode, wire_size
from .hop import WirePiece
from .mesh import Ints, Mesh
from .rows import read

RunsByRank = list[list[tuple[int, int]]]


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
    """What came of them: by feature that is held here, of all ranks' samples."""

    ids: list[Tensor]
    lengths: list[Tensor]
    sizes: Ints


class SumExchange:
    """All such features, in one hop over all ranks."""

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
        self.tables = list(dict.fromkeys((parts[j].piece.table, parts[j].piece.piece) for j in self.held))
        """which shards are read here"""
        columns = np.cumsum([0, *(parts[j].width for j in self.held)])
        self.columns = int(columns[-1])
        self.specs = FeatureSpecs(
            FeatureSpec(
                parts[j].feature, self.tables.index((parts[j].piece.table, parts[j].piece.piece)), "sum", parts[j].width,
                int(columns[k]),
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
        message = []
        for k in range(world):
            message += [pieces[j][1][k] for j in self.held_by[k]] + [pieces[j][0][k] for j in self.held_by[k]]
        sent = [size * len(held) + int(counts[k, 1:][held].sum()) for k, held in enumerate(self.held_by)]
        expected = sizes * len(self.held) + received.sum(1)
        flat = torch.cat(message) if message else torch.empty(0, dtype=torch.int64, device=self.device)
        landed = self.mesh.everyone.all_to_all(flat, np.array(sent, np.int64), expected)
        cuts = [[*([int(sizes[k])] * len(self.held)), *received[k].tolist()] for k in range(world)]
        blocks = torch.split(landed, [cut for part in cuts for cut in part])
        many = 2 * len(self.held)
        all_lengths = [torch.cat([blocks[k * many + h] for k in range(world)]) for h in range(len(self.held))]
        all_ids = [torch.cat([blocks[k * many + many // 2 + h] for k in range(world)]) for h in range(len(self.held))]
        return Delivered(all_ids, all_lengths, sizes)

    def locate(self, came: Delivered, storages: Sequence[Storage], insert: bool) -> Bags:
        """`storages`: of `tables`."""
        return Bags(self._request(came.ids, came.lengths, int(came.sizes.sum()), storages, insert), came.sizes)

    def asked_of(self, came: Delivered, t: int) -> Tensor:
        """All ids that one of `tables` was asked for."""
        return torch.cat([came.ids[f] for f, spec in enumerate(self.specs) if spec.table == t])

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

    def _request(
        self, ids: list[Tensor], lengths: list[Tensor], size: int, storages: Sequence[Storage], insert: bool
    ) -> Request:
        slots = list(ids)
        # All of a table's ids at once: admission counts them, then looks them up.
        for t, storage in enumerate(storages):
            mine = [f for f, spec in enumerate(self.specs) if spec.table == t]
            found = storage.locate(torch.cat([ids[f] for f in mine]), insert)
            for f, part in zip(mine, torch.split(found, [ids[f].numel() for f in mine])):
                slots[f] = part
        empty = torch.empty(0, dtype=torch.int64, device=self.device)
        flat = torch.cat(slots) if slots else empty
        offsets = offsets_of(torch.cat(lengths) if lengths else empty)
        bounds = np.cumsum([0, *(part.numel() for part in ids)], dtype=np.int64)
        index = np.arange(len(self.specs), dtype=np.int64)
        return Request([s.rows for s in storages], self.specs, size, index, flat, flat, offsets, None, bounds)

    def pool(self, bags: Bags) -> Tensor:
        """The sums over the rows that are held here, of all ranks' bags."""
        out = self.mesh.empty((bags.request.size, self.columns), torch.empty(0, device=self.device))
        if self.columns:
            read(self.kernels, bags.request, out, [])
        return out

    def fetch(self, bags: Bags, sums: Tensor, pooled: Tensor) -> None:
        """Sends what `pool` gave to whom it belongs, and fills the features' columns of the pooled output."""
        size = pooled.shape[0]
        by_rank = torch.split(sums, bags.sizes.tolist())
        blocks = [part[:, spec.place : spec.place + spec.dim] for part in by_rank for spec in self.specs]
        came = self._exchange(blocks, self._owned(bags), self._asked(size), self.forward_codec)
        filled: set[int] = set()
        for block, j in zip(came, [j for held in self.held_by for j in held]):
            part = self.parts[j]
            target = pooled[:, part.column : part.column + part.width]
            if j in filled:
                target.add_(block.view(size, part.width))
            else:
                target.copy_(block.view(size, part.width))
                filled.add(j)

    def _owned(self, bags: Bags) -> RunsByRank:
        return [[(int(n), spec.dim) for spec in self.specs] for n in bags.sizes]

    def _asked(self, size: int) -> RunsByRank:
        return [[(size, self.parts[j].width) for j in held] for held in self.held_by]

    def send_back(self, bags: Bags, gradient: Tensor, factors: dict[str, Tensor | float]) -> Tensor:
        """The gradients of all ranks' bags, as the owner's pooled output lies. `gradient`: of this rank's pooled output;
        `factors`: by feature, what it is multiplied by, one number or [samples, 1]."""
        size = gradient.shape[0]
        blocks, made = [], {}
        for held in self.held_by:
            for j in held:
                part = self.parts[j]
                if j not in made:
                    own = gradient[:, part.column : part.column + part.width]
                    made[j] = own * factors[part.feature]
                blocks.append(made[j])
        came = self._exchange(blocks, self._asked(size), self._owned(bags), self.backward_codec)
        out = self.mesh.empty((bags.request.size, self.columns), gradient)
        rows = torch.split(out, bags.sizes.tolist())
        targets = [(own, spec) for own in rows for spec in self.specs]
        for block, (own, spec) in zip(came, targets):
            own[:, spec.place : spec.place + spec.dim] = block.view(-1, spec.dim)
        return out

    def _exchange(self, blocks: list[Tensor], sent: RunsByRank, received: RunsByRank, codec: Codec) -> Sequence[Tensor]:
        """`sent` and `received`: (samples, width) of every block, by rank."""
        flat = self.mesh.empty((sum(block.numel() for block in blocks),), torch.empty(0, device=self.device))
        for view, block in zip(torch.split(flat, [block.numel() for block in blocks]) if blocks else (), blocks):
            view.view(block.shape).copy_(block)
        runs = [run for part in received for run in part]
        if self.mesh.world > 1:
            wire = encode(flat, [run for part in sent for run in part], codec)
            sizes = [
                np.array([sum(wire_size(*run, codec) for run in part) for part in side], np.int64)
                for side in (sent, received)
            ]
            flat = decode(self.mesh.everyone.all_to_all(wire, *sizes), runs, codec)
        return torch.split(flat, [rows * width for rows, width in runs]) if runs else ()
