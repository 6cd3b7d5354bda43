"""Tables and features: what is stored, and how a column of ids reads it."""

from dataclasses import dataclass, field
from typing import Literal

import torch

from .errors import RecipeError
from .optim import Optimizer

Pooling = Literal["sum", "mean"] | None
DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "fp16": torch.float16,
    "float16": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class Table:
    """An embedding table. With `rows` its ids are dense in [0, rows); without, they are any 64-bit integers."""

    name: str
    rows: int | None = None
    dim: int = field(kw_only=True)
    dtype: torch.dtype = field(kw_only=True, default=torch.float32)
    """float32, float16 or bfloat16 (or their short names); the last two are rounded stochastically."""
    optimizer: Optimizer | None = field(kw_only=True, default=None)
    """Overrides the module's optimizer for this table."""
    init_std: float = field(kw_only=True, default=0.01)
    """Standard deviation of fresh rows, drawn from (seed, table, id) alone."""
    admit_after: int = field(kw_only=True, default=1)
    """Unbounded ids only: an id gets a row of its own when training has seen it this often; rarer ids share one row."""

    def __post_init__(self) -> None:
        where = f"table '{self.name}'"
        if not self.name or not isinstance(self.name, str):
            raise RecipeError("table name", "a non-empty string", self.name)
        if isinstance(self.dtype, str):
            if self.dtype not in DTYPES:
                raise RecipeError(f"{where} dtype", "fp32, fp16 or bf16", self.dtype)
            object.__setattr__(self, "dtype", DTYPES[self.dtype])
        if self.dtype not in DTYPES.values():
            raise RecipeError(f"{where} dtype", "float32, float16 or bfloat16", self.dtype)
        if self.rows is not None and not 1 <= self.rows < 2**32:
            raise RecipeError(f"{where} rows", "1 to 2³²−1, or none for unbounded ids", self.rows)
        if not 1 <= self.dim <= 4096:
            raise RecipeError(f"{where} dim", "1 to 4096", self.dim)
        if not 0 <= self.init_std < float("inf"):
            raise RecipeError(f"{where} init_std", "a number of 0 or more", self.init_std)
        if self.admit_after < 1:
            raise RecipeError(f"{where} admit_after", "1 or more", self.admit_after)
        if self.admit_after > 1 and self.rows is not None:
            raise RecipeError(f"{where} admit_after", "1 for a table with a fixed number of rows", self.admit_after)


@dataclass(frozen=True, slots=True)
class Feature:
    """A column of id lists and how it reads its table: summed, averaged, or one vector per id (`pooling=None`)."""

    table: Table
    pooling: Pooling = "sum"

    def __post_init__(self) -> None:
        if self.pooling not in ("sum", "mean", None):
            raise RecipeError(f"feature of table '{self.table.name}' pooling", "'sum', 'mean' or None", self.pooling)
