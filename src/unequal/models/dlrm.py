"""DLRM: pooled embeddings and a bottom MLP, an interaction of all feature vectors, one top MLP per task."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from ..errors import RecipeError
from .config import ModelConfig
from .head import Head

if TYPE_CHECKING:
    from ..batch import Batch
    from ..embeddings import Embeddings


class DLRM(nn.Module):
    """`model(batch)` gives logits [size, tasks]. Every feature of the embeddings must be pooled."""

    def __init__(self, config: ModelConfig, embeddings: Embeddings, *, dense_features: int, tasks: int) -> None:
        super().__init__()
        for name, feature in embeddings.features.items():
            if feature.pooling is None:
                raise RecipeError(
                    f"pooling of '{name}'",
                    'sum or mean in a model of kind "dlrm"',
                    feature.pooling,
                    'pool the column, or set model.kind = "sequence" and name it in model.history',
                )
        self.embeddings = embeddings
        dims = [feature.table.dim for feature in embeddings.features.values()]
        self.head = Head(config, dims, dense_features, tasks)

    def forward(self, batch: Batch) -> Tensor:
        logits: Tensor = self.head(self.embeddings(batch).pooled, batch.dense)
        return logits
