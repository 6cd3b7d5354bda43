"""Popularity changes: what is read is counted during training, a plan's age is told, and rows move between tiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import RecipeError
from ..exchange.mesh import Mesh
from ..plan.moves import Moves, choose_moves
from ..stats.reads import Reads
from ..storage.copies import Copies

Ints = npt.NDArray[np.int64]
FADE = 0.25
"""what counts before a round still weigh after it"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift:
    """What is done where the rows that are read most are no longer those the plan knew."""

    mode: Literal["off", "report", "on"] = "report"
    """off: nothing is counted; report: how well the tiers fit what is read is told; on: rows also move between them"""
    every: int = 500
    """steps between rounds"""
    most: int = 8192
    """rows of a table that may move in a round"""
    sample: int = 4
    """every so manieth step is counted"""
    memory: int = 4 << 20
    """bytes for the counts of each table on each rank"""

    def __post_init__(self) -> None:
        if self.mode not in ("off", "report", "on"):
            raise RecipeError("drift.mode", "one of off, report, on", self.mode)
        for name in ("every", "most", "sample"):
            if getattr(self, name) < 1:
                raise RecipeError(f"drift.{name}", "1 or more", getattr(self, name))


@dataclass(frozen=True, kw_only=True, slots=True)
class TierReport:
    """How well one table's tiers fit what was read since the round before, over all ranks."""

    step: int
    reads: int
    """that were counted"""
    replicated: float
    """share of them that was served by rows that every rank has"""
    node: float
    """and by rows that every node has"""
    chosen_anew: float
    """share that both could serve with the rows that are surely read more often than some of theirs"""
    moved: int
    """rows that changed their tier after that"""

    @property
    def age(self) -> float:
        """Share of the reads that tiers chosen anew would serve and these do not."""
        return max(0.0, self.chosen_anew - self.replicated - self.node)


class Watch:
    """Counts reads on every rank; in a round all ranks bring their counts together and decide alike."""

    def __init__(self, drift: Drift, copies: Mapping[str, Copies], mesh: Mesh) -> None:
        self.drift, self.copies, self.mesh = drift, copies, mesh
        self.reads = {name: Reads(drift.memory) for name in copies}
        self.reports: dict[str, list[TierReport]] = {name: [] for name in copies}

    def note(self, step: int, name: str, ids: Tensor) -> None:
        """All reads of a table in a step, repeated ones included."""
        if step % self.drift.sample == 0 and name in self.reads:
            self.reads[name].add(ids)

    def due(self, step: int) -> bool:
        return step > 0 and step % self.drift.every == 0

    def round(self, step: int) -> dict[str, Moves]:
        """Reports on every table, and what should move; nothing where that is not asked for. All ranks call it."""
        found = {}
        for name, copies in self.copies.items():
            ids = copies.ids.cpu().numpy()
            reads = self.reads[name]
            counts, total, others, other_counts = self._together(ids, reads)
            # Not the best of the counts, which would be their chance too: only rows that are surely read more often.
            best = choose_moves(ids, counts, copies.cuts, others, other_counts, len(ids))
            moves = Moves(best.numbers[:0], best.ids[:0])
            if self.drift.mode == "on":
                moves = choose_moves(ids, counts, copies.cuts, others, other_counts, self.drift.most)
            known, reads_of = np.concatenate([ids, others]), np.concatenate([counts, other_counts])
            order = np.argsort(known)
            now = reads_of[order[np.searchsorted(known, best.ids, sorter=order)]]
            gained = int(now.sum() - counts[best.numbers].sum())
            self.reports[name].append(self._report(step, copies.cuts, counts, total, gained, moves.count))
            found[name] = moves
            reads.decay(FADE)
        return found

    @staticmethod
    def _report(
        step: int, cuts: tuple[int, int], counts: Ints, total: int, gained: int, moved: int
    ) -> TierReport:  # fmt: skip
        everything = max(1, total)
        return TierReport(
            step=step, reads=total, replicated=float(counts[: cuts[0]].sum()) / everything,
            node=float(counts[cuts[0] :].sum()) / everything, chosen_anew=float(counts.sum() + gained) / everything, moved=moved,
        )  # fmt: skip

    def _together(self, ids: Ints, reads: Reads) -> tuple[Ints, int, Ints, Ints]:
        """Over all ranks: how often each row with copies was read, all reads, and popular ids without copies with theirs."""
        named, counted = reads.ranked()
        order = np.argsort(named)
        at = np.searchsorted(named, ids, sorter=order).clip(max=max(0, len(named) - 1))
        own = np.zeros(len(ids) + 1, np.int64)
        if len(named):
            hit = named[order[at]] == ids
            own[:-1][hit] = counted[order[at]][hit]
        own[-1] = int(reads.total)
        summed = self.mesh.sum_exactly(torch.from_numpy(own)).numpy()
        rest = ~np.isin(named, ids)
        # What many ranks read is among the first on most of them; as many again, for what is not.
        best = slice(0, 2 * self.drift.most)
        mine = np.stack([named[rest][best], counted[rest][best].astype(np.int64)], 1)
        gathered = self.mesh.gather_tensors(self.mesh.to_link(torch.from_numpy(mine)))
        everyone = torch.cat([part.cpu() for part in gathered]).numpy()
        others, inverse = np.unique(everyone[:, 0], return_inverse=True)
        counts = np.zeros(len(others), np.int64)
        np.add.at(counts, inverse, everyone[:, 1])
        return summed[:-1], int(summed[-1]), others, counts
