"""Rows by exchange, in one hop or in two: every distinct id once to its owner, its row once back, its gradient once there.

With several nodes an id goes first to the rank of its own node that has the owner's number there, is made unique again with
those of the node's other ranks, and then along the lane of that number: a row crosses the network once per node that reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernels import Backend
from ..kernels.request import FeatureSpec, FeatureSpecs, Request, TableRows
from ..optim import SGD
from ..plan.placement import Codec
from ..storage import Storage
from ..storage.copies import Copies, NarrowCopies
from ..storage.shards import DenseShard
from .hop import NODE, REPLICATED, Asked, Hop, Routed, WirePiece
from .mesh import Ints, Mesh

PLAIN = SGD(lr=1.0)
"""Adds gradients up: with a factor of −1 a row becomes the sum of its gradients, if it was zero before."""


def matrix_rows(matrix: Tensor) -> TableRows:
    """A matrix as a table that the kernels read or add gradients to."""
    return TableRows([matrix], [], matrix.shape[0], PLAIN)


def read(kernels: Backend, request: Request, pooled: Tensor | None, sequences: Sequence[Tensor]) -> None:
    """A lookup of slots that are known to be right."""
    if kernels.on_device:
        noted = torch.zeros(len(request.features), 2, dtype=torch.int64, device=request.ids.device)
        kernels.lookup(request, pooled, sequences, noted)
    else:
        kernels.lookup(request, pooled, sequences)


class Blocks:
    """What a hop's messages ask of this rank: a block for every rank and every piece held here, in the message's order."""

    def __init__(self, kernels: Backend, hop: Hop, table_of: Sequence[int]) -> None:
        """`table_of`: which of the tables that `read` and `update` are given each piece reads."""
        self.kernels, self.hop = kernels, hop
        self.held = [p for p in hop.order if hop.holds[hop.link.place, p]]
        self.blocks = [(k, p) for k in range(hop.link.size) for p in self.held]
        self._table_of = table_of
        self._counted: dict[tuple[int, ...], FeatureSpecs] = {}
        self._travelling = self.select([p for p in self.held if not hop.silent[p]])

    def select(self, pieces: Sequence[int]) -> tuple[FeatureSpecs, Ints]:
        """The blocks of some pieces, as features of a request, and which blocks they are."""
        index = np.array([b for b, (_, p) in enumerate(self.blocks) if p in pieces], np.int64)
        specs = [self.blocks[b] for b in index]
        names = [self.hop.pieces[p].table for _, p in specs]
        return FeatureSpecs(
            FeatureSpec(name, self._table_of[p], None, self.hop.pieces[p].width, place)
            for place, (name, (_, p)) in enumerate(zip(names, specs))
        ), index

    def bounds(self, counts: Ints) -> Ints:
        """Where each block's ids begin, and where the last one's end."""
        return np.cumsum([0, *(counts[k, p] for k, p in self.blocks)], dtype=np.int64)

    def slices(self, counts: Ints) -> dict[int, list[slice]]:
        """Per piece held here: where its ids lie, rank after rank."""
        bounds = self.bounds(counts)
        found: dict[int, list[slice]] = {p: [] for p in self.held}
        for b, (_, p) in enumerate(self.blocks):
            found[p].append(slice(int(bounds[b]), int(bounds[b + 1])))
        return found

    def _request(
        self, tables: Sequence[TableRows], chosen: tuple[FeatureSpecs, Ints], slots: Tensor, counts: Ints
    ) -> Request:
        bounds = self.bounds(counts)
        offsets = torch.from_numpy(bounds).to(slots.device)
        return Request(tables, chosen[0], 1, chosen[1], slots, slots, offsets, None, bounds)

    def read(self, tables: Sequence[TableRows], slots: Tensor, counts: Ints) -> Tensor:
        """The rows of all slots of pieces that travel: float32, flat, in the order of the message."""
        specs, index = self._travelling
        sizes = [int(counts[self.blocks[b]]) * spec.dim for b, spec in zip(index, specs)]
        flat = self.hop.link.mesh.empty((sum(sizes),), torch.empty(0, device=slots.device))
        parts = [part.view(-1, spec.dim) for part, spec in zip(torch.split(flat, sizes), specs)] if sizes else []
        if parts:
            read(self.kernels, self._request(tables, (specs, index), slots, counts), None, parts)
        return flat

    def live(self, tables: Sequence[TableRows], slots: Tensor, counts: Ints) -> Tensor:
        """How many chunks the rows that `read` gives have, where they differ in width."""
        specs, index = self._travelling
        bounds, parts = self.bounds(counts), []
        for b, spec in zip(index, specs):
            own = slots[int(bounds[b]) : int(bounds[b + 1])]
            parts.append(chunks_at(tables[spec.table], own))
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=slots.device)

    def pick(self, of_width: Mapping[int, Tensor], places: Tensor, counts: Ints) -> Tensor:
        """Likewise, where they are known by width and place."""
        specs, index = self._travelling
        bounds, parts = self.bounds(counts), []
        for b, spec in zip(index, specs):
            own = places[int(bounds[b]) : int(bounds[b + 1])]
            parts += [of_width[spec.dim][own]] if own.numel() else []
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=places.device)

    def update(
        self, chosen: tuple[FeatureSpecs, Ints], tables: Sequence[TableRows], slots: Tensor, counts: Ints,
        gradients: Tensor, factor: float, step: int, reads: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Applies the gradients (flat, of all blocks) to the rows of the chosen ones. `reads`: how often each was read, where
        rows are followed by that."""
        specs, index = chosen
        if not index.size:
            return
        sizes = [int(counts[block]) * self.hop.pieces[block[1]].width for block in self.blocks]
        parts = torch.split(gradients, sizes)
        views = [parts[b].view(-1, spec.dim) for b, spec in zip(index, specs)]
        request = self._request(tables, chosen, slots, counts)
        if reads is not None:
            request = self._with_reads(request, chosen, reads)
            views += [
                view.new_zeros(1, view.shape[1]).expand(n, -1) for view, n in zip(views, request.counts()[len(views) :])
            ]
        self.kernels.update(request, None, views, lr_factor=factor, step=step)

    def _with_reads(self, request: Request, chosen: tuple[FeatureSpecs, Ints], reads: Tensor) -> Request:
        """The kernels count lookups. A row whose gradient came as a sum of several reads is looked up as often, the other times
        with a gradient of zeros."""
        specs, index = chosen
        key = tuple(index.tolist())
        if key not in self._counted:
            again = [replace(spec, place=len(specs) + spec.place) for spec in specs]
            self._counted[key] = FeatureSpecs([*specs, *again])
        assert request.bounds is not None
        spans = [slice(int(request.bounds[b]), int(request.bounds[b + 1])) for b in index]
        more = [request.ids[span].repeat_interleave(reads[span] - 1) for span in spans]
        bounds = np.concatenate(
            [request.bounds, request.bounds[-1] + np.cumsum([part.numel() for part in more], dtype=np.int64)]
        )
        slots = torch.cat([request.ids, *more])
        numbers = np.concatenate([index, len(self.blocks) + np.arange(len(more), dtype=np.int64)])
        offsets = torch.from_numpy(bounds).to(slots.device)
        return Request(request.tables, self._counted[key], 1, numbers, slots, slots, offsets, None, bounds)


