"""One hop of the exchange: ids go to the ranks that answer for them, rows come back, and gradients follow the ids.

A message to a rank is made of blocks, one for each piece of a table that the rank answers for, in a fixed order. So a step's
counts, ids, rows and gradients of all tables are one collective each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernels import Backend
from ..plan.parts import ID, id_bytes
from ..plan.placement import Codec, Piece, part_of
from .codecs import DTYPES, decode, encode, wire_size
from .mesh import Ints, Link
from .narrow import NarrowWire, Run

REPLICATED, NODE, GLOBAL = 0, 1, 2
"""Tiers of a table, as routes number them: rows with a copy on every rank, rows with a copy in every node, and the others."""


@dataclass(slots=True)
class Routed:
    """A piece's ids in the order in which they travel: by the rank of the link that they go to."""

    ids: Tensor
    sizes: Ints
    """[ranks of the link]"""
    counts: Tensor | None = None
    """how often each was read, where that is told"""


@dataclass(frozen=True, slots=True)
class WirePiece:
    """A piece of a table, as it is asked for."""

    table: str
    piece: Piece
    rows: int | None
    """ids are below it; None: they may be anything"""
    replicated: bool = False
    """every rank holds all of it: ids and gradients go to all, and no row travels"""
    tier: int = GLOBAL
    """which rows of the table it has"""
    chunk: int = 0
    """values of a chunk where rows differ in width; 0: all are whole"""
    masked: bool = False
    """whether they may have any chunks, or the first ones"""

    @property
    def width(self) -> int:
        return self.piece.width

    @property
    def hashed(self) -> bool:
        return self.rows is None


@dataclass(slots=True)
class Asked:
    """What this rank asked for in a hop, what it was asked for, and where the answers will lie."""

    sent: Ints
    """[ranks, pieces]: ids asked of each rank"""
    received: Ints
    """[ranks, pieces]: ids asked by each rank"""
    ids: Tensor
    """what was received: by rank, then by piece"""
    counts: Tensor | None
    """how often each of them was read, where that is told"""
    places: list[Tensor | None]
    """per piece: of each of its distinct ids the place among all rows of its width: first those that come, in the order of the
    message, then those that are read where they are, in the same order"""
    first: Ints
    """[ranks, pieces]: the place of each block's first row among those of its width"""
    near: dict[int, Tensor]
    """per piece whose rows are read where they are: its ids in the order of the message"""
    live: dict[int, Tensor] = field(default_factory=dict)
    """of rows of different width: how many chunks they have, as `answer` gives the rows; nothing where any chunks may live"""
    answered: Tensor | None = None
    """likewise of what this rank was asked for, in the order of `ids`, where gradients will come as narrow as the rows"""


