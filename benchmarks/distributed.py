"""Whole training steps on 2 ranks × 1 thread over gloo, beside TorchRec's DistributedModelParallel.

P is a DLRM over workload P's tables, S a mean over workload S's sequences with an MLP on top; both sides read the same batches,
which lie in memory. A rank is a process of its own, ours in our environment, TorchRec's in the peers'. Jobs take turns, block by
block, in sittings of fresh processes; ratios are taken round by round. Nothing is timed unless both sides, from the same weights,
come to the same losses on a small version of the workload.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import tempfile
import time
import uuid
from contextlib import ExitStack
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import TYPE_CHECKING, Any

from .distributed_side import Samples
from .processes import ENVIRONMENTS, Worker, run_ours, status
from .report import BenchmarkError, cell, spread
from .workloads import FULL, Workload, small

if TYPE_CHECKING:
    from rich.table import Table

WORLD = 2
STEPS = 8
SITTINGS = 3
ROUNDS = 12
PAUSE = 0.02
"""Seconds between two blocks: what still spins for work in the last job has gone to sleep by then."""
START_TIMEOUT, BLOCK_TIMEOUT = 300.0, 180.0
AGREEMENT = 1e-5
"""Largest relative difference of two sides' losses: the sums are the same, their order is not."""
GATE_STEPS = 12
MODULES = {"unequal": "benchmarks.distributed_worker", "torchrec": "benchmarks.distributed_torchrec"}
BESIDE = {
    "P": (("unequal", "plan"), ("torchrec", "table_wise"), ("torchrec", "column_wise")),
    "S": (("unequal", "plan"), ("torchrec", "row_wise")),
}
BY_HAND = {
    "P": ("table_wise", "table_wise+rows", "row_wise", "row_wise+rows", "column_wise", "data_parallel"),
    "S": ("table_wise", "row_wise", "column_wise"),
}
"""The kinds of sharding that are timed for information; `+rows`: nothing is pooled by its owner."""

ROW_WORK = ("read", "pool", "sum", "update")
"""Phases of the sharded module that a lone process has, too: reading and pooling rows, summing and applying their gradients. What
it spends beside them and beside the collectives is exchange and index work."""

Answers = list[dict[str, Any]]
"""of the ranks of a job, for one block"""


class Job:
    """The ranks of a training. If one of them fails, or does not answer in time, all are ended."""

    def __init__(self, side: str, arrangement: str, folder: Path, *, equal: bool = False) -> None:
        self.name = f"{side} {arrangement}"
        meeting, start = f"meeting-{uuid.uuid4().hex}", "equal" if equal else "fresh"
        self.ranks = [
            Worker(
                side,
                MODULES[side],
                [str(folder), meeting, arrangement, str(rank), str(WORLD), start],
                peer=side != "unequal",
                threads=1,
            )
            for rank in range(WORLD)
        ]
        try:
            self.hello = self._read(START_TIMEOUT)
        except BaseException:
            self.kill()
            raise

    def _read(self, timeout: float) -> Answers:
        answers: dict[int, dict[str, Any]] = {}
        end = time.monotonic() + timeout
        with DefaultSelector() as selector:
            for rank, worker in enumerate(self.ranks):
                assert worker.process.stdout is not None
                selector.register(worker.process.stdout, EVENT_READ, rank)
            while len(answers) < WORLD:
                ready = selector.select(max(0.0, end - time.monotonic()))
                if not ready:
                    raise BenchmarkError(f"{self.name}: no answer within {timeout:.0f} s")
                for key, _ in ready:
                    answers[key.data] = self.ranks[key.data].read()
                    selector.unregister(key.fileobj)
        return [answers[rank] for rank in range(WORLD)]

    def block(self, steps: int) -> Answers:
        try:
            for worker in self.ranks:
                assert worker.process.stdin is not None
                worker.process.stdin.write(json.dumps({"do": "block", "steps": steps}) + "\n")
                worker.process.stdin.flush()
            return self._read(BLOCK_TIMEOUT)
        except BaseException:
            self.kill()
            raise

    def peaks(self) -> list[int]:
        """The most memory each rank has had resident so far, in bytes."""
        return [status(worker.process.pid, "VmHWM") for worker in self.ranks]

    def kill(self) -> None:
        for worker in self.ranks:
            worker.process.kill()
        self.close()

    def close(self) -> None:
        for worker in self.ranks:
            assert worker.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                worker.process.stdin.close()
        for worker in self.ranks:
            worker.close()


