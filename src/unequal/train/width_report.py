"""What a budget came to: how much of the tables is kept, what that saves, and who got it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..embeddings import Embeddings
from ..exchange.mesh import Mesh
from ..storage.narrow import NarrowStorage
from .run import METRICS
from .width_search import SEARCH

WIDTH = "width"
"""what lines of the metrics are called that tell of a round"""
BINS_PER_OCTAVE = 4
LOWEST, HIGHEST = -512, 512
"""bins of utilities, by their logarithm; the lowest also holds those of 0"""


@dataclass(frozen=True, slots=True)
class Held:
    """What the tables of all ranks hold."""

    rows: int
    """live"""
    values: int
    bytes: int
    """of values, optimizer state, and of all that says where they are and how they matter"""
    whole_values: int
    """of the live rows, were they whole"""
    full_rows: int | None
    """None where a table's ids are unbounded: then nobody knows how many rows there could be"""
    full_values: int | None
    full_bytes: int | None
    """of the same tables with all rows whole, spread in the same way, and with what says where rows of unbounded ids are"""

    @classmethod
    def of(cls, embeddings: Embeddings, mesh: Mesh) -> Held | None:
        """None where rows are whole. All ranks call it."""
        if embeddings.width is None:
            return None
        parts = []
        for shard, storage in embeddings.shard_storages():
            assert isinstance(storage, NarrowStorage)
            whole = embeddings.width.rows_of(embeddings.tables[shard.table])
            rows = None if whole is None else shard.rows(whole)
            each = shard.width * storage.table.dtype.itemsize + storage.optimizer.state_bytes_per_row(shard.width)
            full = None if rows is None else rows * each
            if full is not None and storage.table.rows is None:
                full += storage.kernels.HashDirectory.bytes_for(rows)
            key = f"{shard.table}/{shard.first}/{shard.part}"
            held = sum(storage.memory().values())
            parts.append([key, storage.live, storage.values, storage.live * shard.width, rows, shard.width, full, held])
        everyone = [part for own in mesh.gather(parts) for part in own]
        once = list({part[0]: part for part in everyone}.values())  # copies of a table on every rank are one
        known = all(part[4] is not None for part in once)
        return cls(
            rows=sum(part[1] for part in once),
            values=sum(part[2] for part in once),
            whole_values=sum(part[3] for part in once),
            bytes=sum(part[7] for part in everyone),
            full_rows=sum(part[4] for part in once) if known else None,
            full_values=sum(part[4] * part[5] for part in once) if known else None,
            full_bytes=sum(part[6] for part in everyone) if known else None,
        )

    @property
    def kept(self) -> float | None:
        return None if self.full_values is None else self.values / max(1, self.full_values)

    def metrics(self) -> dict[str, float]:
        """What is known of it, by the names that the metrics and the report have."""
        found: dict[str, float | None] = {
            "kept": self.kept,
            "gross_compression": None if self.full_values is None else self.full_values / max(1, self.values),
            "net_compression": None if self.full_bytes is None else self.full_bytes / max(1, self.bytes),
            "bytes": self.bytes,
            "values": self.values,
            "live_rows": self.rows,
            "mean_width": self.values / max(1, self.whole_values),
        }
        return {name: value for name, value in found.items() if value is not None}


class WidthCount:
    """The rounds of a run, as they happen."""

    def __init__(self, embeddings: Embeddings, mesh: Mesh) -> None:
        self._embeddings, self._mesh = embeddings, mesh
        self._seen = 0

    def since_last_line(self) -> dict[str, float]:
        """What the tables hold now. All ranks call it."""
        held = Held.of(self._embeddings, self._mesh)
        return {} if held is None else {f"width_{name}": value for name, value in held.metrics().items()}

    def new_round(self) -> dict[str, Any] | None:
        """What the round of this step did; None where there was none. All ranks call it."""
        if self._embeddings.width is None:
            return None
        reports = self._embeddings.width_reports
        if len(reports) == self._seen:
            return None
        self._seen = len(reports)
        last = reports[-1]
        held = Held.of(self._embeddings, self._mesh)
        assert held is not None
        failed = {"failed": last.failed} if last.failed else {}
        shifted = {"shifted": True} if last.shifted else {}
        return {"pruned": last.pruned, "regained": last.regained, **held.metrics(), **failed, **shifted}


