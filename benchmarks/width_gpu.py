"""A training step with rows as wide as they deserve over the same step with plain tables, on one GPU, and what the
tables take of its memory: `python -m benchmarks.width_gpu`, into results/gpu.json. Needs torch, Triton and numpy
alone, and runs from the source tree (PYTHONPATH=src).

At 100% all rows of all tables are there, whole. At 10% the tables have come to their widths in WARM_UP steps; then no more rows
are added, as when a budget is spent. `device` is the sum of a step's kernels, where the host has no part; `model` a step of a
DLRM over the same tables (pooled features alone). What values save is looked at in each of the first 256 steps, the `early`
ones, and in one of 16 from step 4,096 on, where `step` is from. `round` is what a round takes when rows have come to their
widths. Its share is that of a round every 1,000 steps. Everything is timed by the clock before the first kernel is looked at, and
each workload in a process of its own: once it was used, the profiler makes launches slower for the rest of the process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

import unequal as uq
from unequal.width.intervals import NEVER

from .gpu import BATCHES, ORDER, Step, asked, dlrm_step, gradients_for, kernel_times, milliseconds
from .gpu_workloads import DIM, GpuWorkload, workload
from .report import merge
from .width_memory import BARS, CASES, reads_of, train

WARM_UP, EVERY, ROUNDS = 128, 32, 7
LATER = 4096
"""step from which on what values save is looked at as often as in the long run"""
INTERVAL = 1000
"""steps between rounds, as a recipe has it by default"""
SIDES = ("plain", "100%", "10%")
WORKLOADS = ("P", "S")
PARTS = (*WORKLOADS, "memory")
MEMORY_ROWS = 10_000_000
PIECE = 1 << 20
"""rows that are made at a time"""


def embeddings(work: GpuWorkload, width: uq.Width | None) -> uq.Embeddings:
    pooling = "sum" if work.pooled else None
    tables = [uq.Table(f"t{t}", rows=rows, dim=DIM) for t, rows in enumerate(work.rows)]
    features = {name: uq.Feature(table, pooling) for name, table in zip(work.features, tables)}
    return uq.Embeddings(features, optimizer=uq.RowWiseAdagrad(lr=0.01), device="cuda", width=width)


def stepper(work: GpuWorkload, module: uq.Embeddings, batches: list[uq.Batch], gradients: list[list[Tensor]]) -> Step:
    def step(k: int) -> None:
        output = module(batches[k % len(batches)])
        parts = [output.pooled] if work.pooled else [output[feature].values for feature in work.features]  # type: ignore[union-attr]
        torch.autograd.backward(parts, gradients[k % len(batches)])

    return step


def fill(module: uq.Embeddings) -> None:
    for storage in module._narrow_storages().values():
        rows = storage.table.rows
        assert rows is not None
        for first in range(0, rows, PIECE):
            storage._admit(torch.arange(first, min(first + PIECE, rows), device="cuda"))
    spend_all(module)


def spend_all(module: uq.Embeddings) -> None:
    """No room for new rows: while there is some, a step waits for the device to know how many ids have none."""
    assert module._rounds is not None
    for group in module._rounds.groups:
        group.purse.left = 0.0


def settle(module: uq.Embeddings, step: Step) -> list[float]:
    """Trains until widths are what they will be; then gives the milliseconds of rounds. After it there are none, and no room for
    new rows."""
    for k in range(WARM_UP):
        step(k)
    rounds = module._rounds
    assert rounds is not None
    rounds.intervals, rounds.shifts.every = NEVER, INTERVAL
    times = []
    for number in range(ROUNDS):
        spend_all(module)
        for k in range(EVERY):
            step(number * EVERY + k)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        rounds.round(WARM_UP + number)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
        module._generation += 1
    spend_all(module)
    return times


def timed(work: GpuWorkload, module: uq.Embeddings, step: Step, batches: list[uq.Batch]) -> dict[str, Any]:
    module.step = 0
    found = {"early_step_ms": round(milliseconds(step, windows=5), 4)}
    module.step = LATER
    found["step_ms"] = round(milliseconds(step), 4)
    if work.pooled:
        found["model_ms"] = round(milliseconds(dlrm_step(module, batches)), 4)
    return found


def measure(name: str) -> dict[str, Any]:
    work = workload(name)
    batches = [work.batch(seed) for seed in range(BATCHES)]
    gradients = [gradients_for(work, batch, torch.float32) for batch in batches]
    whole = embeddings(work, uq.Width(budget="100%", every=10**9))
    fill(whole)
    narrow = embeddings(work, uq.Width(budget="10%", every=EVERY))
    modules = dict(zip(SIDES, (embeddings(work, None), whole, narrow)))
    steps = {side: stepper(work, module, batches, gradients) for side, module in modules.items()}
    more = [work.batch(seed) for seed in range(BATCHES, 8 * BATCHES)]
    same = gradients_for(work, more[0], torch.float32)
    rounds = settle(
        narrow,
        stepper(work, narrow, more, [same if work.pooled else gradients_for(work, b, torch.float32) for b in more]),
    )
    result: dict[str, Any] = {"workload": name}
    for side in SIDES:
        result[side] = timed(work, modules[side], steps[side], batches)
    for side in SIDES:
        kernels = kernel_times(steps[side])
        result[side] |= {"device_ms": round(sum(kernels.values()) / 1e3, 4), "kernels_us": kernels}
    for side in ("100%", "10%"):
        for what in ("early_step", "step", "device", "model"):
            if f"{what}_ms" in result[side]:
                times = result[side][f"{what}_ms"] / result["plain"][f"{what}_ms"]
                result[side][f"{what}_over_plain"] = round(times, 3)
    result["round_ms"] = round(statistics.median(rounds), 2)
    for what in ("step", "model"):
        if f"{what}_ms" in result["10%"]:
            share = result["round_ms"] / (INTERVAL * result["10%"][f"{what}_ms"])
            result[f"round_share_of_{what}"] = round(share, 4)
    return result


def device_memory(dim: int, kept: float | None) -> dict[str, Any]:
    """What the device's allocator has given out for tables at the end of a training, and at the most; the steps' buffers are
    gone. The same steps as in width_memory, where the system is asked about a process."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    torch.cuda.reset_peak_memory_stats()
    module = train(reads_of(MEMORY_ROWS), dim, kept, "cuda")
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    torch.cuda.empty_cache()
    return {
        "dim": dim,
        "budget": kept,
        "allocated": torch.cuda.memory_allocated() - before,
        "taken_from_driver": free - torch.cuda.mem_get_info()[0],
        "peak": peak,
        "counted": sum(module.memory().values()),
        "live": sum(module.rows().values()),
    }


