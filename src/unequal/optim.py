"""The fused optimizers: what each is called with and which state it keeps per row. The kernels apply them.

Every touched row is updated once per step with the sum of its gradients, in a fixed order. Rows that were not read in a
step are not touched at all: no decay, no momentum. Norms (LAMB, LARS) are taken per row.
"""

from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from .errors import RecipeError

Per = Literal["row", "value"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """Base of the fused optimizers. `code` is the kernels' number for it; `state` lists (name, one per row or per value)."""

    code: ClassVar[int]
    state: ClassVar[tuple[tuple[str, Per], ...]] = ()
    squares: ClassVar[int] = -1
    """which state has squares of gradients, of every value or of the row on average; -1: none has"""
    measured: ClassVar[bool] = False
    """whether gradients are measured by those before, so that a value's step is about as long whatever they are"""

    lr: float = 0.01
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        for name in (part.name for part in fields(self)):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not value >= 0 or value == float("inf"):
                raise RecipeError(f"{type(self).__name__}.{name}", "a number of 0 or more", value)
            if name.startswith("beta") and value >= 1:
                raise RecipeError(f"{type(self).__name__}.{name}", "a number below 1", value)

    def hyperparameters(self) -> tuple[float, float, float, float]:
        """What the kernel reads beside learning rate, decay and step: first and second beta (or momentum), eps, trust."""
        return (0.0, 0.0, 0.0, 0.0)

    def state_bytes_per_row(self, dim: int) -> int:
        return sum(4 if per == "row" else 4 * dim for _, per in self.state)


@dataclass(frozen=True, kw_only=True, slots=True)
class SGD(Optimizer):
    """w ← w − lr·(g + decay·w)"""

    code: ClassVar[int] = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Adagrad(Optimizer):
    """g ← g + decay·w;  s ← s + g²;  w ← w − lr·g / (√s + eps), s per value"""

    code: ClassVar[int] = 1
    state: ClassVar[tuple[tuple[str, Per], ...]] = (("sum", "value"),)
    squares: ClassVar[int] = 0
    measured: ClassVar[bool] = True
    eps: float = 1e-8

    def hyperparameters(self) -> tuple[float, float, float, float]:
        return (0.0, 0.0, self.eps, 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowWiseAdagrad(Optimizer):
    """g ← g + decay·w;  s ← s + mean(g²);  w ← w − lr·g / (√s + eps), one s per row"""

    code: ClassVar[int] = 2
    state: ClassVar[tuple[tuple[str, Per], ...]] = (("sum", "row"),)
    squares: ClassVar[int] = 0
    measured: ClassVar[bool] = True
    eps: float = 1e-8

    def hyperparameters(self) -> tuple[float, float, float, float]:
        return (0.0, 0.0, self.eps, 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Adam(Optimizer):
    """m ← β₁m + (1−β₁)g;  v ← β₂v + (1−β₂)g²;  w ← w − lr·(m̂ / (√v̂ + eps) + decay·w), corrected by the global step"""

    code: ClassVar[int] = 3
    state: ClassVar[tuple[tuple[str, Per], ...]] = (("first", "value"), ("second", "value"))
    squares: ClassVar[int] = 1
    measured: ClassVar[bool] = True
    lr: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def hyperparameters(self) -> tuple[float, float, float, float]:
        return (self.beta1, self.beta2, self.eps, 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowWiseAdam(Adam):
    """Adam with one second moment per row: v ← β₂v + (1−β₂)·mean(g²)"""

    code: ClassVar[int] = 4
    state: ClassVar[tuple[tuple[str, Per], ...]] = (("first", "value"), ("second", "row"))


@dataclass(frozen=True, kw_only=True, slots=True)
class LAMB(Adam):
    """r = m̂ / (√v̂ + eps) + decay·w;  w ← w − lr·(‖w‖ / ‖r‖)·r, norms per row; where either norm is 0 the ratio is 1"""

    code: ClassVar[int] = 5
    measured: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True, slots=True)
class LARS(Optimizer):
    """l = lr·trust·‖w‖ / (‖g‖ + decay·‖w‖), or lr where a norm is 0;  m ← momentum·m + l·(g + decay·w);  w ← w − m"""

    code: ClassVar[int] = 6
    state: ClassVar[tuple[tuple[str, Per], ...]] = (("momentum", "value"),)
    momentum: float = 0.9
    trust: float = 0.001

    def hyperparameters(self) -> tuple[float, float, float, float]:
        return (self.momentum, 0.0, 0.0, self.trust)


OPTIMIZERS: dict[str, type[Optimizer]] = {
    "sgd": SGD,
    "adagrad": Adagrad,
    "row_wise_adagrad": RowWiseAdagrad,
    "adam": Adam,
    "row_wise_adam": RowWiseAdam,
    "lamb": LAMB,
    "lars": LARS,
}
