"""Tiers on the test cluster: 2 nodes × 4 ranks of one thread, whose links are shaped to 400 Mbit/s or not at all.

Two sequence features over 2 tables × 100,000 rows, dim 64, 256 samples per rank with 100 to 300 ids each, Zipf 1.05. All jobs
train from equal weights on the same batches: TorchRec row-wise, and our plans from row-wise exchange of repeated ids to tiers
with rows that cross once per node. Plans come from a profile of other batches and from rates that `unequal calibrate` measured
on the same cluster. Bytes are what the links' counters say. Then sequences of real people, whose popularity is what it is.
Needs root (see cluster.py). No number is reported unless all float32 jobs come to the same losses.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .cluster import Cluster, ClusterError
from .distributed_side import Samples, share
from .processes import ROOT, environment, interpreter
from .quality import DATA
from .report import BenchmarkError, spread
from .tiers_data import ORDER, Study, generated, real
from .workloads import Workload

if TYPE_CHECKING:
    from rich.table import Table

    from unequal.plan.plan import Plan
    from unequal.plan.topology import Topology

NODES, RANKS = 2, 4
SPEEDS = (400.0, 0.0)
"""Mbit/s of each node's link; 0: unshaped"""
CHECKED = 200.0
"""a second speed at which the cost model is checked"""
SAMPLES, BATCHES, PROFILED, BLOCKS = 256, 4, 24, 3
"""samples of a rank; batches that are measured, and others that are profiled; passes over the batches that count"""
CALIBRATION = 20.0
TIMEOUT = 900.0
AGREEMENT = 1e-5
"""largest relative difference of two sides' losses in the first pass: the sums are the same, their order is not"""
NEAR = 0.02
"""the same with 16 bits on the wire"""
PEER = "torchrec"


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrangement:
    words: str
    unique: str
    tiers: bool = False
    objective: str = "seconds"
    codecs: tuple[str, str] = ("fp32", "fp32")


ARRANGEMENTS = {
    "none": Arrangement(words="row-wise, repeated ids", unique="none"),
    "rank": Arrangement(words="row-wise, once per rank", unique="rank"),
    "node": Arrangement(words="row-wise, once per node", unique="node"),
    "tiers": Arrangement(words="tiers, repeated ids", unique="none", tiers=True, objective="bytes"),
    "tiers_node": Arrangement(words="tiers, once per node", unique="node", tiers=True),
    "tiers_node_16": Arrangement(
        words="tiers, once per node, 16 bits", unique="node", tiers=True, codecs=("fp16", "bf16")
    ),
}


WAITED_FOR = ("tiers_node",)
"""jobs of which is measured how much of the push a step pays"""


def make_plan(arrangement: Arrangement, study: Study, topology: Topology, profile: Any) -> Plan:
    """With every table dealt out by rows, and tiers where the arrangement has them."""
    import unequal as uq

    features, _ = described(study.measured)
    names = [feature.table.name for feature in features.values()]
    return uq.make_plan(
        uq.Embeddings(features, optimizer=uq.RowWiseAdagrad(), device="meta"),
        topology,
        batch_size=study.measured.size,
        load=profile,
        sharding=dict.fromkeys(names, "tiers" if arrangement.tiers else "row_wise"),
        forward=arrangement.codecs[0],  # type: ignore[arg-type]
        backward=arrangement.codecs[1],  # type: ignore[arg-type]
        unique=arrangement.unique,  # type: ignore[arg-type]
        objective=arrangement.objective,  # type: ignore[arg-type]
    )


def described(workload: Workload) -> tuple[dict[str, Any], list[Any]]:
    """Features and batches as the library has them."""
    import torch

    import unequal as uq

    tables = [uq.Table(f"t{t}", rows=rows, dim=workload.dim) for t, rows in enumerate(workload.rows)]
    features = {name: uq.Feature(table, pooling=None) for name, table in zip(workload.features, tables)}
    batches = [
        uq.Batch(tuple(workload.features), torch.from_numpy(ids), torch.from_numpy(lengths))
        for ids, lengths in zip(workload.ids, workload.lengths)
    ]
    return features, batches


