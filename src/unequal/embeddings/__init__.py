"""The embedding modules."""

from .drift import Drift
from .module import Embeddings
from .output import Output
from .sharded import ShardedEmbeddings
from .sharing import shard

__all__ = ["Drift", "Embeddings", "Output", "ShardedEmbeddings", "shard"]
