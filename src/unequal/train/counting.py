"""What the ranks' exchange of rows costs, counted over training steps alone and summed over ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from ..embeddings import Embeddings, ShardedEmbeddings
from ..exchange.mesh import Mesh, Traffic

BYTES = ("inside_bytes", "across_bytes", "repeated_ids_bytes")


class ExchangeCount:
    """Counters of a run, which begin anew with each process. One rank alone has none."""

    def __init__(self, embeddings: Embeddings, mesh: Mesh) -> None:
        self._sharded = embeddings if isinstance(embeddings, ShardedEmbeddings) else None
        self._mesh = mesh
        self._own = torch.zeros(len(BYTES) + 2, dtype=torch.float64)
        """of this rank: bytes, seconds in collectives, seconds in all"""
        self._before = self._own.clone()
        """of all ranks, at the last line of the log"""
        self._now = self._own.clone()
        """of all ranks, at the last settlement"""
        self._first_step = self._line_step = self._step = 0
        self._begun = 0.0
        self.skip()

    def skip(self) -> None:
        """What was exchanged since the last settlement was no training step's."""
        self._mark: Traffic = self._mesh.traffic.copy()
        self._repeated = self._sharded.exchanged()["repeated_ids"] if self._sharded is not None else 0.0

    def begin(self, step: int, seconds: float) -> None:
        """Where this process begins to count, after so many seconds of others."""
        self._first_step = self._line_step = self._step = step
        self._begun = seconds

    def settle(self, loss: float, step: int, seconds: float) -> float:
        """All ranks call it after the same step: adds up what they count, and their parts of the loss, which it gives."""
        if self._sharded is None:
            return loss
        spent = self._mesh.traffic.since(self._mark)
        repeated = self._sharded.exchanged()["repeated_ids"] - self._repeated
        self._own[:-1] += torch.tensor([spent.inside, spent.across, repeated, spent.seconds], dtype=torch.float64)
        self._own[-1] = seconds - self._begun
        total = self._mesh.sum(torch.cat([torch.tensor([loss], dtype=torch.float64), self._own]))
        self._now, self._step = total[1:], step
        self.skip()
        return float(total[0])

    def since_last_line(self) -> dict[str, float]:
        """Per step since the last line of the log."""
        values = self._per_step(self._before, self._line_step)
        self._before, self._line_step = self._now, self._step
        return {f"exchange_{name}": value for name, value in values.items()}

    def report(self) -> dict[str, float]:
        """Per step of this process."""
        return self._per_step(torch.zeros_like(self._now), self._first_step)

    def tiers(self) -> dict[str, dict[str, float]]:
        """Of every table with tiers: how well they fit what is read, by the last round; and all rows that have moved."""
        found: dict[str, dict[str, float]] = {}
        for name, copies in (self._sharded.copies if self._sharded is not None else {}).items():
            replicated, both = copies.cuts
            found[name] = {"replicated_rows": replicated, "node_rows": both - replicated}
            reports = self._sharded.tier_reports.get(name, []) if self._sharded is not None else []
            if reports:
                last = reports[-1]
                found[name] |= {
                    "replicated_reads": last.replicated, "node_reads": last.node, "chosen_anew": last.chosen_anew,
                    "age": last.age, "moved_rows": sum(report.moved for report in reports),
                }  # fmt: skip
        return found

    def _per_step(self, before: Tensor, step: int) -> dict[str, float]:
        steps = self._step - step
        if self._sharded is None or steps <= 0:
            return {}
        *sent, waited, elapsed = (self._now - before).tolist()
        values = {f"{name}_per_step": value / steps for name, value in zip(BYTES, sent)}
        return values | {"time_share": waited / elapsed if elapsed > 0 else 0.0}
