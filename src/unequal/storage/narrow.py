"""Tables whose rows are as wide as they deserve: virtually hashed, physically indexed.

Ids live in a virtual space. A directory holds entries for live rows only; a slot says how many chunks the row has and where its
record lies, among those of rows of the same width. Ids without a row are followed by a table of candidates of fixed size. Between
rounds rows are only added, while the purse lasts; a round changes widths, lays rows together again and gives slabs back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..errors import CheckpointError, UserError
from ..kernels import Backend
from ..kernels.request import WAYS, Records, capturing
from ..optim import Optimizer
from ..tables import Table
from .memory import own_pages
from .tables import Storage
from .tally import Tally

P = ParamSpec("P")
R = TypeVar("R")
INDEX_BITS = 31
"""of a slot, as the directory holds it"""
NOBODY = -1.0
"""utility of a place among the candidates that is free"""


@dataclass(slots=True)
class Purse:
    """Values that tables which share a budget may still take up before the next round."""

    left: float = 0.0

    def take(self, wanted: int, each: int) -> int:
        """For how many of so many rows there is enough; it is taken."""
        rows = max(0, min(wanted, int(self.left // each)))
        self.left -= rows * each
        return rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Narrowing:
    """How a table's rows are kept and followed."""

    chunk: int
    masked: bool
    """whether any chunks may be live, or only the first ones"""
    by_chunk: bool
    """whether each chunk's utility is followed, or each row's"""
    kind: int
    """of utilities; see Records"""
    start: int
    """chunks of a row that is new"""
    rows: float
    """expected to be live, about: slabs and candidates are sized by it"""
    candidates: int
    decay: float
    """of utilities, per step"""
    purse: Purse = field(default_factory=Purse)
    tally: Tally = field(default_factory=Tally)


@dataclass(slots=True)
class Census:
    """All rows of a table that a round decides on: live ones first, then candidates."""

    ids: Tensor
    slots: Tensor
    utilities: Tensor
    """[rows, 1 or chunks]"""
    masks: Tensor | None
    """of live chunks, as bits"""
    live: int

    def chunks(self, records: Records) -> Tensor:
        return self.slots & ((1 << records.class_bits) - 1)


def _as_memory_error(work: Callable[P, R]) -> Callable[P, R]:
    """A GPU without memory says so in its own way."""

    @wraps(work)
    def call(*arguments: P.args, **options: P.kwargs) -> R:
        try:
            return work(*arguments, **options)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error).split(". ")[0]) from None

    return call


