"""Rows that are read so often that others than their owner have copies: routed to the nearest one, kept like their owners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError
from ..exchange.hop import Routed
from ..exchange.rows import Journey, read
from ..kernels import Backend
from ..kernels.request import FeatureSpec, FeatureSpecs, Request
from ..plan.moves import Moves
from ..plan.placement import Shard
from ..storage import Storage
from .drift import TierReport
from .module import Embeddings
from .spread import Part, SpreadTables, Step

CHUNK = 65536
"""rows that are sent at a time when all copies are brought"""


class TieredTables(SpreadTables):
    """Copies hold weights alone and are never updated. Gradients of all rows go to their owners, who sum, update once, and send
    the new rows to the copies; so all copies of a row have the same bits, and those of its owner as they look on the wire."""

    @property
    def step(self) -> int:
        return super().step

    @step.setter
    def step(self, step: int) -> None:
        Embeddings.step.fset(self, step)  # type: ignore[attr-defined]
        # It is set where rows were loaded.
        self._stale, self._loaded = bool(self.copies), True

    # Forward

    def _unique(self, name: str, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The ids to ask for, of every read the place of its id among them, and how often each is read."""
        if self.placement.unique != "none" or self.placement.tables[name].kind == "data_parallel":
            return self._kernels.unique(ids)
        copies = self.copies.get(name)
        if copies is None:
            return ids, torch.arange(ids.numel(), device=ids.device), torch.ones_like(ids)
        hot = copies.directory.find(ids) >= 0
        distinct, inverse, counts = self._kernels.unique(ids[hot])
        others = ids[~hot]
        places = torch.empty_like(ids)
        places[hot] = inverse
        places[~hot] = torch.arange(distinct.numel(), distinct.numel() + others.numel(), device=ids.device)
        return torch.cat([distinct, others]), places, torch.cat([counts, torch.ones_like(others)])

    def _route(self, step: Step, together: bool) -> None:
        """Sorts the ids of tables with tiers by tier. `together`: rows of all tiers go in one exchange."""
        for name, copies in self.copies.items():
            ids = step.distinct.get(name)
            if ids is None:
                continue
            world, size = self.mesh.world, self.mesh.ranks_per_node
            hashed = self.tables[name].rows is None
            order, sizes, _ = self._kernels.route(ids, copies.directory, copies.cuts, world, 1, size, hashed)
            by_tier = sizes.cpu().numpy()
            totals = by_tier.sum(1).tolist()
            parts = torch.split(ids[order], totals)
            counts = torch.split(step.counts[name][order], totals) if self._by_reads else [None] * len(parts)
            replicated, node, rest = (Routed(*routed) for routed in zip(parts, by_tier, counts))
            own = self._pieces_of[name][0]
            step.routed |= dict(zip(self._tier_pieces[name], (replicated, node)))
            step.routed[own] = rest if together else rest.ids
            if rest.counts is not None:
                step.rest_counts[own] = rest.counts
            step.orders[name] = order
        step.moves = self._moves

    def _find_places(self, step: Step) -> dict[int, Tensor | None]:
        """Per piece: of each distinct id of its table the place of its row among all rows of its width."""
        places: dict[int, Tensor | None] = {}
        before: dict[int, int] = {}
        for part, journey in zip(self._exchanges, step.journeys):
            asked, hop = journey.asked[0], part.exchange.hops[0]
            for k, p in enumerate(part.numbers):
                found, first = asked.places[k], before.get(self._wire[p].width, 0)
                places[p] = found + first if found is not None and first and not self._wire[p].replicated else found
            if len(self._exchanges) > 1:
                for width, count in hop.rows_of_width(asked.sent).items():
                    before[width] = before.get(width, 0) + count
        for name, order in step.orders.items():
            own = self._pieces_of[name][0]
            parts = [places[p] for p in (*self._tier_pieces[name], own)]
            known = [part for part in parts if part is not None]
            places[own] = torch.empty_like(order).index_copy_(0, order, torch.cat(known)) if known else None
        return places

    # Copies

    def _bring_copies(self) -> None:
        """All of them, from their owners."""
        if self._push is None or not self._stale:
            return
        self._stale = False
        mine = []
        for copies in self.copies.values():
            numbers = (copies.owners(copies.ids) == self.mesh.rank).nonzero()[:, 0]
            mine.append(numbers)
        self._send_rows(mine, insert=True)

    def _send_rows(self, mine: Sequence[Tensor], insert: bool) -> None:
        """Per tiered table: rows that this rank owns, to their copies, some at a time."""
        assert self._push is not None
        turns = max(self.mesh.gather(max(-(-numbers.numel() // CHUNK) for numbers in mine)))
        for turn in range(turns):
            parts = [numbers[turn * CHUNK : (turn + 1) * CHUNK] for numbers in mine]
            self._push.start([self._own_rows(name, part, insert) for name, part in zip(self.copies, parts)])
        self._push.wait()

    def _own_rows(self, name: str, numbers: Tensor, insert: bool) -> tuple[Tensor, Tensor]:
        """Numbers and values of rows of a tiered table that this rank owns."""
        storage = self._storage_of(self._pieces_of[name][0])
        slots = storage.locate(self.copies[name].ids[numbers], insert)
        return numbers, values_of(storage, slots, self._kernels)

    def _push_updated(self, step: Step) -> None:
        """Sends the rows that this step has changed to their copies."""
        if self._push is None:
            return
        updated = []
        for name, tiers in self._tier_pieces.items():
            # Rows may have moved between forward and backward: then what was asked for as a row without copies has some now.
            pieces = tiers if step.moves == self._moves else (*tiers, self._pieces_of[name][0])
            asked = [
                self._asked_for(part, journey, p)
                for part, journey in zip(self._exchanges, step.journeys)
                for p in pieces
                if p in part.numbers
            ]
            numbers = self.copies[name].directory.find(self._kernels.unique(torch.cat(asked))[0])
            updated.append(self._own_rows(name, numbers[numbers >= 0], False))
        self._push.start(updated)

    @staticmethod
    def _asked_for(part: Part, journey: Journey, p: int) -> Tensor:
        last = journey.asked[-1]
        spans = part.exchange.blocks.slices(last.received)[part.numbers.index(p)]
        return torch.cat([last.ids[span] for span in spans])

    def _watch_drift(self, step: Step) -> None:
        """Before a step that trains: all ranks are at the same one."""
        if self._watch is None or not step.insert or not self._watch.due(self._step) or self._watched == self._step:
            return
        self._watched = self._step
        self.move_rows(self._watch.round(self._step))

    def move_rows(self, moves: Mapping[str, Moves]) -> None:
        """Changes which rows have copies, by table. Values and optimizer state are their owners' and stay; copies are brought to
        where they are now wanted. All ranks call it with the same moves, between steps."""
        if self._push is None or not any(move.count for move in moves.values()):
            return
        self._bring_copies()
        self.wait_for_copies()
        self._moves += 1
        mine = []
        for name, copies in self.copies.items():
            move = moves.get(name)
            numbers = torch.from_numpy(move.numbers if move is not None else np.empty(0, np.int64)).to(self.device)
            if move is not None and move.count:
                copies.rename(numbers, torch.from_numpy(move.ids).to(self.device))
            if self._rounds is None:
                mine.append(self._own_rows(name, numbers[copies.owners(copies.ids[numbers]) == self.mesh.rank], True))
        if self._rounds is None:
            self._push.start(mine)
        else:
            self._stale = True
            self._bring_copies()

    @property
    def tier_reports(self) -> dict[str, list[TierReport]]:
        """By table: how well its tiers fit what is read, one report a round."""
        return {} if self._watch is None else self._watch.reports

    def wait_for_copies(self) -> None:
        """Until all copies are like their owners' rows; they are sent beside the step."""
        if self._push is not None:
            self._push.wait()

    def check_copies(self) -> None:
        """Raises where a copy differs from its owner's row as it looks on the wire, and says which. All ranks call it."""
        self._bring_copies()
        self.wait_for_copies()
        for name, copies in self.copies.items():
            mine = torch.zeros(copies.count, dtype=torch.int64, device=self.device)
            mine[copies.held] = _checksums(copies.bits(copies.held.nonzero()[:, 0]))
            held, owners = copies.held.to(torch.int64), copies.owners(copies.ids)
            everyone = self.mesh.gather_tensors(torch.stack([mine, held])[None])
            sums, has = (torch.stack([part[0][k] for part in everyone]) for k in (0, 1))
            true = sums.gather(0, owners[None])
            wrong = ((sums != true) & (has > 0)).nonzero()
            if wrong.shape[0]:
                rank, number = (int(n) for n in wrong[0])
                raise UserError(
                    f"table '{name}': the copy of row {int(copies.ids[number])} on rank {rank} differs from its owner's, rank "
                    f"{int(owners[number])}, and so do {wrong.shape[0] - 1} more; this is a fault of the library: report it"
                )

    def shard_storages(self) -> list[tuple[Shard, Storage]]:
        self.wait_for_copies()  # so that nothing is on its way when a job ends with what it saved
        return super().shard_storages()

    def memory(self) -> dict[str, int]:
        found = super().memory()
        for copies in self.copies.values():
            own = copies.memory()
            found["weights"] += own["copies"]
            found["directory"] += own["directory"]
        return found


def values_of(storage: Storage, slots: Tensor, kernels: Backend) -> Tensor:
    """Rows as float32."""
    width = storage.table.dim
    rows = torch.empty(slots.numel(), width, device=slots.device)
    if slots.numel():
        ends = torch.tensor([0, slots.numel()], device=slots.device)
        specs = FeatureSpecs([FeatureSpec("rows", 0, None, width, 0)])
        read(kernels, Request([storage.rows], specs, 1, np.zeros(1, np.int64), slots, slots, ends), None, [rows])
    return rows


def _checksums(rows: Tensor) -> Tensor:
    """A number of each row's bits: 32 or 16 of them at a time, each with a factor of its place."""
    words = rows.contiguous().view(torch.int32 if rows.element_size() == 4 else torch.int16).to(torch.int64)
    factors = torch.arange(1, words.shape[1] + 1, device=rows.device) * 0x9E3779B97F4A7C1 | 1
    return (words * factors).sum(1)
