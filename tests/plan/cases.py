"""Tables and machines that the planner's tests share."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from unequal.optim import Optimizer, RowWiseAdagrad
from unequal.plan.topology import Topology
from unequal.tables import Feature, Table


@dataclass
class Module:
    """What a plan needs of an embedding module."""

    features: dict[str, Feature]
    optimizer: Optimizer = field(default_factory=RowWiseAdagrad)

    @property
    def tables(self) -> dict[str, Table]:
        return {feature.table.name: feature.table for feature in self.features.values()}


def machines(nodes: int = 1, size: int = 2, gigabytes: float = 16, **rest: Any) -> Topology:
    return Topology.make(nodes=nodes, ranks_per_node=size, memory_per_rank=int(gigabytes * 1e9), **rest)


def many(count: int, seed: int = 0) -> tuple[Module, dict[str, float]]:
    """Tables of all sizes, and ids per sample of their features."""
    random = np.random.default_rng(seed)
    features = {}
    for k in range(count):
        table = Table(f"t{k}", int(10 ** random.uniform(1, 7.5)), dim=int(random.choice([16, 32, 64, 128])))
        features[f"f{k}"] = Feature(table, None if random.random() < 0.1 else "sum")
    return Module(features), {name: float(random.choice([1, 1, 1, 5, 20, 100])) for name in features}
