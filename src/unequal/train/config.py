"""What a recipe holds beside data and model: tables, pooling, optimizers, schedule, run; and the checks across them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from ..data.config import DataConfig
from ..embeddings.drift import Drift
from ..errors import RecipeError, UserError, nearest
from ..models import ModelConfig
from ..optim import OPTIMIZERS, Optimizer
from ..plan.placement import Codec, Unique
from ..plan.planner import default_codecs
from ..plan.workload import check_sharding
from ..schedule import Schedule
from ..tables import DTYPES
from ..toml import Section, to_mapping, write
from .width_config import WidthConfig

POOLINGS = ("sum", "mean", "none")
WireCodec = Literal["auto", "fp32", "fp16", "bf16", "int8"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TableConfig:
    """One table. What is left out is taken from [tables]."""

    columns: tuple[str, ...] = ()
    """The columns that read it; the column of the table's own name where none is given."""
    rows: int | None = None
    """Ids are dense in [0, rows); left out, they are any 64-bit integers or strings."""
    dim: int | None = None
    dtype: str | None = None
    init_std: float | None = None
    admit_after: int | None = None
    sharding: str | None = None
    """How it is spread over the ranks of a job: auto, or one kind."""
    expected_rows: int | None = None
    """Without `rows`: how many there will be, where the plan should not estimate it from a sample of the data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TablesConfig:
    """Defaults of all tables, and the tables that are described one by one."""

    dim: int = 16
    dtype: str = "fp32"
    init_std: float = 0.05
    """Standard deviation of fresh rows."""
    admit_after: int = 1
    """Unbounded ids only: how often an id must be seen before it gets a row of its own; rarer ids share one."""
    sharding: str = "auto"
    """How tables are spread over the ranks of a job: auto, table_wise, row_wise, column_wise, data_parallel, or hierarchical."""
    named: dict[str, TableConfig] = field(default_factory=dict)

    def __post_init__(self) -> None:
        described: dict[str, TablesConfig | TableConfig] = {"tables": self}
        described |= {f"tables.{name}": table for name, table in self.named.items()}
        for path, table in described.items():
            if table.dim is not None and not 1 <= table.dim <= 4096:
                raise RecipeError(f"{path}.dim", "1 to 4096", table.dim)
            if table.dtype is not None and table.dtype not in DTYPES:
                raise RecipeError(f"{path}.dtype", "fp32, fp16 or bf16", table.dtype)
            if table.init_std is not None and table.init_std < 0:
                raise RecipeError(f"{path}.init_std", "a number of 0 or more", table.init_std)
            if table.admit_after is not None and table.admit_after < 1:
                raise RecipeError(f"{path}.admit_after", "1 or more", table.admit_after)
            if table.sharding is not None:
                check_sharding(table.sharding, f"{path}.sharding")
        for name, own in self.named.items():
            if own.rows is not None and not 1 <= own.rows < 2**32:
                raise RecipeError(f"tables.{name}.rows", "1 to 2³²−1, or no such line for unbounded ids", own.rows)
            if own.rows is not None and (own.admit_after or 1) > 1:
                raise RecipeError(f"tables.{name}.admit_after", "1 for a table with `rows`", own.admit_after)
            if own.expected_rows is not None and (own.rows is not None or own.expected_rows < 1):
                expected = "1 or more" if own.rows is None else "no such line for a table with `rows`"
                raise RecipeError(f"tables.{name}.expected_rows", expected, own.expected_rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """The tables' fused optimizer and the dense part's torch optimizer."""

    tables: str = "row_wise_adagrad"
    tables_lr: float = 0.05
    tables_weight_decay: float = 0.0
    tables_options: dict[str, float] = field(default_factory=dict)
    """Further hyperparameters of the tables' optimizer: eps, beta1, beta2, momentum, trust."""
    dense: Literal["adam", "adamw", "sgd", "adagrad"] = "adam"
    dense_lr: float = 0.001
    dense_weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if self.tables not in OPTIMIZERS:
            raise RecipeError(
                "optimizer.tables", "one of " + ", ".join(OPTIMIZERS), self.tables, nearest(self.tables, OPTIMIZERS)
            )
        for name in ("dense_lr", "dense_weight_decay", "tables_lr", "tables_weight_decay"):
            if getattr(self, name) < 0:
                raise RecipeError(f"optimizer.{name}", "a number of 0 or more", getattr(self, name))
        valid = [f.name for f in fields(OPTIMIZERS[self.tables]) if f.name not in ("lr", "weight_decay")]
        for name in self.tables_options:
            if name not in valid:
                raise RecipeError(
                    f"optimizer.tables_options.{name}", f"a hyperparameter of {self.tables}", name, nearest(name, valid)
                )
        try:
            self.build_tables()
        except RecipeError as error:
            option = error.field.rpartition(".")[2]
            raise UserError(str(error).replace(error.field, f"optimizer.tables_options.{option}", 1)) from error

    def build_tables(self) -> Optimizer:
        return OPTIMIZERS[self.tables](lr=self.tables_lr, weight_decay=self.tables_weight_decay, **self.tables_options)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """The learning rates' course, shared by tables and dense part."""

    kind: Literal["constant", "linear", "cosine", "inverse_sqrt"] = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    """Where linear and cosine end; left out, the length of the run."""
    final: float = 0.0
    """The factor of the base rate at the end."""

    def __post_init__(self) -> None:
        self.build(self.warmup_steps + 1)

    def build(self, run_steps: int) -> Schedule:
        total = self.total_steps
        if total is None and self.kind in ("linear", "cosine"):
            total = run_steps
        return Schedule(kind=self.kind, warmup_steps=self.warmup_steps, total_steps=total, final=self.final)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeConfig:
    """How rows and their gradients travel between the ranks of a job."""

    forward: WireCodec = "auto"
    """Precision of rows on the way: fp32, fp16, bf16, int8 (with a scale per row); auto is fp16 on GPUs, else fp32."""
    backward: WireCodec = "auto"
    """Of gradients; auto is bf16 on GPUs, else fp32."""
    unique: Unique = "node"
    """What travels once: node (each row crosses the network once per node that reads it), rank (once per rank), or none (every id
    and row as often as it is read, as others do by default; for comparison)."""

    def codecs(self, device: str) -> tuple[Codec, Codec]:
        """Forward and backward, on ranks of this kind of device."""
        forward, backward = default_codecs(device)
        return (
            forward if self.forward == "auto" else self.forward,
            backward if self.backward == "auto" else self.backward,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TiersConfig:
    """What is done when the rows that are read most are no longer those that a tiered plan has copies of."""

    drift: Literal["off", "report", "on"] = "report"
    """off: nothing is counted; report: the plan's age is told; on: rows also move between tiers."""
    every: int = 500
    """Steps between rounds."""
    most: int = 8192
    """Rows of a table that may move in a round."""
    check: bool = False
    """Compares all copies with their owners' rows at every line of the log; to find faults."""

    def __post_init__(self) -> None:
        for name in ("every", "most"):
            if getattr(self, name) < 1:
                raise RecipeError(f"tiers.{name}", "1 or more", getattr(self, name))

    def build(self) -> Drift:
        return Drift(mode=self.drift, every=self.every, most=self.most)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """How long, how large, how often."""

    folder: str = ""
    """Where the run is kept; {name} is the recipe's name. Empty: the next free runs/<name>-<number>."""
    epochs: int = 1
    steps: int = 0
    """Stops after so many steps if the epochs are longer; 0 is no limit."""
    batch_size: int = 2048
    evaluation_batch_size: int = 8192
    seed: int = 0
    threads: int = 0
    """Threads of a step; 0 is torch's default."""
    workers: int = 1
    """Threads that read ahead; 0 reads between the steps."""
    checkpoint_every: int = 1000
    """Steps; there is always one at the end. 0: only that one and those of the best evaluations."""
    keep_checkpoints: int = 2
    log_every: int = 50
    evaluate_every: int = 0
    """Steps between evaluations on the validation part; 0 is once per epoch."""
    select_best: bool = True
    """With a validation part: the run's result is the checkpoint of the best evaluation, not the last one."""
    early_stop: int = 0
    """Stops after so many evaluations without improvement; 0 is never."""

    def __post_init__(self) -> None:
        positive = ("epochs", "batch_size", "evaluation_batch_size", "keep_checkpoints", "log_every")
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, int) and value < (least := 1 if f.name in positive else 0):
                raise RecipeError(f"run.{f.name}", f"{least} or more", value)
        if self.seed >= 2**63:
            raise RecipeError("run.seed", "less than 2⁶³", self.seed)
        placeholders = self.folder.replace("{name}", "")
        if "{" in placeholders or "}" in placeholders:
            raise RecipeError("run.folder", "a path in which only {name} is replaced", self.folder)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Everything a run is made of, checked."""

    data: DataConfig
    tables: TablesConfig = field(default_factory=TablesConfig)
    pooling: dict[str, str] = field(default_factory=dict)
    """Per column: sum (the default), mean, or none (the default of a history column)."""
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    exchange: ExchangeConfig = field(default_factory=ExchangeConfig)
    tiers: TiersConfig = field(default_factory=TiersConfig)
    width: WidthConfig | None = None
    """A budget, inside which rows are as wide as they deserve; without it all are whole."""
    run: RunConfig = field(default_factory=RunConfig)
    name: str = field(default="recipe", compare=False)
    """Names the run folder; not part of the file."""
    root: Path = field(default_factory=Path, compare=False)
    """The folder that relative file names start from; not part of the file."""

    def __post_init__(self) -> None:
        _check_columns(self)
        _check_tables(self)
        _check_sequences(self)

    @property
    def features(self) -> tuple[str, ...]:
        return self.data.features

    def pooling_of(self, column: str) -> str:
        history = self.model.kind == "sequence" and column in self.model.history
        return self.pooling.get(column, "none" if history else "sum")

    def table_of(self) -> dict[str, str]:
        """Column → name of its table."""
        grouped = {c: name for name, table in self.tables.named.items() for c in table.columns or (name,)}
        return {column: grouped.get(column, column) for column in self.features}

    def sharding_of(self) -> dict[str, str]:
        """Table → how it may be spread."""
        named = self.tables.named
        return {
            name: (named[name].sharding if name in named else None) or self.tables.sharding
            for name in self.table_of().values()
        }

    def expected_rows(self) -> dict[str, int]:
        """Table → how many rows it will have, where the recipe says so."""
        return {name: own.expected_rows for name, own in self.tables.named.items() if own.expected_rows is not None}

    def to_mapping(self) -> Section:
        sections = to_mapping(self)
        del sections["name"], sections["root"]
        tables = sections["tables"]
        tables |= {name: to_mapping(table) for name, table in self.tables.named.items()}
        del tables["named"]
        sections["pooling"] = Section(self.pooling)
        if self.width is None:  # no word of it: recipes from before there was width keep their hash
            del sections["width"]
        return sections

    def to_toml(self) -> str:
        """The recipe as a file, with every field written out. Loading it gives an equal recipe."""
        return write(self.to_mapping())

    def hash(self) -> str:
        """Names what is trained: the same for equal recipes, wherever their run folder is and however tables are spread."""
        named = {name: replace(own, sharding=None, expected_rows=None) for name, own in self.tables.named.items()}
        described = {name: own for name, own in named.items() if own != TableConfig()}
        tables = replace(self.tables, sharding="auto", named=described)
        width = None if self.width is None else self.width.as_found()
        same = replace(self, run=replace(self.run, folder=""), tables=tables, tiers=TiersConfig(), width=width)
        return hashlib.sha256(same.to_toml().encode()).hexdigest()[:16]


def flatten(mapping: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Nested sections as dotted names, to compare two recipes field by field."""
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, Section):
            flat |= flatten(value, f"{path}{key}.")
        else:
            flat[f"{path}{key}"] = value
    return flat