def least_bytes(workload: Workload) -> float:
    """Sent by a node in a step, at the mean, where each node receives each distinct row of other nodes once, and sends its
    gradient once: float32, without ids."""
    import torch

    from unequal.plan.placement import part_of

    world, crossing = NODES * RANKS, 0
    for batch in range(len(workload.ids)):
        for node in range(NODES):
            shares = [share(workload, batch, rank, world) for rank in range(node * RANKS, (node + 1) * RANKS)]
            for t in range(len(workload.rows)):
                parts = []
                for ids, lengths in shares:
                    ends = np.cumsum(lengths.reshape(len(workload.rows), -1).sum(1))
                    parts.append(ids[ends[t] - lengths.reshape(len(workload.rows), -1)[t].sum() : ends[t]])
                distinct = np.unique(np.concatenate(parts))
                homes = part_of(torch.from_numpy(distinct), world, False).numpy() // RANKS
                crossing += int((homes != node).sum())
    return 2 * crossing * workload.dim * 4 / NODES / len(workload.ids)


class Laboratory:
    """A cluster, and the folder from which its ranks read what to do."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder

    def calibrate(self, seconds: float) -> Topology:
        from unequal.plan.topology import Topology

        file = self.folder / f"topology-{self.cluster.mbit:g}.toml"
        arguments = ["-m", "unequal", "calibrate", "--out", str(file), "--seconds", str(seconds), "--device", "cpu"]
        self._run([sys.executable, *arguments], environment("unequal", 1))
        return Topology.load(file)

    def job(self, side: str, arrangement: str, blocks: int) -> list[dict[str, Any]]:
        """What every rank answers."""
        peer = side == PEER
        module = "benchmarks.tiers_torchrec" if peer else "benchmarks.tiers_worker"
        command = [str(interpreter(peer)), "-m", module, str(self.folder), arrangement, str(blocks)]
        outputs = self._run(command, environment(side, 1))
        return [json.loads(output.splitlines()[-1]) for output in outputs]

    def _run(self, command: list[str], env: dict[str, str]) -> list[str]:
        try:
            return self.cluster.run(["env", "-C", str(ROOT), *command], env, TIMEOUT).outputs
        except ClusterError as error:
            raise BenchmarkError(str(error)) from error


def summary(ranks: list[dict[str, Any]], size: int) -> dict[str, Any]:
    """One job in numbers: medians over the blocks."""
    by_block = list(zip(*(rank["blocks"] for rank in ranks)))

    def over(value: Any) -> dict[str, float]:
        return spread(value(blocks) for blocks in by_block)

    def mean_of(blocks: Any, name: str) -> float:
        return statistics.fmean(block["counters"][name] for block in blocks)

    first_of_node = [node * RANKS for node in range(NODES)]
    found: dict[str, Any] = {
        "wire_mb_per_node": over(lambda blocks: statistics.fmean(blocks[r]["sent"] for r in first_of_node) / 1e6),
        "step_seconds": over(lambda blocks: max(block["seconds"] for block in blocks)),
        "exchange_seconds": over(lambda blocks: mean_of(blocks, "collective_seconds")),
        "least_exchange_seconds": over(lambda blocks: min(b["counters"]["collective_seconds"] for b in blocks)),
        "samples_per_second": over(lambda blocks: size / max(block["seconds"] for block in blocks)),
        "peak_mb_per_rank": round(max(rank["peak_bytes"] for rank in ranks) / 1e6, 1),
        "losses": losses(ranks),
    }
    if "across" in by_block[0][0]["counters"]:
        found["counted_mb_per_node"] = over(lambda blocks: mean_of(blocks, "across") * RANKS / 1e6)
        found["dense_mb_per_node"] = round(statistics.fmean(ranks[r]["dense_sent"] for r in first_of_node) / 1e6, 3)
        found["push_seconds"] = over(lambda blocks: mean_of(blocks, "push_seconds"))
        found["counted_inside_mb_per_rank"] = over(lambda blocks: mean_of(blocks, "inside") / 1e6)
    return found


def losses(ranks: list[dict[str, Any]]) -> list[float]:
    """Of the first pass, over all ranks."""
    return [statistics.fmean(parts) for parts in zip(*(rank["warm_up"]["losses"] for rank in ranks))]


def check_losses(jobs: Mapping[str, dict[str, Any]], base: str) -> None:
    """Raises unless all jobs have learnt alike."""
    right = jobs[base]["losses"]
    for name, job in jobs.items():
        allowed = NEAR if name.endswith("_16") else AGREEMENT
        # Written so that a NaN on either side is a disagreement too.
        if not all(abs(a - b) / abs(b) <= allowed for a, b in zip(job["losses"], right, strict=True)):
            raise BenchmarkError(
                f"{name}: from equal weights its losses are {[round(loss, 6) for loss in job['losses']]}, those of {base} "
                f"{[round(loss, 6) for loss in right]}; no number is reported on a wrong result"
            )


def predicted(plan: Plan) -> dict[str, Any]:
    """What the cost model says of a plan, beside what is measured."""
    seconds = {
        name: statistics.fmean(rank.seconds[name] for rank in plan.ranks)
        for name in ("exchange inside nodes", "exchange across nodes", "messages")
    }
    return {
        "mb_per_node": round(sum(rank.bytes_across for rank in plan.ranks) / NODES / 1e6, 3),
        "inside_mb_per_rank": round(statistics.fmean(rank.bytes_inside for rank in plan.ranks) / 1e6, 3),
        "exchange_seconds": round(sum(seconds.values()), 4),
        "parts": {name: round(value, 4) for name, value in seconds.items()},
        "step_seconds": round(plan.step_seconds, 4),
        "rows": {
            name: {"replicated": len(placed.tiers.replicated), "node": len(placed.tiers.node)}
            for name, placed in plan.tables.items()
            if placed.tiers is not None
        },
    }


def compare(
    study: Study,
    folder: Path,
    speed: float,
    names: list[str],
    blocks: int,
    rates: float | Topology,
    peer: bool,
    waited: Sequence[str] = (),
) -> dict[str, Any]:
    """All jobs at one speed of the links. `rates`: of the machines, or for how many seconds to measure them. `waited`: jobs that
    run once more without sending new rows beside the step."""
    from unequal.stats.profile import Profile

    from .tiers_worker import WAITED, plan_file

    size = study.measured.size
    study.measured.save(folder / "workload.npz")
    Samples.draw(study.measured).save(folder / "samples.npz")
    features, batches = described(study.profiled)
    profile = Profile.of(features, batches)
    with Cluster(NODES, RANKS, speed) as cluster:
        laboratory = Laboratory(cluster, folder)
        topology = laboratory.calibrate(rates) if isinstance(rates, float) else rates
        jobs, plans = {}, {}
        if peer:
            jobs[PEER] = summary(laboratory.job(PEER, "row_wise", blocks), size)
        for name in names:
            plan = make_plan(ARRANGEMENTS[name], study, topology, profile)
            plan.save(plan_file(folder, name))
            jobs[name] = summary(laboratory.job("unequal", name, blocks), size)
            plans[name] = predicted(plan)
        waiting = {name: summary(laboratory.job("unequal", name + WAITED, blocks), size) for name in waited}
    check_losses(jobs | waiting, PEER if peer else names[0])
    for name, plan in plans.items():
        jobs[name]["predicted"] = plan
    found = {"topology": described_topology(topology), "jobs": jobs}
    if waited:
        found["push"] = {name: counted_of_push(jobs[name], job) for name, job in waiting.items()}
    return found


def counted_of_push(beside: dict[str, Any], waiting: dict[str, Any]) -> dict[str, float]:
    """How much of the time that new rows take to their copies a step still pays when they are sent beside it."""
    seconds = [job["exchange_seconds"]["median"] for job in (beside, waiting)]
    push = waiting["push_seconds"]["median"]
    return {
        "push_seconds": push,
        "exchange_seconds_beside": seconds[0],
        "exchange_seconds_waiting": seconds[1],
        "counted": round(1 - (seconds[1] - seconds[0]) / push, 4),
    }


def described_topology(topology: Topology) -> dict[str, Any]:
    """The rates that plans were made with, without the single points."""
    mapping: dict[str, Any] = topology.to_mapping()
    return {part: dict(mapping[part]) for part in ("inside", "across", "compute")}


def machines(rates: dict[str, Any]) -> Topology:
    """The cluster with rates that were measured on it."""
    from unequal.plan.topology import Topology, machine_memory

    shape = {"nodes": NODES, "ranks_per_node": RANKS, "memory_per_rank": machine_memory() // RANKS}
    return Topology.from_mapping({**shape, **rates})


def judged(jobs: dict[str, Any], least_mb: float) -> dict[str, Any]:
    """What the numbers say: against repeated ids, against the least that must cross, against TorchRec."""
    base = jobs["none"]["wire_mb_per_node"]["median"]
    found: dict[str, Any] = {}
    for name, job in jobs.items():
        sent = job["wire_mb_per_node"]["median"]
        found[name] = {"fewer_bytes": round(1 - sent / base, 4), "times_least": round(sent / least_mb, 4)}
        if PEER in jobs and name != PEER:
            theirs = jobs[PEER]
            found[name]["fewer_bytes_than_torchrec"] = round(1 - sent / theirs["wire_mb_per_node"]["median"], 4)
            for part in ("exchange", "step"):
                ratio = theirs[f"{part}_seconds"]["median"] / job[f"{part}_seconds"]["median"]
                found[name][f"{part}_times_torchrec"] = round(ratio, 2)
        if "predicted" in job:
            tables = sent - job["dense_mb_per_node"]
            found[name]["bytes_predicted_over_measured"] = round(job["predicted"]["mb_per_node"] / tables, 4)
            exchange = job["predicted"]["exchange_seconds"] / job["exchange_seconds"]["median"]
            found[name]["exchange_predicted_over_measured"] = round(exchange, 4)
    return found


def run(quick: bool = False) -> dict[str, Any]:
    names = ["none", "tiers_node"] if quick else list(ARRANGEMENTS)
    if quick:
        study = generated(rows=4_000, size=16 * NODES * RANKS, mean=20, batches=2, profiled=4)
    else:
        study = generated(rows=100_000, size=SAMPLES * NODES * RANKS, mean=200, batches=BATCHES, profiled=PROFILED)
    blocks, seconds = (1, 2.0) if quick else (BLOCKS, CALIBRATION)
    shaped = f"{SPEEDS[0]:g} Mbit/s"
    least = least_bytes(study.measured) / 1e6
    result: dict[str, Any] = {"nodes": NODES, "ranks": RANKS, "least_mb_per_node": round(least, 3)}
    with tempfile.TemporaryDirectory() as temporary:
        try:
            for speed in SPEEDS[-1:] if quick else SPEEDS:
                waited = WAITED_FOR if speed or quick else ()
                found = compare(study, Path(temporary), speed, names, blocks, seconds, not quick, waited)
                found["judged"] = judged(found["jobs"], least)
                result[f"{speed:g} Mbit/s" if speed else "unshaped"] = found
            if not quick:
                plain = [name for name in names if not name.endswith("_16")]
                found = compare(study, Path(temporary), CHECKED, plain, 1, seconds, False, WAITED_FOR)
                found["judged"] = judged(found["jobs"], least)
                result[f"{CHECKED:g} Mbit/s"] = found
                result["real"] = real_popularity(Path(temporary), machines(result[shaped]["topology"]))
        except ClusterError as error:
            raise BenchmarkError(str(error)) from error
    return result


def real_popularity(folder: Path, topology: Topology) -> dict[str, Any]:
    """Each plan on real sequences, over shaped links."""
    if not DATA.is_dir():
        raise BenchmarkError("real data not found: ../shared/data")
    names = [name for name in ARRANGEMENTS if not name.endswith("_16")]
    found: dict[str, Any] = {}
    for data in ORDER:
        study = real(data, size=SAMPLES * NODES * RANKS, batches=BATCHES)
        least = least_bytes(study.measured) / 1e6
        one = compare(study, folder, SPEEDS[0], names, 1, topology, peer=False)
        ids = statistics.fmean(len(ids) for ids in study.measured.ids)
        found[data] = {
            "rows": study.measured.rows[0],
            "ids_per_sample": round(ids / study.measured.size, 2),
            "least_mb_per_node": round(least, 3),
            "jobs": one["jobs"],
            "judged": judged(one["jobs"], least),
        }
    return found


def table(result: dict[str, Any]) -> Table:
    from rich.table import Table

    view = Table(title=f"{NODES} nodes × {RANKS} ranks: medians; predicted: over measured")
    for name in ("links or data", "job"):
        view.add_column(name, no_wrap=True)
    for name in ("MB", "fewer", "× least", "step s", "exchange s", "TorchRec ×", "predicted MB", "s"):
        view.add_column(name, justify="right")
    parts = [(name, part) for name, part in result.items() if isinstance(part, dict) and "jobs" in part]
    parts += list(result.get("real", {}).items())
    for where, part in parts:
        for name, job in part["jobs"].items():
            said = part["judged"][name]
            planned = "predicted" in job
            view.add_row(
                where.partition("_")[0],
                ARRANGEMENTS[name].words if name in ARRANGEMENTS else "TorchRec row-wise",
                f"{job['wire_mb_per_node']['median']:.2f}",
                f"{said['fewer_bytes']:.1%}",
                f"{said['times_least']:.2f}",
                f"{job['step_seconds']['median']:.3f}",
                f"{job['exchange_seconds']['median']:.3f}",
                f"{said['exchange_times_torchrec']:.1f}" if "exchange_times_torchrec" in said else "",
                f"{said['bytes_predicted_over_measured']:.3f}" if planned else "",
                f"{said['exchange_predicted_over_measured']:.2f}" if planned else "",
            )
        view.add_section()
    return view
