"""Tiers for tables: what the solver is asked, and its answer in rows, bytes and seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from .cost import Numbers, Part, Pricer, Setting
from .memory import MAP_BYTES
from .placement import Piece, TablePlacement, Tiers
from .tiered import Tier
from .tiers import Allocation, Candidates, Cut, Cuts, solve
from .topology import Topology
from .workload import TableLoad

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Objective = Literal["seconds", "bytes"]
Naming = Callable[[str, int], Ints]
"""The ids of a table's so many most read rows."""
MOST = 1e300
FULL, NO_GAIN, UNNAMED, ALL_ROWS = "memory full", "nothing more to gain", "no more rows named", "all rows that are read"


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """What a table, or all of them, take of a rank in a step."""

    seconds: float
    bytes_inside: float
    """sent to ranks of the same node"""
    bytes_across: float
    memory: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TierChoice:
    """Where the cuts of a table lie, why, and what they change."""

    replicated: int
    """rows"""
    node: int
    rest: int
    """rows without copies"""
    replicated_bytes: float
    """of copies, per rank"""
    node_bytes: float
    map_bytes: float
    """of the map of ids with copies, per rank"""
    before: Flow
    """row-wise, without copies"""
    after: Flow
    replicated_last: float | None
    """gain per byte of the last row that is replicated"""
    replicated_next: float | None
    """of the first one that is not"""
    replicated_why: str
    copied_last: float | None
    """of the last row that has copies at all, and of the first that has none"""
    copied_next: float | None
    copied_why: str


def tiers_of(topology: Topology) -> tuple[Tier, ...]:
    """Those that differ: with one node there are no copies in others, with one rank a node its copy is every rank's."""
    if topology.world == 1:
        return ()
    if topology.nodes == 1 or topology.ranks_per_node == 1:
        return (Tier.REPLICATED,)
    return (Tier.NODE, Tier.REPLICATED)


def why_not(load: TableLoad) -> str | None:
    """What keeps a table's rows from having copies."""
    if load.table.admit_after > 1:
        return "no tiers: ids share a row until they are seen often (admit_after)"
    if load.popularity is None:
        return "no tiers: nothing is known of its single rows"
    return None


def allocate(
    pricer: Pricer, tables: Numbers, numbers: Sequence[int], memory: float, objective: Objective = "seconds"
) -> Allocation:
    """Cuts for some of the tables, with so many bytes of each rank for copies and what they change in messages."""
    asked = []
    for k in numbers:
        costs, reads = pricer.tier_costs(tables, k), tables.reads[k]
        assert reads is not None
        each = costs.seconds if objective == "seconds" else costs.bytes

        def evaluate(
            first: int, last: int, costs: object = costs, each: Floats = each, reads: Floats = reads.each
        ) -> tuple[Floats, Floats]:
            part = reads[first:last]
            return part @ each.T, costs.memory(part)  # type: ignore[attr-defined]

        named = reads.popularity.named
        asked.append(Candidates(rows=reads.rows, evaluate=evaluate, limit=np.inf if named is None else named))
    return solve(asked, memory, tiers_of(pricer.topology))


def counted(replicated: int, node: int) -> Tiers:
    """So many rows that are not named yet: for prices alone. It takes no memory."""
    nothing = np.zeros(1, np.int64)
    return Tiers(np.broadcast_to(nothing, replicated), np.broadcast_to(nothing, node))


def row_wise(load: TableLoad, topology: Topology, tiers: Tiers | None = None) -> TablePlacement:
    piece = Piece(0, load.table.dim, tuple(range(topology.world)))
    return TablePlacement("row_wise", (piece,), False, tiers)


def named(naming: Naming, table: str, tiers: Tiers) -> Tiers:
    """With the ids of the rows that `counted` counted."""
    replicated = len(tiers.replicated)
    ids = naming(table, replicated + len(tiers.node))
    return Tiers(ids[:replicated], ids[replicated:])


def flow(pricer: Pricer, cost: Floats) -> Flow:
    """Of the rank that is busiest or fullest; bytes of the mean rank."""
    sent = [
        sum(float(cost[part].mean()) for part in parts)
        for parts in (
            (Part.ROWS_SENT_INSIDE, Part.BACK_SENT_INSIDE, Part.PUSH_SENT_INSIDE),
            (Part.ROWS_SENT_ACROSS, Part.BACK_SENT_ACROSS, Part.PUSH_SENT_ACROSS),
        )
    ]
    return Flow(
        seconds=float(pricer.own_seconds(cost).max()),
        bytes_inside=sent[0],
        bytes_across=sent[1],
        memory=float(pricer.memory(cost).max()),
    )


def repeated_ids_memory(loads: Sequence[TableLoad], setting: Setting) -> float:
    """Bytes of each rank, the fixed part included, that row-wise sharding of these tables takes at its peak where ids travel as
    often as they are read. Copies are paid from what is saved of that: no more memory than without them."""
    return row_wise_memory(loads, replace(setting, unique="none"))


def row_wise_memory(loads: Sequence[TableLoad], setting: Setting) -> float:
    """The same with the setting's own exchange."""
    pricer = Pricer(setting)
    tables = pricer.numbers([replace(load, popularity=None) for load in loads])
    held = 0.0
    for k, load in enumerate(loads):
        cost = pricer.price_many(tables.take([k]), 1, row_wise(load, setting.topology))[:, 0]
        held += float(pricer.memory(cost).max())
    return held + sum(setting.fixed.values())


def describe(pricer: Pricer, load: TableLoad, cuts: Cuts, price: float, before: Floats, after: Floats) -> TierChoice:
    """The numbers of one table's tiers. `price`: of memory; `before`, `after`: costs without and with copies."""
    replicated, node = cuts.replicated.rows, cuts.node_rows
    tables = pricer.numbers([load])
    row = pricer.tier_costs(tables, 0).kind.row
    return TierChoice(
        replicated=replicated,
        node=node,
        rest=max(0, load.rows - replicated - node),
        replicated_bytes=float(replicated * row),
        node_bytes=node * row / pricer.size,
        map_bytes=float((replicated + node) * MAP_BYTES),
        before=flow(pricer, before),
        after=flow(pricer, after),
        replicated_last=_finite(cuts.replicated.last),
        replicated_next=_finite(cuts.replicated.next),
        replicated_why=_why(cuts.replicated, cuts.limited, price),
        copied_last=_finite(cuts.copied.last),
        copied_next=_finite(cuts.copied.next),
        copied_why=_why(cuts.copied, cuts.limited, price),
    )  # fmt: skip


def _why(cut: Cut, limited: bool, price: float) -> str:
    if cut.next is None:
        return UNNAMED if limited else ALL_ROWS
    return FULL if cut.next > 0 and price > 0 else NO_GAIN


def _finite(value: float | None) -> float | None:
    """JSON has no infinity: a row that gains and takes no memory gains as much per byte as can be written."""
    return None if value is None else max(-MOST, min(MOST, value))