def chunks_at(rows: TableRows, slots: Tensor) -> Tensor:
    """How many chunks rows have, from their slots."""
    assert rows.records is not None
    chunks = slots & ((1 << rows.records.class_bits) - 1)
    return torch.where(slots >= 0, chunks, 0).to(torch.uint8)


class NearRows:
    """Rows of a tier that a hop asks nobody for: they are read here, into the place that they have among those that come."""

    def __init__(self, kernels: Backend, hop: Hop, tier: int, copies: Mapping[str, Copies]) -> None:
        self.kernels, self._hop, self._known = kernels, hop, copies
        mine = [p for p in hop.order if hop.pieces[p].tier == tier and hop.near[p]]
        names = list(dict.fromkeys(hop.pieces[p].table for p in mine))
        self._copies = {p: copies[hop.pieces[p].table] for p in mine}
        self._of_table = [copies[name] for name in names]
        self._blocks = [(k, p, hop.pieces[p].width) for k in range(hop.link.size) for p in mine]
        self._specs = FeatureSpecs(
            FeatureSpec(hop.pieces[p].table, names.index(hop.pieces[p].table), None, width, number)
            for number, (_, p, width) in enumerate(self._blocks)
        )

    def fill(self, asked: Asked, rows: dict[int, Tensor], live: Tensor | None) -> None:
        """`live`: how many chunks the rows have that were sent, where rows differ in width."""
        if asked.live:
            self._tell_chunks(asked)
        if live is not None and self._hop.norms:
            asked.answered = self._answered(asked, live)
        if not any(p in asked.near for p in self._copies):
            return
        slots = {
            p: torch.split(copies.locate(asked.near[p]), asked.sent[:, p].tolist())
            for p, copies in self._copies.items()
            if p in asked.near
        }
        parts, views, none = [], [], asked.ids[:0]
        for k, p, width in self._blocks:
            parts.append(slots[p][k] if p in slots else none)
            first = int(asked.first[k, p])
            views.append(rows[width][first : first + parts[-1].numel()] if parts[-1].numel() else torch.empty(
                0, width, device=none.device
            ))  # fmt: skip
        bounds = np.cumsum([0, *(part.numel() for part in parts)], dtype=np.int64)
        flat, tables = torch.cat(parts), [copies.rows for copies in self._of_table]
        offsets = torch.from_numpy(bounds).to(flat.device)
        index = np.arange(len(parts), dtype=np.int64)
        read(self.kernels, Request(tables, self._specs, 1, index, flat, flat, offsets, None, bounds), None, views)

    def _tell_chunks(self, asked: Asked) -> None:
        """How many chunks they have; also those that only pass on their gradients here, and were read by who asked for them."""
        for p, ids in asked.near.items():
            if not ids.numel():
                continue
            copies = self._known[self._hop.pieces[p].table]
            assert isinstance(copies, NarrowCopies)
            live = torch.split(copies.chunks[copies.directory.find(ids)], asked.sent[:, p].tolist())
            of_width = asked.live[self._hop.pieces[p].width]
            for first, part in zip(asked.first[:, p].tolist(), live):
                of_width[first : first + part.numel()] = part

    def _answered(self, asked: Asked, live: Tensor) -> Tensor:
        """How wide all rows are for which this rank will be sent gradients; copies are everywhere as wide."""
        parts, at, row = [live[:0]], 0, 0
        for _, p, count in self._hop.blocks(asked.received, rows=False):
            if self._hop.silent[p]:
                copies = self._known[self._hop.pieces[p].table]
                assert isinstance(copies, NarrowCopies)
                parts.append(copies.chunks[copies.directory.find(asked.ids[at : at + count])])
            else:
                parts.append(live[row : row + count])
                row += count
            at += count
        return torch.cat(parts)


