"""TOML into frozen dataclasses and back: each value is checked against its field's type, mistakes named in one line."""

from __future__ import annotations

import json
import math
import re
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from .errors import RecipeError, nearest

T = TypeVar("T")
BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
WORDS = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}


class _Nothing:
    """Stands for a value that was not given, so that an error reads `got nothing`."""

    def __repr__(self) -> str:
        return "nothing"


NOTHING = _Nothing()


def parse(cls: type[T], mapping: object, path: str) -> T:
    """An instance of the dataclass `cls` from a TOML table; `path` is how the table is named in errors."""
    if not isinstance(mapping, Mapping):
        raise RecipeError(path, f"a table [{path}]", mapping)
    hints = get_type_hints(cls)
    known = {field.name: field for field in fields(cls) if field.init}  # type: ignore[arg-type]
    for key in mapping:
        if key not in known:
            raise RecipeError(f"{path}.{key}", f"a field of [{path}]", key, nearest(key, known))
    values = {key: convert(hints[key], value, f"{path}.{key}") for key, value in mapping.items()}
    for name, field in known.items():
        if name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise RecipeError(f"{path}.{name}", describe(hints[name]), NOTHING, f"add it to [{path}]")
    return cls(**values)


def convert(hint: Any, value: object, path: str) -> Any:
    """`value` as the type `hint` says, or a RecipeError that names `path`."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _convert_union(arguments, value, path)
    if origin is Literal:
        if value not in arguments or isinstance(value, bool) != isinstance(arguments[0], bool):
            remedy = nearest(value, arguments) if isinstance(value, str) else ""
            raise RecipeError(path, describe(hint), value, remedy if remedy.startswith("did") else "")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            remedy = f"write [{json.dumps(value, ensure_ascii=False)}]" if isinstance(value, str | int | float) else ""
            raise RecipeError(path, describe(hint), value, remedy)
        return tuple(convert(arguments[0], item, f"{path}[{index}]") for index, item in enumerate(value))
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise RecipeError(path, describe(hint), value)
        return {key: convert(arguments[1], item, f"{path}.{key}") for key, item in value.items()}
    if is_dataclass(hint):
        return parse(hint, value, path)  # type: ignore[arg-type]
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise RecipeError(path, "a finite number", value)
        return float(value)
    if hint not in WORDS:
        raise TypeError(f"{path}: recipes cannot hold a {hint}")
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise RecipeError(path, describe(hint), value)
    return value


def _convert_union(arguments: tuple[Any, ...], value: object, path: str) -> Any:
    """X | None: TOML has no null, so the word none stands for it where X is not text."""
    options = [argument for argument in arguments if argument is not type(None)]
    if value is None or (value == "none" and str not in options and len(options) < len(arguments)):
        return None
    if len(options) == 1:
        return convert(options[0], value, path)
    for option in options:
        try:
            return convert(option, value, path)
        except RecipeError:
            continue
    raise RecipeError(path, " or ".join(describe(option) for option in options), value)


def describe(hint: Any) -> str:
    """What a type expects, in words."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(argument) for argument in arguments if argument is not type(None))
    if origin is Literal:
        return "one of " + ", ".join(str(argument) for argument in arguments)
    if origin is tuple:
        return "a list of " + describe(arguments[0]).removeprefix("a ").removeprefix("an ") + "s"
    if origin in (dict, Mapping) or is_dataclass(hint):
        return "a table"
    return WORDS.get(hint, str(hint))


class Section(dict[str, Any]):
    """A mapping that is written as a [section] of its own; plain mappings are written inline."""


def to_mapping(instance: Any) -> Section:
    """The dataclass as nested plain values, every field included, None too."""

    def plain(value: Any) -> Any:
        if is_dataclass(value):
            return to_mapping(value)
        if isinstance(value, Mapping):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    return Section({field.name: plain(getattr(instance, field.name)) for field in fields(instance) if field.init})


def write(section: Mapping[str, Any], path: tuple[str, ...] = ()) -> str:
    """TOML text. A value of None has no form in TOML: it is said in a comment."""
    lines: list[str] = []
    if path:
        lines.append(f"[{'.'.join(map(_key, path))}]")
    for key, value in section.items():
        if value is None:
            lines.append(f"# {_key(key)} is not set")
        elif not isinstance(value, Section):
            lines.append(f"{_key(key)} = {_value(value)}")
    parts = ["\n".join(lines) + "\n"] if lines else []
    parts += [write(value, (*path, key)) for key, value in section.items() if isinstance(value, Section)]
    return "\n".join(parts)


def _key(key: str) -> str:
    return key if BARE_KEY.fullmatch(key) else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    raise TypeError(f"TOML cannot hold a {type(value).__name__}")
