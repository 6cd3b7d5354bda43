"""The cost model on clusters that are not here: published reductions, plans on 16 × 8 GPUs and their growth, production reuse
histograms, and how long the solver takes for 1,000 tables of a billion rows each.

    python -m benchmarks.simulate TABLES      the process in which the solver's time and memory are measured
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .report import ROOT, BenchmarkError

if TYPE_CHECKING:
    from rich.table import Table

    from unequal.plan.workload import TableLoad

LOCALITY = ROOT / "../shared/data/meta_dlrm_locality_stats"
TRACES = ("fbgemm_t856_bs65536", "fbgemm_t856_bs65536_0", "fbgemm_t788_bs131072_0")
DIM = 64
PUBLISHED = (
    # rows, Zipf, samples of a rank, ids of a sample, nodes, ranks; by theory: unique per rank, tiers, tiers + unique per node
    (10_000_000, 1.05, 4096, 500, 16, 8, (78, 85, 87)),
    (100_000_000, 1.05, 1024, 500, 16, 8, (65, 72, 75)),
    (100_000_000, 1.20, 1024, 500, 16, 8, (87, 91, 92)),
    (100_000_000, 0.80, 1024, 500, 16, 8, (16, 23, 28)),
    (100_000, 1.05, 256, 200, 2, 4, (75, 81, 84)),
)
SOLVED = 1000, 10**9
"""tables, rows of each"""
LARGEST = 32768


@dataclass(frozen=True, slots=True)
class Trace:
    """One batch of production reads: how the rows that it reads, and its reads, are spread over numbers of reads per row."""

    name: str
    samples: int
    reads: float
    rows: float
    bounds: list[int]
    """bins (bounds[k], bounds[k + 1]], the last without an end"""
    row_shares: list[float]
    read_shares: list[float]


def parse(text: str) -> list[Trace]:
    """The histograms of a locality file, one per trace."""
    traces = []
    for part in re.split(r"(?m)^(?=\S+\.pt$)", text):
        if not part.strip():
            continue
        sizes = [[float(share) for share in re.findall(r"(?m)^\(\d+(?:, \d+\]|\+): ([\d.]+)$", half)]
                 for half in part.split("Ratio of index distribution")]  # fmt: skip
        lows = [int(low) for low in re.findall(r"(?m)^\((\d+)(?:, \d+\]|\+):", part.split("Ratio of index")[0])]
        numbers = re.search(r"size (\d+)\n.*indices: (\d+)\n.*cols: (\d+)\n", part)
        if numbers is None or len(sizes) != 2 or not len(sizes[0]) == len(sizes[1]) == len(lows):
            raise BenchmarkError(f"not a locality histogram: {part[:60]!r}")
        name = part.split(".pt", 1)[0].strip()
        traces.append(Trace(name, int(numbers[1]), float(numbers[2]), float(numbers[3]), lows, *sizes))
    return traces


def popularity(trace: Trace) -> tuple[Any, Any]:
    """(rows, reads of each in the batch), most read first. Shares have three digits: where a bin's share of the rows has too few
    of them, its rows follow from its share of the reads."""
    rows, reads = [], []
    for low, high, row_share, read_share in zip(
        trace.bounds, [*trace.bounds[1:], 4 * LARGEST], trace.row_shares, trace.read_shares
    ):
        total = trace.reads * read_share
        if not total:
            continue
        count = float(np.sqrt(max(1, low) * high)) if row_share < 0.02 else total / (trace.rows * row_share)
        count = min(max(count, low + 1e-6), high)
        rows.append(total / count)
        reads.append(count)
    return np.array(rows[::-1]), np.array(reads[::-1])


def trace_load(trace: Trace, sizes: tuple[int, ...]) -> TableLoad:
    """All tables of a trace as one: which table a row is of does not matter to where it lives. A part of the batch reads a row
    that the batch reads n times with the chance 1 − (1 − part)ⁿ."""
    from unequal.optim import RowWiseAdagrad
    from unequal.plan.popularity import Popularity
    from unequal.plan.workload import Curve, FeatureLoad, TableLoad
    from unequal.tables import Table

    rows, reads = popularity(trace)
    counts = tuple(float(rows @ (1 - (1 - size / trace.samples) ** reads)) for size in sizes)
    held = int(rows.sum())
    ids = float(rows @ reads) / trace.samples
    return TableLoad(
        table=Table("all", held, dim=DIM), optimizer=RowWiseAdagrad(), features={"all": FeatureLoad(ids, False)},
        distinct=Curve(sizes, counts, float(held)), rows=held, source=trace.name,
        popularity=Popularity(rows, reads / trace.samples),
    )  # fmt: skip


def reductions(load: TableLoad, samples: int, nodes: int, ranks: int) -> dict[str, Any]:
    """Bytes over the network and time of the plans that are compared, in all precisions."""
    from unequal.plan.simulate import Simulation, cluster, fewer

    found: dict[str, Any] = {}
    for objective in ("bytes", "seconds"):
        simulation = Simulation([load], cluster(nodes, ranks), samples=samples, objective=objective)
        plans = simulation.plans()
        found[objective] = [_rounded(asdict(one) | {"fewer": fewer(one, plans[0])}) for one in plans]
    return found


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in values.items()}


def run(quick: bool = False) -> dict[str, Any]:
    from unequal.plan.simulate import Simulation, cluster, fewer, zipf_load

    published = []
    for rows, skew, samples, length, nodes, ranks, theory in PUBLISHED:
        load = zipf_load(rows=rows, skew=skew, dim=DIM, length=length)
        case = {"rows": rows, "zipf": skew, "samples_per_rank": samples, "ids_per_sample": length, "nodes": nodes}
        case |= {"ranks_per_node": ranks, "theory": theory}
        published.append(case | {"plans": reductions(load, samples, nodes, ranks)})
    rows, skew, samples, length, nodes, ranks, _ = PUBLISHED[0]
    simulation = Simulation(
        [zipf_load(rows=rows, skew=skew, dim=DIM, length=length)], cluster(nodes, ranks), samples=samples
    )
    grown = simulation.growth()
    base = {one.nodes: one for one in reversed(grown)}
    growth = [_rounded(asdict(one) | {"fewer": fewer(one, base[one.nodes])}) for one in grown]
    return {
        "published": published,
        "growth": growth,
        "traces": production(),
        "solver": solver(20 if quick else SOLVED[0]),
    }


def production() -> list[dict[str, Any]]:
    """The traces as batches of 16 × 8 ranks."""
    if not LOCALITY.is_dir():
        raise BenchmarkError("real data not found: ../shared/data/meta_dlrm_locality_stats")
    known = {trace.name: trace for file in sorted(LOCALITY.glob("*.txt")) for trace in parse(file.read_text())}
    found = []
    for name in TRACES:
        trace = known[name]
        samples = trace.samples // 128
        rows, reads = popularity(trace)
        found.append({
            "trace": name, "samples": trace.samples, "reads": trace.reads, "rows": trace.rows,
            "rows_of_bins": float(rows.sum()), "reads_of_bins": float(rows @ reads), "dim": DIM,
            "plans": reductions(trace_load(trace, (samples, samples * 8, trace.samples)), samples, 16, 8),
        })  # fmt: skip
    return found


def solver(tables: int) -> dict[str, Any]:
    """Time and peak memory of a process that does nothing else."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.simulate", str(tables)], cwd=ROOT, capture_output=True, text=True, timeout=600
    )  # fmt: skip
    if done.returncode:
        raise BenchmarkError(f"the solver's process failed: {done.stderr.strip()[-500:]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def solve(tables: int) -> dict[str, Any]:
    """Tables of all skews and widths on 16 × 8 ranks, with memory for a part of the copies that would pay."""
    from unequal.plan.allocate import allocate
    from unequal.plan.cost import Pricer, Setting
    from unequal.plan.simulate import cluster, zipf_load

    random = np.random.default_rng(0)
    started = time.perf_counter()
    loads = [
        zipf_load(
            rows=SOLVED[1], skew=float(random.uniform(0.7, 1.3)), dim=int(random.choice([16, 32, 64, 128])),
            length=float(random.integers(1, 100)), name=f"t{k}",
        )
        for k in range(tables)
    ]  # fmt: skip
    curves = time.perf_counter()
    pricer = Pricer(Setting(topology=cluster(16, 8), batch_size=4096 * 128, unique="node"))
    found = allocate(pricer, pricer.numbers(loads), range(tables), tables * 10**6)
    return {
        "tables": tables,
        "rows_each": SOLVED[1],
        "curve_seconds": round(curves - started, 2),
        "solve_seconds": round(time.perf_counter() - curves, 2),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "node_rows": sum(cuts.node_rows for cuts in found.tables),
        "replicated_rows": sum(cuts.replicated.rows for cuts in found.tables),
        "bytes_of_copies": round(found.memory),
        "price": found.price,
    }


def table(result: dict[str, Any]) -> Table:
    from rich.table import Table

    view = Table(title="fewer bytes over the network than row-wise exchange of repeated ids")
    names = ("row-wise, unique per rank", "tiers, repeated ids", "tiers, unique per node")
    for name in ("table", *names, "16 bit", "8 bit"):
        view.add_column(name, justify="left" if name == "table" else "right")
    for case in result["published"] + result["traces"]:
        plans = {(one["plan"], one["codec"]): one["fewer"] for one in case["plans"]["bytes"]}
        title = (
            case.get("trace")
            or f"{case['rows']:,} rows, Zipf {case['zipf']}, {case['nodes']} × {case['ranks_per_node']}"
        )
        cells = [plans[name, "fp32"] for name in names] + [plans[names[-1], codec] for codec in ("16 bit", "8 bit")]
        view.add_row(title, *(f"{value:.1%}" for value in cells))
    solved = result["solver"]
    view.caption = (
        f"{solved['tables']:,} tables of {solved['rows_each']:,} rows: {solved['solve_seconds']} s and "
        f"{solved['curve_seconds']} s for their curves, {solved['peak_bytes'] / 1e9:.2f} GB"
    )
    return view


if __name__ == "__main__":
    print(json.dumps(solve(int(sys.argv[1]))))