def prepare(workload: Workload, folder: Path) -> Path:
    folder.mkdir()
    workload.save(folder / "workload.npz")
    Samples.draw(workload).save(folder / "samples.npz")
    return folder


def losses(blocks: list[Answers]) -> list[float]:
    """Of the whole batch, step by step: shares are of one size."""
    return [statistics.fmean(parts) for answers in blocks for parts in zip(*(rank["losses"] for rank in answers))]


def gate(name: str, folder: Path) -> dict[str, float]:
    """Some steps of every arrangement of ours and of the peer from equal weights; gives the largest differences."""
    peer = next(job for job in BESIDE[name] if job[0] == "torchrec")
    found = {}
    for side, arrangement in (peer, ("unequal", "plan"), *(("unequal", kind) for kind in BY_HAND[name])):
        with ExitStack() as stack:
            job = Job(side, arrangement, folder, equal=True)
            stack.callback(job.close)
            found[side, arrangement] = losses([job.block(GATE_STEPS)])
    theirs = found.pop(peer)
    return {
        arrangement: check_losses(f"{name} {arrangement}", ours, theirs) for (_, arrangement), ours in found.items()
    }


def check_losses(name: str, ours: list[float], theirs: list[float]) -> float:
    """Raises unless the losses agree, step by step; gives the largest relative difference."""
    differences = [abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)]
    # Written so that a NaN on either side is a disagreement too.
    if not all(difference <= AGREEMENT for difference in differences):
        raise BenchmarkError(
            f"{name}: from equal weights our losses are {[round(x, 5) for x in ours]}, TorchRec's "
            f"{[round(x, 5) for x in theirs]}; no time is reported on a wrong result"
        )
    return max(differences)


def check_learning(name: str, found: list[float], batches: int) -> tuple[float, float]:
    """Raises unless all losses are finite and those of the last pass over the batches below those of the first."""
    first, last = statistics.fmean(found[:batches]), statistics.fmean(found[-batches:])
    if not all(math.isfinite(loss) for loss in found) or not last < first:
        raise BenchmarkError(
            f"{name}: the loss went from {first:.5f} to {last:.5f}; no time is reported on such a model"
        )
    return first, last


def sitting(
    order: list[tuple[str, str]], folder: Path, rounds: int, batches: int
) -> dict[tuple[str, str], dict[str, Any]]:
    """Fresh jobs, started in this order, that take turns; the first block of each warms up and does not count."""
    with ExitStack() as stack:
        jobs: dict[tuple[str, str], Job] = {}
        blocks: dict[tuple[str, str], list[Answers]] = {}
        for key in order:
            jobs[key] = Job(*key, folder)
            stack.callback(jobs[key].close)
            blocks[key] = [jobs[key].block(STEPS)]
        for turn in range(rounds):
            for key in order[turn % len(order) :] + order[: turn % len(order)]:
                time.sleep(PAUSE)
                blocks[key].append(jobs[key].block(STEPS))
        result = {}
        for key, job in jobs.items():
            falling = check_learning(job.name, losses(blocks[key]), batches)
            result[key] = {"hello": job.hello, "blocks": blocks[key][1:], "peaks": job.peaks(), "losses": falling}
        return result