class NarrowStorage(Storage):
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
            slab_log2=int(np.clip(int(max(1.0, per_class / 64)).bit_length(), 4, 14)),
        )  # fmt: skip
        self.generation = 0
        """grows when slots change their meaning"""
        self._start()

    def _start(self) -> None:
        """With nothing in it."""
        records = self.records
        for slabs in records.slabs:
            slabs.clear()
        places = max(1, self.how.candidates // WAYS) * WAYS
        records.slabs[0].append(torch.full((places, records.utilities), NOBODY, device=self.device))
        self.followed = torch.zeros(places, dtype=torch.int64, device=self.device)
        self._stamps = torch.zeros(places, dtype=torch.int32, device=self.device)
        self._clock = 0
        self.counts = [0] * (records.chunks + 1)
        """live rows of every class"""
        self.directory: Any = self._directory(0)
        records.gain = 1.0
        self._changed()

    def _directory(self, rows: int) -> Any:
        """With room for so many."""
        where = {"device": self.device} if self.kernels.on_device else {}
        return self.kernels.NarrowDirectory(self.table.rows, rows, **where)

    def _changed(self) -> None:
        self.rows.rows = self.records.bound
        self.rows.cached = None

    @property
    def records(self) -> Records:
        assert self.rows.records is not None
        return self.rows.records

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
            utilities = records.slabs[0][0]
            self.kernels.follow(self.followed, utilities, self._stamps, self._clock, records.class_bits, ids, slots)
        return slots

    def admit_missing(self, ids: Tensor, slots: Tensor) -> None:
        """Rows for ids whose slot is -1, the smallest first, while the purse lasts."""
        missing = slots < 0
        unknown = ids[missing]
        distinct = self.kernels.unique(unknown)[0].sort().values
        rows = self.how.purse.take(distinct.numel(), self.how.start * self.how.chunk)
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
        self.records.gain /= self.how.decay

    @property
    def affords_rows(self) -> bool:
        """Whether there is enough left for a new row."""
        return self.how.purse.left >= self.how.start * self.how.chunk

    def take_rows(self, wanted: int) -> int:
        """Pays for as many new rows as it can, and makes room for them. How many; the caller counts and fills them."""
        k = self.how.start
        rows = self.how.purse.take(wanted, k * self.how.chunk)
        self._grow(k, self.counts[k] + rows)
        self.directory.make_room(rows)
        return rows

    def _admit(self, ids: Tensor) -> None:
        """Makes rows at the end of the class for new ones."""
        k = self.how.start
        first, count = self.counts[k], ids.numel()
        self._grow(k, first + count)
        slots = (torch.arange(first, first + count, device=self.device) << self.records.class_bits) | k
        masks = self.first_masks(ids) if self.how.masked else None
        old = torch.full_like(ids, -1)
        made, starts = self.kernels.rebuild(self.rows, ids, old, slots, masks, None, self.table.init_std)
        self.kernels.place(self.rows, slots, made, starts)
        self.directory.insert(ids, slots)
        self.counts[k] += count

    def first_masks(self, ids: Tensor) -> Tensor:
        """Chunks of new rows, beginning anywhere: a column that no row has gets no gradient from products of rows, ever."""
        chunks = self.records.chunks
        first = self.kernels.bucket_of(ids, chunks)
        bits = (first[:, None] + torch.arange(self.how.start, device=ids.device)) % chunks
        masks: Tensor = (1 << bits).sum(1)
        return masks

    def _grow(self, k: int, rows: int) -> None:
        records = self.records
        while len(records.slabs[k]) << records.slab_log2 < rows:
            records.slabs[k].append(self._slab(k))
            self._changed()

    def _slab(self, k: int) -> Tensor:
        records = self.records
        return own_pages((1 << records.slab_log2, int(records.layout[k, 5])), self.device)

    # A round

    @_as_memory_error
    def census(self) -> Census:
        """Utilities fade to now: after it they are comparable with those of other tables."""
        records = self.records
        ids, slots = self.directory.entries()
        ids, order = ids.sort()  # so that it does not matter how the directory lies
        slots = slots[order]
        utilities, masks = self._worth(slots) if self.kernels.worth is None else self.kernels.worth(self.rows, slots)
        known = (records.slabs[0][0][:, 0] >= 0).nonzero()[:, 0]
        known = known[self.directory.find(self.followed[known]) < 0]  # some have got a row since
        known = known[self.followed[known].argsort()]
        fade = 1 / records.gain
        return Census(
            torch.cat([ids, self.followed[known]]),
            torch.cat([slots, known << records.class_bits]),
            # A training that has diverged must not take the rows with it.
            torch.nan_to_num(torch.cat([utilities, records.slabs[0][0][known]]) * fade, nan=0.0, posinf=1e30),
            None if masks is None else torch.cat([masks, torch.zeros_like(known)]),
            ids.numel(),
        )

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

    @_as_memory_error
    def prepare(self, census: Census, chunks: Tensor, masks: Tensor | None) -> Callable[[], None]:
        """Makes, beside what there is, what rows will be with these chunks. Called, what it gives puts that in place, and needs
        no memory worth the name: where memory is short, it is short before anything has changed."""
        records = self.records
        slots = self._lay_out(census, chunks, census.chunks(records))
        wanted = chunks > 0
        moved = wanted & (slots != census.slots)
        if masks is not None and census.masks is not None:
            moved |= wanted & (masks != census.masks)
        counts = torch.bincount(chunks, minlength=records.chunks + 1).tolist()
        directory = self._directory(int(wanted.sum()))
        directory.insert(census.ids[wanted], slots[wanted])
        made, starts = self.kernels.rebuild(
            self.rows, census.ids[moved], census.slots[moved], slots[moved], None if masks is None else masks[moved], None,
            self.table.init_std,
        )  # fmt: skip
        slabs = [-(-count >> records.slab_log2) for count in counts]
        fresh = [[self._slab(k) for _ in range(len(records.slabs[k]), slabs[k])] for k in range(1, records.chunks + 1)]
        placed = slots[moved]
        dropped = census.ids[~wanted], census.utilities[~wanted]

        def put() -> None:
            for held, new in zip(records.slabs[1:], fresh):
                held += new
            self._changed()
            self.kernels.place(self.rows, placed, made, starts)
            for k in range(1, records.chunks + 1):
                del records.slabs[k][slabs[k] :]
            self.counts, self.directory = [0, *counts[1:]], directory
            self._fade()
            self._follow_instead(dropped)
            self.generation += 1
            self._changed()

        return put

    def _lay_out(self, census: Census, chunks: Tensor, old_chunks: Tensor) -> Tensor:
        """New slots: the rows of a class lie without a gap, and those that can stay where they are do."""
        records = self.records
        counts = torch.bincount(chunks, minlength=records.chunks + 1)
        counts[0] = 0
        most, room = int(counts.max()), 1 << INDEX_BITS - records.class_bits
        if most >= room:
            raise MemoryError(
                f"table '{self.table.name}': {most:,} rows of {int(counts.argmax())} chunks, there is room for {room:,}; "
                "use larger chunks, of which there are fewer"
            )
        # All classes at once, one after the other: on a GPU a loop over them would wait for the device again and again.
        begins = counts.cumsum(0) - counts
        places = census.slots >> records.class_bits
        stays = (old_chunks == chunks) & (places < counts[chunks])
        taken = torch.zeros(int(counts.sum()), dtype=torch.bool, device=self.device)
        taken[(begins[chunks] + places)[stays]] = True
        free = (~taken).nonzero()[:, 0]
        movers = ((chunks > 0) & ~stays).nonzero()[:, 0]
        movers = movers[chunks[movers].argsort(stable=True)]
        slots = torch.where(stays, census.slots, -1)
        k = chunks[movers]
        slots[movers] = ((free - begins[k]) << records.class_bits) | k
        return slots

    def _fade(self) -> None:
        """Utilities count from now on in today's measure."""
        records = self.records
        if self.kernels.fade is not None:
            self.kernels.fade(self.rows, records.gain)
        else:
            for k in range(1, records.chunks + 1):
                first = int(records.layout[k, 3])
                for slab in records.slabs[k]:
                    slab[:, first : first + records.utilities] /= records.gain
        records.gain = 1.0

    def _follow_instead(self, rows: tuple[Tensor, Tensor]) -> None:
        """The candidates are the most useful of these, as far as their buckets have room."""
        ids, utilities = rows
        table = self.records.slabs[0][0]
        table.fill_(NOBODY)
        self._stamps.zero_()
        self._clock = 0
        buckets = table.shape[0] // WAYS
        order = utilities.sum(1).argsort(descending=True, stable=True)
        at = self.kernels.bucket_of(ids[order], buckets)
        by_bucket = at.argsort(stable=True)
        sorted_at = at[by_bucket]
        first = torch.searchsorted(sorted_at, torch.arange(buckets, device=self.device))
        way = torch.arange(at.numel(), device=self.device) - first[sorted_at]
        kept = way < WAYS
        places = sorted_at[kept] * WAYS + way[kept]
        chosen = order[by_bucket[kept]]
        self.followed[places] = ids[chosen]
        table[places] = utilities[chosen]

    # What it takes, and saving it

    def memory(self) -> dict[str, int]:
        """Bytes that are held: of values, of optimizer state, and of all that says where they are and how they matter."""
        records, item = self.records, self.table.dtype.itemsize
        weights = optimizer = metadata = 0
        for k in range(1, records.chunks + 1):
            rows = len(records.slabs[k]) << records.slab_log2
            width, words = int(records.layout[k, 0]), int(records.layout[k, 5])
            weights += rows * width * item
            optimizer += rows * self.optimizer.state_bytes_per_row(width)
            metadata += rows * (words * 4 - width * item - self.optimizer.state_bytes_per_row(width))
        candidates = records.slabs[0][0].nbytes + self.followed.nbytes + self._stamps.nbytes
        return {
            "weights": weights,
            "optimizer": optimizer,
            "directory": self.directory.bytes + metadata + candidates,
        }

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
        if self.how.masked and not wrong:
            bits = (parts["masks"][:, None] >> torch.arange(self.records.chunks, device=self.device)) & 1
            wrong = bool((bits.sum(1) * chunk != widths).any())
        if wrong:
            raise CheckpointError(
                f"table '{self.table.name}': rows were saved in other chunks than {chunk} values of {self.table.dim}; "
                "load it with the chunk it was saved with"
            )
        self._start()
        records = self.records
        chunks = widths // chunk
        counts = torch.bincount(chunks, minlength=records.chunks + 1).tolist()
        slots = torch.empty_like(chunks)
        starts = widths.cumsum(0) - widths
        for k, which in self._by_class(chunks):
            self._grow(k, counts[k])
            slots[which] = (torch.arange(which.numel(), device=self.device) << records.class_bits) | k
            self._fill_class(k, which, starts, parts)
        self.counts = [0, *counts[1:]]
        self.directory = self._directory(widths.numel())
        self.directory.insert(parts["ids"], slots)
        self._follow_instead((parts["candidates"], parts["candidate_utilities"]))
        self.generation += 1
        self._changed()

    def _fill_class(self, k: int, which: Tensor, starts: Tensor, parts: dict[str, Tensor]) -> None:
        records = self.records
        width, *begins = records.layout[k].tolist()
        rows = torch.zeros(which.numel(), int(records.layout[k, 5]), device=self.device)
        at = starts[which][:, None] + torch.arange(width, device=self.device)
        value_words = -(-width * self.table.dtype.itemsize // 4)
        values = torch.zeros(
            which.numel(), value_words * 4 // self.table.dtype.itemsize, dtype=self.table.dtype, device=self.device
        )
        values[:, :width] = parts["weight"][at]
        rows[:, :value_words] = values.view(torch.float32)
        for (name, per), begin in zip(self.optimizer.state, begins):
            if per == "row":
                rows[:, begin] = parts[name][which]
            else:
                rows[:, begin : begin + width] = parts[name][at]
        utility = begins[2]
        rows[:, utility : utility + records.utilities] = parts["utilities"][which]
        if records.masked:
            rows[:, begins[3] : begins[3] + 2] = parts["masks"][which][:, None].contiguous().view(torch.float32)
        size = 1 << records.slab_log2
        for slab, part in zip(records.slabs[k], torch.split(rows, size)):
            slab[: part.shape[0]] = part

    def move(self, kernels: Backend, device: torch.device) -> None:
        state = {name: part.to(device) for name, part in self.state().items()}
        self.kernels, self.device = kernels, device
        self.load(state)
