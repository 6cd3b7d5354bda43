"""The row that rare ids share, where a table's rows are dealt out: every part has a copy, and all copies see all gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..plan.placement import Placement
from ..storage.tables import RARE_SLOT
from .columns import Gathered
from .mesh import Mesh


def share_rare(mesh: Mesh, placement: Placement, work: Sequence[Gathered]) -> None:
    """`work`: of every shard of such tables that is held here, by table, column and part; on all ranks in the same step. Puts the
    sum over all parts in place of each one's own, added in the order of the parts."""
    pieces = {(name, piece.first): piece for name, placed in placement.tables.items() for piece in placed.pieces}
    messages: list[list[Tensor]] = [[] for _ in range(mesh.world)]
    expected: list[list[int]] = [[] for _ in range(mesh.world)]
    own: list[Tensor] = []
    for at, item in enumerate(work):
        own.append(_taken(item))
        for rank in pieces[item.shard.table, item.shard.first].ranks:
            if rank != mesh.rank:
                messages[rank].append(own[-1])
                expected[rank].append(at)
    sizes = [[own[at].numel() for at in parts] for parts in expected]
    like = torch.empty(0, device=own[0].device if own else None)
    came = mesh.everyone.swap(messages, sizes, like)
    found = {
        (rank, at): block
        for rank, (parts, blocks) in enumerate(zip(expected, came))
        for at, block in zip(parts, blocks)
    }
    for at, item in enumerate(work):
        ranks = pieces[item.shard.table, item.shard.first].ranks
        total = torch.stack([own[at] if rank == mesh.rank else found[rank, at] for rank in ranks]).sum(0)
        if float(total[0]):
            rest = item.slots != RARE_SLOT
            slot = item.slots.new_full((1,), RARE_SLOT)
            item.gradients = torch.cat([total[None, 1:], item.gradients[rest]])
            item.slots = torch.cat([slot, item.slots[rest]])


def _taken(item: Gathered) -> Tensor:
    """How many rare rows there are among those that were read, 0 or 1, and the gradient of that one."""
    mine = (item.slots == RARE_SLOT).nonzero()[:, 0]
    gradient = item.gradients[mine].sum(0)
    return torch.cat([torch.full((1,), float(mine.numel()), device=gradient.device), gradient])
