"""uq.shard: from a whole module to one that is spread, with the rows it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..exchange.mesh import Mesh
from ..plan.placement import Placement, Shard, part_of, place
from ..storage import Storage
from ..width import Shifts
from ..width.evidence import part_of_shown
from .drift import Drift
from .module import Embeddings, exact_device
from .sharded import ShardedEmbeddings


def shard(
    embeddings: Embeddings, plan: Placement | None = None, mesh: Any = None, *,
    device: torch.device | str | None = None, timing: bool = False, drift: Drift | None = None,
) -> ShardedEmbeddings:  # fmt: skip
    """The module's tables spread over the ranks of the job, with the same interface. All ranks call it.

    `plan`: where everything goes; by default every table is dealt out by rows over all ranks. `mesh`: a torch DeviceMesh with
    the dimensions (node, rank), or nothing for the whole job. A module on 'meta' holds nothing and is filled with fresh rows;
    of any other the values are taken over. `device`: where the shards are to be, by default where the module is, or the CPU.
    `drift`: what is done where the rows of a tiered plan are no longer those that are read most; by default nothing.
    """
    ranks = Mesh.of(mesh)
    if plan is None:
        placed = {n: place("row_wise", t, ranks.world, ranks.ranks_per_node) for n, t in embeddings.tables.items()}
        plan = Placement(ranks.world, ranks.ranks_per_node, placed)
    if device is None:
        device = "cpu" if embeddings.device.type == "meta" else embeddings.device
    sharded = ShardedEmbeddings(embeddings, plan, ranks, exact_device(device), timing, drift)
    if embeddings.device.type != "meta":
        _take_over(embeddings, sharded)
    sharded.train(embeddings.training)
    return sharded


def _take_over(embeddings: Embeddings, sharded: ShardedEmbeddings) -> None:
    """Gives the shards the rows of a whole module."""
    whole: Mapping[str, Storage] = {shard.table: storage for shard, storage in embeddings.shard_storages()}
    for shard, storage in sharded.shard_storages():
        storage.load(cut(whole[shard.table].state(), shard, embeddings.tables[shard.table].rows is None))
    sharded.step = embeddings.step
    hows = {name: embeddings._narrowing(name) for name in embeddings.tables}
    watched = embeddings.watched()
    sharded.tables_filled(
        {name: how.purse.left for name, how in hows.items() if how is not None},
        None if watched is None else Shifts.together([watched]),
        part_of_shown(embeddings.shown(), sharded.mesh.rank, sharded.mesh.world),
    )


def cut(state: Mapping[str, Tensor], shard: Shard, hashed: bool) -> dict[str, Tensor]:
    """Of a whole table's state, as `Storage.state` gives it, what belongs to a shard."""

    if "widths" in state:
        return _cut_narrow(state, shard, hashed)

    def columns(tensor: Tensor) -> Tensor:
        return tensor[:, shard.first : shard.last] if tensor.dim() == 2 else tensor

    if not hashed:
        return {name: columns(tensor[shard.part :: shard.parts]) for name, tensor in state.items()}
    ids, slots = state["ids"], state["slots"]
    mine = part_of(ids, shard.parts, True) == shard.part
    ids, slots = ids[mine], slots[mine]
    live = slots >= 0
    # A row that rare ids share is no id's own: every shard has it, at the front.
    shared = int(state["weight"].shape[0] > int((state["slots"] >= 0).sum()))
    rows = torch.cat([torch.zeros(shared, dtype=slots.dtype, device=slots.device), slots[live]])
    moved = {name: columns(tensor[rows]) for name, tensor in state.items() if name not in ("ids", "slots")}
    numbers = slots.clone()
    numbers[live] = torch.arange(shared, shared + int(live.sum()), device=slots.device)
    return {**moved, "ids": ids, "slots": numbers}


def _cut_narrow(state: Mapping[str, Tensor], shard: Shard, hashed: bool) -> dict[str, Tensor]:
    """Of rows of different width: their values lie one after the other."""
    mine = part_of(state["ids"], shard.parts, hashed) == shard.part
    followed = part_of(state["candidates"], shard.parts, hashed) == shard.part
    values = mine.repeat_interleave(state["widths"])
    found = {}
    for name, tensor in state.items():
        chosen = followed if name.startswith("candidate") else values if tensor.shape[0] == values.numel() else mine
        found[name] = tensor[chosen]
    return found
