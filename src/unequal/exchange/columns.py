"""Optimizers that need sums over a whole row, for tables whose columns are spread: the pieces of a row exchange their sums."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..batch import offsets_of
from ..kernels import Backend
from ..kernels.reference.rows import read, write
from ..kernels.reference.update import steps
from ..kernels.request import FeatureSpec, FeatureSpecs, Request
from ..optim import LAMB, LARS, Optimizer, RowWiseAdagrad, RowWiseAdam
from ..plan.placement import Placement, Shard
from ..storage import Storage
from .mesh import Mesh
from .rows import matrix_rows

SUMS = {RowWiseAdagrad: 1, RowWiseAdam: 1, LAMB: 2, LARS: 2}
"""numbers per row that an optimizer needs of all columns"""


def sums_of(optimizer: Optimizer) -> int:
    return SUMS.get(type(optimizer), 0)


@dataclass(slots=True)
class Gathered:
    """The distinct rows of a shard that a step has read, in the order of their first appearance, and their gradients' sums."""

    shard: Shard
    storage: Storage
    slots: Tensor
    gradients: Tensor


def sum_by_row(
    kernels: Backend, slots: Tensor, width: int, *, lists: Tensor | None = None,
    pooled: tuple[Tensor, Tensor, list[int]] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(distinct slots in the order of their first appearance, sums of their gradients). `lists`: a gradient per slot; or
    `pooled`: the bags' gradients, the lengths of all bags of all features, and in which column each feature begins."""
    distinct, inverse, _ = kernels.unique(slots)
    sums = torch.zeros(distinct.numel(), width, device=slots.device)
    if not slots.numel():
        return distinct, sums
    if pooled is None:
        specs = FeatureSpecs([FeatureSpec("rows", 0, None, width, 0)])
        size, offsets, upstream = 1, torch.tensor([0, slots.numel()], device=slots.device), None
    else:
        upstream, lengths, places = pooled
        specs = FeatureSpecs(FeatureSpec("rows", 0, "sum", width, place) for place in places)
        size, offsets = upstream.shape[0], offsets_of(lengths)
    index = np.arange(len(specs), dtype=np.int64)
    request = Request([matrix_rows(sums)], specs, size, index, inverse, inverse, offsets)
    kernels.update(request, upstream, [] if lists is None else [lists], lr_factor=-1.0, step=0)
    return distinct, sums


class ColumnSums:
    """Who holds the other columns of the same rows, for every shard of a table that needs sums over whole rows."""

    def __init__(self, mesh: Mesh, placement: Placement, dims: dict[str, int]) -> None:
        self.mesh, self.dims = mesh, dims
        self.peers: dict[tuple[str, int, int], list[Shard]] = {}
        for shard in placement.shards():
            self.peers.setdefault((shard.table, shard.part, shard.parts), []).append(shard)

    def update(self, work: Sequence[Gathered], optimizers: dict[str, Optimizer], factor: float, step: int) -> None:
        """`work`: of every such shard held here, by table, part and column; on all ranks in the same step."""
        running, partial, states = [], [], []
        for item in work:
            rows, optimizer = item.storage.rows, optimizers[item.shard.table]
            weights = read(rows, rows.weights, item.slots).float()
            states.append([read(rows, slabs, item.slots) for slabs in rows.states])
            dim, lr = self.dims[item.shard.table], optimizer.lr * factor
            running.append(steps(optimizer, weights, states[-1], item.gradients, lr, step, dim))
            partial.append(next(running[-1]))
        for item, job, own, total in zip(work, running, states, self._exchange(work, partial)):
            self._finish(item, job, own, total, step)

    def _finish(
        self, item: Gathered, job: Generator[Tensor, Tensor, Tensor], states: list[Tensor], total: Tensor, step: int
    ) -> None:
        try:
            job.send(total)
        except StopIteration as end:
            rows, new = item.storage.rows, end.value
        else:
            raise AssertionError("an optimizer asks for sums once")
        if rows.dtype != torch.float32:
            new = item.storage.kernels.round_rows(new, item.slots, rows.dtype, rows.rounding_key(step))
        write(rows, rows.weights, item.slots, new)
        for slabs, values in zip(rows.states, states):
            write(rows, slabs, item.slots, values)

    def _exchange(self, work: Sequence[Gathered], partial: Sequence[Tensor]) -> list[Tensor]:
        """Every item's sums over all pieces, added in the order of the columns, so that all pieces get the same."""
        world, me = self.mesh.world, self.mesh.rank
        messages: list[list[Tensor]] = [[] for _ in range(world)]
        shapes: dict[tuple[str, int, int], tuple[int, int]] = {}
        for item, sums in zip(work, partial):
            key = (item.shard.table, item.shard.part, item.shard.parts)
            shapes[key] = (sums.shape[0], sums.shape[1])
            for rank in dict.fromkeys(peer.rank for peer in self.peers[key]):
                if rank != me:
                    messages[rank].append(sums.flatten())
        # What a rank sends here: the sums of each of its pieces of the rows that are also held here, in the same order.
        expected = [
            [(key, peer) for key in shapes for peer in self.peers[key] if peer.rank == rank and rank != me]
            for rank in range(world)
        ]
        sizes = [[int(np.prod(shapes[key])) for key, _ in parts] for parts in expected]
        like = torch.empty(0, device=partial[0].device if partial else None)
        came = self.mesh.everyone.swap(messages, sizes, like)
        found = {
            peer: sums.view(shapes[key])
            for parts, blocks in zip(expected, came)
            for (key, peer), sums in zip(parts, blocks)
        }
        found |= {item.shard: sums for item, sums in zip(work, partial)}
        keys = [(item.shard.table, item.shard.part, item.shard.parts) for item in work]
        return [torch.stack([found[peer] for peer in self.peers[key]]).sum(0) for key in keys]
