"""The planner: enumerate, price, choose, balance, explain. Every step is an attribute and can be replaced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..batch import Batch
from ..errors import UserError
from ..optim import Optimizer
from ..stats.profile import Profile
from ..tables import Feature
from . import explain
from .allocate import Objective, named
from .candidates import Candidate, candidates
from .choose import BALANCERS, Balancer, Chooser, Solution
from .cost import Pricer, Setting
from .narrowed import within_budget
from .placement import Codec, TablePlacement, Unique
from .plan import Choice, Plan, RankCost, inputs_of, topology_inputs
from .profiled import loads_from_profile
from .tiering import Copying, Tiering, check_asked, with_popularity
from .topology import Topology
from .workload import TableLoad, assume, measure

Floats = npt.NDArray[np.float64]
PROCESS_BYTES = {"cpu": 380 << 20, "cuda": 600 << 20}
"""Resident without the tables: interpreter, torch, its threads and the links, and what torch's DDP and optimizers load when the
dense part is made; on a GPU the context and kernels there."""


class HasFeatures(Protocol):
    """What is planned for: uq.Embeddings, on any device."""

    features: dict[str, Feature]
    optimizer: Optimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Planner:
    """enumerate → price → choose (with balance) → explain."""

    enumerate: Callable[[TableLoad, Topology], list[Candidate]] = candidates
    price: Callable[[Setting], Pricer] = Pricer
    choose: Callable[[Chooser], Solution] = Chooser.choose
    balance: tuple[tuple[str, Balancer], ...] = tuple(BALANCERS.items())
    explain: Callable[..., str] = explain.reason

    def plan(
        self,
        loads: Mapping[str, TableLoad],
        setting: Setting,
        inputs: Mapping[str, Any],
        copying: Copying | None = None,
    ) -> Plan:
        """A plan for these tables. `inputs`: what the job knows of them, as `inputs_of` gives it. `copying`: how rows may be
        copied; by default none are."""
        pricer = self.price(setting)
        tables = list(loads.values())
        check_asked(tables, copying, setting.topology.world)
        options = [self.enumerate(load, setting.topology) for load in tables]
        chooser = Chooser(tables, options, pricer, dict(self.balance))
        solution = self.choose(chooser)
        tiered = None if copying is None else Tiering(chooser, solution, copying, self.choose).run()
        if tiered is not None:
            chooser, solution = tiered.chooser, tiered.solution
        if solution.short:
            raise UserError(explain.infeasible(chooser, solution))
        choices = {load.table.name: self._explain(chooser, solution, k) for k, load in enumerate(tables)}
        everything: dict[str, Any] = {**inputs, **topology_inputs(setting.topology)}
        everything |= {f"load.fixed.{name}": amount for name, amount in setting.fixed.items()}
        for load in tables:
            everything |= explain.describe_load(load)
        if copying is not None:
            everything |= {"load.copying.objective": copying.objective, "load.copying.budget": _budget(copying)}
        return Plan(
            world=setting.topology.world,
            ranks_per_node=setting.topology.ranks_per_node,
            tables={
                load.table.name: self._named(solution.placements[k], load, copying) for k, load in enumerate(tables)
            },
            forward_codec=setting.forward,
            backward_codec=setting.backward,
            unique=setting.unique,
            notes={name: choice.reason for name, choice in choices.items()},
            choices=choices,
            ranks=self._ranks(pricer, solution),
            balanced=solution.balanced,
            tiers={} if tiered is None else tiered.choices,
            copying=None if tiered is None else tiered.budget,
            bottleneck=explain.bottleneck(chooser, solution),
            memory_limit=setting.topology.usable_memory,
            inputs=everything,
        )

    @staticmethod
    def _named(placed: TablePlacement, load: TableLoad, copying: Copying | None) -> TablePlacement:
        """With the ids of the rows that have copies."""
        if placed.tiers is None or copying is None:
            return placed
        return replace(placed, tiers=named(copying.naming, load.table.name, placed.tiers))

    def _explain(self, chooser: Chooser, solution: Solution, k: int) -> Choice:
        pricer, cost, options = chooser.pricer, solution.costs[k], chooser.options[k]
        own = solution.candidates[k]
        best: tuple[tuple[float, ...], str, Floats, float] | None = None
        for candidate in chooser.alternatives(solution, k):
            _, then, changed = chooser.instead(solution, k, candidate)
            score = (changed.short, float(changed.seconds.max()))
            if best is None or score < best[0]:
                best = (score, candidate.label, then, float(changed.seconds.max()))
        inside, across = explain.sent(cost)
        return Choice(
            label=own.label,
            reason=self.explain(chooser, solution, k, None if best is None else best[1:], options)
            + (explain.without_tiers(chooser.loads[k]) if own.tiers is None and pricer.world > 1 else ""),
            seconds=float(pricer.own_seconds(cost).max()),
            bytes_inside=float(inside.mean()),
            bytes_across=float(across.mean()),
            memory=float(pricer.memory(cost).max()),
            next_best=None if best is None else best[1],
            next_seconds=None if best is None else float(pricer.own_seconds(best[2]).max()),
            next_step_seconds=None if best is None else best[3],
        )

    @staticmethod
    def _ranks(pricer: Pricer, solution: Solution) -> tuple[RankCost, ...]:
        inside, across = explain.sent(solution.total)
        work, messages = explain.work(pricer, solution.total), pricer.messages(solution.total)
        return tuple(
            RankCost(
                seconds={**{name: float(seconds[rank]) for name, seconds in work.items()}, "messages": messages},
                memory=explain.memory_parts(pricer, solution.total, rank),
                bytes_inside=float(inside[rank]),
                bytes_across=float(across[rank]),
            )
            for rank in range(len(inside))
        )


def _budget(copying: Copying) -> float | str:
    if copying.budget is None:
        return "row-wise of repeated ids"
    return copying.budget if np.isfinite(copying.budget) else "none"


def default_codecs(device: str) -> tuple[Codec, Codec]:
    """Forward and backward: half of the bytes between GPUs, where the exchange is what a step waits for."""
    return ("fp16", "bf16") if device == "cuda" else ("fp32", "fp32")


def make_plan(
    embeddings: HasFeatures,
    topology: Topology | None = None,
    *,
    batch_size: int,
    world: int | None = None,
    ranks_per_node: int | None = None,
    device: str = "cpu",
    load: Profile | Sequence[Batch] | Mapping[str, float] | None = None,
    expected_rows: Mapping[str, int] | None = None,
    sharding: Mapping[str, str] | None = None,
    forward: Codec | None = None,
    backward: Codec | None = None,
    unique: Unique = "node",
    objective: Objective = "seconds",
    memory_budget: float | None = None,
    planner: Planner | None = None,
) -> Plan:
    """A plan for an embedding module, which may be on the device "meta", on these machines or on `world` ranks of this one.

    `batch_size`: of all ranks together. `load`: a profile, with which hot rows get copies where that pays; batches of the data to
    measure; or ids per sample of features; by default a pooled feature reads 1 id per sample, another 50, by Zipf's law.
    `expected_rows` and `sharding`: by table. `objective` and `memory_budget`: of copies, see `Copying`."""
    if topology is None:
        if world is None:
            raise UserError("make_plan: expected a topology or world=, the number of ranks, got neither")
        topology = Topology.here(world, ranks_per_node, device)
    elif world is not None:
        size = ranks_per_node or min(world, topology.ranks_per_node)
        if world % size:
            raise UserError(f"make_plan: expected a divisor of the {world} ranks as the ranks of a node, got {size}")
        topology = topology.resized(world // size, size)
    if batch_size < 1:
        raise UserError(f"make_plan: expected a batch_size of 1 or more, got {batch_size}")
    known: dict[str, Any] = {"expected_rows": expected_rows, "sharding": sharding}
    features, optimizer = embeddings.features, embeddings.optimizer
    copying: Copying | None = None
    if isinstance(load, Profile):
        loads = with_popularity(loads_from_profile(load, features, optimizer, **known), load)
        copying = Copying.of(load, objective, memory_budget)
    elif load is None or isinstance(load, Mapping):
        loads = assume(features, optimizer, ids=load, **known)
    else:
        loads = measure(features, optimizer, load, **known)
    loads = within_budget(loads, getattr(embeddings, "width", None))
    codecs = default_codecs(topology.device)
    exchange: dict[str, Any] = {
        "forward": forward or codecs[0],
        "backward": backward or codecs[1],
        "unique": unique,
    }
    setting = Setting(
        topology=topology, batch_size=batch_size, fixed={"process": PROCESS_BYTES[topology.device]}, **exchange
    )
    inputs = inputs_of(
        features, optimizer, batch_size=batch_size, world=topology.world, ranks_per_node=topology.ranks_per_node,
        device=topology.device, **exchange, **known,
    )  # fmt: skip
    return (planner or Planner()).plan(loads, setting, inputs, copying)