class Owner:
    """This rank's shards, as the last hop's messages ask for them."""

    def __init__(self, blocks: Blocks, storages: dict[int, Storage]) -> None:
        """`storages`: of every piece held here."""
        self.blocks, self.storages = blocks, storages
        self.tables = [storages[p].rows for p in blocks.held]
        dense = {p: storage.of for p, storage in storages.items() if isinstance(storage, DenseShard)}
        of_block = [dense.get(p, 0) for _, p in blocks.blocks]
        edges = [b for b in range(1, len(of_block)) if of_block[b] != of_block[b - 1]]
        self._dense = [
            (first, last, storages[blocks.blocks[first][1]])
            for first, last in pairwise([0, *edges, len(of_block)])
            if last > first and of_block[first]
        ]
        """blocks whose slots follow from their ids in the same way"""
        self._by_arithmetic = len(dense) == len(storages)
        self._same = self._by_arithmetic and all(of == 1 for of in dense.values())

    def asked_of(self, asked: Asked) -> list[tuple[Storage, list[slice]]]:
        """Every shard and where its ids lie. Tiers of a table are one shard."""
        found: dict[int, tuple[Storage, list[slice]]] = {}
        for p, spans in self.blocks.slices(asked.received).items():
            found.setdefault(id(self.storages[p]), (self.storages[p], []))[1].extend(spans)
        return list(found.values())

    def locate(self, asked: Asked, insert: bool) -> Tensor:
        """The slot of every id that was asked for."""
        if self._same:
            return asked.ids
        slots, bounds = torch.empty_like(asked.ids), self.blocks.bounds(asked.received)
        for first, last, storage in self._dense:
            span = slice(int(bounds[first]), int(bounds[last]))
            slots[span] = storage.locate(asked.ids[span], insert)
        for storage, spans in () if self._by_arithmetic else self.asked_of(asked):
            if isinstance(storage, DenseShard):
                continue
            ids = torch.cat([asked.ids[span] for span in spans])
            if not ids.numel():
                continue
            if insert and asked.counts is not None and storage.table.admit_after > 1:
                times = torch.cat([asked.counts[span] for span in spans])
                storage.locate(ids.repeat_interleave(times), True)  # admission counts reads, not distinct ids
                found = storage.locate(ids, False)
            else:
                found = storage.locate(ids, insert)
            for span, part in zip(spans, torch.split(found, [span.stop - span.start for span in spans])):
                slots[span] = part
        return slots


