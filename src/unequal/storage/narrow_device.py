"""A batch's ids to slots on a GPU, for all tables of a module whose rows differ in width at once. The rules are those of
NarrowStorage.locate; nothing waits for the device while there is no room for new rows."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..kernels.request import Request
from .narrow import NarrowStorage
from .narrowing import Narrowing, Purse

FIND, FOLLOW, CHOOSE, ENTER = range(4)


def _least(all_of_them: Iterable[Narrowing]) -> list[tuple[Purse, int, int]]:
    """Purses, each with the values of the smallest new row that is paid from it, and those before the first round."""
    found: dict[int, tuple[Purse, int, int]] = {}
    for how in all_of_them:
        _, later, early = found.get(id(how.purse), (how.purse, 1 << 62, 1 << 62))
        found[id(how.purse)] = (how.purse, min(later, how.takes_when(False)), min(early, how.takes_when(True)))
    return list(found.values())


class DeviceLocator:
    """Finds, follows and admits the ids of a module's batches. Its tables must all be narrow."""

    def __init__(self, storages: Iterable[NarrowStorage]) -> None:
        self.storages = list(storages)
        self._key: list[int] = []
        self._directories: Any = None
        self._follows = any(storage.records.kind for storage in self.storages)
        self._newcomers = (CHOOSE, ENTER) if any(s.records.kind and not s.how.by_id for s in self.storages) else ()
        """what is to be done where candidates take each other's places"""
        self._purses = _least(storage.how for storage in self.storages)
        first = self.storages[0]
        stds = [2 * math.sqrt(3) * storage.table.init_std for storage in self.storages]
        self._widths = torch.tensor(stds).to(first.device)
        for storage in self.storages:
            storage.how.tally.count_on(first.device)

    def __getstate__(self) -> dict[str, Any]:
        """Without what holds addresses of this process."""
        return {**self.__dict__, "_key": [], "_directories": None}

    @property
    def directories(self) -> Any:
        key = [number for storage in self.storages for number in (storage.directory.version, storage.generation)]
        if key != self._key:
            kernels, device = self.storages[0].kernels, self.storages[0].device
            tables = [
                (s.directory, s.followed, s.records.slabs[0][0], s._stamps, s.records.class_bits,
                 (1 + s.how.by_id) * (s.records.kind > 0), s._clock, s.how.tally.counter)
                for s in self.storages
            ]  # fmt: skip
            self._directories, self._key = kernels.Directories(tables, device), key
        return self._directories

    def locate(self, request: Request, insert: bool, wrong: Tensor | None) -> Tensor:
        """The slots of all ids; see locate_all for `wrong`."""
        first = self.storages[0]
        first.refuse_capture()
        slots = torch.empty_like(request.ids)
        if not request.ids.numel():
            return slots
        locate: Any = first.kernels.locate_all
        directories = self.directories
        if not insert:
            locate(request, directories, slots, phases=(FIND,), step=0, wrong=wrong, resolves=True)
            return slots
        for storage in self.storages:
            storage.tick()
        step, follows = first._clock, self._follows
        if not any(purse.left >= (early if purse.early else later) for purse, later, early in self._purses):
            phases = (FIND, *self._newcomers) if follows else (FIND,)
            locate(
                request, directories, slots, phases=phases, step=step, at_once=follows, wrong=wrong, counted=True, resolves=True
            )  # fmt: skip
            return slots
        owners = torch.empty(request.ids.numel(), dtype=torch.int32, device=first.device)
        locate(request, directories, slots, phases=(FIND,), step=step, owners=owners, wrong=wrong, counted=True)
        missing = (owners >= 0).nonzero()[:, 0]
        if missing.numel():
            self._admit(request, slots, missing, owners[missing])
            if follows:
                locate(request, self.directories, slots, phases=(FOLLOW, *self._newcomers), step=step)
        return slots

    def _admit(self, request: Request, slots: Tensor, missing: Tensor, owners: Tensor) -> None:
        """Rows for new ids while the purses last: of every table the smallest first."""
        order = request.ids[missing].argsort(stable=True)
        order = order[owners[order].argsort(stable=True)]
        missing, owners = missing[order], owners[order]
        ids = request.ids[missing]
        head = torch.ones_like(ids, dtype=torch.bool)
        head[1:] = (ids[1:] != ids[:-1]) | (owners[1:] != owners[:-1])
        which = head.cumsum(0) - 1
        distinct, owners = ids[head], owners[head]
        counts = torch.bincount(owners, minlength=len(self.storages)).tolist()
        plan, masks, start = [], [], 0
        for storage, count in zip(self.storages, counts):
            k = storage.how.begins
            rows = storage.take_rows(count) if count and storage.affords_rows else 0
            plan.append((start, rows, storage.counts[k], storage.records.class_bits, k))
            if storage.how.masked:
                masks.append(storage.first_masks(distinct[start : start + count]))
            storage.counts[k] += rows
            start += count
        if not any(rows for _, rows, *_ in plan):
            return
        starts, most, firsts, bits, chunks = torch.tensor(plan).to(ids.device)[owners.long()].unbind(1)
        rank = torch.arange(distinct.numel(), device=ids.device) - starts
        new = torch.where(rank < most, ((firsts + rank) << bits) | chunks, -1)
        together = torch.cat(masks) if masks else None
        self.storages[0].kernels.admit_all(request, self.directories, owners, distinct, new, together, self._widths)
        for storage, (_, count, *_) in zip(self.storages, plan):
            storage.directory.used += count
        slots[missing] = new[which]
