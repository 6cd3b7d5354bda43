"""What a module does with rows that are as wide as they deserve, beside looking them up and updating them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import Backend
from ..storage import Storage
from ..storage.narrow import NarrowStorage
from ..width import RoundReport, Rounds
from ..width.savings import Sampled

SHOWN = ("reads", "savings", "rates")
"""of what training has shown of the tables, in a state_dict"""


class NarrowTables(nn.Module):
    """Its tables and their rounds; there are none of these where all rows are whole."""

    _storages: dict[str, Storage]
    _rounds: Rounds | None
    _kernels: Backend
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

    @property
    def width_rates(self) -> dict[str, float]:
        """By table, what its learning rate is multiplied by; see Width.rate. None where all rows are whole."""
        return {} if self._rounds is None else dict(self._rounds.rates.now)

    def tables_filled(
        self, purses: Mapping[str, float] | None = None, watched: Mapping[str, Any] | None = None,
        shown: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """To be called where rows were put into the tables from outside: what a width budget leaves for new ones is counted anew,
        or is what it was. `purses`: by table. `watched`: what was known of their popularity; `shown`: this rank's part of what
        training had shown of them. All ranks call it."""
        if self._rounds is None:
            return
        self._generation += 1
        self._rounds.attach(self._narrow_storages(), self.step, watched, shown)
        if purses is not None:
            for group in self._rounds.groups:
                group.purse.left = purses[group.tables[0]]

    def watched(self) -> dict[str, Any] | None:
        """What this rank knows of the popularity of rows, where they have a width budget; see `unequal.width.Shifts`."""
        return None if self._rounds is None else self._rounds.shifts.state()

    def shown(self) -> dict[str, Any] | None:
        """This rank's part of what training has shown of the tables, where rows have a width budget; see
        `unequal.width.evidence`."""
        return None if self._rounds is None else self._rounds.shown()

    def _shown_numbers(self) -> dict[str, Tensor]:
        """The same, as a state_dict has it."""
        if self._rounds is None:
            return {}
        reads, savings = self._rounds.reads.counted(), self._rounds.savings
        parts = [None if reads is None else torch.tensor(list(reads.values()), dtype=torch.float64)]
        parts.append(None if savings is None else savings.numbers())
        parts.append(torch.tensor(list(self._rounds.rates.now.values()), dtype=torch.float64))
        return {name: part for name, part in zip(SHOWN, parts) if part is not None}

    def _shown_of(self, numbers: Mapping[str, Tensor | None]) -> dict[str, Any] | None:
        """From what a state_dict has of it."""
        reads, savings, rates = known = [numbers[name] for name in SHOWN]
        if self._rounds is None or all(part is None for part in known):
            return None
        own = self._rounds.savings
        return {
            "reads": None if reads is None else dict(zip(self._rounds.tables, reads.tolist())),
            "savings": None if savings is None or own is None else own.of_numbers(savings),
            "rates": None if rates is None else dict(zip(self._rounds.tables, rates.tolist())),
        }

    def _sampled(self, outputs: Sequence[Tensor]) -> Sampled | None:
        """What of a lookup's outputs is looked at, to see what values save."""
        if self._rounds is None or self._rounds.savings is None:
            return None
        return self._rounds.savings.sample(outputs, self.step)

    def _note_savings(self, sampled: Sampled, gradients: Sequence[Tensor | None], samples: int) -> None:
        assert self._rounds is not None and self._rounds.savings is not None
        self._rounds.savings.note(sampled, gradients, samples, self._kernels.count_savings)
