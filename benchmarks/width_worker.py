"""Tables whose rows are narrow beside plain ones, in a process of their own: for width_speed.

    python -m benchmarks.width_worker WORKLOAD.npz THREADS

Commands, a line each: {"do": "build", "width": share or null, "policy": …, "every": n, "model": bool} makes the module;
{"do": "train", "steps": n} takes steps without a clock; {"do": "block", "steps": n} times them; {"do": "sizes"} tells what
it holds.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import unequal as uq

from .distributed_models import MeanOfSequences
from .distributed_side import DENSE, DENSE_LEARNING_RATE, EPS, HIDDEN, LEARNING_RATE, Samples
from .workloads import Workload, pooled


class Narrow:
    """Row-wise AdaGrad over a workload's batches in turn: the embeddings alone, under a fixed gradient, or a whole model."""

    def __init__(self, workload: Workload, width: uq.Width | None, model: bool) -> None:
        self.workload, self.done = workload, 0
        tables = [uq.Table(f"t{t}", rows=rows, dim=workload.dim) for t, rows in enumerate(workload.rows)]
        pooling = "sum" if workload.pooled else None
        self.embeddings = uq.Embeddings(
            {name: uq.Feature(table, pooling=pooling) for name, table in zip(workload.features, tables)},
            optimizer=uq.RowWiseAdagrad(lr=LEARNING_RATE, eps=EPS),
            width=width,
        )
        self.samples = Samples.draw(workload) if model else None
        self.model: nn.Module | None = None
        if model:
            self._add_model()
        else:
            self.gradient = torch.from_numpy(workload.gradient())

    def _add_model(self) -> None:
        from unequal.models import ModelConfig, build_model

        if self.workload.pooled:
            config = ModelConfig(bottom=(HIDDEN,), top=(HIDDEN,))
            self.model = build_model(config, self.embeddings, dense_features=DENSE, tasks=1)
        else:
            self.model = OverSequences(self.embeddings, self.workload)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=DENSE_LEARNING_RATE)

    def batch(self, number: int) -> uq.Batch:
        """Made anew each time, because a batch keeps what is derived from it."""
        ids, lengths = (torch.from_numpy(part[number]) for part in (self.workload.ids, self.workload.lengths))
        batch = uq.Batch(tuple(self.workload.features), ids, lengths)
        if self.samples is not None:
            batch.dense, batch.labels = (
                torch.from_numpy(part[number]) for part in (self.samples.dense, self.samples.labels)
            )
        return batch

    def step(self) -> None:
        number = self.done % len(self.workload.ids)
        batch = self.batch(number)
        self.done += 1
        if self.model is not None:
            assert batch.labels is not None
            self.optimizer.zero_grad(set_to_none=True)
            nn.functional.binary_cross_entropy_with_logits(self.model(batch).squeeze(-1), batch.labels).backward()
            self.optimizer.step()
            return
        out = self.embeddings(batch)
        gradient = self.gradient[: self.workload.output_shape(number)[0]]
        if self.workload.pooled:
            out.pooled.backward(gradient)
        else:
            values = [out[name].values for name in self.workload.features]
            torch.autograd.backward(values, gradient.split(self.workload.counts(number)))

    def block(self, steps: int) -> dict[str, Any]:
        """Seconds of each step; those of steps that ended in a round apart."""
        plain, rounds = [], []
        for _ in range(steps):
            before, start = len(self.embeddings.width_reports), time.perf_counter()
            self.step()
            seconds = time.perf_counter() - start
            (plain if len(self.embeddings.width_reports) == before else rounds).append(seconds)
        return {"step": plain, "with_round": rounds}

    def sizes(self) -> dict[str, Any]:
        reports = self.embeddings.width_reports
        rows = sum(self.workload.rows)
        live = sum(self.embeddings.rows().values()) if self.embeddings.width is not None else rows
        kept = reports[-1].kept if reports else None
        return {"bytes": self.embeddings.memory(), "live": live, "rows": rows, "kept": kept, "rounds": len(reports)}


class OverSequences(nn.Module):
    def __init__(self, embeddings: uq.Embeddings, workload: Workload) -> None:
        super().__init__()
        self.embeddings, self.features = embeddings, workload.features
        self.over = MeanOfSequences(len(workload.features), workload.dim)

    def forward(self, batch: uq.Batch) -> Tensor:
        out = self.embeddings(batch)
        logits: Tensor = self.over([(out[name].values, out[name].lengths) for name in self.features])
        return logits


def width_of(command: dict[str, Any]) -> uq.Width | None:
    if command["width"] is None:
        return None
    return uq.Width(budget=command["width"], policy=command["policy"], every=command["every"])


def main() -> None:
    path, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    torch.manual_seed(0)
    workload = Workload.load(Path(path))
    # Steps of a tiny module load what torch and we load lazily, and start the threads: code, not the tables' memory.
    tiny = Narrow(pooled(total=500, largest=100, size=8, batches=1), uq.Width(budget=0.5, every=1), False)
    tiny.block(2)
    del tiny
    print(json.dumps({}), flush=True)
    narrow: Narrow | None = None
    for line in sys.stdin:
        command = json.loads(line)
        answer: dict[str, Any] = {}
        if command["do"] == "build":
            narrow = Narrow(workload, width_of(command), command["model"])
        else:
            assert narrow is not None, "build comes first"
            if command["do"] == "train":
                for _ in range(command["steps"]):
                    narrow.step()
            elif command["do"] == "block":
                answer = narrow.block(command["steps"])
            else:
                answer = narrow.sizes()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
