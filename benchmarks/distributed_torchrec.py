"""The peer's side of the distributed benchmark: TorchRec's DistributedModelParallel, with the plan of its own planner.

Runs in the peers' environment (`make peers`). P is TorchRec's own DLRM; in S its EmbeddingCollection gives the vectors.
"""

from __future__ import annotations

from typing import Any

from .distributed_side import DENSE, DENSE_LEARNING_RATE, EPS, HIDDEN, LEARNING_RATE, Side, Task, serve, share
from .workloads import Workload


def import_torchrec() -> None:
    import torchrec.distributed
    import torchrec.models.dlrm  # noqa: F401


class TorchRec(Side):
    packages = ("torch", "torchrec", "fbgemm-gpu-cpu")

    def __init__(self, task: Task) -> None:
        import torch
        from torchrec.distributed import DistributedModelParallel
        from torchrec.optim import RowWiseAdagrad
        from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
        from torchrec.optim.optimizers import in_backward_optimizer_filter
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        workload = task.workload
        self.collection, sharder, model = pooled_model(task) if workload.pooled else sequence_model(task)
        apply_optimizer_in_backward(RowWiseAdagrad, self.collection.parameters(), {"lr": LEARNING_RATE, "eps": EPS})
        plan = make_plan(task, model, sharder)
        self.model = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=[sharder])
        if task.equal:
            load_equal_weights(self.model, task)
        parameters = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        self.optimizer = torch.optim.SGD(parameters.values(), lr=DENSE_LEARNING_RATE)
        self.loss_function = torch.nn.BCEWithLogitsLoss()
        self.batches = []
        for k in range(len(workload.ids)):
            ids, lengths = share(workload, k, task.rank, task.world)
            mine = slice(*(workload.size * r // task.world for r in (task.rank, task.rank + 1)))
            features = KeyedJaggedTensor(
                keys=workload.features, values=torch.from_numpy(ids), lengths=torch.from_numpy(lengths)
            )
            features.offsets()
            dense, labels = (
                torch.from_numpy(part[k, mine].copy()) for part in (task.samples.dense, task.samples.labels)
            )
            self.batches.append((dense, features, labels))

    def loss(self, batch: int) -> Any:
        dense, features, labels = self.batches[batch]
        self.optimizer.zero_grad(set_to_none=True)
        return self.loss_function(self.model(dense, features).squeeze(-1), labels)

    def update(self, loss: Any) -> None:
        loss.backward()
        self.optimizer.step()


def described(workload: Workload, kind: Any) -> list[Any]:
    """The workload's tables as one of TorchRec's kinds of tables."""
    return [
        kind(name=f"t{t}", embedding_dim=workload.dim, num_embeddings=rows, feature_names=[feature])
        for t, (feature, rows) in enumerate(zip(workload.features, workload.rows))
    ]


def pooled_model(task: Task) -> tuple[Any, Any, Any]:
    import torch
    import torchrec
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.models.dlrm import DLRM

    workload = task.workload
    collection = torchrec.EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=described(workload, torchrec.EmbeddingBagConfig),
    )
    model = DLRM(collection, DENSE, [HIDDEN, workload.dim], [HIDDEN, 1], dense_device=torch.device("cpu"))
    return collection, EmbeddingBagCollectionSharder(), model


def sequence_model(task: Task) -> tuple[Any, Any, Any]:
    import torch
    import torchrec
    from torchrec.distributed.embedding import EmbeddingCollectionSharder

    from .distributed_models import MeanOfSequences

    workload = task.workload
    collection = torchrec.EmbeddingCollection(
        device=torch.device("meta"),
        tables=described(workload, torchrec.EmbeddingConfig),
    )

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.collection = collection
            self.top = MeanOfSequences(len(workload.rows), workload.dim)

        def forward(self, dense: Any, features: Any) -> Any:
            vectors = self.collection(features)
            return self.top([(vectors[f].values(), vectors[f].lengths()) for f in workload.features])

    return collection, EmbeddingCollectionSharder(), Model()


def make_plan(task: Task, model: Any, sharder: Any) -> Any:
    """TorchRec's planner, held to one kind of sharding and to the fused kernel."""
    import torch.distributed as dist
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints

    constraints = {
        f"t{t}": ParameterConstraints(
            sharding_types=[task.arrangement],
            compute_kernels=["fused"],
            pooling_factors=[lookups_of(task, t)],
            # By default it splits no columns below 128, and column-wise would be table-wise by another name.
            min_partition=task.workload.dim // task.world,
        )
        for t in range(len(task.workload.rows))
    }
    topology = Topology(world_size=task.world, compute_device="cpu", local_world_size=task.world, ddr_cap=64 * 2**30)
    planner = EmbeddingShardingPlanner(
        topology=topology, batch_size=task.workload.size // task.world, constraints=constraints
    )
    return planner.collective_plan(model, [sharder], dist.group.WORLD)


def lookups_of(task: Task, table: int) -> float:
    """Ids per sample: what TorchRec's planner needs to know to balance the tables."""
    size = task.workload.size
    return float(task.workload.lengths[0][table * size : (table + 1) * size].mean())


def load_equal_weights(model: Any, task: Task) -> None:
    import torch

    state, weights = model.state_dict(), task.samples.weights
    for t, values in enumerate(task.workload.initial_weights()):
        name = next(key for key in state if key.endswith(f".t{t}.weight"))
        for shard in state[name].local_shards():
            place = shard.metadata
            window = tuple(slice(o, o + s) for o, s in zip(place.shard_offsets, place.shard_sizes))
            shard.tensor.copy_(torch.from_numpy(values[window]))
    names = {"bottom.0": "dense_arch.model._mlp.0._linear", "bottom.1": "dense_arch.model._mlp.1._linear"}
    names |= {"top.0": "over_arch.model.0._mlp.0._linear", "top.1": "over_arch.model.1"}
    if not task.workload.pooled:
        names = {"top.0": "top.mlp.0", "top.1": "top.mlp.2"}
    for name, values in weights.items():
        layer, kind = name.rsplit(".", 1)
        target = next(tensor for key, tensor in state.items() if key.endswith(f"{names[layer]}.{kind}"))
        target.copy_(torch.from_numpy(values))


if __name__ == "__main__":
    serve(TorchRec, import_torchrec)
