"""The cost model: what a table in a placement asks of every rank in a step, bytes over rates. docs/cost_model.md has every term.

All of a table's costs are one array [parts, ranks], so that costs of tables add up and a table can be taken out again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UserError
from .memory import ID_BYTES, LOOKUP_BYTES, STATISTICS, directory_bytes, exchange_bytes, slab_rows
from .parts import DEAL, ID, LINE, LOCATE, MEMORY, SECONDS, Part, id_bytes, row_bytes
from .placement import Codec, TablePlacement, Tiers, Unique
from .popularity import StepReads
from .shape import Cut, Shapes, Told
from .tiered import PUSH, RowKind, Tier, TierCosts
from .topology import Topology
from .workload import TableLoad

__all__ = ["MEMORY", "SECONDS", "Numbers", "Part", "Pricer", "Setting", "row_bytes"]

Floats = npt.NDArray[np.float64]
APART = 5
"""How many times the fused update of a row costs what is added where its statistics must be brought together first."""
CUT_OUT = 2
"""How many times a plain copy costs what brings sums that came into their columns of the output, and gradients out of them."""
AGAIN = 0.4
"""How many times a plain copy costs what reads a row again, or a gradient, where an owner pools: nothing is written for it, and
all ids of a sample have one gradient."""
SUMS_HELD = 1.5
"""How many times as much of them is held at a time."""
SUMS_HOST = 2
"""How many times the host's work for a piece is that for a piece whose sums travel: lengths go with the ids. Twice that where
both are dealt out."""
DEAL_ROWS = {"cpu": 0.5, "cuda": DEAL}
"""Of what it costs to make ids unique: putting the distinct ones into messages by owner; on CPUs those of all tables at once."""
DEALT_SUMS = 1
"""Of what it costs to make ids unique: dealing out those of sums by owner, and finding their slots there."""
REPLICAS_HOST = 3
"""How many times it is that for a piece which every rank holds: its rows are read and summed apart from the others'."""
STATISTICS_HOST = 4
"""How many times it is that for a piece held here whose rows' statistics must be brought together."""
TIERED_PIECES = 2
"""pieces whose work for the host a table with copies makes: rows of owners, and copies"""
COUNT = 2
"""Bytes that tell how often an id was read, where that is told: up to 65,535 times by a rank or a node."""
BLOCK = 0.25
"""Of the host's work for a piece: that for a block of it in a message that is answered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What all tables have in common."""

    topology: Topology
    batch_size: int
    """of all ranks together"""
    forward: Codec = "fp32"
    backward: Codec = "fp32"
    unique: Unique = "node"
    fixed: dict[str, int] = field(default_factory=dict)
    """bytes of every rank that no plan changes: process, dense part, reader"""

    @property
    def share(self) -> int:
        """samples of a rank"""
        return -(-self.batch_size // self.topology.world)

    @property
    def samples(self) -> tuple[int, int, int]:
        """of a rank, a node, all"""
        return self.share, min(self.share * self.topology.ranks_per_node, self.batch_size), self.batch_size

    @property
    def codecs(self) -> tuple[Codec, Codec]:
        return (self.forward, self.backward)

    @property
    def two_hops(self) -> bool:
        return self.unique == "node" and self.topology.nodes > 1

    @property
    def limit(self) -> int:
        """bytes of each rank that tables may take"""
        return self.topology.usable_memory - sum(self.fixed.values())


class Numbers:
    """What is known of some tables, as columns [tables, 1], so that one formula serves one table and a thousand."""

    def __init__(self, loads: Sequence[TableLoad], setting: Setting) -> None:
        def column(value: Callable[[TableLoad], float]) -> Floats:
            return np.array([[value(load)] for load in loads], np.float64)

        share, of_node, batch = setting.samples
        self.rank = column(lambda load: load.distinct(share))
        """distinct ids in the samples of a rank"""
        self.node = column(lambda load: load.distinct(of_node))
        self.all = column(lambda load: load.distinct(batch))
        self.lookups = column(lambda load: load.ids * share)
        """ids that a rank reads"""
        self.vectors = column(lambda load: load.pooled * share)
        """pooled outputs of a rank"""
        self.outputs = column(lambda load: load.output_rows * share)
        self.dim = column(lambda load: load.table.dim)
        self.item = column(lambda load: load.table.dtype.itemsize)
        self.rows = column(lambda load: load.rows)
        self.entries = column(lambda load: load.entries)
        self.hashed = column(lambda load: load.table.rows is None)
        self.id = column(lambda load: id_bytes(load.table.rows))
        """bytes of an id on the wire"""
        self.counted = column(lambda load: load.table.admit_after > 1)
        self.statistics = column(lambda load: load.statistics)
        self.per_row = column(lambda load: load.optimizer.state_bytes_per_row(0))
        self.per_value = column(lambda load: load.optimizer.state_bytes_per_row(1)) - self.per_row
        self.reads = np.full(len(loads), None, object)
        """[tables]: what a step reads of single rows, where that is known"""
        for k, load in enumerate(loads):
            if load.popularity is not None:
                self.reads[k] = StepReads.of(load.popularity, load.ids, load.distinct, setting.samples)

    def take(self, numbers: Sequence[int]) -> Numbers:
        """Some of the tables."""
        part = Numbers.__new__(Numbers)
        for name, values in vars(self).items():
            setattr(part, name, values[list(numbers)])
        return part

    def state(self, width: float) -> Floats:
        """bytes of optimizer state of a row of so many columns"""
        state: Floats = self.per_row + self.per_value * width
        return state


class Pricer:
    """Prices placements of tables. Replace `price_many` to price otherwise."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.topology = setting, setting.topology
        self.nodes, self.size = self.topology.nodes, self.topology.ranks_per_node
        self.world = self.topology.world
        self.shapes = Shapes(self.nodes, self.size)
        self._tier_costs: dict[RowKind, TierCosts] = {}

    def numbers(self, loads: Sequence[TableLoad]) -> Numbers:
        return Numbers(loads, self.setting)

    def price(self, load: TableLoad, placement: TablePlacement) -> Floats:
        """[parts, ranks]: what a step and the table's memory take of each rank."""
        return self.price_many(self.numbers([load]), 1, placement)[:, 0]

    def price_many(self, tables: Numbers, count: int, placement: TablePlacement) -> Floats:
        """[parts, tables, ranks]: of several tables of one dim, each placed like this."""
        cost = np.zeros((len(Part), count, self.world))
        replicated = placement.kind == "data_parallel"
        if not placement.sums and not replicated:
            self._read_once(cost, tables)
        if placement.tiers is not None:
            self._tiers(cost, tables, placement.tiers)
        cuts, told = self.shapes.of(placement.pieces)
        for cut in cuts:
            if replicated:
                self._replicas(cost, tables, cut.width)
            elif placement.sums:
                self._sums(cost, tables, cut)
            elif placement.tiers is None:
                self._rows(cost, tables, cut)
            self._hold(cost, tables, cut, 1 if replicated else cut.parts)
        if told is not None:
            self._statistics(cost, tables, told, len(placement.pieces))
            held = STATISTICS_HOST * sum((cut.owners for cut in cuts), np.zeros(self.world))
            cost[Part.HOST] += (tables.statistics > 0) * held * self.topology.compute.seconds_per_piece
        cost[Part.WITH_SUMS] = placement.sums
        cost[Part.WITH_REPLICAS] = replicated
        pieces = TIERED_PIECES if placement.tiers is not None else len(placement.pieces)
        cost[Part.HOST] += (pieces + BLOCK * self._blocks(placement, cuts)) * self._host(placement)
        cost[Part.BUFFERS] += 2 * tables.outputs * tables.dim * 4
        cost[Part.INPUTS] += tables.lookups * LOOKUP_BYTES
        return cost

    def _host(self, placement: TablePlacement) -> float:
        times = 1
        if placement.sums:
            times = SUMS_HOST * (2 if any(len(piece.ranks) > 1 for piece in placement.pieces) else 1)
        elif placement.kind == "data_parallel":
            times = REPLICAS_HOST
        return self.topology.compute.seconds_per_piece * times

    def _blocks(self, placement: TablePlacement, cuts: Sequence[Cut]) -> Floats:
        """[ranks]: messages' blocks that a rank answers, one for each that asks and each piece it holds."""
        owners = sum((cut.owners for cut in cuts), np.zeros(self.world))
        if placement.sums or placement.kind == "data_parallel" or not self.setting.two_hops:
            return owners * self.world
        return self.shapes.of_lane(owners) * self.size + owners * self.nodes

    def _hold(self, cost: Floats, tables: Numbers, cut: Cut, parts: int) -> None:
        """Memory of the shards."""
        rows, row = np.ceil(tables.rows / parts), cut.width * tables.item
        if self.topology.device == "cuda":
            rows = np.where(tables.hashed, slab_rows(rows, row), rows)
        cost[Part.WEIGHTS] += cut.owners * rows * row
        cost[Part.OPTIMIZER] += cut.owners * rows * tables.state(cut.width)
        cost[Part.DIRECTORY] += cut.owners * directory_bytes(np.ceil(tables.entries / parts))

    def _read_once(self, cost: Floats, tables: Numbers) -> None:
        """What every rank does with its own ids, however the rows come: unique, pool or spread, and sum gradients."""
        rates, wide, came = self.topology.compute, 4 * tables.dim, self._asks(tables)
        cost[Part.INDEX] += tables.lookups * ID / rates.ids
        # The rows that came lie together, and a row that was read lately is near: both are read at the rate of copies.
        cost[Part.READ] += (tables.lookups + came) * wide / rates.copies
        cost[Part.UPDATE] += (tables.lookups * wide + came * (2 * wide + LINE)) / rates.updates

    def _asks(self, tables: Numbers) -> Floats:
        """Ids that a rank sends out: each as often as it is read, or once."""
        return tables.lookups if self.setting.unique == "none" else tables.rank

    def _tiers(self, cost: Floats, tables: Numbers, tiers: Tiers) -> None:
        """Rows with copies beside those without, each as `TierCosts` has it."""
        copied, near = len(tiers.replicated) + len(tiers.node), len(tiers.replicated)
        for k in range(cost.shape[1]):
            costs, reads = self.tier_costs(tables, k), self.tier_reads(tables, k, near, copied)
            cost[:, k] += np.einsum("tpr,tr->p", costs.parts, reads)[:, None]
            moved = costs.buffers(reads)
            cost[Part.BUFFERS, k] += exchange_bytes(np.array(moved), costs.kind.width, self.setting.codecs)
            cost[Part.INPUTS, k] += moved * ID_BYTES
            held = costs.held
            cost[Part.COPIES, k] += near * held[Tier.REPLICATED] + (copied - near) * held[Tier.NODE]
            cost[Part.INDEX, k] += LOCATE * tables.rank[k] * ID / self.topology.compute.ids
        cost[Part.WITH_NODE_ROWS] = copied > near
        cost[Part.WITH_REPLICATED_ROWS] = near > 0

    def tier_costs(self, tables: Numbers, k: int) -> TierCosts:
        """Of rows of table k."""
        width = int(tables.dim[k, 0])
        state = float(tables.per_row[k, 0] + tables.per_value[k, 0] * width)
        kind = RowKind(width, int(tables.item[k, 0]), state, bool(tables.hashed[k, 0]), int(tables.id[k, 0]))
        found = self._tier_costs.get(kind)
        if found is None:
            found = self._tier_costs[kind] = TierCosts(self.setting, kind)
        return found

    @staticmethod
    def tier_reads(tables: Numbers, k: int, replicated: int, copied: int) -> Floats:
        """[tier, reads]: what a step reads of the rows of each tier of table k, with so many rows in them."""
        reads = tables.reads[k]
        if reads is None:
            raise UserError("a price of tiers: expected how often single rows are read, got none; plan with a profile")
        total = np.array([tables.lookups[k, 0], tables.rank[k, 0], tables.node[k, 0], tables.all[k, 0]])
        near, both = reads.first(replicated), reads.first(copied)
        found: Floats = np.stack([np.maximum(total - both, 0), both - near, near])
        return found

    def _rows(self, cost: Floats, tables: Numbers, cut: Cut) -> None:
        """Distinct ids to their owners, rows back, gradients there."""
        rates, setting, own, of_rank, of_node = (
            self.topology.compute,
            self.setting,
            cut.held,
            self._asks(tables),
            tables.node,
        )
        if setting.two_hops:
            lane = self.shapes.of_lane(own)
            inside = of_rank * (cut.pieces - lane), of_rank * (lane * (self.size - 1))
            across = of_node * (lane - own), of_node * (own * (self.nodes - 1))
            between, answered = of_rank * (lane * self.size), of_node * (own * self.nodes)
            asked = of_rank * cut.pieces + of_node * lane
        else:
            near = self.shapes.of_node(own)
            inside = of_rank * (near - own), of_rank * (own * (self.size - 1))
            across = of_rank * (cut.pieces - near), of_rank * (own * (self.world - self.size))
            between, answered = np.zeros(1), of_rank * (own * self.world)
            asked = of_rank * cut.pieces
        forward, backward = row_bytes(cut.width, setting.forward), row_bytes(cut.width, setting.backward)
        self._link(cost, inside, across, forward, tables.id + COUNT * tables.counted + backward)

        wide = 4 * cut.width
        cost[Part.READ] += self._reads(tables, cut.width, answered, tables.all * own) + between * (wide / rates.copies)
        cost[Part.UPDATE] += self._updates(tables, cut.width, answered, tables.all * own)
        cost[Part.UPDATE] += between * ((wide + LINE) / rates.updates)
        dealt = DEAL_ROWS[self.topology.device] * asked * (cut.parts > 1)
        cost[Part.INDEX] += (between + dealt + answered * (LOCATE * tables.hashed)) * (ID / rates.ids)
        moved = asked + answered + between
        cost[Part.COPY] += self._copies(moved, cut.width)
        cost[Part.BUFFERS] += exchange_bytes(moved, cut.width, self.setting.codecs)
        cost[Part.INPUTS] += moved * ID_BYTES

    def _sums(self, cost: Floats, tables: Numbers, cut: Cut) -> None:
        """All ids to the owners, which pool: a vector per owner, feature and sample comes back."""
        rates, setting, owners, vectors = self.topology.compute, self.setting, cut.owners, tables.vectors
        near = self.shapes.of_node(owners)
        inside = vectors * (near - owners), vectors * (owners * (self.size - 1))
        across = vectors * (owners.sum() - near), vectors * (owners * (self.world - self.size))
        forward, backward = row_bytes(cut.width, setting.forward), row_bytes(cut.width, setting.backward)
        per_vector = tables.lookups / cut.parts / np.maximum(1, vectors)
        # A bag's length goes with its ids, in as many bytes as the number of all ids of its message needs.
        length = np.ceil(np.log2(np.maximum(1, per_vector * setting.share) + 1) / 8)
        self._link(cost, inside, across, forward, backward + length + per_vector * tables.id)

        looked_up = tables.lookups * (self.world * cut.held)
        moved = vectors * (self.world * owners + cut.parts * cut.pieces)
        cost[Part.READ] += self._reads(tables, cut.width, looked_up, tables.all * cut.held, AGAIN)
        cost[Part.UPDATE] += self._updates(tables, cut.width, looked_up, tables.all * cut.held, AGAIN)
        located = tables.lookups * cut.pieces + looked_up * tables.hashed
        dealt = DEALT_SUMS * tables.lookups * (cut.pieces * (cut.parts > 1))
        cost[Part.INDEX] += (LOCATE * located + dealt) * ID / rates.ids
        # Owners pool into messages and update from them; who asked has them in columns of the output.
        came = vectors * (cut.parts * cut.pieces)
        cost[Part.COPY] += self._copies(moved, cut.width) + CUT_OUT * came * (16 * cut.width / rates.copies)
        cost[Part.BUFFERS] += exchange_bytes(SUMS_HELD * moved, cut.width, self.setting.codecs)
        cost[Part.INPUTS] += (moved + looked_up) * ID_BYTES

    def _replicas(self, cost: Floats, tables: Numbers, dim: int) -> None:
        """Rows are read where they are; ids and gradients go to everyone, in one hop."""
        rates, one, backward = self.topology.compute, np.ones(self.world), row_bytes(dim, self.setting.backward)
        inside, across = tables.rank * ((self.size - 1) * one), tables.rank * ((self.world - self.size) * one)
        self._link(cost, (inside, inside), (across, across), 0.0, tables.id + COUNT * tables.counted + backward)
        came = tables.rank * self.world
        cost[Part.INDEX] += (tables.lookups + came * LOCATE) * ID / rates.ids
        cost[Part.READ] += self._reads(tables, dim, tables.lookups, tables.rank)
        cost[Part.UPDATE] += (tables.lookups * dim * 4 + tables.rank * (8 * dim + LINE)) / rates.updates
        cost[Part.UPDATE] += self._updates(tables, dim, came, tables.all)
        cost[Part.COPY] += self._copies(came, dim)
        # What goes to everyone is written once for each.
        cost[Part.BUFFERS] += exchange_bytes(2 * came, dim, self.setting.codecs)
        cost[Part.INPUTS] += came * ID_BYTES

    def _statistics(self, cost: Floats, tables: Numbers, told: Told, pieces: int) -> None:
        """Column pieces of a row-wise optimizer: every owner tells the others its columns' part of each row's statistics."""
        each = tables.all * 4 * tables.statistics
        for part, share in ((Part.BACK_SENT_INSIDE, told.inside), (Part.BACK_SENT_ACROSS, told.across)):
            cost[part] += each * share
            cost[part + 1] += each * share
        # Not the fused kernel: gradients are summed, rows and state read, changed and written, each in a pass of its own.
        width, needed = tables.dim / pieces, tables.statistics > 0
        row = width * (tables.item + 8) + tables.per_row + tables.per_value * width
        apart = APART * needed * tables.all * (2 * row + 2 * LINE) / self.topology.compute.updates
        cost[Part.UPDATE] += apart * told.rows
        cost[Part.WITH_STATISTICS] = needed
        cost[Part.BUFFERS] += STATISTICS * needed * tables.all * 4 * width * told.rows

    def _link(self, cost: Floats, inside: Any, across: Any, forward: Any, backward: Any) -> None:
        """(asked, answered) entries over each class of links: bytes of an entry forward, and back."""
        for (asked, answered), rows, back in (
            (inside, Part.ROWS_SENT_INSIDE, Part.BACK_SENT_INSIDE),
            (across, Part.ROWS_SENT_ACROSS, Part.BACK_SENT_ACROSS),
        ):
            cost[rows] += answered * forward
            cost[rows + 1] += asked * forward
            cost[back] += asked * backward
            cost[back + 1] += answered * backward

    def _reads(self, tables: Numbers, width: int, lookups: Floats, rows: Floats, again: float = 1.0) -> Floats:
        """So many lookups of so many distinct rows: the first of each is at a random place, the others are near. `again`: what
        those cost, of a plain copy."""
        row, rates = width * tables.item, self.topology.compute
        more = np.maximum(lookups - rows, 0) * row * again
        seconds: Floats = rows * (row + LINE) / rates.reads + more / rates.copies
        return seconds

    def _updates(self, tables: Numbers, width: int, gradients: Floats, rows: Floats, again: float = 1.0) -> Floats:
        row = width * tables.item + tables.state(width)
        came = gradients * (4 * width) * again
        seconds: Floats = (came + rows * (2 * row + 2 * LINE)) / self.topology.compute.updates
        return seconds

    def _copies(self, rows: Floats, width: int) -> Floats:
        """Rows are read straight into messages and updated straight from them. Only where they travel in another precision are
        they changed there and back, in both directions."""
        each = 0.0
        for codec in (self.setting.forward, self.setting.backward):
            each += 0 if codec == "fp32" else 4 * width + row_bytes(width, codec)
        seconds: Floats = rows * (each / self.topology.compute.copies)
        return seconds

    def seconds(self, cost: Floats) -> Floats:
        """[ranks]: how long a step keeps each rank busy with all tables."""
        seconds: Floats = self.own_seconds(cost) + self.messages(cost)
        return seconds

    def own_seconds(self, cost: Floats) -> Floats:
        """[ranks]: without the messages that all tables share."""
        seconds: Floats = cost[SECONDS].sum(0) + self.exchange_seconds(cost)
        return seconds

    def exchange_seconds(self, cost: Floats) -> Floats:
        """A link carries both directions at a time, so the larger one counts; inside a machine of CPUs their mean."""
        inside, across = self.link_seconds(cost)
        return inside + across

    def link_seconds(self, cost: Floats) -> tuple[Floats, Floats]:
        """Inside nodes and across."""

        def busier(part: Part) -> Floats:
            more: Floats = np.maximum(cost[part], cost[part + 1])
            return more

        def within(part: Part) -> Floats:
            # Between processes of one machine the cores move the bytes, and it is all the same to them in which direction.
            both: Floats = (cost[part] + cost[part + 1]) / 2
            return both if self.topology.device == "cpu" else busier(part)

        inside = within(Part.ROWS_SENT_INSIDE) + within(Part.BACK_SENT_INSIDE)
        across = busier(Part.ROWS_SENT_ACROSS) + busier(Part.BACK_SENT_ACROSS)
        # New rows go to copies beside the rest of the step.
        inside, across = (
            inside + PUSH * within(Part.PUSH_SENT_INSIDE),
            across + PUSH * busier(Part.PUSH_SENT_ACROSS),
        )
        return inside / self.topology.inside.bytes_per_second, across / self.topology.across.bytes_per_second

    def messages(self, cost: Floats) -> float:
        """Seconds of a step's messages apart from their bytes. All tables share them: counts, ids, rows, gradients."""
        nodes, size = self.nodes, self.size
        inside = (size - 1) * self.topology.inside.seconds_per_message
        across = (nodes - 1) * self.topology.across.seconds_per_message
        # One collective's messages set out together: those to all ranks of a node take as long as one.
        each = inside + across
        total = 4 * each
        total += 4 * each * bool(cost[Part.WITH_SUMS].any())
        total += 3 * each * bool(self.setting.two_hops and cost[Part.WITH_REPLICAS].any())
        total += each * bool(cost[Part.WITH_STATISTICS].any())
        near, nodes_rows = bool(cost[Part.WITH_REPLICATED_ROWS].any()), bool(cost[Part.WITH_NODE_ROWS].any())
        if near or nodes_rows:
            # Where ids take one hop, copies' ids, rows and gradients have messages of their own. New rows: counts and rows.
            total += 4 * each if nodes > 1 and not self.setting.two_hops else 0
            total += 2 * PUSH * (across + inside * near)
        return total

    def memory(self, cost: Floats) -> Floats:
        """[ranks]: bytes of each rank, without the fixed part."""
        held: Floats = cost[MEMORY].sum(0)
        return held
