"""Our side of the cluster benchmark: sequence features over tables that are placed as a plan in the folder says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unequal.allocator import keep_freed_memory

from .distributed_side import Task
from .distributed_worker import Unequal, import_unequal
from .tiers_side import serve

if TYPE_CHECKING:
    import unequal as uq
    from unequal.plan.plan import Plan


class Planned(Unequal):
    """`arrangement` is the name of a plan."""

    def arrange(self, task: Task, embeddings: uq.Embeddings) -> Plan:
        from unequal.plan.plan import Plan

        return Plan.load(plan_file(Path(sys.argv[1]), task.arrangement))

    @property
    def dense_values(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def settle(self) -> None:
        self.embeddings.wait_for_copies()

    def counters(self) -> dict[str, float]:
        traffic = self.embeddings.mesh.traffic
        return super().counters() | {"inside": traffic.inside, "across": traffic.across}

    def notes(self) -> dict[str, Any]:
        return super().notes() | {"memory": self.embeddings.memory()}


def plan_file(folder: Path, arrangement: str) -> Path:
    return folder / f"{arrangement}.plan.json"


if __name__ == "__main__":
    keep_freed_memory()  # as `unequal train` does; TorchRec has the same by its environment
    serve(Planned, import_unequal)
