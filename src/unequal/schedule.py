"""Learning-rate schedules, shared by the tables and the dense part: a step number in, a factor of the base rate out."""

import math
from dataclasses import dataclass

from .errors import RecipeError

KINDS = ("constant", "linear", "cosine", "inverse_sqrt")


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Rises linearly over `warmup_steps`, then stays, or falls to `final` of the base rate at `total_steps`."""

    kind: str = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    final: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise RecipeError("schedule.kind", "one of " + ", ".join(KINDS), self.kind)
        if self.warmup_steps < 0:
            raise RecipeError("schedule.warmup_steps", "0 or more", self.warmup_steps)
        if not 0 <= self.final <= 1:
            raise RecipeError("schedule.final", "a factor between 0 and 1", self.final)
        if self.kind in ("linear", "cosine") and (self.total_steps is None or self.total_steps <= self.warmup_steps):
            raise RecipeError("schedule.total_steps", f"more than warmup_steps ({self.warmup_steps})", self.total_steps)

    def __call__(self, step: int) -> float:
        """The factor for the update number `step`, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return 1.0
        if self.kind == "inverse_sqrt":
            return math.sqrt(max(1, self.warmup_steps) / max(1, step + 1))
        assert self.total_steps is not None
        done = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        left = 1 - done if self.kind == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return self.final + (1 - self.final) * left
