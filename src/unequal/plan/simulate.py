"""What plans would cost on machines that are not here: traffic, time and memory of several, and how they grow with the nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..errors import UserError
from ..optim import Optimizer, RowWiseAdagrad
from ..stats.curve import Curve
from ..tables import Table
from .allocate import Objective, allocate, counted, flow, row_wise, row_wise_memory, why_not
from .candidates import NARROWEST, Candidate
from .choose import Chooser
from .cost import Pricer, Setting
from .placement import Codec, Unique
from .popularity import Popularity
from .topology import Topology
from .workload import FeatureLoad, TableLoad

Floats = npt.NDArray[np.float64]
CODECS: dict[str, tuple[Codec, Codec]] = {
    "fp32": ("fp32", "fp32"),
    "16 bit": ("fp16", "bf16"),
    "8 bit": ("int8", "int8"),
}
NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
GPU_MEMORY = 40 * 10**9


@dataclass(frozen=True, slots=True)
class Way:
    """One plan of the comparison: all tables alike."""

    name: str
    kind: str
    unique: Unique
    tiers: bool = False


REPEATED = Way("row-wise, repeated ids", "row_wise", "none")
TIERS_REPEATED = Way("tiers, repeated ids", "row_wise", "none", True)
NODE = Way("row-wise, unique per node", "row_wise", "node")
TIERS_NODE = Way("tiers, unique per node", "row_wise", "node", True)
WAYS = (
    REPEATED,
    Way("row-wise, unique per rank", "row_wise", "rank"),
    NODE,
    Way("table-wise", "table_wise", "node"),
    Way("column-wise", "column_wise", "node"),
    TIERS_REPEATED,
    TIERS_NODE,
)
GROWING = (REPEATED, NODE, TIERS_REPEATED, TIERS_NODE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one plan comes to. Bytes: what a rank sends in a step, on average; seconds: of the slowest; memory: of the fullest."""

    plan: str
    codec: str
    nodes: int
    ranks_per_node: int
    bytes_across: float
    bytes_inside: float
    exchange_seconds: float
    """of links and messages; new rows on their way to copies count in part, because they run beside the step"""
    step_seconds: float
    """of the tables' whole part of a step"""
    memory: float
    fits: bool
    """whether the machines have it"""
    replicated_rows: int = 0
    node_rows: int = 0


def zipf_load(
    *, rows: int, skew: float, dim: int, length: float, name: str = "table", optimizer: Optimizer | None = None
) -> TableLoad:
    """A table of which every sample reads so many rows, one by one, by Zipf's law."""
    return popularity_load(Popularity.zipf(rows, skew, length), rows=rows, dim=dim, name=name, optimizer=optimizer)


def popularity_load(
    popularity: Popularity, *, rows: int, dim: int, name: str = "table", optimizer: Optimizer | None = None
) -> TableLoad:
    """The same of any popularity; samples read independently of each other."""
    sizes = [2**k for k in range(31)]
    counts = tuple(float(popularity.rows @ popularity.chances(size)) for size in sizes)
    return TableLoad(
        table=Table(name, rows, dim=dim),
        optimizer=optimizer or RowWiseAdagrad(),
        features={name: FeatureLoad(popularity.total, False)},
        distinct=Curve(tuple(sizes), counts, float(rows)),
        rows=rows,
        source="assumed",
        popularity=popularity,
    )


def cluster(nodes: int, ranks_per_node: int, topology: Topology | None = None) -> Topology:
    """So many of these machines; by default GPUs with 40 GB, 300 GB/s inside nodes, 7 GB/s across in all-to-all, as published."""
    if topology is None:
        return Topology.make(
            device="cuda", memory_per_rank=GPU_MEMORY, nodes=nodes, ranks_per_node=ranks_per_node
        )  # fmt: skip
    return topology.resized(nodes, ranks_per_node)