def _check_columns(recipe: Recipe) -> None:
    data = recipe.data
    if not recipe.features:
        raise RecipeError("data.categorical", "at least one categorical or sequence column", list(data.categorical))
    if not data.files and data.generate is None:
        raise RecipeError("data.files", "Parquet files, or a section [data.generate]", [], 'say files = ["*.parquet"]')
    if data.files and data.generate is not None:
        raise RecipeError("data.generate", "no such section where data.files names files", list(data.files), "keep one")
    for column, pooling in recipe.pooling.items():
        if column not in recipe.features:
            hint = nearest(column, recipe.features)
            raise RecipeError(f"pooling.{column}", "a column of data.categorical or data.sequences", column, hint)
        if pooling not in POOLINGS:
            raise RecipeError(f"pooling.{column}", "one of " + ", ".join(POOLINGS), pooling)


def _check_tables(recipe: Recipe) -> None:
    owner: dict[str, str] = {}
    for name, table in recipe.tables.named.items():
        for column in table.columns or (name,):
            if column not in recipe.features:
                where = f"tables.{name}.columns" if table.columns else f"tables.{name}"
                hint = nearest(column, recipe.features)
                remedy = hint if table.columns else f"{hint} or name the table's columns"
                raise RecipeError(where, "columns of data.categorical or data.sequences", column, remedy)
            if column in owner:
                raise RecipeError(
                    f"tables.{name}.columns", f"columns of no other table ('{column}' reads '{owner[column]}')", column
                )
            owner[column] = name
    for column in recipe.features:
        if column not in owner and column in recipe.tables.named:
            raise RecipeError(
                f"tables.{column}.columns",
                f"also the column '{column}', which has no table yet and would get one of the same name",
                list(recipe.tables.named[column].columns),
                "add the column or rename the table",
            )


def _check_sequences(recipe: Recipe) -> None:
    model = recipe.model
    for history, target in model.history.items():
        for column in (history, target):
            if column not in recipe.features:
                raise RecipeError(
                    f"model.history.{history}",
                    "columns of data.sequences and data.categorical",
                    column,
                    nearest(column, recipe.features),
                )
        if recipe.pooling_of(target) == "none":
            raise RecipeError(f"model.history.{history}", "a target column with one id per sample", target)
    for column in recipe.features:
        pooling = recipe.pooling_of(column)
        pooled = pooling != "none"
        if pooled and model.kind == "sequence" and column in model.history:
            raise RecipeError(f"pooling.{column}", "none for a history of the sequence model", pooling)
        if not pooled and (model.kind != "sequence" or column not in model.history):
            raise RecipeError(
                f"pooling.{column}",
                "sum or mean for a column that is no history of a sequence model",
                "none",
                'choose one, or set model.kind = "sequence" and name the column in model.history',
            )
