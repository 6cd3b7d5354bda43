"""Our side of the cluster benchmark: sequence features over tables that are placed as a plan in the folder says."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unequal.allocator import keep_freed_memory

from .distributed_side import Task
from .distributed_worker import Unequal, import_unequal
from .tiers_side import serve

if TYPE_CHECKING:
    import unequal as uq
    from unequal.plan.plan import Plan


WAITED = "_waited"
"""ends the name of a job that waits for the copies after every backward pass, so that nothing is sent beside it"""


class Planned(Unequal):
    """`arrangement` is the name of a plan."""

    def arrange(self, task: Task, embeddings: uq.Embeddings) -> Plan:
        from unequal.plan.plan import Plan

        self.waits, self.push_seconds = task.arrangement.endswith(WAITED), 0.0
        return Plan.load(plan_file(Path(sys.argv[1]), task.arrangement.removesuffix(WAITED)))

    @property
    def dense_values(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def settle(self) -> None:
        self.embeddings.wait_for_copies()

    def update(self, loss: Any) -> None:
        if not self.waits:
            super().update(loss)
            return
        loss.backward()
        started = time.perf_counter()
        self.settle()
        self.push_seconds += time.perf_counter() - started
        self.optimizer.step()

    def counters(self) -> dict[str, float]:
        traffic = self.embeddings.mesh.traffic
        own = {"inside": traffic.inside, "across": traffic.across, "push_seconds": self.push_seconds}
        return super().counters() | own

    def notes(self) -> dict[str, Any]:
        return super().notes() | {"memory": self.embeddings.memory()}


def plan_file(folder: Path, arrangement: str) -> Path:
    return folder / f"{arrangement}.plan.json"


if __name__ == "__main__":
    keep_freed_memory()  # as `unequal train` does; TorchRec has the same by its environment
    serve(Planned, import_unequal)