def lines_of(folder: Path, until: int | None = None) -> list[dict[str, Any]]:
    """A run's metrics, up to a step."""
    path = folder / METRICS
    if not path.is_file():
        return []
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [line for line in lines if until is None or line["step"] <= until]


def width_report(embeddings: Embeddings, mesh: Mesh, folder: Path, steps: int) -> dict[str, Any]:
    """Everything that a report says of widths; nothing where rows are whole. All ranks call it."""
    held = Held.of(embeddings, mesh)
    if held is None:
        return {}
    assert embeddings.width is not None
    budget = embeddings.width.common
    rounds = [line for line in lines_of(folder, steps) if line["kind"] == WIDTH] if mesh.rank == 0 else []
    report: dict[str, Any] = {
        "policy": embeddings.width.policy,
        "budget_share": budget.share,
        "budget_bytes": budget.size,
        "table_budgets": sorted(embeddings.width.tables),
        "uniform": _uniform(embeddings, mesh),
        "rates": embeddings.width_rates,
        **held.metrics(),
        "full_bytes": held.full_bytes,
        "full_values": held.full_values,
        "full_rows": held.full_rows,
        "rounds": len(rounds),
        "pruned": sum(line["pruned"] for line in rounds),
        "regained": sum(line["regained"] for line in rounds),
        "failed_rounds": sum("failed" in line for line in rounds),
        "by_popularity": by_popularity(embeddings, mesh),
    }
    if mesh.rank == 0 and (folder / SEARCH).is_file():
        report["search"] = json.loads((folder / SEARCH).read_text(encoding="utf-8"))["tried"]
    shared: dict[str, Any] = mesh.share(report)
    return shared


def _uniform(embeddings: Embeddings, mesh: Mesh) -> list[str]:
    """Tables whose rows are all equally wide, because following them would not pay."""
    own = [s.table.name for _, s in embeddings.shard_storages() if isinstance(s, NarrowStorage) and s.how.uniform]
    return sorted({name for names in mesh.gather(own) for name in names})


def by_popularity(embeddings: Embeddings, mesh: Mesh) -> dict[str, list[list[float]]]:
    """How wide rows are by their place in the order of utility: for every table and for all ("") pairs of [place,
    mean width there as a share of the whole]. Empty where the policy follows nothing."""
    counted: dict[str, list[list[float]]] = {}
    for shard, storage in embeddings.shard_storages():
        if not isinstance(storage, NarrowStorage) or not storage.records.kind:
            continue
        census = storage.census()
        utilities = census.utilities.sum(1).double()
        widths = census.chunks(storage.records).double() / storage.records.chunks
        bins = (utilities.clamp(min=1e-300).log2() * BINS_PER_OCTAVE).floor().clamp(LOWEST, HIGHEST).long() - LOWEST
        rows = torch.zeros(HIGHEST - LOWEST + 1, dtype=torch.float64, device=bins.device)
        wide = torch.zeros_like(rows)
        rows.index_add_(0, bins, torch.ones_like(widths))
        wide.index_add_(0, bins, widths)
        own = [[float(b), float(rows[b]), float(wide[b])] for b in rows.nonzero()[:, 0].tolist()]
        counted.setdefault(shard.table, []).extend(own)
    everyone = mesh.gather(counted)
    names = dict.fromkeys(name for own in everyone for name in own)
    parts = {name: [entry for own in everyone for entry in own.get(name, [])] for name in names}
    if len(parts) > 1:
        parts = {"": [entry for own in parts.values() for entry in own], **parts}
    return {name: _curve(entries) for name, entries in parts.items() if entries}


def _curve(entries: list[list[float]]) -> list[list[float]]:
    """Bins from the most useful on, joined until each is a step on a logarithmic axis."""
    bins: dict[float, list[float]] = {}
    for number, rows, wide in entries:
        total = bins.setdefault(number, [0.0, 0.0])
        total[0], total[1] = total[0] + rows, total[1] + wide
    curve: list[list[float]] = []
    seen = rows = wide = 0.0
    for number in sorted(bins, reverse=True):
        rows, wide = rows + bins[number][0], wide + bins[number][1]
        if seen == 0 or rows >= 0.2 * seen or number == min(bins):
            curve.append([math.sqrt((seen + 1) * (seen + rows)), wide / rows])
            seen, rows, wide = seen + rows, 0.0, 0.0
    return curve
