"""What a module does with rows that are as wide as they deserve, beside looking them up and updating them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..storage import Storage
from ..storage.narrow import NarrowStorage
from ..width import RoundReport, Rounds


class NarrowTables(nn.Module):
    """Its tables and their rounds; there are none of these where all rows are whole."""

    _storages: dict[str, Storage]
    _rounds: Rounds | None
    _generation: int
    step: int

    def _narrow_storages(self) -> dict[str, NarrowStorage]:
        return {name: storage for name, storage in self._storages.items() if isinstance(storage, NarrowStorage)}

    def over_budget(self) -> bool:
        """Whether rows have still to shrink to what a width allows. All ranks call it."""
        return self._rounds is not None and self._rounds.is_over()

    @property
    def width_reports(self) -> list[RoundReport]:
        """What every round of widths did; none where all rows are whole."""
        return [] if self._rounds is None else self._rounds.reports

    def tables_filled(
        self, purses: Mapping[str, float] | None = None, watched: Mapping[str, Any] | None = None,
        reads: Mapping[str, float] | None = None,
    ) -> None:  # fmt: skip
        """To be called where rows were put into the tables from outside: what a width budget leaves for new ones is counted anew,
        or is what it was. `purses`: by table. `watched`: what was known of their popularity; `reads`: this rank's part of how
        often they were read. All ranks call it."""
        if self._rounds is None:
            return
        self._generation += 1
        self._rounds.attach(self._narrow_storages(), self.step, watched, reads)
        if purses is not None:
            for group in self._rounds.groups:
                group.purse.left = purses[group.tables[0]]

    def watched(self) -> dict[str, Any] | None:
        """What this rank knows of the popularity of rows, where they have a width budget; see `unequal.width.Shifts`."""
        return None if self._rounds is None else self._rounds.shifts.state()

    def table_reads(self) -> dict[str, float] | None:
        """This rank's part of how often each table was read in training, where rows have a width budget and it is known."""
        return None if self._rounds is None else self._rounds.reads.counted()