def summary(sittings: list[dict[str, Any]], size: int) -> dict[str, Any]:
    """Figures of one job over its sittings. A step is as long as the slowest rank's; bytes and memory are those of each rank."""
    blocks: list[Answers] = [block for part in sittings for block in part["blocks"]]
    hello = [answer for part in sittings for answer in part["hello"]]
    result: dict[str, Any] = {
        "samples_per_second": spread(rates(sittings, size)),
        "step_ms": spread((slowest(block) for block in blocks), 1000),
    }
    for part in ("forward", "backward"):
        medians = [max(statistics.median(rank[part]) for rank in block) for block in blocks]
        result[f"{part}_ms"] = spread(medians, 1000)
    result["sent_bytes_per_step"] = [
        round(statistics.fmean(block[rank]["sent"] / STEPS for block in blocks)) for rank in range(WORLD)
    ]
    result["peak_memory_bytes"] = [max(part["peaks"][rank] for part in sittings) for rank in range(WORLD)]
    result["import_seconds"] = spread(answer["import_seconds"] for answer in hello)
    result["build_seconds"] = spread(answer["build_seconds"] for answer in hello)
    result["losses"] = [round(loss, 5) for loss in sittings[0]["losses"]]
    known = ("import_seconds", "build_seconds", "of_rank")
    result |= {name: value for name, value in sittings[0]["hello"][0].items() if name not in known}
    if blocks[0][0]["counters"]:
        result |= inside(blocks)
    ranks = [answer.get("of_rank", {}) for answer in sittings[0]["hello"]]
    if all("predicted_memory" in rank for rank in ranks):
        result["memory"] = [against_plan(rank, peak) for rank, peak in zip(ranks, result["peak_memory_bytes"])]
    return result


def against_plan(rank: dict[str, Any], peak: int) -> dict[str, Any]:
    """What the plan said a rank would take, and what it took, without the batches that lie ready: a reader holds few of them."""
    predicted, measured = sum(rank["predicted_memory"].values()), peak - rank["ready_batches_bytes"]
    return rank | {
        "predicted_bytes": predicted,
        "measured_bytes": measured,
        "predicted_over_measured": predicted / measured,
    }


def slowest(block: Answers) -> float:
    """Seconds of a step."""
    return max(rank["seconds"] for rank in block) / STEPS


def rates(sittings: list[dict[str, Any]], size: int) -> list[float]:
    return [size / slowest(block) for part in sittings for block in part["blocks"]]


def inside(blocks: list[Answers]) -> dict[str, Any]:
    """Where our time goes, as shares of the step: collectives, and the phases around them."""
    ranks = [rank for block in blocks for rank in block]

    def share(name: str) -> dict[str, float]:
        return spread(rank["counters"][name] / rank["seconds"] for rank in ranks)

    phases = [name for name in ranks[0]["counters"] if name.startswith("phase ")]

    def beside_rows(rank: dict[str, Any]) -> float:
        counters = rank["counters"]
        rows = sum(counters.get(f"phase {name}", 0.0) for name in ROW_WORK)
        return float(counters["embedding_seconds"] - counters["collective_seconds"] - rows)

    return {
        "exchanged_bytes_per_step": [
            round(statistics.fmean(block[rank]["counters"]["exchanged"] / STEPS for block in blocks))
            for rank in range(WORLD)
        ],
        "collectives_per_step": statistics.fmean(rank["counters"]["collectives"] / STEPS for rank in ranks),
        "embedding_share": share("embedding_seconds"),
        "collective_share": share("collective_seconds"),
        "exchange_and_index_share": spread(beside_rows(rank) / rank["seconds"] for rank in ranks),
        "phase_shares": {name.removeprefix("phase "): share(name) for name in phases},
    }


def ratios(name: str, sittings: list[dict[tuple[str, str], dict[str, Any]]]) -> dict[str, Any]:
    """How many times as many samples a second as each arrangement of the peer, and as the faster one, round by round."""
    ours, *theirs = BESIDE[name]

    def of(job: tuple[str, str]) -> list[float]:
        return rates([part[job] for part in sittings], 1)

    best = max(theirs, key=lambda job: statistics.median(of(job)))
    found = {f"times_{side}_{kind}": spread(a / b for a, b in zip(of(ours), of((side, kind)))) for side, kind in theirs}
    return found | {"best_peer": " ".join(best), "times_best_peer": found["times_" + "_".join(best)]}