class Hop:
    """Ids of pieces, dealt out over the ranks of a link."""

    def __init__(
        self, kernels: Backend, device: torch.device, link: Link, pieces: Sequence[WirePiece],
        target: Callable[[int], int], counted: bool, near: int = REPLICATED, norms: bool = False,
    ) -> None:  # fmt: skip
        """`target`: which place of the link answers for what a rank holds, or -1 for none. `counted`: tell how often ids were
        read. `near`: rows of tiers up to this one are read where they are; only their ids and gradients travel. `norms`: of the
        gradients of chunks that a row lacks only the norm travels."""
        self.kernels, self.device, self.link, self.pieces, self.counted = kernels, device, link, list(pieces), counted
        self._targets = [torch.tensor([target(rank) for rank in piece.piece.ranks]) for piece in pieces]
        self._ways = [_way(targets.tolist()) for targets in self._targets]
        self.holds = np.zeros((link.size, len(pieces)), bool)
        for p, targets in enumerate(self._targets):
            self.holds[targets[targets >= 0].numpy(), p] = True
        self.widths = np.array([piece.width for piece in pieces], np.int64)
        # What goes nowhere stays as it is.
        self.id_bytes = np.array([id_bytes(piece.rows) if link.size > 1 else ID for piece in pieces], np.int64)
        """of an id of each piece on the wire"""
        self.replicated = np.array([piece.replicated for piece in pieces], bool)
        self.near = np.array([piece.tier <= near for piece in pieces], bool)
        self.silent = self.replicated | self.near
        """no row travels"""
        self._narrow = (
            NarrowWire(kernels, link, any(piece.masked for piece in pieces)) if any(p.chunk for p in pieces) else None
        )
        self.told = self._narrow is not None and not self._narrow.masked
        """whether answers need to be given how many chunks rows have"""
        self.norms = norms and self.told and link.size > 1
        # Equal widths lie together, so that a message is one matrix where there is one width; what has no rows comes last.
        # Next to each other lie also those that are spread over as many ranks: slots are then found for all of them at once.
        self.order = sorted(
            range(len(pieces)),
            key=lambda p: (
                self.silent[p], self.replicated[p], self.widths[p], len(pieces[p].piece.ranks), self.id_bytes[p], p
            ),
        )  # fmt: skip
        held = {
            width: (self.widths == width) & (~self.silent | self.near) for width in sorted(set(self.widths.tolist()))
        }
        self._of_width = {width: pieces.nonzero()[0] for width, pieces in held.items() if pieces.any()}
        """by width: pieces whose rows come back or are read where they are"""
        self._one_width = len(self._of_width) == 1 and not self.silent.any()
        """whether all messages are matrices of one width"""
        self._dealer = self._make_dealer()

    def _make_dealer(self) -> Any:
        """What puts messages together in one call, where the kernels have that and ids travel alone."""
        if self.kernels.Dealer is None or self.counted or self.near.any():
            return None
        widths, ways = sorted(set(self.widths.tolist())), []
        for p, (piece, targets) in enumerate(zip(self.pieces, self._targets)):
            way: tuple[int, Ints] | None = (1, np.array(targets[:1].tolist(), np.int64))
            if piece.replicated:
                way = (1, np.zeros(0, np.int64))
            elif len(targets) > 1 and self.link.size > 1:
                way = self._ways[p]
            if way is None:
                return None
            group = -1 if self.silent[p] else widths.index(piece.width)
            ways.append((len(targets), *way, piece.hashed, group, int(self.id_bytes[p])))
        return self.kernels.Dealer(ways, self.order, self.link.size)

    def blocks(self, counts: Ints, rows: bool) -> list[tuple[int, int, int]]:
        """(rank, piece, count) in the order of a message with these counts [ranks, pieces]; `rows`: only what travels as rows."""
        return [
            (k, p, of_rank[p])
            for k, of_rank in enumerate(counts.tolist())
            for p in self.order
            if of_rank[p] and not (rows and self.silent[p])
        ]

    def near_blocks(self, counts: Ints) -> list[tuple[int, int, int]]:
        """(rank, piece, count) of what is read where it is, in the order of its rows."""
        return [block for block in self.blocks(counts, rows=False) if self.near[block[1]]] if self.near.any() else []

    def ask(
        self, distinct: Sequence[Tensor | Routed | None], counts: Sequence[Tensor | None], header: Ints
    ) -> tuple[Asked, Ints]:
        """Sends every distinct id of every piece to the rank that answers for it. `header`: a few numbers for every rank; those
        of the others are given back, [ranks, numbers]."""
        if self._dealer is not None:
            message, sent, first, places = self._dealer.deal(distinct)
            received, headers = self._tell(sent, header)
            landed = self.link.all_to_all(message, sent @ self.id_bytes, received @ self.id_bytes)
            landed = self.kernels.widen_ids(landed, self._id_runs(received).reshape(-1, 2))
            return Asked(sent, received, landed, None, places, first, {}), headers
        size = self.link.size
        sent = np.zeros((size, len(self.pieces)), np.int64)
        sorted_ids: list[Tensor | None] = [None] * len(self.pieces)
        sorted_counts: list[Tensor | None] = [None] * len(self.pieces)
        orders: list[Tensor | None] = [None] * len(self.pieces)
        for p, (piece, ids) in enumerate(zip(self.pieces, distinct)):
            if isinstance(ids, Routed):
                sorted_ids[p], sent[:, p], sorted_counts[p] = ids.ids, ids.sizes, ids.counts
                continue
            if ids is None or not ids.numel():
                continue
            targets, way = self._targets[p], self._ways[p]
            if piece.replicated:
                sent[:, p] = ids.numel()
            elif len(targets) == 1 or size == 1:
                sent[int(targets[0]), p] = ids.numel()
            elif way is not None:
                divisor, places = way
                orders[p], sizes, _ = self.kernels.route(
                    ids, None, (), len(targets), divisor, len(places), piece.hashed
                )
                sent[places, p] = sizes[0].cpu().numpy()
            else:
                place = targets.to(ids.device)[part_of(ids, len(targets), piece.hashed)]
                orders[p] = torch.argsort(place, stable=True)
                sent[:, p] = torch.bincount(place, minlength=size).cpu().numpy()
            order = orders[p]
            sorted_ids[p] = ids if order is None else ids[order]
            times = counts[p]
            if self.counted and times is not None:
                sorted_counts[p] = times if order is None else times[order]
        if self.counted:
            # Those of tiers are not counted where their tables give every id a row.
            for p, part in enumerate(sorted_ids):
                if part is not None and sorted_counts[p] is None:
                    sorted_counts[p] = torch.ones_like(part)
            header = np.append(header, _bytes_of(sorted_counts))
        received, headers = self._tell(sent, header)
        landed, read = self._send_ids(sorted_ids, sorted_counts, sent, received, header, headers)
        headers = headers[:, :-1] if self.counted else headers
        first = self._find_first(sent)
        near = {p: part for p, part in enumerate(sorted_ids) if part is not None and self.near[p]}
        return Asked(sent, received, landed, read, self._find_places(orders, sent, first), first, near), headers

    def _tell(self, sent: Ints, header: Ints) -> tuple[Ints, Ints]:
        """How many ids of each piece the others ask for, and their headers."""
        told = np.concatenate([np.broadcast_to(header, (self.link.size, header.size)), sent], 1)
        came = self.link.all_to_all_counts(told)
        return came[:, header.size :], came[:, : header.size]

    def _send_ids(
        self, ids: Sequence[Tensor | None], counts: Sequence[Tensor | None], sent: Ints, received: Ints, header: Ints,
        headers: Ints,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Parts that are sorted by rank, piece by piece, as a message: by rank, then by piece; behind the ids for a rank how
        often they were read, where that is told, in as many bytes as the last number of the header says."""
        blocks, runs = self._id_blocks(ids, sent), self._id_runs(received)
        sizes = sent @ self.id_bytes, received @ self.id_bytes
        if self.counted:
            times = self._id_blocks(counts, sent)
            for of_rank, read in zip(blocks, times):
                of_rank += [(part, int(header[-1])) for part, _ in read]
            asked = received.sum(1)
            runs = np.concatenate([runs, np.stack([asked, headers[:, -1]], 1)[:, None]], 1)
            sizes = sizes[0] + sent.sum(1) * header[-1], sizes[1] + asked * headers[:, -1]
        message = self.kernels.narrow_ids([block for of_rank in blocks for block in of_rank], self.device)
        landed = self.kernels.widen_ids(self.link.all_to_all(message, *sizes), runs.reshape(-1, 2))
        if not self.counted:
            return landed, None
        both = torch.split(landed, np.repeat(asked, 2).tolist())
        return torch.cat(both[::2]), torch.cat(both[1::2])

    def _id_blocks(self, parts: Sequence[Tensor | None], sent: Ints) -> list[list[tuple[Tensor, int]]]:
        """By rank: the blocks of a message to it, and the bytes of an id of each."""
        splits: dict[int, Sequence[Tensor]] = {
            p: [part] * len(sent) if self.replicated[p] else torch.split(part, sent[:, p].tolist())
            for p, part in enumerate(parts)
            if part is not None
        }
        found: list[list[tuple[Tensor, int]]] = [[] for _ in range(self.link.size)]
        for k, p, _ in self.blocks(sent, rows=False):
            found[k].append((splits[p][k], int(self.id_bytes[p])))
        return found

    def _id_runs(self, received: Ints) -> Ints:
        """[ranks, pieces, 2]: how many ids the blocks of a message have, and the bytes of one."""
        counts = received[:, self.order]
        return np.stack([counts, np.broadcast_to(self.id_bytes[self.order], counts.shape)], 2)

    def _find_first(self, sent: Ints) -> Ints:
        """Where each block's rows will begin among those of their width: what comes, in the message's order, then the rest."""
        first = np.zeros_like(sent)
        next_of: dict[int, int] = {}
        for k, p, count in [*self.blocks(sent, rows=True), *self.near_blocks(sent)]:
            width = int(self.widths[p])
            first[k, p] = next_of.get(width, 0)
            next_of[width] = first[k, p] + count
        return first

    def _find_places(self, orders: Sequence[Tensor | None], sent: Ints, first: Ints) -> list[Tensor | None]:
        """Where each distinct id's row will lie."""
        places: list[Tensor | None] = []
        for p in range(len(self.pieces)):
            total = int(sent[:, p].sum())
            if self.replicated[p]:
                places.append(torch.arange(int(sent[0, p]), device=self.device))
                continue
            if not total:
                places.append(None)
                continue
            holders = np.flatnonzero(sent[:, p])
            spans = [torch.arange(first[k, p], first[k, p] + sent[k, p], device=self.device) for k in holders]
            in_order, order = (spans[0] if len(spans) == 1 else torch.cat(spans)), orders[p]
            places.append(in_order if order is None else torch.empty_like(in_order).index_copy_(0, order, in_order))
        return places

    def rows_of_width(self, sent: Ints) -> dict[int, int]:
        """How many rows of each width come back or are read where they are."""
        totals = sent.sum(0)
        found = {width: int(totals[pieces].sum()) for width, pieces in self._of_width.items()}
        return {width: count for width, count in found.items() if count}

    def answer(self, asked: Asked, rows: Tensor, codec: Codec, live: Tensor | None = None) -> dict[int, Tensor]:
        """Sends the rows that were asked for (float32, flat, in the order of the ids); gives the rows that came, by width, and
        room behind them for those that are read where they are. `live`: how many chunks each of them has, where that is to be
        told."""
        if self._narrow is None:
            flat = self._exchange(rows, asked.received, asked.sent, codec, rows=True)
        else:
            if live is None:
                live = self.kernels.used_chunks(
                    rows, [run for part in self._runs(asked.received, True) for run in part]
                )
            flat, live = self._exchange_narrow(rows, live, asked.received, asked.sent, codec, rows=True)
        found = self._by_width(flat, asked.sent)
        if self.told and live is not None:
            asked.live = self._live_by_width(live, asked.sent)
        for width, total in self.rows_of_width(asked.sent).items() if self.near.any() else ():
            came = found.get(width)
            if came is None or came.shape[0] < total:
                found[width] = self.link.mesh.empty((total, width), flat)
                if came is not None:
                    found[width][: came.shape[0]] = came
        return found

    def _by_width(self, flat: Tensor, sent: Ints) -> dict[int, Tensor]:
        if self._one_width:
            return {width: flat.view(-1, width) for width in self.rows_of_width(sent)}
        blocks = self.blocks(sent, rows=True)
        widths = {int(self.widths[p]) for _, p, _ in blocks}
        if len(widths) == 1:
            return {width: flat.view(-1, width) for width in widths}
        parts = torch.split(flat, [count * int(self.widths[p]) for _, p, count in blocks]) if blocks else ()
        grouped: dict[int, list[Tensor]] = {}
        for part, (_, p, _) in zip(parts, blocks):
            grouped.setdefault(int(self.widths[p]), []).append(part)
        return {width: torch.cat(parts).view(-1, width) for width, parts in grouped.items()}

    def _live_by_width(self, live: Tensor, sent: Ints) -> dict[int, Tensor]:
        blocks = self.blocks(sent, rows=True)
        found = {
            width: torch.zeros(count, dtype=torch.uint8, device=self.device)
            for width, count in self.rows_of_width(sent).items()
        }
        at = dict.fromkeys(found, 0)
        for part, (_, p, count) in zip(torch.split(live, [count for _, _, count in blocks]) if blocks else (), blocks):
            width = int(self.widths[p])
            found[width][at[width] : at[width] + count] = part
            at[width] += count
        return found

    def return_gradients(
        self, asked: Asked, gradients: dict[int, Tensor], replicas: Sequence[Tensor | None], codec: Codec
    ) -> Tensor:
        """Sends the gradient of every row that came (by width, in the order in which rows came) and of the replicated pieces'
        distinct ids; gives what came for the ids this rank was asked for: flat, in their order."""
        sent = asked.sent
        if self._one_width and not self.norms:
            rows = next(iter(gradients.values()), torch.empty(0, device=self.device))
            return self._exchange(rows.view(-1), sent, asked.received, codec, rows=False)
        blocks = self.blocks(sent, rows=False)
        travelling = [block for block in blocks if not self.silent[block[1]]]
        widths = {int(self.widths[p]) for _, p, _ in travelling}
        if len(travelling) == len(blocks) and len(widths) == 1:
            flat = gradients[widths.pop()].view(-1)
        else:
            placed: dict[int, list[tuple[int, int, int]]] = {}
            for block in [*travelling, *self.near_blocks(sent)]:
                placed.setdefault(int(self.widths[block[1]]), []).append(block)
            of_block: dict[tuple[int, int], Tensor] = {}
            for width, mine in placed.items():
                cut = torch.split(gradients[width], [count for _, _, count in mine])
                of_block |= {(k, p): part for (k, p, _), part in zip(mine, cut)}
            parts = []
            for k, p, _ in blocks:
                part = replicas[p] if self.replicated[p] else of_block[k, p]
                assert part is not None
                parts.append(part.reshape(-1))
            flat = torch.cat(parts) if parts else torch.empty(0, device=self.device)
        if self.norms:
            live = self._live_of_blocks(asked, blocks)
            return self._exchange_narrow(flat, live, sent, asked.received, codec, False, asked.answered)[0]
        return self._exchange(flat, sent, asked.received, codec, rows=False)

    def _live_of_blocks(self, asked: Asked, blocks: Sequence[tuple[int, int, int]]) -> Tensor:
        parts = [
            asked.live[int(self.widths[p])][int(asked.first[k, p]) : int(asked.first[k, p]) + count]
            for k, p, count in blocks
        ]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=self.device)

    def _runs(self, counts: Ints, rows: bool) -> list[list[Run]]:
        """By rank."""
        found: list[list[Run]] = [[] for _ in range(self.link.size)]
        for k, p, count in self.blocks(counts, rows):
            found[k].append(Run(count, int(self.widths[p]), self.pieces[p].chunk))
        return found

    def _exchange_narrow(
        self,
        flat: Tensor,
        live: Tensor,
        sent: Ints,
        received: Ints,
        codec: Codec,
        rows: bool,
        known: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert self._narrow is not None
        if self.link.size == 1 or (rows and self.silent.all()):
            return flat, live
        runs = self._runs(sent, rows), self._runs(received, rows)
        return self._narrow.swap(flat, live, *runs, codec, norms=self.norms and not rows, known=known)

    def _exchange(self, flat: Tensor, sent: Ints, received: Ints, codec: Codec, rows: bool) -> Tensor:
        def runs(counts: Ints) -> list[tuple[int, int]]:
            if codec != "int8":  # all other codecs take value by value
                return []
            return [(n, int(self.widths[p])) for _, p, n in self.blocks(counts, rows)]

        def sizes(counts: Ints) -> Ints:
            travelling = counts * ~self.silent if rows else counts
            total: Ints = wire_size(travelling, self.widths, codec).sum(1)
            return total

        if self.link.size == 1 or (rows and self.silent.all()):
            return flat
        wire = encode(flat, runs(sent), codec)
        assert wire.dtype == DTYPES[codec]
        return decode(self.link.all_to_all(wire, sizes(sent), sizes(received)), runs(received), codec)


def _bytes_of(counts: Sequence[Tensor | None]) -> int:
    """That the largest needs."""
    return id_bytes(max((int(part.max()) for part in counts if part is not None and part.numel()), default=0) + 1)


def _way(targets: Sequence[int]) -> tuple[int, Ints] | None:
    """(divisor, places) where arithmetic gives the place of the link that answers for a part: places[part // divisor % their
    number]. None where a table is on ranks in some other order. Parts that this rank is never asked for have no target."""
    known = [(part, target) for part, target in enumerate(targets) if target >= 0]
    if len(known) == len(targets) and all(one[1] < other[1] for one, other in pairwise(known)):
        return 1, np.array(targets, np.int64)
    count = max(targets, default=0) + 1
    for divisor in (1, len(targets) // count if count else 1):
        if known and divisor and all(target == part // divisor % count for part, target in known):
            return divisor, np.arange(count, dtype=np.int64)
    return None
