"""What a sharded module is made of: this rank's shards, the exchange that asks for all of them, and their state."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..batch import Batch
from ..errors import UserError
from ..exchange.columns import ColumnSums, sums_of
from ..exchange.hop import GLOBAL, NODE, REPLICATED, Routed, WirePiece
from ..exchange.mesh import Ints, Mesh
from ..exchange.push import Push
from ..exchange.rows import Journey, Owner, RowExchange
from ..exchange.sums import Bagged, Bags, Delivered, SumExchange
from ..kernels.request import FeatureSpec, FeatureSpecs, Request
from ..plan.placement import WHOLE_ROWS, Placement, Shard
from ..storage import Storage, make_shard
from ..storage.copies import Copies, NarrowCopies
from ..storage.narrow import NarrowStorage
from ..storage.shards import NarrowShard
from ..width import Rounds, Width
from ..width.policy import READS
from .device import out_of_memory
from .drift import Drift, Watch
from .module import Embeddings, exact_device

Flags = npt.NDArray[np.bool_]
WIRE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}


@dataclass(slots=True)
class Step:
    """One step's lookups on their way."""

    batch: Batch
    weights: Tensor | None
    insert: bool
    by_sums: bool
    """whether the tables placed with `sums` are pooled by their owners; where ids have weights they are not"""
    distinct: dict[str, Tensor] = field(default_factory=dict)
    """per table read by rows: its distinct ids"""
    inverses: dict[str, Tensor] = field(default_factory=dict)
    """per feature of such a table: of each of its ids the place among the table's distinct ones"""
    inverse: Tensor | None = None
    """all of them, as the batch's ids lie, where they were found at once"""
    counts: dict[str, Tensor] = field(default_factory=dict)
    routed: dict[int, Tensor | Routed] = field(default_factory=dict)
    """per piece of a table with tiers: what it is asked for"""
    rest_counts: dict[int, Tensor] = field(default_factory=dict)
    """how often, where that is not in it"""
    orders: dict[str, Tensor] = field(default_factory=dict)
    """per table with tiers: its distinct ids by tier"""
    moves: int = 0
    """how often rows had moved between tiers when they were"""
    generation: int = 0
    """of the owners' slots: they mean nothing once rows have been laid out anew"""
    delivered: Delivered | None = None
    """what `bags` were made of, where slots can change"""
    journeys: list[Journey] = field(default_factory=list)
    places: dict[int, Tensor | None] = field(default_factory=dict)
    """per piece: of each distinct id of its table the place of its row among all that came"""
    bags: Bags | None = None
    local: Request | None = None

    @property
    def size(self) -> int:
        return self.batch.size


@dataclass(slots=True)
class Entries:
    """(feature, piece) pairs that are pooled or listed on this rank, as features of a request over the rows that came."""

    features: list[str]
    pieces: list[int]
    forward: FeatureSpecs
    backward: FeatureSpecs
    sequences: list[tuple[int, int, int]]
    """of the unpooled ones: number of the sequence output, first column, last column"""
    single: bool
    """every feature has one piece at most, so that positions in the batch serve as they are"""


@dataclass(slots=True)
class Part:
    """Pieces that are exchanged together, and this rank's shards of them."""

    numbers: list[int]
    """which of the module's pieces"""
    exchange: RowExchange
    owner: Owner
    fused: tuple[FeatureSpecs, Ints]
    """the blocks whose rows are updated where their gradients arrive"""
    summed: list[int]
    """pieces held here whose rows are not: their gradients are gathered first"""
    tables: Ints
    """by piece: the number of its table"""
    copied: Flags
    """whether some of its rows have copies"""
    spread: Flags
    """whether it has the rows that have one owner each"""


def check_width(placement: Placement) -> None:
    """Rows of different width stay in one piece, and each has one owner."""
    for name, placed in placement.tables.items():
        if len(placed.pieces) > 1 or placed.kind == "data_parallel":
            raise UserError(
                f"table '{name}' is placed {placed.kind}, but with a width budget its rows differ in width: expected whole rows "
                f"with one owner each; place it by {', '.join(WHOLE_ROWS)} or tiers"
            )


