"""A plan: where every table goes, why, what it costs, and what it was made from. Saved as JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args

from ..errors import UserError
from ..optim import Optimizer
from ..tables import Feature
from .allocate import Flow, TierChoice, counted
from .placement import CODECS, UNIQUES, Codec, Kind, Piece, Placement, TablePlacement, Unique
from .rowsfile import load_rows, save_rows
from .tiering import CopyBudget
from .topology import Topology

VERSION = 1
MEASURED = ("topology.", "load.")
"""Inputs that a job need not know to use a plan: what machines and data were when it was made."""
SHOWN = 60
"""Tables and ranks that `print` shows at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What was chosen for one table, and why."""

    label: str
    """kind, number of pieces, sums"""
    reason: str
    seconds: float
    """of a step, on the rank that it keeps busiest"""
    bytes_inside: float
    """sent per rank and step to ranks of the same node, on average"""
    bytes_across: float
    """to other nodes"""
    memory: float
    """bytes on the rank that has most of it"""
    next_best: str | None
    next_seconds: float | None
    """of a step, on the rank that the next best would keep busiest"""
    next_step_seconds: float | None
    """what a step would take with it"""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankCost:
    """What one rank has to do and to hold."""

    seconds: dict[str, float]
    """of a step, by kind of work"""
    memory: dict[str, int]
    """bytes by what holds them"""
    bytes_inside: float
    """sent per step to ranks of the same node"""
    bytes_across: float

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def total_memory(self) -> int:
        return sum(self.memory.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan(Placement):
    """A placement with its reasons. `print(plan)` explains it."""

    choices: Mapping[str, Choice] = field(default_factory=dict)
    ranks: tuple[RankCost, ...] = ()
    balanced: Mapping[str, float | None] = field(default_factory=dict)
    """the slowest rank's seconds by each method of balance, before single tables were changed; None: memory would not do"""
    tiers: Mapping[str, TierChoice] = field(default_factory=dict)
    """of the tables with tiers: where the cuts lie, why, and what they change"""
    copying: CopyBudget | None = None
    """the memory that copies of rows were given; None where there are none"""
    bottleneck: str = ""
    memory_limit: int = 0
    """bytes that may be used of each rank"""
    inputs: Mapping[str, Any] = field(default_factory=dict)
    """everything the plan depends on, by name"""

    @property
    def step_seconds(self) -> float:
        """Of the slowest rank, for the tables alone."""
        return max((rank.total_seconds for rank in self.ranks), default=0.0)

    @property
    def hash(self) -> str:
        """Names the inputs."""
        text = json.dumps(dict(self.inputs), sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def placement(self) -> Placement:
        """Without the reasons."""
        return Placement(**{f.name: getattr(self, f.name) for f in fields(Placement)})

    def check_inputs(self, inputs: Mapping[str, Any]) -> None:
        """Raises where the plan was made for something else, and says for what."""
        differing = [
            name
            for name in dict.fromkeys([*self.inputs, *inputs])
            if not (name.startswith(MEASURED) and (name not in inputs or name not in self.inputs))
            and self.inputs.get(name) != inputs.get(name)
        ]
        if differing:
            told = [
                f"{name}: planned with {_word(self.inputs, name)}, now {_word(inputs, name)}" for name in differing[:4]
            ]
            more = f", and {len(differing) - 4} more" if len(differing) > 4 else ""
            raise UserError(
                f"the plan was made for another job: {'; '.join(told)}{more}; "
                "make it again with `unequal plan`, or train without it"
            )

    def to_json(self) -> dict[str, Any]:
        tables = {
            name: {
                "kind": placed.kind,
                "sums": placed.sums,
                "pieces": [{"columns": [p.first, p.last], "ranks": list(p.ranks)} for p in placed.pieces],
                **(asdict(self.choices[name]) if name in self.choices else {}),
                **({"tiers": asdict(self.tiers[name])} if name in self.tiers else {}),
            }
            for name, placed in self.tables.items()
        }
        return {
            "version": VERSION,
            "hash": self.hash,
            "world": self.world,
            "ranks_per_node": self.ranks_per_node,
            "forward_codec": self.forward_codec,
            "backward_codec": self.backward_codec,
            "unique": self.unique,
            "step_seconds": self.step_seconds,
            "bottleneck": self.bottleneck,
            "balanced": dict(self.balanced),
            "memory_limit": self.memory_limit,
            **({"copying": asdict(self.copying)} if self.copying is not None else {}),
            "tables": tables,
            "ranks": [asdict(rank) for rank in self.ranks],
            "inputs": dict(self.inputs),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Plan:
        """Rows of tiers are counted and not named: they are in a file of their own, which `load` reads."""
        if content.get("version") != VERSION:
            raise UserError(f"expected a plan of version {VERSION}, got {content.get('version')!r}; make it again")
        named = [f.name for f in fields(Choice)]
        try:
            tables = {
                name: TablePlacement(
                    part["kind"],
                    tuple(_piece(piece) for piece in part["pieces"]),
                    part["sums"],
                    counted(part["tiers"]["replicated"], part["tiers"]["node"]) if "tiers" in part else None,
                )
                for name, part in content["tables"].items()
            }
            choices = {
                name: Choice(**{key: part[key] for key in named})
                for name, part in content["tables"].items()
                if "reason" in part
            }
            plan = cls(
                world=content["world"],
                ranks_per_node=content["ranks_per_node"],
                tables=tables,
                forward_codec=content["forward_codec"],
                backward_codec=content["backward_codec"],
                unique=content["unique"],
                notes={name: choice.reason for name, choice in choices.items()},
                choices=choices,
                ranks=tuple(RankCost(**rank) for rank in content["ranks"]),
                balanced=content["balanced"],
                tiers={name: _tiers(part["tiers"]) for name, part in content["tables"].items() if "tiers" in part},
                copying=CopyBudget(**content["copying"]) if "copying" in content else None,
                bottleneck=content["bottleneck"],
                memory_limit=content["memory_limit"],
                inputs=content["inputs"],
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"expected a plan, got a file that lacks a part of one: {error}; make it again") from error
        if plan.hash != content.get("hash"):
            raise UserError(
                f"the inputs' hash is {plan.hash}, not {content.get('hash')!r}: the plan was changed; make it again"
            )
        if (
            {plan.forward_codec, plan.backward_codec} - set(CODECS)
            or any(part.kind not in get_args(Kind) for part in tables.values())
            or plan.unique not in UNIQUES
        ):
            raise UserError("expected a plan with known codecs and kinds; make it again")
        return plan

    def save(self, path: Path | str) -> None:
        path = Path(path)
        partial = path.with_name(f".{path.name}.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = save_rows(path, self.tables)
            content = self.to_json() | ({} if rows is None else {"rows": rows})
            partial.write_text(
                json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8"
            )
            partial.replace(path)
        except OSError as error:
            raise UserError(f"{path}: cannot write the plan: {error.strerror}; choose another file") from error

    @classmethod
    def load(cls, path: Path | str) -> Plan:
        path = Path(path)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"{path}: cannot read the plan: {error.strerror}; make one with `unequal plan`") from error
        except ValueError as error:
            raise UserError(f"{path}: expected a plan in JSON, got: {error}; make it again") from error
        if not isinstance(content, Mapping):
            raise UserError(f"{path}: expected a plan in JSON, got a {type(content).__name__}; make it again")
        try:
            plan = cls.from_json(content)
            return plan._named(path, content) if plan.tiers else plan
        except UserError as error:
            raise UserError(f"{path}: {error}") from error

    def _named(self, path: Path, content: Mapping[str, Any]) -> Plan:
        """With the rows of its tiers, from the file beside it."""
        try:
            found = load_rows(path, content["rows"], self.tables)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"expected a plan that names its rows' file, got one without: {error}; make it again"
            ) from error
        tables = {name: replace(placed, tiers=found.get(name)) for name, placed in self.tables.items()}
        return replace(self, tables=tables)

    def __str__(self) -> str:
        from .explain import text

        return text(self)

    def summary(self) -> list[str]:
        """A line per table: its name and what was chosen."""
        return [f"{name}: {choice.label}" for name, choice in self.choices.items()]

    def tables_text(self, limit: int | None = SHOWN) -> str:
        from .explain import tables_text

        return tables_text(self, limit)

    def ranks_text(self, limit: int | None = SHOWN) -> str:
        from .explain import ranks_text

        return ranks_text(self, limit)


def _piece(content: Mapping[str, Any]) -> Piece:
    first, last = content["columns"]
    return Piece(first, last, tuple(content["ranks"]))


def _tiers(content: Mapping[str, Any]) -> TierChoice:
    flows = {name: Flow(**content[name]) for name in ("before", "after")}
    return TierChoice(**{**content, **flows})


def _word(inputs: Mapping[str, Any], name: str) -> str:
    value = inputs.get(name)
    return "nothing" if value is None else f"'{value}'" if isinstance(value, str) else str(value)


def predict_memory(plan: Plan) -> list[dict[str, int]]:
    """Of every rank: bytes by what holds them. Their sum is what the model says is resident, on a GPU what is allocated there."""
    return [dict(rank.memory) for rank in plan.ranks]


def inputs_of(
    features: Mapping[str, Feature],
    optimizer: Optimizer,
    *,
    batch_size: int,
    world: int,
    ranks_per_node: int,
    device: str,
    forward: Codec,
    backward: Codec,
    unique: Unique,
    sharding: Mapping[str, str] | None = None,
    expected_rows: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """What a plan depends on, as far as a job knows it: flat, plain values."""
    found: dict[str, Any] = {
        "batch_size": batch_size,
        "world": world,
        "ranks_per_node": ranks_per_node,
        "device": device,
        "exchange.forward": forward,
        "exchange.backward": backward,
        "exchange.unique": unique,
    }
    for name, feature in features.items():
        table = feature.table
        found[f"features.{name}.table"] = table.name
        found[f"features.{name}.pooling"] = feature.pooling
        where = f"tables.{table.name}"
        found[f"{where}.rows"] = table.rows
        found[f"{where}.dim"] = table.dim
        found[f"{where}.dtype"] = str(table.dtype).removeprefix("torch.")
        found[f"{where}.optimizer"] = type(table.optimizer or optimizer).__name__
        found[f"{where}.admit_after"] = table.admit_after
        found[f"{where}.sharding"] = (sharding or {}).get(table.name, "auto")
        found[f"{where}.expected_rows"] = (expected_rows or {}).get(table.name)
    return found


def topology_inputs(topology: Topology) -> dict[str, Any]:
    """The machines, as inputs of a plan."""
    flat: dict[str, Any] = {}
    for name, value in topology.to_mapping().items():
        if name == "measured":
            continue
        if isinstance(value, Mapping):
            flat |= {f"topology.{name}.{key}": item for key, item in value.items()}
        else:
            flat[f"topology.{name}"] = value
    return flat
