"""A batch's ids to slots on the CPU, for all tables of a module whose rows differ in width at once. The rules are those of
NarrowStorage.locate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernels.request import Request
from .memory import OutputPool
from .narrow import NarrowStorage


class HostLocator:
    """Finds, follows and admits the ids of a module's batches. Its tables must all be narrow. `readers`: of each table the
    features that read it."""

    def __init__(self, storages: Iterable[NarrowStorage], readers: Sequence[Sequence[int]]) -> None:
        self.storages, self.readers = list(storages), readers
        self._firsts = np.cumsum([0, *(len(features) for features in readers[:-1])])
        """where a table's features begin, of all of them in the order of tables"""
        self._follows = any(storage.records.kind for storage in self.storages)
        self._slots = OutputPool()
        self._key: list[int] = []
        self._made: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """Without what holds addresses of this process."""
        return {**self.__dict__, "_key": [], "_made": None}

    @property
    def _finder(self) -> Any:
        key = [number for storage in self.storages for number in (storage.directory.version, storage.generation)]
        if key != self._key:
            tables = [
                (s.directory, s.followed, s.records.slabs[0][0], s._stamps, s.records.class_bits) for s in self.storages
            ]
            self._made, self._key = self.storages[0].kernels.Finder(tables, self.readers), key
        return self._made

    def locate(self, request: Request, insert: bool) -> tuple[Tensor, tuple[int, int] | None]:
        """The slots of all ids; or the feature and the place of an id that its table does not have: nothing changed then."""
        slots = self._slots.take(request.ids.numel(), 2).view(torch.int64).view(-1)
        finder = self._finder
        missing, wrong = finder.find(request.ids, slots, request.starts, request.ends)
        if (wrong >= 0).any():
            first = int((wrong >= 0).argmax())
            return slots, (int(finder.order[first]), int(wrong[first]))
        if not insert:
            return slots, None
        reads = (request.ends - request.starts)[finder.order]
        reads, unfound = (np.add.reduceat(numbers, self._firsts).tolist() for numbers in (reads, missing))
        for storage, of_table, without in zip(self.storages, reads, unfound):
            storage.tick()
            storage.how.tally.note(of_table, without)
        if not any(unfound):
            return slots, None
        for storage, features, without in zip(self.storages, self.readers, unfound):
            if without and storage.affords_rows:
                self._admit(storage, request, slots, features)
        if self._follows:
            finder.follow(slots, [storage._clock for storage in self.storages])
        return slots, None

    def _admit(self, storage: NarrowStorage, request: Request, slots: Tensor, features: Sequence[int]) -> None:
        spans = [slice(int(request.starts[f]), int(request.ends[f])) for f in features]
        found = torch.cat([slots[span] for span in spans])
        storage.admit_missing(torch.cat([request.ids[span] for span in spans]), found)
        for span, part in zip(spans, torch.split(found, [span.stop - span.start for span in spans])):
            slots[span] = part
