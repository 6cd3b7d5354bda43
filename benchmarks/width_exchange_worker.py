"""One rank of the benchmark of narrow rows on the cluster: python -m benchmarks.width_exchange_worker FOLDER JOB BLOCKS.

A job is the name of a plan, or that and how gradients travel, with a plus between them: tables then keep a quarter of their
values.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unequal.allocator import keep_freed_memory

from .distributed_side import EPS, LEARNING_RATE, Task
from .distributed_worker import import_unequal
from .tiers_side import serve
from .tiers_worker import Planned, plan_file

if TYPE_CHECKING:
    import unequal as uq
    from unequal.plan.plan import Plan

KEPT = 0.25
EVERY, WARM_UP = 2, 16
"""steps between rounds, and steps before what is measured, in which none falls"""


class Narrow(Planned):
    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.passes = -(-WARM_UP // len(self.batches))

    def make_tables(self, task: Task) -> uq.Embeddings:
        """Fresh rows depend on the seed, the table and the id: those of narrow tables begin like those of whole ones."""
        import unequal as uq

        workload = task.workload
        tables = [uq.Table(f"t{t}", rows=rows, dim=workload.dim) for t, rows in enumerate(workload.rows)]
        gradients = task.arrangement.partition("+")[2]
        return uq.Embeddings(
            {name: uq.Feature(table, pooling=None) for name, table in zip(workload.features, tables)},
            optimizer=uq.RowWiseAdagrad(lr=LEARNING_RATE, eps=EPS),
            device="meta",
            width=uq.Width(budget=KEPT, every=EVERY, gradients=gradients) if gradients else None,
        )

    def arrange(self, task: Task, embeddings: uq.Embeddings) -> Plan:
        from unequal.plan.plan import Plan

        self.waits, self.push_seconds = False, 0.0
        return Plan.load(plan_file(Path(sys.argv[1]), task.arrangement.partition("+")[0]))

    def update(self, loss: Any) -> None:
        from unequal.width.intervals import NEVER

        super().update(loss)
        rounds = self.embeddings._rounds
        if rounds is not None and self.embeddings.step >= self.passes * len(self.batches):
            rounds.intervals = NEVER

    def counters(self) -> dict[str, float]:
        return super().counters() | {"cpu_seconds": time.process_time()}

    def notes(self) -> dict[str, Any]:
        """Raises where a copy differs from its owner's row."""
        self.embeddings.check_copies()
        reports = self.embeddings.width_reports if self.embeddings.width is not None else []
        return super().notes() | {"rounds": [[report.step, report.rows, report.values] for report in reports]}


if __name__ == "__main__":
    keep_freed_memory()  # as `unequal train` does
    serve(Narrow, import_unequal)
