"""Ids of a table that have no row, but whose worth is known: candidates."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.request import WAYS, Records
from .memory import zeros
from .narrowing import Narrowing
from .tables import Storage

NOBODY = -1.0
"""utility of a place among the candidates that is free"""


class FollowingStorage(Storage):
    """What is followed: all ids, each at its own place; or as many as there are places, which lie in buckets."""

    part, of = 0, 1
    """ids part, part + of, part + 2·of … are its own, where ids are bounded"""
    how: Narrowing

    @property
    def records(self) -> Records:
        assert self.rows.records is not None
        return self.rows.records

    @property
    def own_rows(self) -> int:
        """Ids of a bounded table that are its own."""
        assert self.table.rows is not None
        return -(-(self.table.rows - self.part) // self.of)

    def _start_following(self) -> None:
        """Nobody."""
        records = self.records
        places = max(1, self.how.candidates // WAYS) * WAYS
        if self.how.by_id or self.how.uniform:
            apart = self.how.by_id and not self.how.in_directory
            own = (max(1, self.own_rows), records.utilities) if apart else (1, 1)
            records.slabs[0].append(zeros(own, torch.float32, self.device))
            places = 0
        else:
            records.slabs[0].append(torch.full((places, records.utilities), NOBODY, device=self.device))
        self.followed = torch.zeros(places, dtype=torch.int64, device=self.device)
        """by place; nothing where places are those of the ids"""
        self._stamps = torch.zeros(places, dtype=torch.int32, device=self.device)
        self._clock = 0

    @property
    def following_bytes(self) -> int:
        """Whatever lives."""
        return self.followed.nbytes + self._stamps.nbytes + (0 if self.how.uniform else self.records.slabs[0][0].nbytes)

    def follow(self, ids: Tensor, slots: Tensor) -> None:
        """Gives ids without a row (slot -1) the slots of their candidates."""
        records = self.records
        if self.how.by_id:
            numbers = ids if self.of == 1 else torch.div(ids, self.of, rounding_mode="floor")
            torch.where(slots < 0, numbers << records.class_bits, slots, out=slots)
        else:
            table = records.slabs[0][0]
            self.kernels.follow(self.followed, table, self._stamps, self._clock, records.class_bits, ids, slots)

    def candidates(self) -> tuple[Tensor, Tensor]:
        """Places that are in use among the candidates, and whose they are."""
        table = self.records.slabs[0][0][: 0 if self.how.uniform else None]
        if self.how.by_id or self.how.uniform:
            places = (table > 0).any(1).nonzero()[:, 0]
            return places, places * self.of + self.part
        places = (table[:, 0] >= 0).nonzero()[:, 0]
        return places, self.followed[places]

    def put_candidates(self, places: Tensor, ids: Tensor, utilities: Tensor) -> None:
        """They alone, at these places. A directory that holds them is new: it has rows, and nobody else yet."""
        if self.how.uniform:
            return
        table = self.records.slabs[0][0]
        if self.how.in_directory:  # whatever was saved: a sign would make a slot of it
            table[places] = utilities.nan_to_num(nan=0.0).abs()
            return
        table.fill_(0.0 if self.how.by_id else NOBODY)
        table[places] = utilities
        if not self.how.by_id:
            self.followed[places] = ids

    def _follow_instead(self, rows: tuple[Tensor, Tensor]) -> None:
        """The candidates are the most useful of these, as far as there is room."""
        ids, utilities = rows
        self._stamps.zero_()
        self._clock = 0
        if self.how.by_id or self.how.uniform:
            self.put_candidates(torch.div(ids, self.of, rounding_mode="floor"), ids, utilities)
            return
        buckets = self.followed.numel() // WAYS
        if self.kernels.best_of_buckets is not None:
            worth = utilities[:, 0] if utilities.shape[1] == 1 else utilities.sum(1)
            places, chosen = self.kernels.best_of_buckets(ids, worth, buckets)
            self.put_candidates(places, ids[chosen], utilities[chosen])
            return
        order = utilities.sum(1).argsort(descending=True, stable=True)
        at = self.kernels.bucket_of(ids[order], buckets)
        by_bucket = at.argsort(stable=True)
        sorted_at = at[by_bucket]
        first = torch.searchsorted(sorted_at, torch.arange(buckets, device=self.device))
        way = torch.arange(at.numel(), device=self.device) - first[sorted_at]
        kept = way < WAYS
        places = sorted_at[kept] * WAYS + way[kept]
        chosen = order[by_bucket[kept]]
        self.put_candidates(places, ids[chosen], utilities[chosen])
