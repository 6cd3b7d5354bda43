"""From a recipe to the things it describes: tables, embeddings, the dense part's optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..embeddings import Embeddings
from ..errors import RecipeError
from ..plan.placement import WHOLE_ROWS
from ..schedule import Schedule
from ..tables import DTYPES, Feature, Table
from .config import OptimizerConfig, Recipe, TableConfig

HOW = ("fused", "foreach", "capturable")
"""The options of torch's optimizers that choose an implementation."""


def build_tables(recipe: Recipe) -> dict[str, Feature]:
    """Every feature column with its table, shared where the recipe groups columns."""
    defaults, tables = recipe.tables, {}
    for name in dict.fromkeys(recipe.table_of().values()):
        own = recipe.tables.named.get(name, TableConfig())
        admit_after = own.admit_after
        if admit_after is None:
            admit_after = 1 if own.rows is not None else defaults.admit_after
        tables[name] = Table(
            name,
            own.rows,
            dim=own.dim or defaults.dim,
            dtype=DTYPES[own.dtype or defaults.dtype],
            init_std=defaults.init_std if own.init_std is None else own.init_std,
            admit_after=admit_after,
        )
    features = {}
    for column, name in recipe.table_of().items():
        pooling = recipe.pooling_of(column)
        features[column] = Feature(tables[name], None if pooling == "none" else pooling)  # type: ignore[arg-type]
    return features


def check_width(recipe: Recipe) -> None:
    """Refuses a [width] that does not fit the recipe's tables."""
    if recipe.width is None:
        return
    tables = {feature.table.name: feature.table for feature in build_tables(recipe).values()}
    recipe.width.check(tables, recipe.optimizer.build_tables())
    valid = ("auto", *WHOLE_ROWS, "tiers")
    for name, sharding in recipe.sharding_of().items():
        if sharding not in valid:
            expected = f"one of {', '.join(valid)} with a [width]: rows that differ in width stay in one piece"
            raise RecipeError(f"tables.{name}.sharding", expected, sharding)


def build_embeddings(
    recipe: Recipe, schedule: Schedule | None = None, device: torch.device | str = "cpu"
) -> Embeddings:
    """The embedding module of the recipe. The schedule is given apart: its end may depend on the length of the run."""
    return Embeddings(
        build_tables(recipe),
        optimizer=recipe.optimizer.build_tables(),
        schedule=schedule,
        seed=recipe.run.seed,
        device=device,
        width=None if recipe.width is None else recipe.width.build(),
    )


def build_dense_optimizer(config: OptimizerConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """On a GPU, Adam updates all parameters in one kernel; elsewhere torch chooses how."""
    parameters = list(parameters)
    kinds: dict[str, Any] = {
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
    }
    options: dict[str, Any] = {"lr": config.dense_lr, "weight_decay": config.dense_weight_decay}
    if config.dense in ("adam", "adamw") and all(parameter.device.type == "cuda" for parameter in parameters):
        options["fused"] = True
    optimizer: torch.optim.Optimizer = kinds[config.dense](parameters, **options)
    return optimizer


def load_dense_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Gives the optimizer a saved state. How it computes stays its own: that belongs to the device, not to the state."""
    groups = [
        {**saved, **{name: own[name] for name in HOW if name in own}}
        for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=True)
    ]
    optimizer.load_state_dict({**state, "param_groups": groups})