@dataclass(slots=True)
class Journey:
    """A step's ids on their way, for their rows and then their gradients to follow."""

    asked: list[Asked]
    slots: Tensor
    """at the owner, of what it was asked for"""
    between: Tensor | None = None
    """at the lane's rank: the place of each id that it was asked for among the rows it asked for itself"""
    headers: Ints = field(default_factory=lambda: np.zeros((0, 0), np.int64))


class RowExchange:
    """All pieces of all tables, over one hop or two."""

    def __init__(
        self, mesh: Mesh, pieces: Sequence[WirePiece], kernels: Backend, device: torch.device, *,
        two_hops: bool, counted: bool, forward_codec: Codec, backward_codec: Codec, copies: Mapping[str, Copies],
        norms: bool = False,
    ) -> None:  # fmt: skip
        """`copies`: of the tables with tiers, by name. `norms`: of the gradients of chunks that rows lack only norms travel."""
        self.mesh, self.pieces, self.kernels, self.device = mesh, list(pieces), kernels, device
        self.forward_codec, self.backward_codec = forward_codec, backward_codec
        size = mesh.ranks_per_node
        if two_hops:
            lane = {rank: place for place, rank in enumerate(mesh.lane.ranks)}
            near = Hop(kernels, device, mesh.in_node, pieces, lambda rank: rank % size, counted, norms=norms)
            far = Hop(kernels, device, mesh.lane, pieces, lambda rank: lane.get(rank, -1), counted, NODE, norms)
            self.hops = [near, far]
        else:
            self.hops = [Hop(kernels, device, mesh.everyone, pieces, lambda rank: rank, counted, norms=norms)]
        last = self.hops[-1]
        held = [p for p in last.order if last.holds[last.link.place, p]]
        self.blocks = Blocks(kernels, last, [held.index(p) if p in held else -1 for p in range(len(pieces))])
        self.widths = sorted({piece.width for piece in pieces})
        self._between = Blocks(kernels, self.hops[0], [self.widths.index(piece.width) for piece in pieces])
        self._all_between = self._between.select(self._between.held)
        self._near = [NearRows(kernels, hop, tier, copies) for hop, tier in zip(self.hops, (REPLICATED, NODE))]

    def ask(self, distinct: Sequence[Tensor | Routed | None], counts: Sequence[Tensor | None], header: Ints) -> Journey:
        """Brings every piece's distinct ids to their owners."""
        asked, headers = self.hops[0].ask(distinct, counts, header)
        journey = Journey([asked], asked.ids, None, headers)
        if len(self.hops) == 2:
            journey.asked.append(self._ask_on(asked, journey))
        return journey

    def _ask_on(self, asked: Asked, journey: Journey) -> Asked:
        """From the lane's rank along the lane, each id once."""
        distinct: list[Tensor | None] = [None] * len(self.pieces)
        counts: list[Tensor | None] = [None] * len(self.pieces)
        inverses: dict[int, Tensor] = {}
        slices = self._between.slices(asked.received)
        for p, spans in slices.items():
            ids = torch.cat([asked.ids[span] for span in spans])
            if not ids.numel():
                continue
            distinct[p], inverses[p], _ = self.kernels.unique(ids)
            if asked.counts is not None:
                times = torch.cat([asked.counts[span] for span in spans])
                found = distinct[p]
                assert found is not None
                counts[p] = torch.zeros_like(found).index_add_(0, inverses[p], times)
        header = journey.headers.max(0, initial=0)
        onward, journey.headers = self.hops[1].ask(distinct, counts, header)
        between = torch.empty_like(asked.ids)
        for p, inverse in inverses.items():
            places, spans = onward.places[p], slices[p]
            assert places is not None
            for span, part in zip(spans, torch.split(places[inverse], [span.stop - span.start for span in spans])):
                between[span] = part
        journey.between = between
        return onward

    def fetch(self, journey: Journey, tables: Sequence[TableRows]) -> dict[int, Tensor]:
        """The rows this rank asked for, by width; `tables` are the owner's, one for each piece held here."""
        last = journey.asked[-1]
        if all(piece.replicated for piece in self.pieces):
            return {}
        live = self.blocks.live(tables, journey.slots, last.received) if self.hops[-1].told else None
        answers = self.blocks.read(tables, journey.slots, last.received)
        rows = self.hops[-1].answer(last, answers, self.forward_codec, live)
        self._near[-1].fill(last, rows, live)
        if journey.between is None:
            return rows
        middle = [matrix_rows(self._width(rows, width)) for width in self.widths]
        first = journey.asked[0]
        answers = self._between.read(middle, journey.between, first.received)
        live = self._between.pick(last.live, journey.between, first.received) if self.hops[0].told else None
        rows = self.hops[0].answer(first, answers, self.forward_codec, live)
        self._near[0].fill(first, rows, live)
        return rows

    def _width(self, rows: dict[int, Tensor], width: int) -> Tensor:
        found = rows.get(width)
        return torch.empty(0, width, device=self.device) if found is None else found

    def zeros(self, sent: Ints, hop: Hop) -> dict[int, Tensor]:
        """A row of zeros for every row that a hop brings, by width."""
        like = torch.empty(0, device=self.device)
        return {width: self.mesh.empty((n, width), like).zero_() for width, n in hop.rows_of_width(sent).items()}

    def send_back(self, journey: Journey, gradients: dict[int, Tensor], replicas: Sequence[Tensor | None]) -> Tensor:
        """Brings the gradients of the rows that were fetched, and of replicated pieces' distinct ids, to the owners: flat, in
        the order of the ids they were asked for."""
        first = journey.asked[0]
        flat = self.hops[0].return_gradients(first, gradients, replicas, self.backward_codec)
        if journey.between is None:
            return flat
        onward = journey.asked[1]
        sums = self.zeros(onward.sent, self.hops[1])
        middle = [matrix_rows(self._width(sums, width)) for width in self.widths]
        self._between.update(self._all_between, middle, journey.between, first.received, flat, -1.0, 0)
        none: list[Any] = [None] * len(self.pieces)
        return self.hops[1].return_gradients(onward, sums, none, self.backward_codec)
