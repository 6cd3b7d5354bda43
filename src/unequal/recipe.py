"""Recipes: the TOML file that says what to train on what, and `key=value` overrides of it."""

from __future__ import annotations

import glob
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from .data.config import DataConfig
from .errors import RecipeError, UserError, nearest
from .models import ModelConfig
from .toml import NOTHING, convert, parse
from .train.build import build_embeddings, build_tables, check_width
from .train.config import (
    ExchangeConfig,
    OptimizerConfig,
    Recipe,
    RunConfig,
    ScheduleConfig,
    TableConfig,
    TablesConfig,
    TiersConfig,
    flatten,
)
from .train.run import RECIPE
from .train.width_config import WidthConfig

__all__ = ["Recipe", "build_embeddings", "build_tables", "load_recipe", "load_run", "parse_recipe"]

PACKAGED = Path(__file__).parent / "recipes"
# What may differ between a run and its continuation: all else would make it another training.
FREE_ON_RESUME = {
    "run.folder",
    "run.epochs",
    "run.steps",
    "run.threads",
    "run.workers",
    "run.checkpoint_every",
    "run.keep_checkpoints",
    "run.log_every",
    "run.evaluation_batch_size",
    "run.evaluate_every",
    "run.select_best",
    "run.early_stop",
    "tables.sharding",
    "exchange.forward",
    "exchange.backward",
    "exchange.unique",
    "tiers.drift",
    "tiers.every",
    "tiers.most",
    "tiers.check",
    "width.tolerance",
    "width.auto_steps",
}
FREE_OF_A_TABLE = (".sharding", ".expected_rows")
SECTIONS = {
    "data": DataConfig,
    "model": ModelConfig,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "exchange": ExchangeConfig,
    "tiers": TiersConfig,
    "width": WidthConfig,
    "run": RunConfig,
}


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a file, or a packaged one such as `default`, with `key=value` overrides laid over it."""
    file = recipe_file(Path(path))
    try:
        text = file.read_text(encoding="utf-8")
        mapping = tomllib.loads(text)
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: expected a TOML file in UTF-8, got other bytes at position {error.start}") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{file}: not valid TOML: {error}; compare the line with the examples' recipes") from error
    except OSError as error:
        raise UserError(f"{file}: cannot read the recipe: {error.strerror}") from error
    for override in overrides:
        apply_override(mapping, override)
    return parse_recipe(mapping, name=file.stem, root=file.resolve().parent)


def load_run(run: Path, recipe: Path | str | None = None, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a run folder. One given beside it may change how long to go on, but not what is trained."""
    own = run / RECIPE
    if not own.is_file():
        what = "a folder without a recipe.toml" if run.is_dir() else "no such folder"
        raise UserError(f"{run}: expected the folder of a run, got {what}; runs are under runs/ or run.folder")
    original = load_recipe(own)
    chosen = load_recipe(own if recipe is None else recipe, overrides)
    if chosen.schedule.total_steps is None:
        chosen = replace(chosen, schedule=replace(chosen.schedule, total_steps=original.schedule.total_steps))
    if chosen.width is not None and chosen.width.searches:  # what was found by then, which may be none
        found = None if original.width is None else replace(chosen.width, budget=original.width.budget)
        chosen = replace(chosen, width=found)
    before, after = flatten(original.to_mapping()), flatten(chosen.to_mapping())
    for field in dict.fromkeys([*before, *after]):
        if not _is_free(field) and not _same(before.get(field), after.get(field)):
            remedy = f"resume with `--resume {run}` alone, or start a new run"
            expected = repr(before[field]) if before.get(field) is not None else "it to be left out,"
            raise RecipeError(field, f"{expected} as in the run {run}", after.get(field), remedy)
    return chosen


def _is_free(field: str) -> bool:
    return field in FREE_ON_RESUME or (field.startswith("tables.") and field.endswith(FREE_OF_A_TABLE))


def _same(before: Any, after: Any) -> bool:
    """A table that is described without columns is the one that is not described."""
    return bool(before == after) or (before in (None, []) and after in (None, []))


