"""The embedding modules."""

from .module import Embeddings, Output
from .sharded import ShardedEmbeddings
from .sharing import shard

__all__ = ["Embeddings", "Output", "ShardedEmbeddings", "shard"]