def memory() -> list[dict[str, Any]]:
    cases = []
    train(reads_of(200_000, quick=True), 16, 0.1, "cuda")  # loads the kernels
    for dim, shares in ((dim, shares) for (rows, dim), shares in CASES.items() if rows == MEMORY_ROWS):
        plain = device_memory(dim, None)
        cases.append(plain)
        for kept in shares:
            found = device_memory(dim, kept)
            for name in ("allocated", "taken_from_driver"):
                found[f"times_less_{name}"] = round(plain[name] / max(1, found[name]), 2)
            cases.append(found | {"bar": BARS.get((dim, kept))})
            print(cases[-1], flush=True)
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.width_gpu", description=__doc__)
    parser.add_argument("--only", nargs="+", default=PARTS, choices=PARTS)
    arguments, origin = asked(parser)
    steps = []
    for name in (name for name in WORKLOADS if name in arguments.only):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
            steps.append(alone.submit(measure, name).result())
        print({key: part for key, part in steps[-1].items() if not isinstance(part, dict)}, flush=True)
        print({side: {k: v for k, v in steps[-1][side].items() if k != "kernels_us"} for side in SIDES}, flush=True)
    if steps:
        merge(arguments.output, {"width": origin | {"results": steps}}, ORDER)
    if "memory" in arguments.only:
        merge(arguments.output, {"width_memory": origin | {"results": memory()}}, ORDER)


if __name__ == "__main__":
    main()
