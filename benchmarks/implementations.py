"""The implementations that embedding_step compares, all behind one interface. Each is imported only by its own worker.

Peers are driven the way their documentation asks for, with their offsets made beforehand; ours makes its own in time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from .workloads import Workload

LEARNING_RATE = 0.02
EPS = 1e-8


class Unsupported(Exception):
    """The peer has no such operator."""


class Implementation(ABC):
    """An embedding module with row-wise AdaGrad (or the nearest the peer has), fed with the batches of a workload."""

    packages: tuple[str, ...] = ("torch",)
    update = "row-wise AdaGrad, fused"

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.ids = [torch.from_numpy(part) for part in workload.ids]
        self.lengths = [torch.from_numpy(part) for part in workload.lengths]
        self.gradient = torch.from_numpy(workload.gradient())

    def gradient_of(self, batch: int) -> Tensor:
        return self.gradient[: self.workload.output_shape(batch)[0]]

    def gradients_by_feature(self, batch: int) -> Sequence[Tensor]:
        gradient = self.gradient_of(batch)
        if self.workload.pooled:
            return gradient.split(self.workload.dim, dim=1)
        return gradient.split(self.workload.counts(batch))

    def offsets_of(self, lengths: Tensor) -> Tensor:
        return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])

    @abstractmethod
    def forward(self, batch: int) -> list[Tensor]:
        """The outputs: one tensor of all features, or one per feature, whichever the implementation gives."""

    def backward(self, batch: int, outputs: list[Tensor]) -> None:
        """Backward and update."""
        torch.autograd.backward(outputs, self.gradients(batch))

    def gradients(self, batch: int) -> Sequence[Tensor]:
        """The upstream gradient in the shape of `forward`'s outputs."""
        return [self.gradient_of(batch)]

    @abstractmethod
    def load_weights(self, weights: list[Tensor]) -> None: ...

    @abstractmethod
    def weights(self) -> list[Tensor]: ...


class Unequal(Implementation):
    packages = ("torch", "unequal")

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        import unequal as uq

        self.batch_type = uq.Batch
        self.tables = [uq.Table(f"t{t}", rows=rows, dim=workload.dim) for t, rows in enumerate(workload.rows)]
        pooling = "sum" if workload.pooled else None
        self.module = uq.Embeddings(
            {name: uq.Feature(table, pooling=pooling) for name, table in zip(workload.features, self.tables)},
            optimizer=uq.RowWiseAdagrad(lr=LEARNING_RATE, eps=EPS),
        )

    def forward(self, batch: int) -> list[Tensor]:
        features = tuple(self.workload.features)
        out = self.module(self.batch_type(features, self.ids[batch], self.lengths[batch]))
        return [out.pooled] if self.workload.pooled else [out[name].values for name in features]

    def gradients(self, batch: int) -> Sequence[Tensor]:
        return [self.gradient_of(batch)] if self.workload.pooled else self.gradients_by_feature(batch)

    def load_weights(self, weights: list[Tensor]) -> None:
        state = self.module.state_dict()
        for table, values in zip(self.tables, weights):
            state[f"{table.name}.weight"] = values
        self.module.load_state_dict(state)

    def weights(self) -> list[Tensor]:
        state = self.module.state_dict()
        return [state[f"{table.name}.weight"] for table in self.tables]


class Fbgemm(Implementation):
    packages = ("torch", "fbgemm-gpu-cpu")

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        self.module = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, workload.dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows in workload.rows],
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=LEARNING_RATE,
            eps=EPS,
            pooling_mode=PoolingMode.SUM if workload.pooled else PoolingMode.NONE,
        )
        self.module.init_embedding_weights_uniform(-0.02, 0.02)
        self.offsets = [self.offsets_of(lengths) for lengths in self.lengths]

    def forward(self, batch: int) -> list[Tensor]:
        return [self.module(self.ids[batch], self.offsets[batch])]

    def load_weights(self, weights: list[Tensor]) -> None:
        for mine, given in zip(self.weights(), weights):
            mine.data.copy_(given)

    def weights(self) -> list[Tensor]:
        return [part.detach() for part in self.module.split_embedding_weights()]


class TorchRec(Implementation):
    packages = ("torch", "torchrec", "fbgemm-gpu-cpu")

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        if not workload.pooled:
            raise Unsupported("TorchRec's fused collection without pooling refuses to run on the CPU")
        import torchrec
        from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

        self.module = FusedEmbeddingBagCollection(
            [
                torchrec.EmbeddingBagConfig(
                    name=f"t_{f}", embedding_dim=workload.dim, num_embeddings=n, feature_names=[f]
                )
                for f, n in zip(workload.features, workload.rows)
            ],
            optimizer_type=torchrec.optim.RowWiseAdagrad,
            optimizer_kwargs={"lr": LEARNING_RATE, "eps": EPS},
            device=torch.device("cpu"),
        )
        self.batches = [
            torchrec.KeyedJaggedTensor(
                keys=workload.features, values=ids, lengths=lengths, offsets=self.offsets_of(lengths)
            )
            for ids, lengths in zip(self.ids, self.lengths)
        ]

    def forward(self, batch: int) -> list[Tensor]:
        return [self.module(self.batches[batch]).values()]

    def load_weights(self, weights: list[Tensor]) -> None:
        for mine, given in zip(self.weights(), weights):
            mine.copy_(given)

    def weights(self) -> list[Tensor]:
        state = self.module.state_dict()
        return [state[f"embedding_bags.t_{f}.weight"] for f in self.workload.features]


class TorchSparse(Implementation):
    """torch's own way: sparse gradients, then the optimizer. It has plain AdaGrad only, not the row-wise."""

    update = "AdaGrad, sparse gradients"

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self.parts: list[torch.nn.Embedding | torch.nn.EmbeddingBag] = []
        for rows in workload.rows:
            weight = torch.empty(rows, workload.dim).uniform_(-0.02, 0.02)
            if workload.pooled:
                part = torch.nn.EmbeddingBag(
                    rows, workload.dim, mode="sum", sparse=True, include_last_offset=True, _weight=weight
                )
            else:
                part = torch.nn.Embedding(rows, workload.dim, sparse=True, _weight=weight)
            self.parts.append(part)
        self.optimizer = torch.optim.Adagrad([part.weight for part in self.parts], lr=LEARNING_RATE, eps=EPS)
        self.inputs = [
            [
                (ids, self.offsets_of(lengths))
                for ids, lengths in zip(all_ids.split(workload.counts(k)), all_lengths.split(workload.size))
            ]
            for k, (all_ids, all_lengths) in enumerate(zip(self.ids, self.lengths))
        ]

    def forward(self, batch: int) -> list[Tensor]:
        inputs = self.inputs[batch]
        if self.workload.pooled:
            return [part(ids, offsets) for part, (ids, offsets) in zip(self.parts, inputs)]
        return [part(ids) for part, (ids, _) in zip(self.parts, inputs)]

    def gradients(self, batch: int) -> Sequence[Tensor]:
        return self.gradients_by_feature(batch)

    def backward(self, batch: int, outputs: list[Tensor]) -> None:
        super().backward(batch, outputs)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def load_weights(self, weights: list[Tensor]) -> None:
        for mine, given in zip(self.weights(), weights):
            mine.copy_(given)

    def weights(self) -> list[Tensor]:
        return [part.weight.detach() for part in self.parts]


IMPLEMENTATIONS: dict[str, type[Implementation]] = {
    "unequal": Unequal,
    "fbgemm": Fbgemm,
    "fbgemm_huge_pages": Fbgemm,
    "torchrec": TorchRec,
    "torch_sparse": TorchSparse,
}
