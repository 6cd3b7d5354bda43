"""How rows of different width travel: of every row which chunks it has, then the values of these alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..kernels import Backend
from ..plan.placement import Codec
from .mesh import Ints, Link


class Run(NamedTuple):
    """Rows of one table in a message."""

    rows: int
    width: int
    chunk: int

    @property
    def chunks(self) -> int:
        return self.width // self.chunk


Runs = Sequence[Run]


def joined(runs: Runs) -> list[Run]:
    """Neighbours that are alike are taken together."""
    found: list[Run] = []
    for run in runs:
        if found and found[-1][1:] == run[1:]:
            found[-1] = Run(found[-1].rows + run.rows, run.width, run.chunk)
        elif run.rows:
            found.append(run)
    return found


class NarrowWire:
    """Messages of such rows over a link. `masked`: any chunks may live, named by bits; otherwise the first ones, by number."""

    def __init__(self, kernels: Backend, link: Link, masked: bool) -> None:
        self.kernels, self.link, self.masked = kernels, link, masked

    def swap(
        self, rows: Tensor, live: Tensor, sent: Sequence[Runs], received: Sequence[Runs], codec: Codec, norms: bool,
        known: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """`rows`: float32, flat, at full width, by rank; `live`: which chunks each of them has. `sent`, `received`: by rank.
        `norms`: of every row that is not whole the norm of what it lacks goes along, and is found in place of the first missing
        value; sums of such rows are sums of norms, and no less than the norm of the sum. `known`: which chunks the rows that come
        have, where that need not be told. Gives what came, likewise."""
        ours, theirs = ([joined(part) for part in side] for side in (sent, received))
        came = known
        if came is None:
            sizes = self._head_sizes(ours), self._head_sizes(theirs)
            came = self._live(self.link.all_to_all(self._heads(live, ours), *sizes), theirs)
        sizes = self._sizes(live, ours, codec, norms), self._sizes(came, theirs, codec, norms)
        wire = self.kernels.pack(rows, live, _flat(ours), codec, norms)
        landed = self.link.all_to_all(wire, *sizes)
        values = sum(run.rows * run.width for run in _flat(theirs))
        found = self.link.mesh.empty((values,), rows)
        self.kernels.unpack(landed, came, _flat(theirs), codec, norms, found)
        return found, came

    def _sizes(self, live: Tensor, side: Sequence[Runs], codec: Codec, norms: bool) -> Ints:
        """Elements for each rank."""
        of_run = iter(self.kernels.packed_sizes(live, _flat(side), codec, norms))
        return np.array([sum(next(of_run) for _ in part) for part in side], np.int64)

    def _head_bytes(self, run: Run) -> int:
        return -(-run.chunks // 8) if self.masked else 1

    def _head_sizes(self, side: Sequence[Runs]) -> Ints:
        return np.array([sum(run.rows * self._head_bytes(run) for run in part) for part in side], np.int64)

    def _heads(self, live: Tensor, side: Sequence[Runs]) -> Tensor:
        if not self.masked:
            return live.to(torch.uint8)
        cut = torch.split(live, [run.rows for run in _flat(side)]) if live.numel() else ()
        parts = [
            part.view(torch.uint8).view(-1, 8)[:, : self._head_bytes(run)].reshape(-1)
            for part, run in zip(cut, _flat(side))
        ]
        return torch.cat(parts) if parts else live.new_empty(0, dtype=torch.uint8)

    def _live(self, heads: Tensor, side: Sequence[Runs]) -> Tensor:
        if not self.masked:
            return heads
        runs = _flat(side)
        parts = [torch.empty(0, dtype=torch.int64, device=heads.device)]
        for part, run in zip(torch.split(heads, [run.rows * self._head_bytes(run) for run in runs]), runs):
            whole = torch.zeros(run.rows, 8, dtype=torch.uint8, device=heads.device)
            whole[:, : self._head_bytes(run)] = part.view(run.rows, -1)
            parts.append(whole.view(torch.int64)[:, 0])
        return torch.cat(parts)


def _flat(side: Sequence[Runs]) -> list[Run]:
    return [run for part in side for run in part]
