"""Our side of the distributed benchmark: sharded embeddings, the dense part in torch's DDP."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from unequal.allocator import keep_freed_memory

from .distributed_side import DENSE, DENSE_LEARNING_RATE, EPS, HIDDEN, LEARNING_RATE, Floats, Side, Task, serve, share

if TYPE_CHECKING:
    import unequal as uq
    from unequal.plan.placement import Placement


def import_unequal() -> None:
    import torch.nn.parallel  # noqa: F401

    import unequal.embeddings
    import unequal.models
    import unequal.plan.planner  # noqa: F401


class Unequal(Side):
    packages = ("torch", "unequal")

    def __init__(self, task: Task) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        import unequal as uq

        workload = task.workload
        whole = self.make_tables(task)
        self.placement = self.arrange(task, whole)
        self.embeddings = uq.shard(whole, self.placement, timing=True)
        del whole
        self.watch = Watch(self.embeddings, workload.features[0])
        model = pooled_model(task, self.embeddings) if workload.pooled else sequence_model(task, self.embeddings)
        # The dense part's buffers are constants: nothing to broadcast.
        self.model = DistributedDataParallel(model, forward_sync_buffers=False, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=DENSE_LEARNING_RATE)
        self.loss_function = torch.nn.BCEWithLogitsLoss()
        self.batches = []
        for k in range(len(workload.ids)):
            ids, lengths = (torch.from_numpy(part) for part in share(workload, k, task.rank, task.world))
            mine = slice(*(workload.size * r // task.world for r in (task.rank, task.rank + 1)))
            dense, labels = (
                torch.from_numpy(part[k, mine].copy()) for part in (task.samples.dense, task.samples.labels)
            )
            self.batches.append(uq.Batch(tuple(workload.features), ids, lengths, dense=dense, labels=labels))

    def make_tables(self, task: Task) -> uq.Embeddings:
        import torch

        import unequal as uq

        workload = task.workload
        tables = [uq.Table(f"t{t}", rows=rows, dim=workload.dim) for t, rows in enumerate(workload.rows)]
        pooling = "sum" if workload.pooled else None
        whole = uq.Embeddings(
            {name: uq.Feature(table, pooling=pooling) for name, table in zip(workload.features, tables)},
            optimizer=uq.RowWiseAdagrad(lr=LEARNING_RATE, eps=EPS),
            device="cpu" if task.equal else "meta",
        )
        if task.equal:
            values = workload.initial_weights()
            start = {f"{table.name}.weight": torch.from_numpy(part) for table, part in zip(tables, values)}
            whole.load_state_dict(whole.state_dict() | start)
        return whole

    def arrange(self, task: Task, embeddings: uq.Embeddings) -> Placement:
        return arrange(task, embeddings)

    def loss(self, batch: int) -> Any:
        inputs = self.batches[batch]
        self.optimizer.zero_grad(set_to_none=True)
        return self.loss_function(self.model(inputs).squeeze(-1), inputs.labels)

    def update(self, loss: Any) -> None:
        loss.backward()
        self.optimizer.step()

    def notes(self) -> dict[str, Any]:
        from unequal.plan.plan import Plan, predict_memory

        kinds = [table.kind + (" sums" if table.sums else "") for table in self.placement.tables.values()]
        ready = [part for batch in self.batches for part in (batch.ids, batch.lengths, batch.dense, batch.labels)]
        found = {
            "tables": {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
            "codecs": [self.placement.forward_codec, self.placement.backward_codec],
            "of_rank": {
                "table_bytes": sum(self.embeddings.memory().values()),
                "ready_batches_bytes": sum(part.nbytes for part in ready),
            },
        }
        if isinstance(self.placement, Plan):
            found["of_rank"]["predicted_memory"] = predict_memory(self.placement)[self.embeddings.mesh.rank]
        return found

    def counters(self) -> dict[str, float]:
        traffic = self.embeddings.mesh.traffic
        phases = {f"phase {name}": seconds for name, seconds in self.embeddings.timing.items()}
        return {
            "embedding_seconds": self.watch.seconds,
            "collective_seconds": traffic.seconds,
            "collectives": traffic.calls,
            "exchanged": traffic.inside + traffic.across,
        } | phases


class Watch:
    """Seconds inside the sharded module, forward and backward, whatever it does there."""

    def __init__(self, module: Any, feature: str) -> None:
        self.seconds, self.started, self.feature = 0.0, 0.0, feature
        module.register_forward_pre_hook(self.begin)
        module.register_forward_hook(self.after_forward)

    def begin(self, *_: Any) -> None:
        self.started = time.perf_counter()

    def end(self, *_: Any) -> None:
        self.seconds += time.perf_counter() - self.started

    def after_forward(self, module: Any, inputs: Any, output: Any) -> None:
        self.end()
        pooled = module.features[self.feature].pooling is not None
        node = (output.pooled if pooled else output[self.feature].values).grad_fn
        node.register_prehook(self.begin)
        node.register_hook(self.end)


def pooled_model(task: Task, embeddings: uq.Embeddings) -> Any:
    """Our DLRM, with a ReLU at the end of the bottom MLP, as TorchRec's has."""
    import torch

    from unequal.models import ModelConfig, build_model

    config = ModelConfig(kind="dlrm", bottom=(HIDDEN,), top=(HIDDEN,))
    model = build_model(config, embeddings, dense_features=DENSE, tasks=1)
    bottom, top = model.head.bottom, model.head.tops[0]
    bottom.append(torch.nn.ReLU())
    if task.equal:
        weights = dict(task.samples.weights)
        weights["top.0.weight"] = in_our_order(weights["top.0.weight"], len(task.workload.rows), task.workload.dim)
        load({"bottom.0": bottom[0], "bottom.1": bottom[2], "top.0": top[0], "top.1": top[2]}, weights)
    return model


