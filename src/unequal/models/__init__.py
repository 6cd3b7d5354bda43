"""Models over the embedding module: DLRM, plain and with encoded histories."""

from .build import build_model
from .config import ModelConfig
from .dlrm import DLRM
from .sequence import SequenceDLRM

__all__ = ["DLRM", "ModelConfig", "SequenceDLRM", "build_model"]
