"""What both sides of the cluster benchmark have in common: one rank of a training, and how its steps are timed and counted.

    python -m benchmarks.tiers_worker FOLDER ARRANGEMENT BLOCKS

runs on every rank of a cluster (cluster.py), trains so many blocks of steps after one that warms up (or `passes` of them, where
a side asks for more), and prints one line of JSON.
A block is one pass over the batches. The bytes of a block are those of the node's link, read while no rank sends.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .cluster import link_bytes
from .distributed_side import Samples, Side, Task
from .processes import status
from .workloads import Workload


class Blocked:
    """Seconds that this process spends in collectives: in the calls, and in waiting for those it did not wait for at once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False

    def watch(self, owner: Any, *names: str) -> None:
        """From now on these functions of a module, or methods of a class, are timed; what they call is a part of them."""
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            if self._inside:
                return function(*arguments, **options)
            self._inside, started = True, time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self._inside = False
                self.seconds += time.perf_counter() - started

        return timed


def settle(side: Side) -> None:
    """Until nothing is on its way: what a step sends beside the next one belongs to its block."""
    wait: Callable[[], None] | None = getattr(side, "settle", None)
    if wait is not None:
        wait()


def block(side: Side, batches: int) -> dict[str, Any]:
    """One step with every batch: how long they took, what crossed the node's link, and what the side counted itself."""
    import torch.distributed as dist

    dist.barrier()
    before, counted = link_bytes(), side.counters()
    dist.barrier()
    started = time.perf_counter()
    losses = []
    for batch in range(batches):
        loss = side.loss(batch)
        side.update(loss)
        losses.append(loss.detach())
    settle(side)
    dist.barrier()
    seconds = time.perf_counter() - started
    crossed = link_bytes().since(before)
    grown = {name: value - counted.get(name, 0) for name, value in side.counters().items()}
    dist.barrier()
    return {
        "seconds": seconds / batches,
        "sent": crossed.sent / batches,
        "received": crossed.received / batches,
        "losses": [float(loss) for loss in losses],
        "counters": {name: value / batches for name, value in grown.items()},
    }


def dense(side: Side, steps: int) -> float:
    """Bytes that the dense part's gradients send over the node's link in a step, summed over all ranks as torch's DDP does."""
    import torch
    import torch.distributed as dist

    values: int = getattr(side, "dense_values", 0)
    if not values:
        return 0.0
    gradients = torch.zeros(values)
    dist.barrier()
    before = link_bytes()
    dist.barrier()
    for _ in range(steps):
        dist.all_reduce(gradients)
    dist.barrier()
    return link_bytes().since(before).sent / steps


def serve(make: Callable[[Task], Side], import_side: Callable[[], None]) -> None:
    """The main function of a rank."""
    folder, arrangement, blocks = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    # Libraries print to stdout as they load; the answer goes to a copy of it that only this function knows.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch

    import_side()
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    task = Task(
        workload=Workload.load(folder / "workload.npz"),
        samples=Samples.load(folder / "samples.npz"),
        arrangement=arrangement,
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        equal=True,
    )
    batches = len(task.workload.ids)
    side = make(task)
    del task
    built = status(os.getpid(), "VmRSS")
    first, *_ = [block(side, batches) for _ in range(getattr(side, "passes", 1))]
    Path("/proc/self/clear_refs").write_text("5")  # from here on the peak is that of training, not of the start
    rest = [block(side, batches) for _ in range(blocks)]
    found = {"built_bytes": built, "peak_bytes": status(os.getpid(), "VmHWM"), "warm_up": first, "blocks": rest}
    found["dense_sent"] = dense(side, batches)
    print(json.dumps(found | side.notes()), file=answer, flush=True)
    dist.barrier()
    dist.destroy_process_group()
