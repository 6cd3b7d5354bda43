"""A DLRM whose history columns are encoded against their target before they join the interaction."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..errors import RecipeError, nearest
from .config import ModelConfig
from .encoder import TargetAttention, TransformerEncoder
from .head import Head

if TYPE_CHECKING:
    from ..batch import Batch, Jagged
    from ..embeddings import Embeddings


class SequenceDLRM(nn.Module):
    """`model(batch)` gives logits [size, tasks]. Histories are unpooled features, all others pooled."""

    def __init__(self, config: ModelConfig, embeddings: Embeddings, *, dense_features: int, tasks: int) -> None:
        super().__init__()
        features = embeddings.features
        _check_columns(config, embeddings)
        self.embeddings = embeddings
        self.histories = dict(config.history)
        pooled = {name: feature.table.dim for name, feature in features.items() if feature.pooling is not None}
        self.spans: dict[str, tuple[int, int]] = {}
        start = 0
        for name, dim in pooled.items():
            self.spans[name] = (start, start + dim)
            start += dim
        dims = [features[name].table.dim for name in self.histories]
        self.encoders = nn.ModuleList(
            _encoder(config, name, dim, pooled[target]) for (name, target), dim in zip(self.histories.items(), dims)
        )
        self.head = Head(config, [*pooled.values(), *dims], dense_features, tasks)

    def forward(self, batch: Batch) -> Tensor:
        out = self.embeddings(batch)
        pooled = out.pooled
        vectors = [pooled]
        for encoder, (name, target) in zip(self.encoders, self.histories.items()):
            first, last = self.spans[target]
            vectors.append(encoder(_weighted(out[name]), pooled[:, first:last]))
        logits: Tensor = self.head(torch.cat(vectors, 1), batch.dense)
        return logits


def _weighted(history: Jagged) -> Jagged:
    """Ids' weights scale their vectors, as they do in a pooled sum."""
    if history.weights is None:
        return history
    return replace(history, values=history.values * history.weights.unsqueeze(1))


def _encoder(config: ModelConfig, name: str, dim: int, target_dim: int) -> nn.Module:
    if config.encoder == "attention":
        return TargetAttention(dim, target_dim)
    if dim % config.heads:
        raise RecipeError("model.heads", f"a divisor of the dim of '{name}' ({dim})", config.heads)
    return TransformerEncoder(
        dim,
        target_dim,
        layers=config.layers,
        heads=config.heads,
        max_positions=config.max_positions,
        dropout=config.dropout,
    )


def _check_columns(config: ModelConfig, embeddings: Embeddings) -> None:
    features = embeddings.features
    for name, target in config.history.items():
        for column, role in ((name, "history"), (target, "target")):
            if column not in features:
                raise RecipeError("model.history", f"a {role} that is an id column", column, nearest(column, features))
        if features[name].pooling is not None:
            raise RecipeError(f"pooling of '{name}'", "none for a history column", features[name].pooling)
        if features[target].pooling is None:
            raise RecipeError(
                "model.history", f"a pooled target for '{name}'", target, f"give '{target}' pooling sum or mean"
            )
    for name, feature in features.items():
        if feature.pooling is None and name not in config.history:
            raise RecipeError(
                f"pooling of '{name}'",
                "sum or mean for a column that is not in model.history",
                feature.pooling,
                "pool the column, or name it in model.history with its target",
            )
