"""Lookup and update on one GPU: `python -m benchmarks.gpu [--output FILE]`, by default benchmarks/results/gpu.json.

Needs torch, Triton and numpy alone, and runs from the source tree (PYTHONPATH=src). Times are medians from device events over
rotating batches through the public module, of the quietest of seven windows: `step` as Python calls it, `captured` the same
step replayed as a CUDA graph, where the host has no part. Beside them stands what FBGEMM 1.6.0 took on the same kind of GPU
for the same workloads.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import unequal as uq
from unequal.models import ModelConfig, build_model

from .gpu_workloads import DIM, NAMES, GpuWorkload, workload
from .report import merge, stamp

RESULTS = Path(__file__).parent / "results" / "gpu.json"
ORDER = ("limits", "embedding_step", "dlrm", "width", "width_memory", "training")
"""of the parts of that file"""
BATCHES = 4
# Milliseconds on an H200: (forward, step). Not remade here: FBGEMM does not install from where this runs.
FBGEMM = {
    "float32": {"P": (0.433, 1.541), "S": (0.739, 1.872), "U": (0.377, 1.956)},
    "float16": {"P": (0.447, 1.464), "S": (0.394, 1.501), "U": (0.298, 2.143)},
}
Step = Callable[[int], None]


def milliseconds(work: Step, repeats: int = 40, warm: int = 8, windows: int = 7) -> float:
    """The lowest of the medians of several windows. Within a window all calls are queued before the first is waited for; a
    host that others share can be slow for whole windows at a time, and then the GPU waits for it."""
    for k in range(warm):
        work(k)
    medians = []
    for _ in range(windows):
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        torch.cuda.synchronize()
        for k, (begin, end) in enumerate(events):
            begin.record()
            work(k)
            end.record()
        torch.cuda.synchronize()
        medians.append(statistics.median(begin.elapsed_time(end) for begin, end in events))
    return min(medians)


def captured(step: Step, count: int = 2) -> Step:
    """The step on the first `count` batches, as graphs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for k in range(BATCHES):
            step(k)
    torch.cuda.current_stream().wait_stream(stream)
    graphs = []
    for k in range(count):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            step(k)
    return lambda k: graphs[k % count].replay()