def measure(name: str, workload: Workload, folder: Path, quick: bool) -> dict[str, Any]:
    jobs, count, batches = list(BESIDE[name]), 1 if quick else SITTINGS, len(workload.ids)
    rounds = 2 if quick else ROUNDS // SITTINGS
    sittings = [
        sitting(jobs[turn % len(jobs) :] + jobs[: turn % len(jobs)], folder, rounds, batches) for turn in range(count)
    ]
    beside = {" ".join(job): summary([part[job] for part in sittings], workload.size) for job in jobs}
    by_hand = {}
    for kind in BY_HAND[name]:
        alone = ("unequal", kind)
        by_hand[kind] = summary([sitting([alone], folder, 1 if quick else 4, batches)[alone]], workload.size)
    return ratios(name, sittings) | {"sides": beside, "by_hand": by_hand}


def first_step(folder: Path, quick: bool) -> dict[str, Any]:
    """Seconds from the command to the end of the first training step of the default recipe on 2 ranks, the data being there; and
    what its plan said a rank would take at most, over what one took."""
    found, memory = [], []
    for number in range(1 if quick else 6):
        report = folder / f"first-step-{number}.json"
        settings = ["run.steps=3", f'run.folder="{folder / f"first-step-{number}"}"']
        chosen = [part for value in settings for part in ("--set", value)]
        run_ours(
            "unequal", 1, "-m", "unequal", "train", "default", "--ranks", str(WORLD), *chosen, "--json", str(report)
        )
        told, planned = (json.loads(file.read_text()) for file in (report, folder / report.stem / "plan.json"))
        found.append(told["seconds_to_first_step"])
        predicted = max(sum(rank["memory"].values()) for rank in planned["ranks"])
        memory.append(predicted / told["peak_memory_bytes"])
    return {"seconds": spread(found if quick else found[1:]), "memory_predicted_over_measured": spread(memory)}


def run(quick: bool = False) -> dict[str, Any]:
    cases = []
    with tempfile.TemporaryDirectory() as temporary:
        for name in FULL:
            tiny = small(name)
            differences = gate(name, prepare(tiny, Path(temporary) / f"gate-{name}"))
            workload = tiny if quick else FULL[name]()
            folder = prepare(workload, Path(temporary) / name)
            case = {"workload": name, "batch": workload.size, "largest_relative_difference_to_torchrec": differences}
            cases.append(case | measure(name, workload, folder, quick))
            (folder / "workload.npz").unlink()
        start = first_step(Path(temporary), quick)
    return {
        "ranks": WORLD,
        "threads_per_rank": 1,
        "steps_per_block": STEPS,
        "environments": {side: ENVIRONMENTS[side] for side in MODULES},
        "cases": cases,
        "first_step": start,
    }


def table(result: dict[str, Any]) -> Table:
    from rich.table import Table

    view = Table(title="training steps on 2 ranks: medians (quartiles)")
    headings = (
        "",
        "job",
        "samples/s",
        "step ms",
        "forward",
        "backward",
        "MB sent",
        "peak GiB",
        "collectives",
        "index",
        "×",
    )
    for heading in headings:
        view.add_column(heading, justify="left" if heading in ("", "job") else "right")

    def share(values: dict[str, Any], name: str) -> str:
        return f"{values[name]['median']:.0%}" if name in values else ""

    for case in result["cases"]:
        by_hand = {f"unequal {kind}": values for kind, values in case["by_hand"].items()}
        for name, values in (case["sides"] | by_hand).items():
            view.add_row(
                case["workload"],
                name,
                cell(values["samples_per_second"], 0),
                cell(values["step_ms"]),
                *(f"{values[f'{part}_ms']['median']:.1f}" for part in ("forward", "backward")),
                f"{max(values['sent_bytes_per_step']) / 1e6:.1f}",
                f"{max(values['peak_memory_bytes']) / 2**30:.2f}",
                share(values, "collective_share"),
                share(values, "exchange_and_index_share"),
                cell(case["times_best_peer"], 2) if name == "unequal plan" else "",
            )
        view.add_section()
    memory = [
        f"{case['workload']} {rank['predicted_over_measured']:.2f}"
        for case in result["cases"]
        for rank in case["sides"]["unequal plan"]["memory"]
    ]
    view.caption = (
        f"from command to first step: {cell(result['first_step']['seconds'])} s; "
        f"memory predicted by the plan over measured, per rank: {', '.join(memory)}"
    )
    return view
