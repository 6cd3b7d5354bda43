"""Tables whose rows are as wide as they deserve: what they take, and how they are saved and loaded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..kernels import Backend
from .narrow_rows import NarrowRows
from .narrowing import Census, Narrowing, Purse
from .records import joined

__all__ = ["Census", "NarrowStorage", "Narrowing", "Purse"]


class NarrowStorage(NarrowRows):
    """Rows of a table, each as wide as it is, with their bytes."""

    def memory(self) -> dict[str, int]:
        """Bytes that are held: of values, of optimizer state, and of all that says where they are and how they matter."""
        records, item = self.records, self.table.dtype.itemsize
        weights = optimizer = metadata = 0
        for k in range(1, records.chunks + 1):
            rows = sum(slab.shape[0] for slab in records.slabs[k])
            width, words = int(records.layout[k, 0]), int(records.layout[k, 5])
            weights += rows * width * item
            optimizer += rows * self.optimizer.state_bytes_per_row(width)
            metadata += rows * (words * 4 - width * item - self.optimizer.state_bytes_per_row(width))
        return {
            "weights": weights,
            "optimizer": optimizer,
            "directory": self.directory.bytes + metadata + self.following_bytes,
        }

    def bytes_with(self, rows: Sequence[int]) -> int:
        """That it takes after a round that leaves so many rows of each class."""
        words = sum(count * int(of) for count, of in zip(rows[1:], self.records.layout[1:, 5]))
        entries: int = self.directory.bytes_for(sum(rows[1:]))
        return 4 * words + entries + self.following_bytes

    @property
    def to_spare(self) -> int:
        """Bytes by which it may grow beside its new rows: up to a slab, and a directory with more room."""
        grown: int = self.directory.bytes_for(self.live + self.live // self.directory.GROWN) - self.directory.bytes
        slab: int = 4 * int(self.records.layout[self.how.begins, 5]) << self.records.slab_log2
        return slab + max(0, grown)

    @property
    def parts(self) -> tuple[str, ...]:
        masks = ("masks",) if self.how.masked else ()
        return (*super().parts, "ids", "widths", "utilities", *masks, "candidates", "candidate_utilities")

    def state(self) -> dict[str, Tensor]:
        """Rows by id: how wide each is in values, then all values of all rows one after the other."""
        census, records = self.census(), self.records
        ids, slots = census.ids[: census.live], census.slots[: census.live]
        chunks, places = slots & ((1 << records.class_bits) - 1), slots >> records.class_bits
        widths = chunks * self.how.chunk
        found: dict[str, Tensor] = {
            "weight": torch.empty(int(widths.sum()), dtype=self.table.dtype, device=self.device)
        }
        for name, per in self.optimizer.state:
            size = ids.numel() if per == "row" else int(widths.sum())
            found[name] = torch.empty(size, device=self.device)
        starts = widths.cumsum(0) - widths
        for k, which in self._by_class(chunks):
            width, *begins = records.layout[k].tolist()
            at = starts[which][:, None] + torch.arange(width, device=self.device)
            rows = self._read(k, slice(None))[places[which]]
            value_words = -(-width * self.table.dtype.itemsize // 4)
            found["weight"][at] = rows[:, :value_words].contiguous().view(self.table.dtype)[:, :width]
            for (name, per), begin in zip(self.optimizer.state, begins):
                if per == "row":
                    found[name][which] = rows[:, begin]
                else:
                    found[name][at] = rows[:, begin : begin + width]
        found |= {"ids": ids, "widths": widths, "utilities": census.utilities[: census.live]}
        if census.masks is not None:
            found["masks"] = census.masks[: census.live]
        kept = slice(census.live, None)
        return found | {"candidates": census.ids[kept], "candidate_utilities": census.utilities[kept]}

    def load(self, state: dict[str, Tensor]) -> None:
        missing = [name for name in self.parts if name not in state]
        if missing:
            raise CheckpointError(
                f"table '{self.table.name}' has rows of different width, but the saved one has no {missing[0]}; "
                "load it with the recipe it was saved with"
            )
        parts = {name: part.to(self.device) for name, part in state.items()}
        widths, chunk = parts["widths"], self.how.chunk
        wrong = bool((widths % chunk != 0).any()) or bool((widths > self.table.dim).any())
        if self.how.uniform and bool((widths != self.how.start * chunk).any()):
            raise self.otherwise_saved()
        if self.how.masked and not wrong:
            bits = (parts["masks"][:, None] >> torch.arange(self.records.chunks, device=self.device)) & 1
            wrong = bool((bits.sum(1) * chunk != widths).any())
        if wrong:
            raise CheckpointError(
                f"table '{self.table.name}': rows were saved in other chunks than {chunk} values of {self.table.dim}; "
                "load it with the chunk it was saved with"
            )
        if parts["utilities"].shape[1] != self.records.utilities or (
            self.how.uniform and not torch.equal(parts["ids"], self.directory.entries()[0])
        ):
            raise self.otherwise_saved()
        self._start()
        records = self.records
        chunks = widths // chunk
        counts = torch.bincount(chunks, minlength=records.chunks + 1).tolist()
        slots = torch.empty_like(chunks)
        starts = widths.cumsum(0) - widths
        for k, which in self._by_class(chunks):
            self._grow(k, counts[k], spare=False)
            slots[which] = (torch.arange(which.numel(), device=self.device) << records.class_bits) | k
            self._fill_class(k, which, starts, parts)
        self.counts = [0, *counts[1:]]
        self._find_by(self._directory(widths.numel()))
        self.directory.insert(parts["ids"], slots)
        self._follow_instead((parts["candidates"], parts["candidate_utilities"]))
        self.generation += 1
        self._changed()

    def otherwise_saved(self) -> CheckpointError:
        here, saved = f"all rows {self.how.start * self.how.chunk} values wide", "others"
        if not self.how.uniform:
            here, saved = (
                "rows as wide as each deserves",
                "rows that are all equally wide, or were followed by another policy",
            )
        return CheckpointError(
            f"table '{self.table.name}': expected {here}, got {saved}; load it with the width it was saved with"
        )

    def _fill_class(self, k: int, which: Tensor, starts: Tensor, parts: dict[str, Tensor]) -> None:
        records = self.records
        at = starts[which][:, None] + torch.arange(int(records.layout[k, 0]), device=self.device)
        where = {"weight": at, "utilities": which, "masks": which}
        where |= {name: which if per == "row" else at for name, per in self.optimizer.state}
        own = {name: parts[name][place] for name, place in where.items() if name in parts}
        rows = joined(records, self.optimizer, k, own)
        size = 1 << records.slab_log2
        for slab, part in zip(records.slabs[k], torch.split(rows, size)):
            slab[: part.shape[0]] = part

    def move(self, kernels: Backend, device: torch.device) -> None:
        state = {name: part.to(device) for name, part in self.state().items()}
        self.kernels, self.device = kernels, device
        self.load(state)