def kernel_times(step: Step, steps: int = 6) -> dict[str, float]:
    """Microseconds a step spends in each kernel."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for k in range(steps):
            step(k)
        torch.cuda.synchronize()
    times: dict[str, float] = defaultdict(float)
    for event in profiled.key_averages():
        times[short(event.key)] += event.device_time_total / steps
    return {name: round(time, 1) for name, time in sorted(times.items(), key=lambda item: -item[1]) if time > 0.05}


def short(kernel: str) -> str:
    for part, name in (
        ("radix_sort", "sort"),
        ("fill_reverse", "sort"),
        ("Mem", "memory copies and fills"),
        ("gemm", "gemm"),
    ):
        if part in kernel:
            return name
    for part in ("nvjet", "cutlass", "cublas", "xmma"):
        if part in kernel:
            return "gemm"
    return kernel.removeprefix("void ").split("<")[0].split("(")[0].strip()[:60]


def limits() -> dict[str, float]:
    """Bytes read and written per second, in TB/s: a plain copy, and rows of 512 bytes picked at random."""
    source = torch.empty(1 << 29, device="cuda").normal_()
    target = torch.empty_like(source)
    copy = 2 * source.numel() * 4 / milliseconds(lambda k: target.copy_(source)) / 1e9
    rows = source.view(-1, DIM)
    index = torch.randint(0, rows.shape[0], (2_000_000,), device="cuda")
    out = torch.empty(index.numel(), DIM, device="cuda")
    gather = 2 * out.numel() * 4 / milliseconds(lambda k: torch.index_select(rows, 0, index, out=out)) / 1e9
    return {"copy_TBps": round(copy, 2), "index_select_TBps": round(gather, 2)}


def gradients_for(work: GpuWorkload, batch: uq.Batch, dtype: torch.dtype) -> list[Tensor]:
    draw = lambda *shape: torch.randn(*shape, device="cuda").mul_(1e-3).to(dtype)  # noqa: E731
    if work.pooled:
        return [draw(work.size, DIM * len(work.rows))]
    return [draw(int(count), DIM) for count in batch.bounds[1:] - batch.bounds[:-1]]


def measure(name: str, dtype: torch.dtype) -> dict[str, Any]:
    work = workload(name)
    embeddings = work.embeddings(dtype)
    batches = [work.batch(seed) for seed in range(BATCHES)]
    gradients = [gradients_for(work, batch, dtype) for batch in batches]

    def forward(k: int) -> None:
        with torch.no_grad():
            embeddings(batches[k % BATCHES])

    def step(k: int) -> None:
        output = embeddings(batches[k % BATCHES])
        parts = [output.pooled] if work.pooled else [output[feature].values for feature in work.features]  # type: ignore[union-attr]
        torch.autograd.backward(parts, gradients[k % BATCHES])

    label = str(dtype).removeprefix("torch.")
    result: dict[str, Any] = {"workload": name, "dtype": label, "rows": sum(work.rows), "batch": work.size}
    result["lookups"] = batches[0].ids.numel()
    result["distinct_rows"] = sum(batches[0][feature].values.unique().numel() for feature in work.features)
    result["forward_ms"], result["step_ms"] = round(milliseconds(forward), 4), round(milliseconds(step), 4)
    kernels = kernel_times(step)
    result["captured_step_ms"] = round(milliseconds(captured(step)), 4)
    result["fbgemm_forward_ms"], result["fbgemm_step_ms"] = FBGEMM[label][name]
    result["kernels_us"] = kernels
    result["bytes"] = counted_bytes(work, batches[0], result, dtype)
    return result


def counted_bytes(work: GpuWorkload, batch: uq.Batch, result: dict[str, Any], dtype: torch.dtype) -> dict[str, float]:
    """The fewest bytes each of the two large kernels can move, in GB, and how fast it moved them, in TB/s. A row that is read
    several times is counted every time by the lookup (caches may do better) and once by the update."""
    item, lookups, distinct = dtype.itemsize, result["lookups"], result["distinct_rows"]
    output = (work.size * len(work.rows) if work.pooled else lookups) * DIM * item
    looked_up = lookups * (DIM * item + 8) + output
    updated = output + distinct * (2 * DIM * item + 8) + lookups * 8
    times = result["kernels_us"]
    return {
        "look_up_GB": round(looked_up / 1e9, 3),
        "look_up_TBps": round(looked_up / times["look_up"] / 1e6, 2),
        "update_pieces_GB": round(updated / 1e9, 3),
        "update_pieces_TBps": round(updated / times["update_pieces"] / 1e6, 2),
    }


def dlrm_step(embeddings: uq.Embeddings, batches: list[uq.Batch]) -> Step:
    """A step of a DLRM over pooled features: forward, backward, all updates."""
    torch.manual_seed(0)
    config = ModelConfig(bottom=(512, 256), top=(1024, 1024, 512, 256), interaction_dim=DIM)
    model = build_model(config, embeddings, dense_features=13, tasks=1).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True, capturable=True)
    for batch in batches:
        batch.dense = torch.randn(batch.size, 13, device="cuda")
        batch.labels = torch.randint(0, 2, (batch.size, 1), device="cuda").float()

    def step(k: int) -> None:
        batch = batches[k % len(batches)]
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


def whole_model() -> dict[str, Any]:
    """A DLRM over workload P as a user's loop runs it and as one graph."""
    work = workload("P")
    step = dlrm_step(work.embeddings(torch.float32), [work.batch(seed) for seed in range(BATCHES)])
    times: dict[str, Any] = {"batch": work.size, "step_ms": round(milliseconds(step), 4)}
    kernels = kernel_times(step)
    replay = captured(step)
    times["captured_step_ms"] = round(milliseconds(replay), 4)
    busy = sum(kernel_times(replay).values()) / 1000
    times["samples_per_second"] = round(work.size / times["captured_step_ms"] * 1000)
    times["busy_ms"] = round(busy, 4)  # inside kernels, in the captured step; the rest are gaps between them
    ours = ("look_up", "update_pieces", "join_pieces", "cut_pieces", "count_pieces", "number_rows", "sort")
    times["share_of_kernels"] = {
        "embeddings": round(sum(kernels.get(name, 0.0) for name in ours) / 1000 / busy, 3),
        "matrix products": round(kernels.get("gemm", 0.0) / 1000 / busy, 3),
    }
    times["kernels_us"] = kernels
    return times


def gpu() -> dict[str, Any]:
    import subprocess

    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(ask, capture_output=True, text=True).stdout.strip()
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
    }


def asked(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, dict[str, Any]]:
    """The arguments, with those of all benchmarks on a GPU, and where results come from."""
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument(
        "--commit", help="which commit this is, unchanged, where the source is a copy without its history"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU, and torch sees none")
    origin = stamp(quick=False) | gpu()
    if arguments.commit:
        origin |= {"commit": arguments.commit, "dirty": False}
    return arguments, origin


def main() -> None:
    arguments, origin = asked(argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__))
    parts: dict[str, Any] = {"limits": limits()}
    cases = []
    for dtype in (torch.float32, torch.float16):
        for name in NAMES:
            cases.append(measure(name, dtype))
            case = cases[-1]
            print(
                f"{name} {case['dtype']}: forward {case['forward_ms']:.3f} ms (FBGEMM {case['fbgemm_forward_ms']}), step "
                f"{case['step_ms']:.3f} ms, captured {case['captured_step_ms']:.3f} ms (FBGEMM {case['fbgemm_step_ms']})",
                flush=True,
            )
            torch.cuda.empty_cache()
    parts["embedding_step"] = cases
    parts["dlrm"] = whole_model()
    print({name: value for name, value in parts["dlrm"].items() if name != "kernels_us"})
    merge(arguments.output, {name: origin | {"results": part} for name, part in parts.items()}, ORDER)


if __name__ == "__main__":
    main()
