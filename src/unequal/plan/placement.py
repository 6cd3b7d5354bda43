"""Where rows and columns of every table are. All kinds of sharding are one thing here: pieces of columns, each dealt out by
row over a list of ranks; a data-parallel table is a piece that every rank holds whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from ..errors import RecipeError
from ..kernels.reference.route import part_of as part_of
from ..tables import Table

Kind = Literal[
    "table_wise", "row_wise", "column_wise", "data_parallel",
    "table_row_wise", "table_column_wise", "column_row_wise", "column_column_wise",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)
WHOLE_ROWS: tuple[Kind, ...] = ("table_wise", "row_wise", "table_row_wise")
"""kinds in which a row is in one piece and has one owner, as rows of different width must"""
Codec = Literal["fp32", "fp16", "bf16", "int8"]
CODECS: tuple[Codec, ...] = get_args(Codec)
Unique = Literal["none", "rank", "node"]
UNIQUES: tuple[Unique, ...] = get_args(Unique)
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Piece:
    """Columns [first, last) of a table. Row `id` of them is on ranks[part_of(id)]."""

    first: int
    last: int
    ranks: tuple[int, ...]

    @property
    def width(self) -> int:
        return self.last - self.first


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank holds of a piece: the rows whose part is `part` of `parts`."""

    table: str
    first: int
    last: int
    part: int
    parts: int
    rank: int

    @property
    def width(self) -> int:
        return self.last - self.first

    def rows(self, table_rows: int) -> int:
        """How many of a dense table's rows: id part + k·parts is its row k."""
        return max(0, -(-(table_rows - self.part) // self.parts))


@dataclass(frozen=True, eq=False, slots=True)
class Tiers:
    """The rows of a table dealt out by rows over all ranks that are read so often that others keep copies of them. Their owner,
    who is always the same, sums the gradients, updates, and sends the new row to the copies."""

    replicated: Ints
    """ids copied to every rank, most read first"""
    node: Ints
    """ids copied once to every node, to its rank with the owner's number there; most read first"""


@dataclass(frozen=True, slots=True)
class TablePlacement:
    """How one table is spread."""

    kind: Kind
    pieces: tuple[Piece, ...]
    """Cover all columns, in order. Data-parallel: one piece; each of its ranks holds all of it."""
    sums: bool = False
    """Owners pool and send (partial) sums instead of rows; only where all features of the table are pooled."""
    tiers: Tiers | None = None
    """Row-wise tables: rows that have copies."""

    def shards(self, table: str) -> Iterator[Shard]:
        for piece in self.pieces:
            for part, rank in enumerate(piece.ranks):
                if self.kind == "data_parallel":
                    yield Shard(table, piece.first, piece.last, 0, 1, rank)
                else:
                    yield Shard(table, piece.first, piece.last, part, len(piece.ranks), rank)

    def check(self, table: Table, world: int) -> None:
        where = f"plan of table '{table.name}'"
        if self.kind not in KINDS:
            raise RecipeError(f"{where} kind", "one of " + ", ".join(KINDS), self.kind)
        ends = [0, *(piece.last for piece in self.pieces)]
        if (
            [piece.first for piece in self.pieces] != ends[:-1]
            or ends[-1] != table.dim
            or min((piece.width for piece in self.pieces), default=0) < 1
        ):
            raise RecipeError(f"{where} pieces", f"columns 0 to {table.dim} in order, without gaps", self.pieces)
        for piece in self.pieces:
            ranks = piece.ranks
            if not ranks or len(set(ranks)) != len(ranks) or not all(0 <= rank < world for rank in ranks):
                raise RecipeError(f"{where} ranks", f"different ranks of 0 to {world - 1}", ranks)
        if self.tiers is not None:
            self._check_tiers(self.tiers, table, world, where)
        if self.kind == "data_parallel" and (len(self.pieces) != 1 or len(self.pieces[0].ranks) != world):
            raise RecipeError(f"{where} pieces", f"one piece on all {world} ranks", self.pieces)

    def _check_tiers(self, tiers: Tiers, table: Table, world: int, where: str) -> None:
        if self.kind != "row_wise" or self.sums or [p.ranks for p in self.pieces] != [tuple(range(world))]:
            raise RecipeError(
                f"{where} tiers", f"a row_wise table without sums on all {world} ranks in order", self.kind
            )
        if table.admit_after > 1:
            raise RecipeError(f"{where} tiers", "a table that gives every id a row (admit_after 1)", table.admit_after)
        ids = np.concatenate([tiers.replicated, tiers.node])
        if len(np.unique(ids)) != len(ids):
            raise RecipeError(f"{where} tiers", "every id once", "ids that are named twice")
        if table.rows is not None and ids.size and not (ids.min() >= 0 and ids.max() < table.rows):
            raise RecipeError(f"{where} tiers", f"ids of 0 to {table.rows - 1}", f"{ids.min()} to {ids.max()}")


@dataclass(frozen=True, slots=True)
class Placement:
    """Where everything is: what sharded modules are made from. A `Plan` is one, with reasons."""

    world: int
    ranks_per_node: int
    tables: Mapping[str, TablePlacement]
    forward_codec: Codec = "fp32"
    backward_codec: Codec = "fp32"
    unique: Unique = "node"
    """What travels once. node: with several nodes, rows cross the network once per node that reads them, in two hops; rank: once
    per rank that reads them; none: ids and rows travel as often as they are read."""
    notes: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def nodes(self) -> int:
        return self.world // self.ranks_per_node

    def check(self, tables: Mapping[str, Table]) -> None:
        if self.world < 1 or self.ranks_per_node < 1 or self.world % self.ranks_per_node:
            raise RecipeError("plan ranks_per_node", f"a divisor of the {self.world} ranks", self.ranks_per_node)
        for name in dict.fromkeys([*tables, *self.tables]):
            if name not in self.tables or name not in tables:
                which = "a table that the plan does not place" if name in tables else "a table that the model lacks"
                raise RecipeError("plan tables", f"the model's tables {list(tables)}", f"'{name}', {which}")
            self.tables[name].check(tables[name], self.world)

    def shards(self, rank: int | None = None) -> list[Shard]:
        """Of one rank, or of all, in the order of tables, columns and parts."""
        every = [shard for name, table in self.tables.items() for shard in table.shards(name)]
        return every if rank is None else [shard for shard in every if shard.rank == rank]


def even(dim: int, pieces: int) -> list[tuple[int, int]]:
    """Columns [first, last) of pieces as equal as they can be, each but the last a multiple of 4 where dim allows it."""
    unit = 4 if dim >= 4 * pieces else 1
    units = -(-dim // unit)
    bounds = [min(dim, unit * (units * k // pieces)) for k in range(pieces)] + [dim]
    return list(pairwise(bounds))


def place(
    kind: Kind, table: Table, world: int, ranks_per_node: int | None = None, first: int = 0, sums: bool = False
) -> TablePlacement:
    """A table in one of the kinds, with everything it can use; `first`: the rank or node where it begins."""
    size = world if ranks_per_node is None else ranks_per_node
    nodes = world // size

    def node(number: int) -> tuple[int, ...]:
        begin = number % nodes * size
        return tuple(range(begin, begin + size))

    start = first % world
    match kind:
        case "table_wise":
            pieces = [Piece(0, table.dim, (start,))]
        case "row_wise" | "data_parallel":
            pieces = [Piece(0, table.dim, tuple(range(world)))]
        case "column_wise":
            cuts = even(table.dim, min(world, table.dim))
            pieces = [Piece(a, b, ((start + k) % world,)) for k, (a, b) in enumerate(cuts)]
        case "table_row_wise":
            pieces = [Piece(0, table.dim, node(first))]
        case "table_column_wise":
            cuts = even(table.dim, min(size, table.dim))
            pieces = [Piece(a, b, (node(first)[k],)) for k, (a, b) in enumerate(cuts)]
        case "column_row_wise":
            pieces = [Piece(a, b, node(first + k)) for k, (a, b) in enumerate(even(table.dim, min(nodes, table.dim)))]
        case "column_column_wise":
            pieces = []
            for n, (low, high) in enumerate(even(table.dim, min(nodes, table.dim))):
                cuts = even(high - low, min(size, high - low))
                pieces += [Piece(low + a, low + b, (node(first + n)[k],)) for k, (a, b) in enumerate(cuts)]
    return TablePlacement(kind, tuple(pieces), sums and kind != "data_parallel")
