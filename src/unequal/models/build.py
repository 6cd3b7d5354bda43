"""From a configuration and an embedding module to a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from ..errors import RecipeError
from .config import ModelConfig
from .dlrm import DLRM
from .sequence import SequenceDLRM
from .vector_math import settle

if TYPE_CHECKING:
    from ..embeddings import Embeddings


def build_model(config: ModelConfig, embeddings: Embeddings, *, dense_features: int, tasks: int) -> nn.Module:
    """A model that owns `embeddings` and gives logits [size, tasks] for a batch.

    Dense weights are drawn from torch's global generator: seed it first for a model that repeats.
    """
    if not embeddings.features:
        raise RecipeError("data.categorical", "at least one column of ids", [])
    if tasks < 1:
        raise RecipeError("data.labels", "at least one label", tasks)
    settle()
    kind = DLRM if config.kind == "dlrm" else SequenceDLRM
    return kind(config, embeddings, dense_features=dense_features, tasks=tasks)
