"""Narrow rows on the test cluster of the tiers benchmark: what a width budget of 25% on top of tiers leaves of the bytes between
nodes.

2 nodes × 4 ranks of one thread, links of 400 Mbit/s; 2 sequence features over 2 tables × 100,000 rows, dim 64, 256 samples per
rank with 100 to 300 ids each, Zipf 1.05. One plan with tiers serves all jobs of a precision: whole rows, and narrow ones whose
gradients travel whole or as narrow as the rows. It is made from a profile of other batches and from the rates that the tiers
benchmark has measured on the same cluster and left in the results: so bytes are the same every time. All train 16 steps with
rounds in them before 12 are measured in which none falls. Bytes are what the links' counters say. No number is reported unless
every copy equals its owner's row, the budget is kept and spent, and losses are near those of whole rows. Needs root (see
cluster.py). Takes six minutes of CPU, nearly half of it in the starts of processes.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cluster import Cluster, ClusterError
from .distributed_side import Samples
from .processes import ROOT, environment, interpreter
from .report import BenchmarkError, spread
from .tiers import NODES, RANKS, SAMPLES, Arrangement, Laboratory, described, machines, make_plan
from .tiers_data import generated
from .width_exchange_worker import KEPT

if TYPE_CHECKING:
    from rich.table import Table

    from unequal.plan.topology import Topology

SPEED = 400.0
BATCHES, PROFILED, BLOCKS = 4, 24, 3
RATES = ROOT / "benchmarks" / "results" / "cluster.json"
"""where the tiers benchmark leaves the rates of the cluster"""
NEAR = 0.1
"""largest relative difference of the last measured losses from those of whole rows"""
SPENT = 0.95
"""least share of the budget that live values must come to"""
PLANS = {
    "tiers": Arrangement(words="32 bits", unique="node", tiers=True),
    "tiers_16": Arrangement(words="16 bits", unique="node", tiers=True, codecs=("fp16", "bf16")),
}
GRADIENTS = {"": "whole rows", "whole": "25% kept, whole gradients", "norms": "25% kept, narrow gradients"}


class NarrowLaboratory(Laboratory):
    def job(self, side: str, arrangement: str, blocks: int) -> list[dict[str, Any]]:
        command = [str(interpreter(False)), "-m", "benchmarks.width_exchange_worker"]
        outputs = self._run([*command, str(self.folder), arrangement, str(blocks)], environment(side, 1))
        return [json.loads(output.splitlines()[-1]) for output in outputs]


def summary(ranks: list[dict[str, Any]], values: int) -> dict[str, Any]:
    """One job in numbers: medians over the blocks. `values`: of whole tables."""
    by_block = list(zip(*(rank["blocks"] for rank in ranks)))
    first_of_node = [node * RANKS for node in range(NODES)]

    def mean_of(name: str) -> dict[str, float]:
        return spread(statistics.fmean(block["counters"][name] for block in blocks) for blocks in by_block)

    found: dict[str, Any] = {
        "wire_mb_per_node": spread(
            statistics.fmean(blocks[r]["sent"] for r in first_of_node) / 1e6 for blocks in by_block
        ),
        "dense_mb_per_node": round(statistics.fmean(ranks[r]["dense_sent"] for r in first_of_node) / 1e6, 3),
        "exchange_seconds": mean_of("collective_seconds"),
        "step_seconds": spread(max(block["seconds"] for block in blocks) for blocks in by_block),
        "cpu_seconds_per_rank": mean_of("cpu_seconds"),
        "loss": round(statistics.fmean(loss for rank in ranks for loss in rank["blocks"][-1]["losses"]), 5),
    }
    if ranks[0]["rounds"]:
        found["kept"] = round(ranks[0]["rounds"][-1][2] / values, 4)
    return found


def check(jobs: dict[str, Any]) -> None:
    """Raises where narrow rows are not what they should be."""
    for name, job in jobs.items():
        plan, _, gradients = name.partition("+")
        if not gradients:
            continue
        if not SPENT * KEPT <= job["kept"] <= KEPT:
            raise BenchmarkError(
                f"{name}: keeps {job['kept']:.2%} of all values, expected {KEPT:.0%}; nothing is reported"
            )
        # Written so that a NaN is a disagreement too.
        if not abs(job["loss"] - jobs[plan]["loss"]) <= NEAR * jobs[plan]["loss"]:
            raise BenchmarkError(
                f"{name}: its loss is {job['loss']}, that of whole rows {jobs[plan]['loss']}; nothing is reported"
            )


def judged(jobs: dict[str, Any]) -> dict[str, Any]:
    """Narrow rows against whole ones of the same precision: how many times fewer bytes, how many times shorter."""
    found = {}
    for name, job in jobs.items():
        plan, _, gradients = name.partition("+")
        if gradients:
            pairs = {
                "bytes": "wire_mb_per_node",
                "exchange": "exchange_seconds",
                "step": "step_seconds",
                "cpu": "cpu_seconds_per_rank",
            }
            found[name] = {
                f"{part}_times": round(jobs[plan][figure]["median"] / job[figure]["median"], 3)
                for part, figure in pairs.items()
            }
    return found


def assumed() -> Topology:
    """The cluster as its links are shaped, not measured."""
    from unequal.plan.topology import Topology, machine_memory

    rates = {"bytes_per_second": SPEED * 1e6 / 8 / RANKS, "seconds_per_message": 2e-3}
    shape = {"nodes": NODES, "ranks_per_node": RANKS, "memory_per_rank": machine_memory() // RANKS}
    return Topology.from_mapping({**shape, "across": rates})


def measured() -> Topology:
    """The cluster with the rates that the tiers benchmark has measured on it."""
    try:
        rates = json.loads(RATES.read_text())["tiers"]["results"][f"{SPEED:g} Mbit/s"]["topology"]
    except (OSError, KeyError) as error:
        raise BenchmarkError(
            f"the rates of the cluster: expected those of the tiers benchmark in {RATES.name}, found none ({error!r}); "
            "measure them with `python -m benchmarks --only tiers`"
        ) from error
    return machines(rates)


def run(quick: bool = False) -> dict[str, Any]:
    from unequal.stats.profile import Profile

    from .tiers_worker import plan_file

    if quick:
        study = generated(rows=500, size=32 * NODES * RANKS, mean=40, batches=2, profiled=4)
    else:
        study = generated(rows=100_000, size=SAMPLES * NODES * RANKS, mean=200, batches=BATCHES, profiled=PROFILED)
    plans = {"tiers": PLANS["tiers"]} if quick else PLANS
    modes = ["", "norms"] if quick else list(GRADIENTS)
    blocks = 1 if quick else BLOCKS
    jobs: dict[str, Any] = {}
    values = sum(study.measured.rows) * study.measured.dim
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        study.measured.save(folder / "workload.npz")
        Samples.draw(study.measured).save(folder / "samples.npz")
        profile = Profile.of(*described(study.profiled))
        try:
            with Cluster(NODES, RANKS, SPEED) as cluster:
                laboratory = NarrowLaboratory(cluster, folder)
                topology = assumed() if quick else measured()
                for plan, arrangement in plans.items():
                    make_plan(arrangement, study, topology, profile).save(plan_file(folder, plan))
                    for mode in modes:
                        name = f"{plan}+{mode}" if mode else plan
                        jobs[name] = summary(laboratory.job("unequal", name, blocks), values)
        except ClusterError as error:
            raise BenchmarkError(str(error)) from error
    check(jobs)
    return {"nodes": NODES, "ranks": RANKS, "mbit": SPEED, "kept": KEPT, "jobs": jobs, "judged": judged(jobs)}


def table(result: dict[str, Any]) -> Table:
    from rich.table import Table

    view = Table(title=f"{NODES} nodes × {RANKS} ranks, {SPEED:g} Mbit/s, tiers: medians; × whole rows")
    for name in ("wire", "rows"):
        view.add_column(name, no_wrap=True)
    for name in ("MB", "× fewer", "exchange s", "×", "step s", "×", "CPU s", "×"):
        view.add_column(name, justify="right")
    for name, job in result["jobs"].items():
        plan, _, gradients = name.partition("+")
        said = result["judged"].get(name, {})
        row = [PLANS[plan].words, GRADIENTS[gradients]]
        for figure, part in (
            ("wire_mb_per_node", "bytes"), ("exchange_seconds", "exchange"), ("step_seconds", "step"),
            ("cpu_seconds_per_rank", "cpu"),
        ):  # fmt: skip
            ratio = said.get(f"{part}_times")
            row += [f"{job[figure]['median']:.3f}", "" if ratio is None else f"{ratio:.2f}"]
        view.add_row(*row)
    return view
