"""What a round knows of a table, and the sample of all of them from which the threshold is found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from ..kernels.request import Records, mix64
from ..storage import by_class
from ..storage.memory import give_back_freed
from ..storage.narrow import Census, NarrowStorage
from .evidence import believed
from .policy import Policy, Rows

SAMPLE = 200_000
"""rows from which the threshold is found"""
DRAWS = 1 << 20
"""numbers that are drawn are below that"""
NEAR = 1 << 14
"""rows that numbers are drawn for at a time"""
MANY = 1 << 17
"""rows of a table from which what a round needed for it goes back to the system at once, or the C library would keep it"""


def steadily(policy: Policy, rows: Rows, old: Tensor, threshold: float, hysteresis: float) -> Tensor:
    """Rows grow where they are wide at a higher threshold, too, and shrink where they are narrow at a lower one, too."""
    if rows.kernels is not None:
        widths: Tensor = rows.kernels.widths_between(*_bounds(rows, old, threshold, hysteresis))
        return widths
    grown = policy.chosen(rows, threshold * (1 + hysteresis))
    shrunk = policy.chosen(rows, threshold / (1 + hysteresis))
    if old.dtype == torch.bool:
        return grown | (old & shrunk)
    return torch.minimum(torch.maximum(old, grown), shrunk)


def _bounds(
    rows: Rows, old: Tensor, threshold: float, hysteresis: float
) -> tuple[Tensor, Tensor, list[int], Tensor, Tensor]:
    """What `widths_between` and `chunks_between` take."""
    grow, shrink = rows.limits_at(threshold * (1 + hysteresis)), rows.limits_at(threshold / (1 + hysteresis))
    return rows.utilities, old, rows.ends, grow, shrink


def _counts(chosen: Tensor) -> Tensor:
    """Chunks of every row."""
    if chosen.dtype == torch.bool:
        return (
            chosen.view(torch.uint8).sum(1, dtype=torch.uint8).to(torch.int16)
        )  # at most 63; other sums are far slower
    return chosen


@dataclass(slots=True)
class Sample:
    """Rows of tables of one shape, of which each stands for as many as its weight says."""

    policy: Policy
    rows: Rows
    old: Tensor
    weights: Tensor
    each: list[float] | None = None
    """weights by table, where they are enough"""

    def values(self, threshold: float, hysteresis: float) -> float:
        """that would live"""
        if self.each is not None and self.rows.kernels is not None:
            chunks = self.rows.kernels.chunks_between(*_bounds(self.rows, self.old, threshold, hysteresis))
            return float(sum(weight * count for weight, count in zip(self.each, chunks))) * self.rows.values
        chosen = steadily(self.policy, self.rows, self.old, threshold, hysteresis)
        # Not torch.dot: on a GPU that is cuBLAS, which takes 32 MiB for as long as the process lives.
        return float(self.weights.mul(_counts(chosen)).sum()) * self.rows.values

    def thin(self, by: int) -> Sample:
        each = None if self.each is None else [weight * by for weight in self.each]
        return Sample(self.policy, self.rows.thin(by), self.old[::by].contiguous(), self.weights[::by] * by, each)


def by_shape(parts: Iterable[Part]) -> list[list[Part]]:
    shapes: dict[tuple[int, int], list[Part]] = {}
    for part in parts:
        shapes.setdefault((part.rows.chunks, part.rows.values), []).append(part)
    return list(shapes.values())


def samples_of(parts: list[Part]) -> list[Sample]:
    """Tables of one shape together: a model may have hundreds."""
    step = max(1, sum(part.old.numel() for part in parts) // SAMPLE)
    samples = []
    for members in by_shape(parts):
        rows = Rows.joined([part.rows.thin(step) for part in members])
        old = torch.cat([part.held[::step] for part in members])
        counts = [-(-len(part.held) // step) for part in members]
        each = [len(part.held) / max(1, count) for part, count in zip(members, counts)]
        if rows.kernels is not None:
            samples.append(Sample(members[0].policy, rows, old, torch.empty(0), each))
            continue
        weights = [
            torch.full((count,), weight, dtype=torch.float64, device=old.device) for count, weight in zip(counts, each)
        ]
        samples.append(Sample(members[0].policy, rows, old, torch.cat(weights)))
    return samples


def _beyond(drawn: Tensor, share: float) -> Tensor:
    """All but such a share of the rows, as was drawn."""
    return drawn >= int(share * DRAWS)


def _tidy(ids: Tensor) -> None:
    """After work on such rows of a table."""
    if ids.numel() >= MANY and ids.device.type == "cpu":
        give_back_freed()


class Part:
    """One table in a round."""

    def __init__(self, storage: NarrowStorage, policy: Policy) -> None:
        """`measure` comes next."""
        self.storage, self.policy = storage, policy
        self.records: Records = storage.records
        self.census: Census = storage.census()
        _tidy(self.census.ids)
        self.old = self.census.chunks(self.records)
        self.held = self._bits(self.census.masks) if self.census.masks is not None else self.old
        """its chunks, where any may live"""
        self.new: Tensor = self.old
        self._draws = 0
        self._tallied: tuple[Tensor, tuple[Tensor, Tensor]] | None = None

    @property
    def known(self) -> tuple[int, int]:
        """How many ids have a row, and how many without one are followed."""
        return self.census.live, len(self.census.ids) - self.census.live

    def measure(
        self, share: float, unit: Tensor | None = None, doubt: float = 0.0, priorities: Tensor | None = None
    ) -> Part:
        """Makes what its rows are worth comparable with those of other tables, where so much of all values is kept: as far as it
        is believed, and in this unit of each number, or as it is. `priorities`: of its chunks."""
        utilities = believed(self.census.utilities, doubt)
        utilities = utilities if unit is None else utilities / unit.to(self.census.ids.device)
        self.rows = self.policy.measure(utilities, self.records.chunks, self.records.chunk, share, priorities)
        if self.rows.limits is not None and self.storage.kernels.widths_between is not None:
            self.rows.kernels = self.storage.kernels
        return self

    @property
    def _on_device(self) -> bool:
        return bool(self.storage.kernels.on_device)

    # What rows of exactly 1, 2, … chunks are worth, as they are and as they will be.

    def worth_now(self) -> Tensor:
        live = self.census.live
        return by_class.sums(
            self.old[:live], self.census.utilities[:live, 0], self.records.chunks, self.storage.kernels
        )

    def worth_then(self) -> Tensor:
        return by_class.sums(self._counts, self.census.utilities[:, 0], self.records.chunks, self.storage.kernels)

    def _bits(self, masks: Tensor) -> Tensor:
        bits = torch.empty(len(masks), self.records.chunks, dtype=torch.bool, device=masks.device)
        for k in range(self.records.chunks):  # all at once would take 8 bytes for each
            bits[:, k] = masks >> k & 1
        return bits

    def _masks(self) -> Tensor:
        masks = torch.zeros_like(self.census.ids)
        for k in range(self.records.chunks):
            masks |= self.new[:, k].to(torch.int64) << k
        return masks

    def choose(self, threshold: float, hysteresis: float) -> None:
        self.new = steadily(self.policy, self.rows, self.held, threshold, hysteresis)

    @property
    def _counts(self) -> Tensor:
        return _counts(self.new)

    # What is counted stays where the rows are: a GPU is waited for once for all tables (see `listed`).

    def _tally(self) -> tuple[Tensor, Tensor]:
        """Chunks by which rows shrink and grow, and how many rows have none, one, two …; on a CPU, all in one pass."""
        if self._tallied is None or self._tallied[0] is not self.new:
            tally_widths = self.storage.kernels.tally_widths
            self._tallied = self.new, tally_widths(self.old, self._counts, self.records.chunks)
        return self._tallied[1]

    def change(self) -> Tensor:
        """Values by which rows shrink, and by which they grow."""
        if self.storage.kernels.tally_widths is not None:
            return self._tally()[0] * self.records.chunk
        change = self._counts - self.old
        return torch.stack([-change.clamp(max=0).sum(), change.clamp(min=0).sum()]) * self.records.chunk

    def exchanged(self) -> Tensor:
        """Values that go, and that come: a row may have others instead, where any may live."""
        if self.new.dtype != torch.bool:
            return self.change()
        return torch.stack([(self.held & ~self.new).sum(), (self.new & ~self.held).sum()]) * self.records.chunk

    def class_counts(self) -> Tensor:
        if self.storage.kernels.tally_widths is not None:
            return self._tally()[1]
        return by_class.counts(self._counts, self.records.chunks, self._on_device)

    def _keep(self, which: Tensor) -> None:
        """These rows stay as they are."""
        if self.new.dtype == torch.bool:
            self.new = torch.where(which[:, None], self.held, self.new)
        else:  # torch chooses between numbers of 2 bytes one by one, and multiplies them in vectors
            self.new = (self.held - self.new).mul_(which).add_(self.new)

    def draw(self, step: int) -> Tensor:
        """A number for every row, by its id, and every time another: rows that were left alone before would be so again, and the
        rest untouched."""
        salt = mix64(step + (self._draws << 40)) >> 1
        self._draws += 1
        ids, bucket_of = self.census.ids, self.storage.kernels.bucket_of
        if self._on_device:
            return bucket_of(ids ^ salt, DRAWS).to(torch.int32)  # type: ignore[no-any-return]
        # Some at a time, so that what is made on the way stays near.
        numbers = torch.empty(len(ids), dtype=torch.int32)
        for some, drawn in zip(torch.split(ids, NEAR), torch.split(numbers, NEAR)):
            drawn.copy_(bucket_of(some ^ salt, DRAWS))
        return numbers

    def growth(self, drawn: Tensor, share: float = 1.0) -> Tensor:
        """Values that come if only such a share of the rows that would grow do."""
        more = (self._counts - self.old).clamp_(min=0).mul_(~_beyond(drawn, share))
        return more.sum() * self.records.chunk

    def hold_back(self, drawn: Tensor, share: float) -> None:
        """Only about this share of the rows may change."""
        self._keep(_beyond(drawn, share))

    def grow_less(self, drawn: Tensor, share: float) -> None:
        """Only about this share of the rows that would grow do: the estimate was too low, or rows that hold back made no room."""
        self._keep((self._counts > self.old) & _beyond(drawn, share))

    def prepare(self, rows: list[int] | None) -> Callable[[], None]:
        """`rows`: see by_class.counts; nothing where no row changes."""
        masks = self._masks() if rows is not None and self.new.dtype == torch.bool else None
        census, counts = self.census, self._counts
        self._tallied = None
        del self.census, self.rows, self.old, self.held, self.new  # by far the most that a round holds
        if rows is None:
            return self.storage.prepare_unchanged()
        put = self.storage.prepare(census, counts, masks, rows)
        _tidy(census.ids)
        return put


def listed(numbers: Iterable[Tensor]) -> list[list[int]]:
    """Numbers of every table, of which a GPU is asked at once."""
    parts = list(numbers)
    flat = iter(torch.cat(parts).tolist() if parts else ())
    return [list(islice(flat, len(part))) for part in parts]


# Where the time of a round goes into starting its many small steps, on a GPU and in small models, tables are taken together, as
# far as it is simple. Large ones are taken one after the other on a host, so that no more is held than one table needs.


def are_together(parts: Sequence[Part]) -> bool:
    on_device = all(part.storage.kernels.on_device for part in parts)
    return bool(parts) and (on_device or sum(len(part.old) for part in parts) < MANY)


def choose_all(parts: list[Part], threshold: float, hysteresis: float) -> list[Part]:
    """The parts, with the widths that their rows have at this threshold."""
    if not are_together(parts):
        for part in parts:
            part.choose(threshold, hysteresis)
        return parts
    for members in by_shape(parts):
        first = members[0]
        rows, held = Rows.joined([part.rows for part in members]), torch.cat([part.held for part in members])
        new = steadily(first.policy, rows, held, threshold, hysteresis)
        for part, own in zip(members, torch.split(new, [len(part.held) for part in members])):
            part.new = own
    return parts


def changes_of(parts: Sequence[Part], net: bool = False) -> list[list[int]]:
    """Values that go and that come, of each part: see Part.exchanged and, where it is `net`, Part.change."""
    if not are_together(parts) or parts[0].new.dtype == torch.bool:
        return listed(part.change() if net else part.exchanged() for part in parts)
    new, old = (torch.cat(each) for each in zip(*((part.new, part.old) for part in parts)))
    # In one dimension: sums of two rows would take two of the GPU's processors.
    goes_and_comes = torch.cat([new.new_zeros(1), (old - new).clamp_(min=0), (new - old).clamp_(min=0)])
    ends = torch.tensor([0, *(len(part.old) for part in parts), *(len(part.old) for part in parts)]).cumsum(0)
    sums = goes_and_comes.cumsum(0, dtype=torch.int64)[ends.to(new.device)].diff().tolist()
    return [[n * part.records.chunk for n in own] for part, *own in zip(parts, sums, sums[len(parts) :])]
