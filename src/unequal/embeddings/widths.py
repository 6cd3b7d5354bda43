"""Spread tables whose rows are as wide as they deserve: all ranks agree on who gets a row, and hold rounds together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..exchange.rows import Journey, chunks_at
from ..exchange.sums import Delivered
from ..storage.copies import NarrowCopies
from ..width import Rounds
from .spread import Part, Step
from .tiered import TieredTables


class TablesOfWidth(TieredTables):
    """One budget over all ranks, and one purse between rounds: an id gets a row if it would in one process."""

    def _admit(self, journeys: Sequence[Journey], bags: Delivered | None) -> None:
        """Begins a step of training: ids without a row get one while the purse lasts, tables in order, small ids first."""
        assert self._rounds is not None
        shards = self._narrow_shards()
        for shard in shards.values():
            shard.tick()  # on all ranks alike, whoever is asked for something
        how = self._rounds.how
        open_for = [name for name in self.tables if how[name].purse.left >= how[name].takes]
        if not open_for:
            return
        asked = self._asked_by_table(journeys, bags)
        none = torch.empty(0, dtype=torch.int64, device=self.device)
        wanted = {name: shards[name].without_row(asked[name]) if name in asked else none for name in open_for}
        counts = np.array([[part.numel() for part in wanted.values()]], np.int64)
        totals = self.mesh.everyone.all_to_all_counts(np.repeat(counts, self.mesh.world, 0)).sum(0)
        for total, (name, own) in zip(totals.tolist(), wanted.items()):
            rows = how[name].purse.take(total, how[name].takes)
            if not rows:
                continue
            if rows < total:
                everyone = torch.cat(self.mesh.gather_tensors(self.mesh.to_link(own[:rows])))
                own = own[own <= int(everyone.sort().values[rows - 1])]
            if name in shards:
                shards[name].admit(own)

    def _asked_by_table(self, journeys: Sequence[Journey], bags: Delivered | None) -> dict[str, Tensor]:
        """All ids that this rank's shards were asked for."""
        found: dict[str, list[Tensor]] = {}
        for part, journey in zip(self._exchanges, journeys):
            last = journey.asked[-1]
            for storage, spans in part.owner.asked_of(last):
                found.setdefault(storage.table.name, []).extend(last.ids[span] for span in spans)
        if bags is not None and self._sum_exchange is not None:
            for t, (name, _) in enumerate(self._sum_exchange.tables):
                found.setdefault(name, []).append(self._sum_exchange.asked_of(bags, t))
        return {name: torch.cat(parts) for name, parts in found.items()}

    def _locate_again(self, step: Step, gradients: Sequence[Tensor]) -> None:
        """Rows were laid out anew since they were looked up. What has no row by now is not updated."""
        for part, journey, flat in zip(self._exchanges, step.journeys, gradients):
            last, before = journey.asked[-1], journey.slots
            journey.slots = part.owner.locate(last, False)
            if part.exchange.hops[-1].norms:
                _forget_norms(part, journey, before, flat)
        if step.delivered is not None and self._sum_exchange is not None:
            storages = [self._storages[self._name_of(*shard)] for shard in self._sum_exchange.tables]
            step.bags = self._sum_exchange.locate(step.delivered, storages, False)

    def _round(self, rounds: Rounds) -> None:
        """After a step that was one: rows change their width, and copies follow."""
        report = rounds.after_step(self._step)
        if report is not None:
            self._generation += 1
        # Without a policy there are new rows, but no rounds: copies follow when one would be.
        if self.copies and (report is not None or rounds.is_round(self._step)):
            self._follow_widths(everything=False)

    def tables_filled(
        self, purses: Mapping[str, float] | None = None, watched: Mapping[str, Any] | None = None,
        shown: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().tables_filled(purses, watched, shown)
        self._loaded = False

    def _bring_copies(self) -> None:
        if self._loaded and self._rounds is not None:
            self._loaded = False
            self._generation += 1
            self._rounds.attach(self._narrow_storages(), self.step, shown=self._rounds.shown())
        if self._rounds is None or self._push is None:
            super()._bring_copies()
        elif self._stale:
            self._stale = False
            self._follow_widths(everything=True)

    def _follow_widths(self, everything: bool) -> None:
        """Copies become as wide as their owners' rows. Values are brought of all of them, or of those whose width has changed."""
        self.wait_for_copies()
        self._moves += 1
        mine = []
        for name, copies in self.copies.items():
            assert isinstance(copies, NarrowCopies)
            changed = self._lay_out_copies(name, copies)
            numbers = copies.chunks.nonzero()[:, 0] if everything else changed
            mine.append(numbers[copies.owners(copies.ids[numbers]) == self.mesh.rank])
        self._send_rows(mine, insert=False)

    def _lay_out_copies(self, name: str, copies: NarrowCopies) -> Tensor:
        owners = copies.owners(copies.ids)
        shard = self._narrow_shards()[name]
        slots = shard.locate(copies.ids[owners == self.mesh.rank], False)

        def together(own: Tensor) -> Tensor:
            whole = own.new_zeros(copies.count)
            for rank, part in enumerate(self.mesh.gather_tensors(self.mesh.to_link(own))):
                whole[owners == rank] = part.to(self.device)
            return whole

        masks = together(shard.masks_of(slots)) if shard.how.masked else None
        return copies.lay_out(together(shard.chunks_of(slots).to(torch.uint8)), masks)


def _forget_norms(part: Part, journey: Journey, before: Tensor, gradients: Tensor) -> None:
    """Of rows that have another width by now: a norm that stands in place of a value must not be taken for one."""
    blocks, received = part.exchange.blocks, journey.asked[-1].received
    bounds, at = blocks.bounds(received), 0
    for b, (_, p) in enumerate(blocks.blocks):
        piece, rows = part.exchange.pieces[p], part.owner.tables[blocks.held.index(p)]
        span = slice(int(bounds[b]), int(bounds[b + 1]))
        was, now = chunks_at(rows, before[span]).to(torch.int64), chunks_at(rows, journey.slots[span]).to(torch.int64)
        own = gradients[at : at + was.numel() * piece.width].view(-1, piece.width)
        beyond = torch.arange(piece.width, device=own.device) >= (was * piece.chunk)[:, None]
        own.masked_fill_(beyond & (was != now)[:, None], 0.0)
        at += own.numel()
