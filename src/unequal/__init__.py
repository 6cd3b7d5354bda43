"""unequal: embedding rows are not equal. Where a row lives, how wide it is and how warm it is kept are decided per row.

Names are imported when they are first used, so that commands which need no torch (`unequal --help`) do not wait for it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .batch import Batch, Jagged
    from .embeddings import Drift, Embeddings, Output, ShardedEmbeddings, shard
    from .errors import CheckpointError, DataError, RecipeError, UserError
    from .optim import LAMB, LARS, SGD, Adagrad, Adam, Optimizer, RowWiseAdagrad, RowWiseAdam
    from .plan.placement import Placement, Tiers
    from .plan.plan import Plan
    from .plan.planner import make_plan
    from .plan.topology import Topology
    from .schedule import Schedule
    from .stats.profile import Profile
    from .tables import Feature, Table
    from .width import Width

__version__ = "0.1.0"
_HOMES = {
    "batch": ("Batch", "Jagged"),
    "embeddings": ("Drift", "Embeddings", "Output", "ShardedEmbeddings", "shard"),
    "errors": ("CheckpointError", "DataError", "RecipeError", "UserError"),
    "optim": ("LAMB", "LARS", "SGD", "Adagrad", "Adam", "Optimizer", "RowWiseAdagrad", "RowWiseAdam"),
    "plan.placement": ("Placement", "Tiers"),
    "plan.plan": ("Plan",),
    "plan.planner": ("make_plan",),
    "plan.topology": ("Topology",),
    "schedule": ("Schedule",),
    "stats.profile": ("Profile",),
    "tables": ("Feature", "Table"),
    "width": ("Width",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}
__all__ = [
    "LAMB", "LARS", "SGD", "Adagrad", "Adam", "Batch", "CheckpointError", "DataError", "Drift", "Embeddings", "Feature", "Jagged",
    "Optimizer", "Output", "Placement", "Plan", "Profile", "RecipeError", "RowWiseAdagrad", "RowWiseAdam", "Schedule",
    "ShardedEmbeddings", "Table", "Tiers", "Topology", "UserError", "Width", "make_plan", "shard",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'unequal' has no attribute '{name}'")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
