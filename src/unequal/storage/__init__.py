"""Where rows lie: memory for tables and outputs, and for every table the answer to `locate(ids) → slots`."""

from .shards import make_shard
from .tables import DenseStorage, HashedStorage, Storage, make_storage

__all__ = ["DenseStorage", "HashedStorage", "Storage", "make_shard", "make_storage"]
