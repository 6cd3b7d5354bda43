"""The embedding modules."""

from .drift import Drift
from .module import Embeddings, Output
from .sharded import ShardedEmbeddings
from .sharing import shard

__all__ = ["Drift", "Embeddings", "Output", "ShardedEmbeddings", "shard"]
