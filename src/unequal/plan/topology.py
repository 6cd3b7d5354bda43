"""The machines a job runs on, as far as a plan must know them: how many ranks, how much memory, and how fast bytes move."""

from __future__ import annotations

import datetime
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from ..errors import RecipeError, UserError
from ..toml import Section, parse, to_mapping, write

Device = Literal["cpu", "cuda"]
UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
RESERVE = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkRates:
    """One class of links: bytes that a rank sends in a second while it receives as many, and what each message costs beside."""

    bytes_per_second: float
    seconds_per_message: float
    """of one rank to one other in one collective"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeRates:
    """What one rank does in a second, in bytes."""

    reads: float
    """rows read at random places"""
    updates: float
    """gradients, rows and optimizer state read and written by an update"""
    copies: float
    """plain copies, and changes of precision on the way"""
    ids: float
    """ids made unique or found in a directory, 8 bytes each"""
    seconds_per_piece: float
    """the host's work for each piece of a table and step"""


# CPU: two ranks of one thread each at the same time, on two cores with AVX2, gloo through the loopback. Bytes per second of a
# link: all-to-all of 12 MB. The rest are what the phases of benchmarks/distributed.py took on workload P, table-wise by rows,
# with the bytes counted as cost.py counts them; a message's seconds include that the ranks wait for each other. Across: 10 Gbit/s
# Ethernet, assumed.
# GPU: one H200 (docs/gpu.md) for reads, updates, copies and ids. Inside: half of NVLink's 600 GB/s in both directions. Across:
# what all-to-all reached over RoCE on 128 GPUs, 7 of 25 GB/s. Seconds per message are assumed.
LINKS: dict[str, dict[str, LinkRates]] = {
    "cpu": {
        "inside": LinkRates(bytes_per_second=0.9e9, seconds_per_message=2e-3),
        "across": LinkRates(bytes_per_second=0.9e9, seconds_per_message=2.2e-3),
    },
    "cuda": {
        "inside": LinkRates(bytes_per_second=300e9, seconds_per_message=5e-6),
        "across": LinkRates(bytes_per_second=7e9, seconds_per_message=15e-6),
    },
}
COMPUTE: dict[str, ComputeRates] = {
    "cpu": ComputeRates(reads=4e9, updates=7.5e9, copies=8e9, ids=0.8e9, seconds_per_piece=40e-6),
    "cuda": ComputeRates(reads=2e12, updates=1.5e12, copies=4.2e12, ids=50e9, seconds_per_piece=150e-6),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """Nodes of equal ranks. Rates that are left out are those of the device's class, measured on other machines."""

    nodes: int = 1
    ranks_per_node: int = 1
    device: Device = "cpu"
    memory_per_rank: int
    """bytes; a text such as "24 GB" in a file"""
    reserve: float = RESERVE
    """share of the memory that a plan leaves free: the memory model is good to 10%"""
    inside: LinkRates
    """links between ranks of one node"""
    across: LinkRates
    """links between nodes"""
    compute: ComputeRates
    measured: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """where the rates come from: whatever a file says in [measured], kept as it is"""

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node", "memory_per_rank"):
            if getattr(self, name) < 1:
                raise RecipeError(f"topology.{name}", "1 or more", getattr(self, name))
        if not 0 <= self.reserve < 1:
            raise RecipeError("topology.reserve", "a share from 0 to below 1", self.reserve)
        for part in ("inside", "across", "compute"):
            rates = getattr(self, part)
            for rate in (f.name for f in fields(rates)):
                value = getattr(rates, rate)
                if not value > 0 and not (rate.startswith("seconds") and value == 0):
                    raise RecipeError(f"topology.{part}.{rate}", "a number above 0", value)

    @property
    def world(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def usable_memory(self) -> int:
        """What a plan may fill on each rank."""
        return int(self.memory_per_rank * (1 - self.reserve))

    def resized(self, nodes: int, ranks_per_node: int) -> Topology:
        """The same machines, more or fewer of them."""
        return replace(self, nodes=nodes, ranks_per_node=ranks_per_node)

    @classmethod
    def make(cls, *, device: Device = "cpu", memory_per_rank: int, **rest: Any) -> Topology:
        """With the rates of the device's class where none are given."""
        return cls(device=device, memory_per_rank=memory_per_rank, **{**_defaults(device), **rest})

    @classmethod
    def here(cls, world: int, ranks_per_node: int | None = None, device: str = "cpu") -> Topology:
        """Nodes like this machine: its memory, shared by the ranks of a node."""
        size = world if ranks_per_node is None else ranks_per_node
        if world < 1 or size < 1 or world % size:
            raise UserError(f"expected a divisor of the {world} ranks as the ranks of a node, got {size}")
        if device not in ("cpu", "cuda"):
            raise UserError(f"expected a topology of cpu or cuda ranks, got '{device}'")
        if device == "cpu":
            memory = machine_memory() // size
        elif torch.cuda.is_available():
            sharing = -(-size // torch.cuda.device_count())
            memory = torch.cuda.get_device_properties(0).total_memory // sharing
        else:
            raise UserError(
                "a plan for GPUs: expected a GPU here or a topology that says how much memory they have, got neither; "
                "give --topology FILE (examples/topology.toml is one), or choose --device cpu"
            )
        return cls.make(nodes=world // size, ranks_per_node=size, device=device, memory_per_rank=memory)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: Path | str) -> Topology:
        """From a TOML file."""
        path = Path(path)
        try:
            mapping = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"{path}: cannot read the topology: {error.strerror}; name a TOML file") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UserError(
                f"{path}: not valid TOML: {error}; compare the line with the example's topology.toml"
            ) from error
        try:
            return cls.from_mapping(mapping)
        except RecipeError as error:
            raise UserError(f"{path}: {error}") from error

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Topology:
        values = {key: value for key, value in mapping.items() if key != "measured"}
        measured = mapping.get("measured", {})
        if not isinstance(measured, Mapping):
            raise RecipeError("topology.measured", "a table [measured]", measured)
        device = values.get("device", "cpu")
        for name, rates in _defaults(device if device in COMPUTE else "cpu").items():
            given = values.get(name, {})
            if isinstance(given, Mapping):
                sized = {
                    key: item if key.startswith("seconds") else _amount(item, f"topology.{name}.{key}")
                    for key, item in given.items()
                }
                values[name] = {**to_mapping(rates), **sized}
        if "memory_per_rank" in values:
            values["memory_per_rank"] = _amount(values["memory_per_rank"], "topology.memory_per_rank")
        return replace(parse(cls, values, "topology"), measured=_plain(measured))

    def to_mapping(self) -> Section:
        return Section({**to_mapping(self), "measured": Section(self.measured)})

    def to_toml(self) -> str:
        """The file that loads as this topology, with every rate written out."""
        mapping = self.to_mapping()
        if not self.measured:
            del mapping["measured"]
        return write(mapping)

    def save(self, path: Path | str) -> None:
        Path(path).write_text(self.to_toml(), encoding="utf-8")


def _defaults(device: str) -> dict[str, Any]:
    return {**LINKS[device], "compute": COMPUTE[device]}


def _amount(value: object, path: str) -> Any:
    """A number of bytes from text such as 24 GB or 7 GB/s; anything but text as it is."""
    return parse_bytes(value, path) if isinstance(value, str) else value


def parse_bytes(value: str, path: str) -> float:
    """24 GB → 24 · 10⁹. `path`: what the error names."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+?)(?:/s)?\s*", value)
    units = {unit.lower(): scale for unit, scale in UNITS.items()}
    if found is None or found[2].lower() not in units:
        raise RecipeError(path, 'bytes, as a number or as a text such as "24 GB"', value)
    amount = float(found[1]) * units[found[2].lower()]
    return int(amount) if amount.is_integer() else amount


def _plain(value: Any) -> Any:
    """What TOML can hold and this library can write again: dates become text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.isoformat() if isinstance(value, datetime.date | datetime.time) else value


def machine_memory() -> int:
    """Bytes of memory this process may use with its siblings: the machine's, or less where a control group says so."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in _group_limits():
        memory = min(memory, limit)
    return memory


def _group_limits() -> list[int]:
    """The limits of the control groups this process is in, from its own up to the root; both versions of the interface."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # no Linux, or no /proc: there are no control groups to ask
        return []
    files = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        root = Path("/sys/fs/cgroup") if not controllers else Path("/sys/fs/cgroup/memory")
        name = "memory.max" if not controllers else "memory.limit_in_bytes"
        inner = root / group.lstrip("/")
        files += [folder / name for folder in (inner, *inner.parents) if folder.is_relative_to(root)]
    limits = []
    for file in files:
        if file.is_file():
            text = file.read_text(encoding="utf-8").strip()
            limits += [int(text)] if text.isdigit() else []
    return limits
