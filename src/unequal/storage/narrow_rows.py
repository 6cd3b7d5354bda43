"""Rows that are as wide as they deserve: virtually hashed, physically indexed.

Ids live in a virtual space. A directory holds entries for live rows only; a slot says how many chunks the row has and where its
record lies, among those of rows of the same width. Ids without a row are followed by a table of candidates of fixed size. Between
rounds rows are only added, while the purse lasts; a round changes widths, lays rows together again and gives slabs back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError
from ..kernels import Backend
from ..kernels.request import Records, capturing
from ..optim import Optimizer
from ..tables import Table
from .following import FollowingStorage
from .memory import own_pages
from .narrowing import Census, Narrowing
from .numbered import NumberedDirectory

INDEX_BITS = 31
"""of a slot, as the directory holds it"""
CHUNK = 65536
"""rows that are made at a time"""
MOST_GAIN = 2.0**40
"""The measure that utilities are kept in grows up to this; then they are all made smaller."""


class NarrowRows(FollowingStorage):
    """Rows of a table, each as wide as it is. `rows.records` is what the kernels see."""

    def __init__(
        self, table: Table, optimizer: Optimizer, seed: int, kernels: Backend, device: torch.device, how: Narrowing
    ) -> None:
        super().__init__(table, optimizer, seed, kernels, device)
        self.how = how
        per_class = how.rows * how.chunk / table.dim
        self.rows.strict = False
        self.rows.records = Records.make(
            table.dim, table.dtype, optimizer, chunk=how.chunk, masked=how.masked, by_chunk=how.by_chunk, kind=how.kind,
            slab_log2=int(np.clip(int(max(1.0, per_class / 8)).bit_length(), 4, 14)), uniform=how.uniform,
        )  # fmt: skip
        self.generation = 0
        """grows when slots change their meaning"""
        self._start()

    def _start(self) -> None:
        """With nothing in it."""
        records = self.records
        for slabs in records.slabs:
            slabs.clear()
        self._start_following()
        self.counts = [0] * (records.chunks + 1)
        """live rows of every class"""
        self._laid_out: list[int] = []
        """the same after the last round"""
        self._find_by(self._directory(0))
        records.gain = 1.0
        self._changed()
        if self.how.uniform:
            self._make_all()

    def _make_all(self) -> None:
        """All rows of a uniform table."""
        k = self.how.start
        self._grow(k, self.own_rows, spare=False)
        self.counts[k] = self.own_rows
        if self.own_rows:  # what stands for a row that does not exist is never read: it needs an address alone
            self.records.slabs[0][0] = self.records.slabs[k][0][:1, :1]
        for ids, slots in zip(*(part.split(CHUNK) for part in self.directory.entries())):
            old = torch.full_like(ids, -1)
            self.kernels.place(
                self.rows, slots, *self.kernels.rebuild(self.rows, ids, old, slots, None, self.table.init_std)
            )

    def _directory(self, rows: int) -> Any:
        """With room for so many."""
        if self.how.uniform:
            assert self.table.rows is not None
            bits = self.records.class_bits
            return NumberedDirectory(self.table.rows, self.part, self.of, self.how.start, bits, self.device)
        if self.how.in_directory:
            assert self.table.rows is not None
            worth = own_pages((max(1, self.own_rows), 1), self.device)
            return self.kernels.FollowedDirectory(self.table.rows, self.part, self.of, worth)
        where = {"device": self.device} if self.kernels.on_device else {}
        return self.kernels.NarrowDirectory(self.table.rows, rows, **where)

    def _find_by(self, directory: Any) -> None:
        """From now on; the caller tells the kernels (_changed)."""
        self.directory: Any = directory
        if self.how.in_directory:
            self.records.slabs[0][0] = directory.worth

    def _changed(self) -> None:
        self.rows.rows = self.records.bound
        self.rows.cached = None

    def learn_by(self, optimizer: Optimizer) -> None:
        """From now on by this one, of the same kind."""
        self.optimizer = self.rows.optimizer = optimizer
        self.rows.cached = None

    @property
    def live(self) -> int:
        return sum(self.counts)

    @property
    def values(self) -> int:
        """of all live rows"""
        return sum(k * self.how.chunk * count for k, count in enumerate(self.counts))

    # A step

    def locate(self, ids: Tensor, insert: bool, out: Tensor | None = None) -> Tensor:
        """`out`: where the slots are written."""
        self.refuse_capture()
        ids = ids.contiguous()
        slots = torch.empty_like(ids) if out is None else out
        unfound: int = self.directory.find_into(ids, slots)
        if not insert:
            return slots
        records = self.records
        self.tick()
        self.how.tally.note(ids.numel(), unfound)
        if not unfound:
            return slots
        if self.affords_rows:
            self.admit_missing(ids, slots)
        if records.kind:
            self.follow(ids, slots)
        return slots

    def admit_missing(self, ids: Tensor, slots: Tensor) -> None:
        """Rows for ids whose slot is -1, the smallest first, while the purse lasts."""
        missing = slots < 0
        unknown = ids[missing]
        distinct = self.kernels.unique(unknown)[0].sort().values
        rows = self.how.purse.take(distinct.numel(), self.how.takes)
        if rows:
            self._admit(distinct[:rows])
            slots[missing] = self.directory.find(unknown)

    def refuse_capture(self) -> None:
        if capturing(self.device):
            raise UserError(
                f"table '{self.table.name}' has rows of different width, which come and go between steps, so that a step cannot "
                "be captured in a CUDA graph; train without a graph, or without a width"
            )

    def tick(self) -> None:
        """Once a step: what was useful before it counts a little less from now on."""
        self._clock += 1
        self._count_for(self.how.decay)

    def forget(self, share: float) -> None:
        """What was useful so far counts for so much of itself from now on; where nothing fades, for all of it."""
        if self.how.decay < 1:
            self._count_for(share)

    def _count_for(self, share: float) -> None:
        self.records.gain /= share
        if self.records.gain > MOST_GAIN:
            self._fade()

    @property
    def affords_rows(self) -> bool:
        """Whether there is enough left for a new row."""
        return self.how.purse.left >= self.how.takes

    def take_rows(self, wanted: int) -> int:
        """Pays for as many new rows as it can, and makes room for them. How many; the caller counts and fills them."""
        k = self.how.begins
        rows = self.how.purse.take(wanted, self.how.takes)
        self._grow(k, self.counts[k] + rows)
        self.directory.make_room(rows)
        return rows

    def _admit(self, ids: Tensor) -> None:
        """Makes rows at the end of the class for new ones."""
        k = self.how.begins
        first, count = self.counts[k], ids.numel()
        self._grow(k, first + count)
        slots = (torch.arange(first, first + count, device=self.device) << self.records.class_bits) | k
        masks = self.first_masks(ids) if self.how.masked else None
        old = torch.full_like(ids, -1)
        made, starts = self.kernels.rebuild(self.rows, ids, old, slots, masks, self.table.init_std)
        self.kernels.place(self.rows, slots, made, starts)
        self.directory.insert(ids, slots)
        self.counts[k] += count

    def first_masks(self, ids: Tensor) -> Tensor:
        """Chunks of new rows, beginning anywhere: a column that no row has gets no gradient from products of rows, ever."""
        chunks = self.records.chunks
        first = self.kernels.bucket_of(ids, chunks)
        bits = (first[:, None] + torch.arange(self.how.begins, device=ids.device)) % chunks
        masks: Tensor = (1 << bits).sum(1)
        return masks

    def _grow(self, k: int, rows: int, spare: bool = True) -> None:
        """Room for so many rows of a class; with `spare` for some more."""
        if self._room(k) >= rows:
            return
        size = 1 << self.records.slab_log2
        whole = -(-rows // size) * size
        kept, new = self._enlarged(k, whole if spare else rows)
        self._replace(k, kept, new)
        self._changed()

    def _room(self, k: int) -> int:
        """For so many rows of a class its slabs are there: all but the last have 2^slab_log2."""
        held = self.records.slabs[k]
        return ((len(held) - 1) << self.records.slab_log2) + held[-1].shape[0] if held else 0

    def _enlarged(self, k: int, rows: int) -> tuple[int, list[Tensor]]:
        """How many slabs of a class stay as they are, and those that follow, where it has exactly so many rows."""
        held, size = self.records.slabs[k], 1 << self.records.slab_log2
        if rows == self._room(k):  # so it is with most classes in most rounds
            return len(held), []
        sizes = [min(size, rows - first) for first in range(0, rows, size)]
        same = [slab.shape[0] == wanted for slab, wanted in zip(held, sizes)]
        kept = same.index(False) if False in same else len(same)
        return kept, [self._slab(k, wanted) for wanted in sizes[kept:]]

    def _replace(self, k: int, kept: int, new: list[Tensor]) -> None:
        """Puts slabs in place of those of a class after the first ones, and their rows into them."""
        held = self.records.slabs[k]
        for slab, old in zip(new, held[kept:]):
            both = min(slab.shape[0], old.shape[0])
            slab[:both] = old[:both]
        held[kept:] = new

    def _slab(self, k: int, rows: int) -> Tensor:
        return own_pages((rows, int(self.records.layout[k, 5])), self.device)

    # A round

    def census(self) -> Census:
        """Utilities in it have faded to now, so that they are comparable with those of other tables."""
        records = self.records
        known, names = self.candidates()
        rowless = (self.directory.find(names) < 0).nonzero()[:, 0]  # some have got a row since
        names, known = names[rowless], known[rowless]
        if not self.how.by_id:
            names, known = self._by_id(names, known)
        if hasattr(self.directory, "entries_then"):
            ids, slots = self.directory.entries_then(names, known << records.class_bits)
            live = ids.numel() - names.numel()
            assert self.kernels.worth is not None
            utilities, masks = self.kernels.worth(self.rows, slots)
        else:
            ids, slots = self.directory.entries()
            # So that it does not matter how the directory lies.
            if not self.directory.in_order:
                ids, slots = self._by_id(ids, slots)
            live = ids.numel()
            utilities, masks = (
                self._worth(slots) if self.kernels.worth is None else self.kernels.worth(self.rows, slots)
            )
            # One after the other, so that no two of them are there twice at a time.
            ids = torch.cat([ids, names])
            slots = torch.cat([slots, known << records.class_bits])
            utilities = torch.cat([utilities, records.slabs[0][0][known, : records.utilities]])
            masks = None if masks is None else torch.cat([masks, torch.zeros_like(known)])
        # A training that has diverged must not take the rows with it.
        utilities.mul_(1 / records.gain).nan_to_num_(nan=0.0, posinf=1e30)
        return Census(ids, slots, utilities, masks, live)

    def _by_id(self, ids: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        if self.kernels.order_by_id is not None:
            ordered: tuple[Tensor, Tensor] = self.kernels.order_by_id(ids, slots)
            return ordered
        ids, order = ids.sort()
        return ids, slots[order]

    def _worth(self, slots: Tensor) -> tuple[Tensor, Tensor | None]:
        """Utilities and masks of live rows."""
        records = self.records
        utilities = torch.empty(slots.numel(), records.utilities, device=self.device)
        masks = torch.empty(slots.numel(), dtype=torch.int64, device=self.device) if records.masked else None
        chunks, places = slots & ((1 << records.class_bits) - 1), slots >> records.class_bits
        for k, which in self._by_class(chunks):
            layout = records.layout[k]
            rows = self._read(k, slice(int(layout[3]), int(layout[5])))
            utilities[which] = rows[places[which], : records.utilities]
            if masks is not None:
                masks[which] = rows[:, records.utilities :].flatten().clone().view(torch.int64)[places[which]]
        return utilities, masks

    def _by_class(self, chunks: Tensor) -> list[tuple[int, Tensor]]:
        """(chunks, which rows have so many, in order) for each number of chunks that there is."""
        order = chunks.argsort(stable=True)
        counts = torch.bincount(chunks, minlength=self.records.chunks + 1).tolist()
        parts = torch.split(order, counts)
        return [(k, part) for k, part in enumerate(parts) if k and part.numel()]

    def _read(self, k: int, words: slice) -> Tensor:
        """[rows, words]: these words of all rows of a class."""
        slabs = [slab[:, words] for slab in self.records.slabs[k]]
        return torch.cat(slabs)[: self.counts[k]]

    def prepare(self, census: Census, chunks: Tensor, masks: Tensor | None, rows: list[int]) -> Callable[[], None]:
        """Makes, beside what there is, what rows will be with these chunks. Called, what it gives puts that in place, and needs
        no memory worth the name: where memory is short, it is short before anything has changed. `rows`: see by_class.counts."""
        records = self.records
        held = [0, *rows[1:]]
        self._check_room(held)
        counts = torch.tensor(held).to(self.device)
        slots = self.kernels.lay_out(census.slots, chunks, counts, records.class_bits)
        if masks is not None and census.masks is not None:
            movers = ((slots != census.slots) & (slots >= 0) | (chunks > 0) & (masks != census.masks)).nonzero()[:, 0]
        elif self.kernels.moved is not None:
            movers = self.kernels.moved(census.slots, slots)
        else:
            movers = ((slots != census.slots) & (slots >= 0)).nonzero()[:, 0]
        directory = self._directory(sum(held))
        directory.insert(census.ids, slots)
        placed = slots[movers]
        del slots
        made, starts = self.kernels.rebuild(
            self.rows, census.ids[movers], census.slots[movers], placed, None if masks is None else masks[movers],
            self.table.init_std, self.how.inherit,
        )  # fmt: skip
        slabs = [self._enlarged(k, count) for k, count in enumerate(held) if k]
        unwanted = (chunks == 0).nonzero()[:, 0]
        dropped = census.ids[unwanted], census.utilities[unwanted] * records.gain

        def put() -> None:
            self._put(slabs, directory, held)
            self.kernels.place(self.rows, placed, made, starts)
            self._follow_instead(dropped)

        return put

    def prepare_unchanged(self) -> Callable[[], None]:
        """As `prepare`, where no row changes: what those that came since the last round have to spare is given back."""
        if self.counts == self._laid_out:
            return lambda: None
        directory = self.directory
        if not self.how.in_directory:
            directory = self._directory(self.live)
            directory.insert(*self.directory.entries())
        slabs = [self._enlarged(k, count) for k, count in enumerate(self.counts) if k]
        return lambda: self._put(slabs, directory, self.counts)

    def _put(self, slabs: list[tuple[int, list[Tensor]]], directory: Any, counts: list[int]) -> None:
        """Puts slabs (of every class from the first on, see _enlarged) and a directory in place; rows follow."""
        for k, (kept, new) in enumerate(slabs, 1):
            self._replace(k, kept, new)
        self._find_by(directory)
        self._changed()
        self.counts, self._laid_out = counts, list(counts)
        self.generation += 1

    def _check_room(self, counts: list[int]) -> None:
        """Of slots of every class."""
        most, room = max(counts), 1 << INDEX_BITS - self.records.class_bits
        if most >= room:
            raise MemoryError(
                f"table '{self.table.name}': {most:,} rows of {counts.index(most)} chunks, there is room for {room:,}; "
                "use larger chunks, of which there are fewer"
            )

    def _fade(self) -> None:
        """Utilities count from now on in today's measure."""
        records = self.records
        followed = records.slabs[0][0].view(torch.int32)  # as words: not all that are negative are numbers
        faded = (records.slabs[0][0] / records.gain).view(torch.int32)
        followed.copy_(torch.where(followed < 0, followed, faded))
        if self.kernels.fade is not None:
            self.kernels.fade(self.rows, records.gain)
        else:
            for k in range(1, records.chunks + 1):
                first = int(records.layout[k, 3])
                for slab in records.slabs[k]:
                    slab[:, first : first + records.utilities] /= records.gain
        records.gain = 1.0
        self.rows.cached = None
