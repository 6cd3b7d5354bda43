"""What both sides of the distributed benchmark have in common: each rank's share of the data, the same start, the clock.

A rank is a process that reads a command per line and answers with a line: {"do": "block", "steps": n} takes n steps. It ends when
its input is closed. Torch is imported by the side, in time: how long that takes is one of the figures.

    python -m benchmarks.distributed_worker FOLDER MEETING ARRANGEMENT RANK WORLD equal|fresh
"""

from __future__ import annotations

import json
import os
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .workloads import Integers, Workload

DENSE = 13
HIDDEN = 128
LEARNING_RATE = 0.02
DENSE_LEARNING_RATE = 0.05
EPS = 1e-8

Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """Dense columns and labels beside the ids of a workload, and the equal weights of the dense part."""

    dense: Floats
    """[batches, size, DENSE]"""
    labels: Floats
    """[batches, size]"""
    weights: dict[str, Floats]

    @classmethod
    def draw(cls, workload: Workload) -> Samples:
        """Labels have a cause, so that a model that learns shows it: the dense columns, or the ids of the first feature."""
        draw = np.random.default_rng(3)
        batches, size = len(workload.ids), workload.size
        dense = draw.standard_normal((batches, size, DENSE), dtype=np.float32)
        if workload.pooled:
            cause = dense @ draw.standard_normal(DENSE).astype(np.float32)
        else:
            cause = np.stack([first_feature_score(workload, batch) for batch in range(batches)])
        cause = (cause - cause.mean()) / cause.std() + 0.3 * draw.standard_normal(cause.shape)
        weights = {
            name: (draw.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
            for name, shape in dense_shapes(workload).items()
        }
        return cls(dense=dense, labels=(cause > 0).astype(np.float32), weights=weights)

    def save(self, path: Path) -> None:
        np.savez(path, dense=self.dense, labels=self.labels, **{f"weight {n}": w for n, w in self.weights.items()})  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: Path) -> Samples:
        with np.load(path, allow_pickle=False) as file:
            weights = {name.removeprefix("weight "): file[name] for name in file.files if name.startswith("weight ")}
            return cls(dense=file["dense"], labels=file["labels"], weights=weights)


def first_feature_score(workload: Workload, batch: int) -> Floats:
    """For each sample the mean over its first feature's ids of a value that depends on the id alone."""
    lengths = workload.lengths[batch][: workload.size]
    ids = workload.ids[batch][: lengths.sum()]
    sums = np.add.reduceat(np.where(ids * 2654435761 >> 7 & 1, 1.0, -1.0), np.cumsum(lengths) - lengths)
    return (sums / lengths).astype(np.float32)


def dense_shapes(workload: Workload) -> dict[str, tuple[int, ...]]:
    """The dense part: DLRM with bottom 128-64 and top 128-1, or an MLP 128-1 over the means of all sequences."""
    features, dim = len(workload.rows), workload.dim
    if not workload.pooled:
        sizes = {"top.0": (HIDDEN, features * dim), "top.1": (1, HIDDEN)}
    else:
        joined = dim + features * (features + 1) // 2
        sizes = {
            "bottom.0": (HIDDEN, DENSE),
            "bottom.1": (dim, HIDDEN),
            "top.0": (HIDDEN, joined),
            "top.1": (1, HIDDEN),
        }
    return {f"{n}.{kind}": s[: 2 if kind == "weight" else 1] for n, s in sizes.items() for kind in ("weight", "bias")}


def share(workload: Workload, batch: int, rank: int, world: int) -> tuple[Integers, Integers]:
    """The ids and lengths of the samples that belong to a rank: a contiguous piece of the batch."""
    lengths = workload.lengths[batch].reshape(len(workload.rows), workload.size)
    first, last = (workload.size * r // world for r in (rank, rank + 1))
    ends = np.cumsum(lengths.reshape(-1)).reshape(lengths.shape)
    starts = ends - lengths
    parts = [workload.ids[batch][starts[f, first] : ends[f, last - 1]] for f in range(len(workload.rows))]
    return np.concatenate(parts), lengths[:, first:last].reshape(-1).copy()


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What a side is to build."""

    workload: Workload
    samples: Samples
    arrangement: str
    """how the tables are spread: a kind of sharding, or `plan` for what the library chooses itself"""
    rank: int
    world: int
    equal: bool
    """from the weights that are the same for every side"""


class Side(ABC):
    """One rank of a training: model, batches in memory, optimizer."""

    packages: tuple[str, ...]

    @abstractmethod
    def __init__(self, task: Task) -> None: ...

    @abstractmethod
    def loss(self, batch: int) -> Any:
        """Forward: the mean loss of this rank's share, a tensor."""

    @abstractmethod
    def update(self, loss: Any) -> None:
        """Backward, and the update of the dense part; that of the tables is a part of backward on both sides."""

    def notes(self) -> dict[str, Any]:
        """What the side knows about itself once it is built."""
        return {}

    def counters(self) -> dict[str, float]:
        """Sums since the start, of which a block reports how much they grew."""
        return {}


def sent_bytes() -> int:
    """All bytes this process has handed to the system, on whatever way: between two points of a step, what it sent."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("wchar:")))


def block(side: Side, first: int, steps: int, batches: int) -> dict[str, Any]:
    """Seconds of the parts of each step, the losses, the whole block's seconds and what was sent in it."""
    import torch.distributed as dist

    forward, backward, losses = [], [], []
    dist.barrier()
    before, sent = side.counters(), sent_bytes()
    start = time.perf_counter()
    for step in range(first, first + steps):
        begin = time.perf_counter()
        loss = side.loss(step % batches)
        middle = time.perf_counter()
        side.update(loss)
        forward.append(middle - begin)
        backward.append(time.perf_counter() - middle)
        losses.append(loss.detach())
    seconds, sent = time.perf_counter() - start, sent_bytes() - sent
    grown = {name: value - before.get(name, 0) for name, value in side.counters().items()}
    return {
        "seconds": seconds,
        "forward": forward,
        "backward": backward,
        "losses": [float(loss) for loss in losses],
        "sent": sent,
        "counters": grown,
    }


def serve(make: Any, import_side: Any) -> None:
    """The main function of a rank. `import_side` imports what the side needs, `make` builds it from a Task."""
    folder, meeting, arrangement, rank, world, start = sys.argv[1:]
    # Libraries print to stdout as they load; the answers go to a copy of it that only this function knows.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    begin = time.perf_counter()
    import torch

    import_side()
    imported = time.perf_counter()
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    meet = (Path(folder) / meeting).as_uri()
    dist.init_process_group("gloo", init_method=meet, rank=int(rank), world_size=int(world))
    task = Task(
        workload=Workload.load(Path(folder) / "workload.npz"),
        samples=Samples.load(Path(folder) / "samples.npz"),
        arrangement=arrangement,
        rank=int(rank),
        world=int(world),
        equal=start == "equal",
    )
    batches = len(task.workload.ids)
    ready = time.perf_counter()
    side: Side = make(task)
    del task
    hello = {"import_seconds": imported - begin, "build_seconds": time.perf_counter() - ready}
    hello["versions"] = {package: version(package) for package in side.packages}
    print(json.dumps(hello | side.notes()), file=answers)
    done = 0
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(block(side, done, command["steps"], batches)), file=answers)
        done += command["steps"]
    dist.destroy_process_group()
