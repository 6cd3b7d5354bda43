"""What every model ends in: dense columns through the bottom MLP, the interaction, one top MLP per task."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..errors import DataError
from .config import ModelConfig
from .interaction import CrossInteraction, DotInteraction
from .mlp import mlp


class Head(nn.Module):
    """Feature vectors side by side [batch, sum of dims] and dense columns in, logits [batch, tasks] out."""

    def __init__(self, config: ModelConfig, dims: Sequence[int], dense_features: int, tasks: int) -> None:
        super().__init__()
        dim = config.interaction_dim or max(dims)
        self.dense_features = dense_features
        self.bottom = mlp(dense_features, config.bottom, dim, config.dropout) if dense_features else None
        dims = [*dims, dim] if dense_features else list(dims)
        self.interaction: DotInteraction | CrossInteraction
        if config.interaction == "dot":
            self.interaction = DotInteraction(dims, dim)
        else:
            self.interaction = CrossInteraction(dims, config.cross_layers, config.cross_rank)
        # Products alone would hide the dense columns' own effect; cross layers and a lone vector pass it on themselves.
        alone = config.interaction == "cross" or len(dims) == 1
        self.keeps_vectors = config.keep_vectors and not alone
        self.keeps_dense = dense_features > 0 and not alone and not self.keeps_vectors
        inputs = self.interaction.outputs + (sum(dims) if self.keeps_vectors else dim if self.keeps_dense else 0)
        self.tops = nn.ModuleList(mlp(inputs, config.top, 1, config.dropout) for _ in range(tasks))

    def forward(self, vectors: Tensor, dense: Tensor | None) -> Tensor:
        below: Tensor | None = None
        if self.bottom is not None:
            if dense is None or dense.dim() != 2 or dense.shape[1] != self.dense_features:
                got = "none" if dense is None else f"a tensor of shape {list(dense.shape)}"
                raise DataError(f"the model reads {self.dense_features} dense columns per sample, the batch has {got}")
            below = self.bottom(dense)
            vectors = torch.cat([vectors, below], 1)
        x = self.interaction(vectors)
        if self.keeps_vectors:
            x = torch.cat([vectors, x], 1)
        elif self.keeps_dense and below is not None:
            x = torch.cat([below, x], 1)
        return torch.cat([top(x) for top in self.tops], 1)
