"""A model over several ranks: the dense part averaged by torch's DistributedDataParallel, the tables placed by a plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..batch import Batch
from ..data.dataset import Dataset
from ..data.reader import Reader
from ..embeddings import Embeddings
from ..errors import UserError
from ..exchange.mesh import Mesh
from ..kernels.request import mix64
from ..plan.placement import Tiers
from ..plan.plan import Plan
from ..storage.narrow import NarrowStorage
from . import checkpoint
from .config import Recipe
from .device import Device
from .planning import load_plan, plan_recipe
from .processes import Ranks
from .run import PLAN

NAMED = 6
"""tables that a line names"""


def data_parallel(model: nn.Module, embeddings: Embeddings, reader: Reader, device: Device, mesh: Mesh) -> nn.Module:
    """What training calls: the model itself where there is one rank.

    DDP orders its buckets of gradients by the first backward pass and keeps that order. The order of a sum over three or more
    ranks depends on it, so a first pass without samples settles it: a resumed run then has the order of one that was not cut.
    """
    if mesh.world == 1:
        return model
    parallel = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, **_fixed_buffers())
    embeddings.eval()
    parallel(device.move(empty_batch(reader))).sum().backward()
    embeddings.train()
    parallel.zero_grad(set_to_none=True)
    return parallel


def _fixed_buffers() -> dict[str, Any]:
    """The option by which DDP leaves buffers alone in every step: the models' never change. It has two names."""
    known = inspect.signature(nn.parallel.DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}


def empty_batch(reader: Reader) -> Batch:
    """A batch without samples of the columns that the reader reads."""
    config = reader.config
    return Batch(
        reader.features,
        torch.empty(0, dtype=torch.int64),
        torch.empty(0, dtype=torch.int64),
        torch.empty(0) if config.id_weights else None,
        torch.empty(0, len(config.dense)) if config.dense else None,
        torch.empty(0, len(config.labels)),
        torch.empty(0) if config.sample_weight is not None else None,
    )


def seed_rank(seed: int, mesh: Mesh, step: int = 0) -> None:
    """Gives every rank random numbers of its own, for dropout. One rank alone goes on with those the model was made with."""
    if mesh.world > 1:
        torch.manual_seed(mix64(mix64(mix64(seed) + step) + mesh.world * 2**32 + mesh.rank) % 2**63)


def tensors_of(model: nn.Module, embeddings: Embeddings) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the model that this rank holds, tables slab by slab and live rows only."""
    yield from checkpoint.dense_state(model, embeddings).items()
    for shard, storage in embeddings.shard_storages():
        if isinstance(storage, NarrowStorage):
            yield from ((f"embeddings.{shard.table}.{name}", part) for name, part in _narrow_tensors(storage))
            continue
        for name, slabs in zip(storage.parts, (storage.rows.weights, *storage.rows.states)):
            left = storage.live
            for slab in slabs:
                yield f"embeddings.{shard.table}.{name}", slab[:left]
                left -= min(left, slab.shape[0])


def _narrow_tensors(storage: NarrowStorage) -> Iterator[tuple[str, Tensor]]:
    """Values and optimizer state of live rows, slab by slab of every width."""
    records, item = storage.records, storage.table.dtype.itemsize
    for k in range(1, records.chunks + 1):
        width, *begins = records.layout[k].tolist()
        left = storage.counts[k]
        for slab in records.slabs[k]:
            rows = slab[:left]
            # A last word may be used by half: what lies in the rest of it means nothing.
            yield "weight", rows[:, : -(-width * item // 4)].contiguous().view(storage.table.dtype)[:, :width]
            for (name, per), begin in zip(storage.optimizer.state, begins):
                yield name, rows[:, begin : begin + (1 if per == "row" else width)]
            left -= min(left, slab.shape[0])


def choose_plan(
    recipe: Recipe, data: Dataset, ranks: Ranks, path: Path | None, run: Path | None, say: Callable[[str], None]
) -> Plan | None:
    """How the tables are spread: by the plan that was given; else by that of the run that goes on, so that it goes on with the
    same bits; else by a new one. None where one rank holds them whole."""
    job: dict[str, Any] = {
        "world": ranks.world, "ranks_per_node": ranks.mesh.ranks_per_node, "device": ranks.device.torch.type,
    }  # fmt: skip
    kept = None if run is None else run / PLAN

    def choose() -> Plan:
        if path is not None:
            return load_plan(path, recipe, **job)
        if kept is not None and kept.is_file():
            try:
                return load_plan(kept, recipe, **job)
            except UserError:
                say("the tables are spread anew: the run was planned for other ranks or settings")
        return plan_recipe(recipe, data=data, **job)

    chosen: list[Plan] = []

    def tell() -> dict[str, Any]:
        chosen.append(choose())
        return chosen[0].to_json()

    if ranks.world == 1:
        if path is not None:
            load_plan(path, recipe, **job)
        return None
    told = Plan.from_json(ranks.first(tell))
    return _share_tiers(chosen[0] if chosen else told, ranks.mesh)


def _share_tiers(plan: Plan, mesh: Mesh) -> Plan:
    """Rank 0's plan names the rows that have copies, the others' only say that there are some."""
    tables = dict(plan.tables)
    for name, placed in plan.tables.items():
        if placed.tiers is not None:
            own = (placed.tiers.replicated, placed.tiers.node)
            parts = [torch.from_numpy(ids if mesh.rank == 0 else ids[:0]) for ids in own]
            named = [mesh.gather_tensors(mesh.to_link(part))[0].cpu().numpy() for part in parts]
            tables[name] = replace(placed, tiers=Tiers(*named))
    return replace(plan, tables=tables)


def summary(plan: Plan | None) -> list[str]:
    """A line for every way in which tables are spread."""
    ways: dict[str, list[str]] = {}
    for name, placed in plan.tables.items() if plan is not None else ():
        more = ", sums" if placed.sums else " in tiers" if placed.tiers is not None else ""
        ways.setdefault(placed.kind.replace("_", "-") + more, []).append(name)
    return [
        f"{way}: {', '.join(names) if len(names) <= NAMED else f'{len(names)} tables'}" for way, names in ways.items()
    ]