def recipe_file(path: Path) -> Path:
    if path.is_file():
        return path
    if path.is_dir():
        if (path / "recipe.toml").is_file():
            return path / "recipe.toml"
        raise UserError(f"{path}: expected a recipe file, got a folder without a recipe.toml; name the .toml file")
    packaged = PACKAGED / f"{path}.toml"
    if len(path.parts) == 1 and packaged.is_file():
        return packaged
    beside = [found.name for found in sorted(path.parent.glob("*.toml"))] if path.parent.is_dir() else []
    names = beside + [found.stem for found in sorted(PACKAGED.glob("*.toml"))]
    raise UserError(f"{path}: no such recipe file; {nearest(path.name, names)}")


def parse_recipe(mapping: Mapping[str, Any], *, name: str = "recipe", root: Path | None = None) -> Recipe:
    """A checked recipe from the nested mapping a TOML file holds."""
    root = Path.cwd() if root is None else root
    known = [f.name for f in fields(Recipe) if f.name not in ("name", "root")]
    for key in mapping:
        if key not in known:
            raise RecipeError(key, "a section of the recipe", key, nearest(key, [f"[{name}]" for name in known]))
    if "data" not in mapping:
        raise RecipeError("data", "a section [data] that names files, labels and columns", NOTHING)
    parts: dict[str, Any] = {key: parse(SECTIONS[key], mapping[key], key) for key in SECTIONS if key in mapping}
    if "tables" in mapping:
        parts["tables"] = _parse_tables(mapping["tables"])
    parts["pooling"] = convert(dict[str, str], mapping.get("pooling", {}), "pooling")
    data: DataConfig = parts["data"]
    parts["data"] = replace(data, files=tuple(_absolute(file, root) for file in data.files))
    recipe = Recipe(**parts, name=name, root=root)
    check_width(recipe)
    return recipe


def _absolute(file: str, root: Path) -> str:
    """A path or pattern that means the same from any folder; the root's own name is never a pattern."""
    file = str(Path(file).expanduser())
    return os.path.normpath(os.path.join(glob.escape(str(root)) if glob.has_magic(file) else str(root), file))


def _parse_tables(mapping: object) -> TablesConfig:
    """[tables] holds defaults and, as [tables.NAME], single tables; a default's name is no table's name."""
    if not isinstance(mapping, Mapping):
        raise RecipeError("tables", "a section [tables]", mapping)
    defaults = [f.name for f in fields(TablesConfig) if f.name != "named"]
    named = {key: value for key, value in mapping.items() if isinstance(value, Mapping) and key not in defaults}
    if "named" in mapping and "named" not in named:
        raise RecipeError("tables.named", "a field of [tables]", "named", "valid: " + ", ".join(defaults))
    tables = parse(TablesConfig, {key: value for key, value in mapping.items() if key not in named}, "tables")
    return replace(tables, named={key: parse(TableConfig, value, f"tables.{key}") for key, value in named.items()})


def apply_override(mapping: dict[str, Any], override: str) -> None:
    """Lays `section.field=value` over a recipe's mapping. The value is TOML; a bare word is text."""
    key, equals, text = override.partition("=")
    try:
        path = tomllib.loads(f"{key.strip()} = 0") if equals and "\n" not in key and "#" not in key else {}
    except tomllib.TOMLDecodeError:
        path = {}
    if not path:
        raise RecipeError("--set", "section.field=value, such as run.epochs=3", override)
    section, names = mapping, []
    while True:
        ((name, path),) = path.items()
        names.append(name)
        if not isinstance(path, dict):
            break
        section = section.setdefault(name, {})
        if not isinstance(section, dict):
            raise RecipeError("--set", f"'{'.'.join(names)}' to be a section of the recipe", override)
    section[names[-1]] = override_value(text)


def override_value(text: str) -> Any:
    """TOML where it is TOML; lists of bare words; else the text itself."""
    text = text.strip()
    try:
        value = tomllib.loads(f"value = {text}")
        if len(value) == 1 and isinstance(value["value"], str | int | float | list | dict):
            return value["value"]
    except tomllib.TOMLDecodeError:
        pass
    if re.fullmatch(r"\[.*\]", text, flags=re.DOTALL):
        return [override_value(item) for item in text[1:-1].split(",") if item.strip()]
    return text