class SpreadTables(Embeddings):
    """Every rank's shards of the tables, and how they are asked for. What a step does with them: sharded.py."""

    def __init__(
        self, source: Embeddings, placement: Placement, mesh: Mesh, device: torch.device, timing: bool = False,
        drift: Drift | None = None,
    ) -> None:  # fmt: skip
        placement.check(source.tables)
        if (placement.world, placement.ranks_per_node) != (mesh.world, mesh.ranks_per_node):
            raise UserError(
                f"the plan is for {placement.world} ranks, {placement.ranks_per_node} on a node; the job has {mesh.world}, "
                f"{mesh.ranks_per_node} on a node; plan it for this job"
            )
        if source.width is not None:
            check_width(placement)
        self.placement, self.mesh = placement, mesh
        self.timing: dict[str, float] | None = {} if timing else None
        """seconds spent per kind of work, where asked for"""
        super().__init__(
            source.features, optimizer=source.optimizer, schedule=source.schedule, seed=source.seed, device=device,
            output_dtype=source.output_dtype, width=source.width,
        )  # fmt: skip
        self._side = None
        self._choose_ways()
        self.copies = self._make_copies()
        """of the tables with tiers: rows that are read here without asking"""
        watched = self.copies and drift is not None and drift.mode != "off"
        self._watch = Watch(drift, self.copies, mesh) if watched and drift is not None else None
        self._watched, self._moves = -1, 0
        self._loaded = False
        """whether rows were loaded since the last step"""
        self._wire, self._pieces_of, self._tier_pieces = self._lay_out_pieces()
        self._build_exchange()
        self._with_sums, self._without_sums = self._lay_out_entries(True), self._lay_out_entries(False)
        self._feature_numbers = {name: number for number, name in enumerate(self._specs)}
        self._table_of = np.array([spec.table for spec in self._spec_list], np.int64)
        self._table_order = np.array([f for readers in self._readers for f in readers], np.int64)
        """features, table by table"""
        self._table_shapes = {by_sums: self._lay_out_tables(by_sums) for by_sums in (False, True)}
        self._repeated_bytes = 0.0

    def _make_storages(self) -> dict[str, Storage]:
        storages: dict[str, Storage] = {}
        self._shards: dict[str, Shard] = {}
        for shard in self.placement.shards(self.mesh.rank):
            name = self._name_of(shard.table, shard)
            table = self.tables[shard.table]
            try:
                storages[name] = make_shard(
                    table, shard.first, shard.last, shard.part, shard.parts, self.optimizers[shard.table], self.seed,
                    self._kernels, self.device, self._narrowing(shard.table),
                )  # fmt: skip
            except torch.OutOfMemoryError:
                sizes = {shard.table: (table, 0)}
                raise out_of_memory(self.device, sizes, "while the tables' shards were made") from None
            self._shards[name] = shard
        return storages

    def _make_rounds(self, width: Width) -> Rounds:
        shares = dict.fromkeys(self.tables, 0.0)
        for shard in self.placement.shards(self.mesh.rank):
            shares[shard.table] = 1 / shard.parts
        mesh = self.mesh
        rounds = Rounds(width, self.tables, self.optimizers, mesh.total, mesh.world, shares, mesh.totals, self.features)
        rounds.reads.asked = dict.fromkeys(self.tables, 0)
        return rounds

    def _narrow_storages(self) -> dict[str, NarrowStorage]:
        return dict(self._narrow_shards())

    def _narrow_shards(self) -> dict[str, NarrowShard]:
        """By table: what this rank has of it, where rows differ in width."""
        parts = ((self._shards[name].table, storage) for name, storage in self._storages.items())
        return {table: storage for table, storage in parts if isinstance(storage, NarrowShard)}

    def _make_copies(self) -> dict[str, Copies]:
        mesh = self.mesh
        made: dict[str, Copies] = {}
        for name, table in self.tables.items():
            tiers = self.placement.tables[name].tiers
            if tiers is None or mesh.world == 1:
                continue
            # On one node a row that every node has is on its owner.
            node = tiers.node if mesh.nodes > 1 else tiers.node[:0]
            replicated, near = torch.from_numpy(tiers.replicated.copy()), torch.from_numpy(node.copy())
            where: dict[str, Any] = {
                "rank": mesh.rank, "world": mesh.world, "ranks_per_node": mesh.ranks_per_node, "kernels": self._kernels,
                "device": self.device,
            }  # fmt: skip
            how = self._narrowing(name)
            try:
                if how is None:
                    made[name] = Copies(table, replicated, near, **where)
                else:
                    made[name] = NarrowCopies(table, replicated, near, how=how, **where)
            except torch.OutOfMemoryError:
                raise out_of_memory(self.device, {name: (table, 0)}, "while copies of its rows were made") from None
        return made

    def _lay_out_pieces(self) -> tuple[list[WirePiece], dict[str, list[int]], dict[str, tuple[int, int]]]:
        wire: list[WirePiece] = []
        pieces_of: dict[str, list[int]] = {}
        for name, table in self.tables.items():
            placed, how = self.placement.tables[name], self._narrowing(name)
            for piece in placed.pieces:
                pieces_of.setdefault(name, []).append(len(wire))
                whole = WirePiece(name, piece, table.rows, placed.kind == "data_parallel")
                wire.append(whole if how is None else replace(whole, chunk=how.chunk, masked=how.masked))
        tiers = {}
        for name in self.copies:
            whole = wire[pieces_of[name][0]]
            tiers[name] = (len(wire), len(wire) + 1)
            wire += [replace(whole, tier=tier) for tier in (REPLICATED, NODE)]
        return wire, pieces_of, tiers

    def _storage_of(self, p: int) -> Storage:
        piece = self._wire[p]
        return self._storages[self._name_of(piece.table, piece.piece)]

    def _build_exchange(self) -> None:
        placement, mesh = self.placement, self.mesh
        self._by_reads = self._rounds is not None and bool(self._rounds.policy.kind & READS)
        """whether owners must learn how often rows were read"""
        counted = self._by_reads or any(table.admit_after > 1 for table in self.tables.values())
        norms = self.width is not None and self.width.gradients == "norms"
        codecs: dict[str, Any] = {"forward_codec": placement.forward_codec, "backward_codec": placement.backward_codec}
        spread = [p for p, piece in enumerate(self._wire) if not piece.replicated and piece.tier == GLOBAL]
        tiers = [p for p, piece in enumerate(self._wire) if piece.tier != GLOBAL]
        copied = [p for p, piece in enumerate(self._wire) if piece.replicated]
        two_hops = placement.unique == "node" and mesh.nodes > 1 and bool(spread)
        # Gradients of rows with copies are summed in every node first, however the others travel.
        apart = tiers if mesh.nodes > 1 and not two_hops else []
        spread += [] if apart else tiers
        self._together = not apart
        """whether rows of all tiers go in one exchange"""
        # Replicas are asked for nothing, and gradients go to all: that is one hop whatever the mesh.
        groups = [(spread, True), (copied, False)] if two_hops and copied else [(spread + copied, two_hops)]
        groups += [(apart, True)] if apart else []
        self._exchanges = []
        for numbers, hops in groups:
            pieces = [self._wire[p] for p in numbers]
            exchange = RowExchange(
                mesh, pieces, self._kernels, self.device, two_hops=hops, counted=counted, copies=self.copies, norms=norms,
                **codecs,
            )  # fmt: skip
            storages = {k: self._storage_of(numbers[k]) for k in exchange.blocks.held}
            owner = Owner(exchange.blocks, storages)
            summed = [k for k in exchange.blocks.held if exchange.pieces[k].table in self._statistics | self._rare]
            fused = exchange.blocks.select([k for k in exchange.blocks.held if k not in summed])
            tables = np.array([self._numbers[piece.table] for piece in pieces], np.int64)
            copied_rows = np.array([piece.table in self.copies for piece in pieces], bool)
            owned = np.array([not piece.replicated and piece.tier == GLOBAL for piece in pieces], bool)
            self._exchanges.append(Part(numbers, exchange, owner, fused, summed, tables, copied_rows, owned))
        bagged = [
            Bagged(name, self._wire[p], spec.place + self._wire[p].piece.first)
            for name, spec in self._specs.items()
            for p in self._pieces_of[self.features[name].table.name]
            if self.features[name].table.name in self._summed
        ]
        self._sum_exchange = SumExchange(mesh, bagged, self._kernels, self.device, **codecs) if bagged else None
        self._push = Push(mesh, self.copies, placement.forward_codec, self.device) if self.copies else None
        self._stale = bool(self.copies)
        """whether copies must be brought from their owners before they are read: at first, and after rows were loaded"""
        self._column_sums = ColumnSums(mesh, placement, {name: table.dim for name, table in self.tables.items()})

    def _choose_ways(self) -> None:
        """Which tables go another way than most: names, found once and not in every step."""
        self._numbers = {name: number for number, name in enumerate(self.tables)}
        placed = self.placement.tables
        listed = {feature.table.name for feature in self.features.values() if feature.pooling is None}
        self._summed = {name for name in self.tables if placed[name].sums and name not in listed}
        """their owners pool"""
        self._statistics = {n for n in self.tables if len(placed[n].pieces) > 1 and sums_of(self.optimizers[n])}
        """their optimizer needs numbers of whole rows, and the columns are spread"""
        self._rare = {
            name
            for name, table in self.tables.items()
            if table.admit_after > 1
            and self._rounds is None
            and placed[name].kind != "data_parallel"
            and any(len(piece.ranks) > 1 for piece in placed[name].pieces)
        }
        """rare ids share a row that several ranks have a copy of"""

    def _lay_out_entries(self, by_sums: bool) -> Entries:
        widths = sorted({piece.width for piece in self._wire})
        replicas = [p for p, piece in enumerate(self._wire) if piece.replicated]
        names, pieces, specs = [], [], []
        sequences: list[tuple[int, int, int]] = []
        for name, spec in self._specs.items():
            table = self.features[name].table.name
            if by_sums and table in self._summed:
                continue
            for p in self._pieces_of[table]:
                piece = self._wire[p]
                number = len(widths) + replicas.index(p) if piece.replicated else widths.index(piece.width)
                names.append(name)
                pieces.append(p)
                if spec.pooling is None:
                    at = len(sequences)
                    sequences.append((spec.place, piece.piece.first, piece.piece.last))
                else:
                    at = spec.place + piece.piece.first
                specs.append(FeatureSpec(name, number, spec.pooling, piece.width, at))
        self._widths, self._replicas = widths, replicas
        return Entries(
            names, pieces, FeatureSpecs(specs), FeatureSpecs(specs), sequences, len(set(names)) == len(names)
        )

    def _lay_out_tables(self, by_sums: bool) -> Ints:
        """Per table: where its features begin among all of them, their number, its rows or -1, and whether it is read by rows."""
        firsts = np.cumsum([0, *(len(readers) for readers in self._readers)]).tolist()
        return np.array(
            [
                (first, len(readers), -1 if table.rows is None else table.rows, not (by_sums and name in self._summed))
                for first, readers, (name, table) in zip(firsts, self._readers, self.tables.items())
            ],
            np.int64,
        )

    @staticmethod
    def _name_of(table: str, piece: Any) -> str:
        return f"{table}[{piece.first}:{piece.last}]"

    def _shard_of(self, p: int) -> Shard:
        return self._shards[self._name_of(self._wire[p].table, self._wire[p].piece)]

    def shard_storages(self) -> list[tuple[Shard, Storage]]:
        return [(self._shards[name], storage) for name, storage in self._storages.items()]

    def rows(self) -> dict[str, int]:
        """Live rows of each table on this rank; a row of which it holds some columns counts."""
        found = dict.fromkeys(self.tables, 0)
        for shard, storage in self.shard_storages():
            found[shard.table] = max(found[shard.table], storage.live)
        return found

    def exchanged(self) -> dict[str, float]:
        """Bytes that this rank has sent to others so far, and what the exchange of its ids would have taken had they not been
        made unique."""
        traffic = self.mesh.traffic
        return {"sent": float(traffic.inside + traffic.across), "repeated_ids": self._repeated_bytes}

    def _count_repeated(self, step: Step) -> None:
        wire = WIRE_BYTES[self.placement.forward_codec] + step.insert * WIRE_BYTES[self.placement.backward_codec]
        ids = np.bincount(self._table_of, np.diff(step.batch.bounds)[self._index], len(self.tables))
        for part, journey in zip(self._exchanges, step.journeys):
            sent, hop = journey.asked[0].sent, part.exchange.hops[0]
            totals, copied = sent.sum(0), part.copied
            here = np.where(copied, 1 / self.mesh.world, sent[hop.link.place] / np.maximum(totals, 1))
            each = (1 - here) * ids[part.tables] * (hop.id_bytes + wire * hop.widths)
            self._repeated_bytes += float(each[part.spread & (copied | (totals > 0))].sum())

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        if self.timing is None:
            yield
            return
        started, waited = time.perf_counter(), self.mesh.traffic.seconds
        yield
        spent = time.perf_counter() - started - (self.mesh.traffic.seconds - waited)
        self.timing[what] = self.timing.get(what, 0.0) + spent

    def _apply(self, fn: Any, recurse: bool = True) -> SpreadTables:
        torch.nn.Module._apply(self, fn, recurse)  # type: ignore[no-untyped-call]
        device = exact_device(fn(torch.zeros(0, device=self.device)).device)
        if device != self.device:
            raise UserError(f"shards stay where they were made, on {self.device}; shard the module on {device}")
        return self

    def _key(self, name: str) -> str:
        shard = self._shards[name]
        return f"{shard.table}.{shard.first}-{shard.last}.{shard.part}of{shard.parts}"
