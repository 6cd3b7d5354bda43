"""One implementation in a process of its own: reads a command per line, answers with a line, sleeps in between.

    python -m benchmarks.worker IMPLEMENTATION WORKLOAD.npz THREADS

Commands: {"do": "block", "steps": n} times n steps; {"do": "state", "steps": n, "path": …} loads the workload's common
initial weights, takes n steps and writes outputs and weights for comparison; {"do": "quit"}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .implementations import IMPLEMENTATIONS, Implementation, Unsupported
from .workloads import Workload


def block(implementation: Implementation, first: int, steps: int) -> dict[str, Any]:
    """Seconds of each step, and of its forward part."""
    forward, whole = [], []
    batches = len(implementation.ids)
    for step in range(first, first + steps):
        start = time.perf_counter()
        outputs = implementation.forward(step % batches)
        middle = time.perf_counter()
        implementation.backward(step % batches, outputs)
        end = time.perf_counter()
        del outputs
        forward.append(middle - start)
        whole.append(end - start)
    return {"forward": forward, "step": whole}


def write_state(implementation: Implementation, steps: int, path: Path) -> None:
    implementation.load_weights([torch.from_numpy(part) for part in implementation.workload.initial_weights()])
    arrays: dict[str, Any] = {}
    for step in range(steps):
        outputs = implementation.forward(step % len(implementation.ids))
        joined = torch.cat(outputs, dim=1 if implementation.workload.pooled else 0)
        arrays[f"output{step}"] = joined.detach().numpy().copy()
        implementation.backward(step % len(implementation.ids), outputs)
    arrays |= {f"weights{table}": part.float().numpy() for table, part in enumerate(implementation.weights())}
    np.savez(path, **arrays)


def main() -> None:
    name, workload_path, threads = sys.argv[1:]
    # Libraries print to stdout as they load; the answers go to a copy of it that only this function knows.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(content: dict[str, Any]) -> None:
        print(json.dumps(content), file=answers)

    torch.set_num_threads(int(threads))
    torch.manual_seed(0)
    try:
        implementation = IMPLEMENTATIONS[name](Workload.load(Path(workload_path)))
    except Unsupported as reason:
        answer({"unsupported": str(reason)})
        return
    answer(
        {
            "versions": {package: version(package) for package in implementation.packages},
            "update": implementation.update,
            "threads": torch.get_num_threads(),
        }
    )
    done = 0
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "quit":
            return
        if command["do"] == "block":
            answer(block(implementation, done, command["steps"]))
            done += command["steps"]
        else:
            write_state(implementation, command["steps"], Path(command["path"]))
            answer({})


if __name__ == "__main__":
    main()
