"""The embedding modules."""

from .module import Embeddings, Output

__all__ = ["Embeddings", "Output"]
