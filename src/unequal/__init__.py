"""unequal: embedding rows are not equal. Where a row lives, how wide it is and how warm it is kept are decided per row."""

from .batch import Batch, Jagged
from .embeddings import Embeddings, Output
from .errors import CheckpointError, DataError, RecipeError, UserError
from .optim import LAMB, LARS, SGD, Adagrad, Adam, Optimizer, RowWiseAdagrad, RowWiseAdam
from .schedule import Schedule
from .tables import Feature, Table

__version__ = "0.1.0"
__all__ = [
    "LAMB", "LARS", "SGD", "Adagrad", "Adam", "Batch", "CheckpointError", "DataError", "Embeddings", "Feature", "Jagged",
    "Optimizer", "Output", "RecipeError", "RowWiseAdagrad", "RowWiseAdam", "Schedule", "Table", "UserError",
]  # fmt: skip
