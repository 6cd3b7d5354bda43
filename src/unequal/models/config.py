"""The `[model]` part of a recipe: which model, how it mixes features, how it reads histories."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import RecipeError, nearest

KINDS = ("dlrm", "sequence")
INTERACTIONS = ("dot", "cross")
ENCODERS = ("attention", "transformer")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A DLRM, plain or with encoded histories. Sizes of tables belong to the tables, not here."""

    kind: str = "dlrm"
    """"dlrm", or "sequence" when `history` names columns to be encoded against a target."""
    bottom: tuple[int, ...] = (64,)
    """Hidden sizes of the MLP over the dense columns; its output always has the interaction's dim."""
    top: tuple[int, ...] = (128, 64)
    """Hidden sizes of each task's MLP over the interaction."""
    interaction: str = "dot"
    """"dot" (all pairs of feature vectors) or "cross" (DCN-v2 cross layers over all their values)."""
    interaction_dim: int | None = None
    """Dim the dot interaction brings features to (default: the largest table's); for cross, of the bottom's output."""
    keep_vectors: bool = False
    """Dot interaction: the top MLPs read the feature vectors too, beside their products."""
    cross_layers: int = 3
    cross_rank: int = 0
    """Rank of the cross layers' matrices; 0 for full matrices."""
    history: Mapping[str, str] = field(default_factory=dict)
    """History column → the column it is compared with, for kind "sequence"."""
    encoder: str = "attention"
    """"attention" (the target weighs the history) or "transformer" (history and target through encoder layers)."""
    layers: int = 1
    """Layers of the transformer encoder."""
    heads: int = 2
    """Attention heads of the transformer encoder; must divide the history table's dim."""
    max_positions: int = 64
    """The transformer encoder reads this many ids at the end of a history, the newest."""
    dropout: float = 0.0
    """Share of values dropped after each hidden layer in training."""

    def __post_init__(self) -> None:
        for name, valid in (("kind", KINDS), ("interaction", INTERACTIONS), ("encoder", ENCODERS)):
            value = getattr(self, name)
            if value not in valid:
                raise RecipeError(f"model.{name}", "one of " + ", ".join(valid), value, nearest(str(value), valid))
        for name in ("bottom", "top"):
            sizes = getattr(self, name)
            if not isinstance(sizes, list | tuple) or not all(_is_count(size, 1) for size in sizes):
                raise RecipeError(f"model.{name}", "a list of layer sizes, each 1 or more", sizes)
            object.__setattr__(self, name, tuple(sizes))
        if self.interaction_dim is not None and not _is_count(self.interaction_dim, 1):
            raise RecipeError(
                "model.interaction_dim", "1 or more, or nothing for the largest table's dim", self.interaction_dim
            )
        if not isinstance(self.keep_vectors, bool):
            raise RecipeError("model.keep_vectors", "true or false", self.keep_vectors)
        for name, least in (("cross_layers", 1), ("cross_rank", 0), ("layers", 1), ("heads", 1), ("max_positions", 1)):
            if not _is_count(getattr(self, name), least):
                raise RecipeError(f"model.{name}", f"a whole number of {least} or more", getattr(self, name))
        if isinstance(self.dropout, bool) or not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise RecipeError("model.dropout", "a share from 0 to below 1", self.dropout)
        self._check_history()

    def _check_history(self) -> None:
        history = self.history
        if not isinstance(history, Mapping) or not all(
            isinstance(part, str) for pair in history.items() for part in pair
        ):
            raise RecipeError("model.history", 'pairs of columns such as { history = "item" }', history)
        if self.kind == "sequence" and not history:
            raise RecipeError(
                "model.history",
                'a history column and its target for kind "sequence"',
                {},
                'for example { history = "item" }',
            )
        if self.kind == "dlrm" and history:
            raise RecipeError("model.history", 'nothing for kind "dlrm"', dict(history), 'set model.kind = "sequence"')


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