class Simulation:
    """Tables with so many samples a rank, on any number of these machines."""

    def __init__(
        self,
        loads: Sequence[TableLoad],
        topology: Topology,
        *,
        samples: int,
        fixed: dict[str, int] | None = None,
        objective: Objective = "seconds",
        memory_budget: float | None = None,
    ) -> None:
        """`samples`: of a rank; `fixed`: bytes of a rank beside the tables'; `memory_budget`: see `Copying`."""
        if samples < 1:
            raise UserError(f"a simulation: expected 1 sample a rank or more, got {samples}; choose a larger batch")
        if not loads:
            raise UserError("a simulation: expected tables, got none")
        self.loads, self.topology, self.samples = list(loads), topology, samples
        self.fixed, self.objective, self.budget = fixed or {}, objective, memory_budget

    def setting(self, way: Way, codec: str, topology: Topology) -> Setting:
        forward, backward = CODECS[codec]
        return Setting(
            topology=topology, batch_size=self.samples * topology.world, forward=forward, backward=backward,
            unique=way.unique, fixed=self.fixed,
        )  # fmt: skip

    def outcome(self, way: Way, codec: str = "fp32", nodes: int | None = None) -> Outcome:
        """One plan in one precision of what travels."""
        topology = self.topology if nodes is None else self.topology.resized(nodes, self.topology.ranks_per_node)
        setting = self.setting(way, codec, topology)
        pricer = Pricer(setting)
        rows = (0, 0)
        if way.tiers:
            cost, rows = self._tiers(pricer)
        elif way.kind == "row_wise":
            cost = _sum(pricer.price(replace(load, popularity=None), row_wise(load, topology)) for load in self.loads)
        else:
            cost = self._balanced(way, pricer)
        sent, memory = flow(pricer, cost), float(pricer.memory(cost).max()) + sum(self.fixed.values())
        return Outcome(
            plan=way.name,
            codec=codec,
            nodes=topology.nodes,
            ranks_per_node=topology.ranks_per_node,
            bytes_across=sent.bytes_across,
            bytes_inside=sent.bytes_inside,
            exchange_seconds=float(pricer.exchange_seconds(cost).max()) + pricer.messages(cost),
            step_seconds=float(pricer.seconds(cost).max()),
            memory=memory,
            fits=memory <= topology.usable_memory,
            replicated_rows=rows[0],
            node_rows=rows[1],
        )

    def _balanced(self, way: Way, pricer: Pricer) -> Floats:
        """Tables, or their columns in as many pieces as there can be, over the ranks."""
        options = [[_candidate(way.kind, load.table.dim, pricer.world)] for load in self.loads]
        chooser = Chooser([replace(load, popularity=None) for load in self.loads], options, pricer)
        return chooser.balance([each[0] for each in options]).total

    def _tiers(self, pricer: Pricer) -> tuple[Floats, tuple[int, int]]:
        topology, setting = pricer.topology, pricer.setting
        tables = pricer.numbers(self.loads)
        plain = [
            pricer.price_many(tables.take([k]), 1, row_wise(load, topology))[:, 0] for k, load in enumerate(self.loads)
        ]
        budget = self.budget
        if budget is None:
            budget = row_wise_memory(self.loads, replace(setting, unique="none"))
        held = float(pricer.memory(_sum(plain)).max()) + sum(self.fixed.values())
        numbers = [k for k, load in enumerate(self.loads) if why_not(load) is None]
        found = allocate(pricer, tables, numbers, min(budget, topology.usable_memory) - held, self.objective)
        tiered, rows = list(plain), np.zeros(2)
        for k, cuts in zip(numbers, found.tables):
            if cuts.copied.rows:
                placement = row_wise(self.loads[k], topology, counted(cuts.replicated.rows, cuts.node_rows))
                cost = pricer.price_many(tables.take([k]), 1, placement)[:, 0]
                if self.objective == "bytes" or pricer.own_seconds(cost).max() < pricer.own_seconds(plain[k]).max():
                    tiered[k] = cost
                    rows += [cuts.replicated.rows, cuts.node_rows]
        before, after = _sum(plain), _sum(tiered)
        if self.objective == "seconds" and pricer.seconds(after).max() >= pricer.seconds(before).max():
            return before, (0, 0)  # what rows gain is less than what the messages of copies cost
        return after, (int(rows[0]), int(rows[1]))

    def plans(self, codecs: Sequence[str] = tuple(CODECS), ways: Sequence[Way] = WAYS) -> list[Outcome]:
        """Every plan in every precision, codec by codec."""
        return [self.outcome(way, codec) for codec in codecs for way in ways]

    def growth(self, nodes: Sequence[int] = NODES, ways: Sequence[Way] = GROWING, codec: str = "fp32") -> list[Outcome]:
        """The same samples a rank on ever more nodes."""
        return [self.outcome(way, codec, count) for count in nodes for way in ways]


def fewer(outcome: Outcome, baseline: Outcome) -> float:
    """By what part it sends less over the network; inside the node, where there is one."""
    name = "bytes_across" if outcome.nodes > 1 else "bytes_inside"
    before = getattr(baseline, name)
    return 1 - getattr(outcome, name) / before if before else 0.0


def _candidate(kind: str, dim: int, world: int) -> Candidate:
    if kind == "column_wise":
        pieces = min(world, max(1, dim // NARROWEST))
        return Candidate("column_wise", 1 << (pieces.bit_length() - 1))
    return Candidate("table_wise")


def _sum(costs: Iterator[Floats] | Sequence[Floats]) -> Floats:
    total: Floats | None = None
    for cost in costs:
        total = cost if total is None else total + cost
    assert total is not None
    return total