def sequence_model(task: Task, embeddings: uq.Embeddings) -> Any:
    import torch

    from .distributed_models import MeanOfSequences

    features = task.workload.features

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embeddings = embeddings
            self.top = MeanOfSequences(len(features), task.workload.dim)

        def forward(self, batch: uq.Batch) -> Any:
            vectors = self.embeddings(batch)
            return self.top([(vectors[f].values, vectors[f].lengths) for f in features])

    model = Model()
    if task.equal:
        load({"top.0": model.top.mlp[0], "top.1": model.top.mlp[2]}, task.samples.weights)
    return model


def load(layers: dict[str, Any], weights: dict[str, Floats]) -> None:
    import torch

    for name, values in weights.items():
        layer, kind = name.rsplit(".", 1)
        getattr(layers[layer], kind).data.copy_(torch.from_numpy(values))


def in_our_order(weight: Floats, features: int, dim: int) -> Floats:
    """The first top layer's columns: TorchRec counts the dense vector as the first of those that meet, we as the last."""
    count = features + 1
    number = np.zeros((count, count), np.int64)
    number[np.triu_indices(count, 1)] = np.arange(count * (count - 1) // 2)
    number += number.T
    theirs = np.roll(np.arange(count), -1)
    first, second = np.triu_indices(count, 1)
    return np.concatenate([weight[:, :dim], weight[:, dim + number[theirs[first], theirs[second]]]], 1)


def arrange(task: Task, embeddings: uq.Embeddings) -> Placement:
    """What the planner chooses, or every table in one kind; owners pool where a sample has several ids, but not with `+rows`."""
    import torch

    import unequal as uq
    from unequal.plan.placement import Placement, place

    workload, world = task.workload, task.world
    if task.arrangement == "plan":
        ids, lengths = (torch.from_numpy(part[0]) for part in (workload.ids, workload.lengths))
        sample = [uq.Batch(tuple(workload.features), ids, lengths)]
        return uq.make_plan(embeddings, world=world, ranks_per_node=world, batch_size=workload.size, load=sample)
    lookups = workload.lengths[0].reshape(len(workload.rows), workload.size).sum(1)
    load, first = [0] * world, {}
    for t in np.argsort(-lookups, kind="stable"):
        first[t] = load.index(min(load))
        load[first[t]] += int(lookups[t])
    name, _, how = task.arrangement.partition("+")
    kind: Any = name
    sums = (lookups > workload.size) & (workload.pooled and how != "rows")
    tables = enumerate(embeddings.tables.items())
    placed = {name: place(kind, table, world, first=first[t], sums=bool(sums[t])) for t, (name, table) in tables}
    return Placement(world, world, placed)


if __name__ == "__main__":
    keep_freed_memory()  # as `unequal train` does; TorchRec has the same by its environment
    serve(Unequal, import_unequal)
