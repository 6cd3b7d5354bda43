"""Tiers when popularity shifts: 2 nodes × 2 ranks of the test cluster, one sequence feature over 100,000 rows, dim 64, Zipf 1.05.

Which row is how popular is drawn twice. The first third of the steps reads by the first draw, in the second third ever more
samples read by the second one, in the last third all do. Three jobs train on the same batches: with tiers from a profile of the
first draw, with the same tiers and rows that move, and with tiers from a profile of the second. Bytes are what the links'
counters say, in the last third. Needs root (see cluster.py).
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .cluster import Cluster, ClusterError
from .processes import ROOT, environment, interpreter
from .report import BenchmarkError

if TYPE_CHECKING:
    from rich.table import Table

    from unequal.plan.placement import Unique
    from unequal.plan.plan import Plan

Ints = npt.NDArray[np.int64]
NODES, RANKS, ROWS, DIM, SKEW = 2, 2, 100_000, 64, 1.05
SAMPLES, LENGTH, STEPS, PROFILED = 64, 100, 180, 24
EVERY, SAMPLED = 10, 2
TIMEOUT = 600.0
JOBS = {"static": "tiers of the first draw", "moving": "the same, rows move", "fresh": "tiers of the second draw"}
EXCHANGES: tuple[Unique, ...] = ("none", "rank")
"""Where ids cross once per node, copies save no bytes: a plan for bytes has none, and none can age."""


class Popularity:
    """Ids by Zipf's law, by either of two draws of who is popular."""

    def __init__(self, rows: int, seed: int) -> None:
        self.draw = np.random.default_rng(seed)
        weights = np.arange(1, rows + 1) ** -SKEW
        self.ends = np.cumsum(weights / weights.sum())
        self.named = [self.draw.permutation(rows) for _ in range(2)]

    def batch(self, samples: int, length: int, second: float) -> Ints:
        """`second`: the share of samples that read by the second draw."""
        ranks = np.searchsorted(self.ends, self.draw.random((samples, length))).clip(max=len(self.ends) - 1)
        by_second = self.draw.random((samples, 1)) < second
        return np.where(by_second, self.named[1][ranks], self.named[0][ranks]).astype(np.int64)


def share_of_second(step: int, steps: int) -> float:
    return min(1.0, max(0.0, 3 * step / steps - 1))


def features() -> dict[str, Any]:
    import unequal as uq

    return {"history": uq.Feature(uq.Table("item", rows=ROWS, dim=DIM), pooling=None)}


def as_batch(ids: Ints) -> Any:
    import torch

    import unequal as uq

    samples, length = ids.shape
    return uq.Batch(("history",), torch.from_numpy(ids.reshape(-1).copy()), torch.full((samples,), length))


def make_plan(unique: Unique, profiled: list[Ints]) -> Plan:
    import unequal as uq

    described = features()
    return uq.make_plan(
        uq.Embeddings(described, optimizer=uq.RowWiseAdagrad(), device="meta"),
        uq.Topology.make(nodes=NODES, ranks_per_node=RANKS, memory_per_rank=8 << 30),
        batch_size=SAMPLES * NODES * RANKS,
        load=uq.Profile.of(described, [as_batch(ids) for ids in profiled]),
        sharding={"item": "tiers"},
        unique=unique,
        objective="bytes",
    )


def job(cluster: Cluster, folder: Path, name: str, unique: str) -> dict[str, Any]:
    command = [str(interpreter(False)), "-m", "benchmarks.drift_worker", str(folder), name, unique]
    try:
        outputs = cluster.run(["env", "-C", str(ROOT), *command], environment("unequal", 1), TIMEOUT).outputs
    except ClusterError as error:
        raise BenchmarkError(str(error)) from error
    ranks = [json.loads(output.splitlines()[-1]) for output in outputs]
    sent = np.array([ranks[node * RANKS]["sent"] for node in range(NODES)]).mean(0)
    thirds = [float(part.mean()) / 1e6 for part in np.array_split(sent, 3)]
    return {
        "mb_per_node": {"first": thirds[0], "shifting": thirds[1], "second": thirds[2]},
        "reports": ranks[0]["reports"],
        "losses": [statistics.fmean(parts) for parts in zip(*(rank["losses"] for rank in ranks))],
    }


def run(quick: bool = False) -> dict[str, Any]:
    steps = 30 if quick else STEPS
    popularity = Popularity(ROWS, 0)
    whole = SAMPLES * NODES * RANKS
    batches = [popularity.batch(whole, LENGTH, share_of_second(step, steps)) for step in range(steps)]
    profiled = [[popularity.batch(whole, LENGTH, second) for _ in range(PROFILED)] for second in (0.0, 1.0)]
    result: dict[str, Any] = {"nodes": NODES, "ranks": RANKS, "rows": ROWS, "steps": steps, "every": EVERY}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        np.savez(folder / "batches.npz", ids=np.stack(batches))
        try:
            with Cluster(NODES, RANKS, 0.0) as cluster:
                for unique in EXCHANGES[:1] if quick else EXCHANGES:
                    for plan, sample in zip(("first", "second"), profiled):
                        make_plan(unique, sample).save(folder / f"{plan}.plan.json")
                    jobs = {name: job(cluster, folder, name, unique) for name in JOBS}
                    result[unique] = judged(jobs)
        except ClusterError as error:
            raise BenchmarkError(str(error)) from error
    return result


def judged(jobs: dict[str, Any]) -> dict[str, Any]:
    right = jobs["fresh"].pop("losses")
    for name in ("static", "moving"):
        if not np.allclose(jobs[name].pop("losses"), right, rtol=1e-4, atol=1e-6):
            raise BenchmarkError(f"{name}: its losses are not those of the fresh plan; no number is reported")
    fresh = jobs["fresh"]["mb_per_node"]["second"]
    for own in jobs.values():
        own["times_fresh"] = round(own["mb_per_node"]["second"] / fresh, 4)
        own["mb_per_node"] = {part: round(value, 3) for part, value in own["mb_per_node"].items()}
    return jobs


def table(result: dict[str, Any]) -> Table:
    from rich.table import Table

    view = Table(title="MB a node and step on the wire when popularity shifts")
    for column in ("ids unique per", "job"):
        view.add_column(column)
    for column in ("first draw", "shifting", "second draw", "× fresh", "reads served at the end", "rows moved"):
        view.add_column(column, justify="right")
    for unique in EXCHANGES:
        for name, own in result.get(unique, {}).items():
            last = own["reports"][-1] if own["reports"] else None
            view.add_row(
                unique if name == "static" else "", JOBS[name], *(f"{value:.2f}" for value in own["mb_per_node"].values()),
                f"{own['times_fresh']:.3f}", f"{last['replicated'] + last['node']:.0%}" if last else "–",
                f"{sum(report['moved'] for report in own['reports']):,}",
            )  # fmt: skip
        view.add_section()
    return view
