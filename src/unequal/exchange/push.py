"""Copies follow their owners: after an update every owner sends its changed rows along its lane, one message to each other node,
and there the lane's rank passes on those that every rank has. It runs beside the rest of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from ..plan.parts import id_bytes
from ..plan.placement import Codec
from ..storage.copies import Copies, NarrowCopies
from .codecs import DTYPES, decode, encode, wire_size
from .hop import REPLICATED
from .mesh import Ints, Link, Mesh
from .narrow import Run


@dataclass(slots=True)
class Changed:
    """Rows of one table that have new values."""

    numbers: Tensor
    """among those that have copies"""
    wire: Tensor
    """flat: as they travel, so that all copies get the same bits, on every way"""


class Push:
    """Sends changed rows of all tables to their copies. Collectives have groups of their own, so that they can run beside those
    of the step; every rank starts the same number of them."""

    def __init__(self, mesh: Mesh, copies: Mapping[str, Copies], codec: Codec, device: torch.device) -> None:
        self.mesh, self.copies, self.codec, self.device = mesh, list(copies.values()), codec, device
        self._number_bytes = np.array([id_bytes(own.cuts[-1]) for own in self.copies], np.int64)
        self._apart = mesh.apart()
        # One after the other on a GPU: its kernels and collectives have one order there.
        self._thread = ThreadPoolExecutor(1, "push") if device.type == "cpu" and mesh.world > 1 else None
        self._running: Future[None] | None = None

    def start(self, updated: Sequence[tuple[Tensor, Tensor]]) -> None:
        """`updated`: for every table numbers and rows (float32) that this rank owns and has changed."""
        self.wait()
        changed = [
            Changed(numbers, self._packed(copies, numbers, rows))
            for copies, (numbers, rows) in zip(self.copies, updated)
        ]
        if self._thread is None:
            self._run(changed)
        else:
            self._running = self._thread.submit(self._run, changed)

    def wait(self) -> None:
        """Until all copies are as their owners."""
        if self._running is not None:
            started = perf_counter()
            running, self._running = self._running, None
            running.result()
            self.mesh.traffic.seconds += perf_counter() - started
        self._count()

    def _count(self) -> None:
        """What was sent beside counts as sent; only what was waited for counts as time."""
        own, total = self._apart.traffic, self.mesh.traffic
        if self._thread is None:
            total.seconds += own.seconds
        total.inside, total.across, total.calls = (
            total.inside + own.inside, total.across + own.across, total.calls + own.calls
        )  # fmt: skip
        self._apart.traffic = type(own)()

    def _run(self, changed: Sequence[Changed]) -> None:
        apart = self._apart
        everyone = self._send(apart.lane if apart.nodes > 1 else None, changed)
        if apart.ranks_per_node > 1 and any(copies.cuts[REPLICATED] for copies in self.copies):
            shared = [self._replicated(copies, parts) for copies, parts in zip(self.copies, everyone)]
            self._send(apart.in_node, shared)

    def _send(self, link: Link | None, changed: Sequence[Changed]) -> list[list[Changed]]:
        """To all ranks of a link; writes what came and gives it by table, own rows included."""
        for k, part in enumerate(changed):
            self._write(k, part)
        found = [[part] for part in changed]
        if link is None:
            return found
        counts = [part.numbers.numel() for part in changed]
        others = np.array([place != link.place for place in range(link.size)])
        wires = [part.wire for part in changed]
        # Of rows that differ in width, how many there are does not say how long they are.
        counts += [wire.numel() for wire, copies in zip(wires, self.copies) if isinstance(copies, NarrowCopies)]
        told = link.all_to_all_counts(np.where(others[:, None], np.array(counts, np.int64), 0))
        own = torch.cat([*wires, self._named([part.numbers for part in changed])])
        sizes = [self._size(n) for n in told]
        message = torch.cat([own] * int(others.sum())) if others.any() else own[:0]
        came = link.all_to_all(message, np.where(others, own.numel(), 0), np.array(sizes, np.int64))
        for n, message in zip(told, torch.split(came, sizes)):
            for k, part in self._unpack(message, n):
                self._write(k, part)
                found[k].append(part)
        return found

    def _write(self, k: int, part: Changed) -> None:
        copies, count = self.copies[k], part.numbers.numel()
        if not count:
            return
        width = copies.table.dim
        if isinstance(copies, NarrowCopies):
            values = self._apart.empty((count * width,), torch.empty(0, device=self.device))
            live, run = self._live(copies, part.numbers)
            copies.kernels.unpack(part.wire, live, [run], self.codec, False, values)
        else:
            values = decode(part.wire, [(count, width)], self.codec)
        copies.write(part.numbers, values.view(count, width))

    def _named(self, numbers: Sequence[Tensor]) -> Tensor:
        """The end of a message: which rows it has, in elements of the wire's dtype."""
        blocks = list(zip(numbers, self._number_bytes.tolist()))
        heads: Tensor = self.copies[0].kernels.narrow_ids(blocks, self.device)
        item = DTYPES[self.codec].itemsize
        return torch.nn.functional.pad(heads, (0, -heads.numel() % item)).view(DTYPES[self.codec])

    def _lengths(self, counts: Ints) -> list[int]:
        """Elements of each table's rows in a message with these counts."""
        told = iter(counts[len(self.copies) :])
        return [
            int(next(told))
            if isinstance(copies, NarrowCopies)
            else int(wire_size(int(n), copies.table.dim, self.codec))
            for n, copies in zip(counts, self.copies)
        ]

    def _size(self, counts: Ints) -> int:
        named = int(counts[: len(self.copies)] @ self._number_bytes)
        return sum(self._lengths(counts)) + -(-named // DTYPES[self.codec].itemsize)

    def _unpack(self, message: Tensor, counts: Ints) -> list[tuple[int, Changed]]:
        lengths, rows = self._lengths(counts), counts[: len(self.copies)]
        *wires, heads = torch.split(message, [*lengths, message.numel() - sum(lengths)])
        runs = np.stack([rows, self._number_bytes], 1)
        named = heads.contiguous().view(torch.uint8)[: int(runs.prod(1).sum())]
        numbers = torch.split(self.copies[0].kernels.widen_ids(named, runs), rows.tolist())
        return [(k, Changed(numbers[k], wires[k])) for k, n in enumerate(rows) if n]

    def _live(self, copies: NarrowCopies, numbers: Tensor) -> tuple[Tensor, Run]:
        """Which chunks rows have. All ranks know how wide rows with copies are."""
        live = copies.chunks if copies.masks is None else copies.masks
        return live[numbers], Run(numbers.numel(), copies.table.dim, copies.how.chunk)

    def _packed(self, copies: Copies, numbers: Tensor, rows: Tensor) -> Tensor:
        if not numbers.numel():
            return rows.new_empty(0, dtype=DTYPES[self.codec])
        if not isinstance(copies, NarrowCopies):
            return encode(rows.reshape(-1), [(rows.shape[0], rows.shape[1])], self.codec)
        live, run = self._live(copies, numbers)
        wire: Tensor = copies.kernels.pack(rows.reshape(-1), live, [run], self.codec, False)
        return wire

    def _replicated(self, copies: Copies, parts: Sequence[Changed]) -> Changed:
        """Those that every rank has."""
        numbers, wire = torch.cat([part.numbers for part in parts]), torch.cat([part.wire for part in parts])
        chosen = numbers < copies.cuts[REPLICATED]
        if not isinstance(copies, NarrowCopies):
            size = int(wire_size(1, copies.table.dim, self.codec))
            return Changed(numbers[chosen], wire.view(-1, size)[chosen].view(-1))
        chunks = copies.chunks[numbers].to(torch.int64)
        sizes = torch.where(chunks > 0, chunks * copies.how.chunk + int(wire_size(1, 0, self.codec)), 0)
        return Changed(numbers[chosen], wire[chosen.repeat_interleave(sizes)])

    def close(self) -> None:
        self.wait()
        if self._thread is not None:
            self._thread.shutdown()
