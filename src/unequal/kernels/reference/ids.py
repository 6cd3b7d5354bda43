"""Ids as they travel: each block of them in as many bytes as its largest can need, the low ones first."""

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

WHOLE = 8
"""bytes of an id that may be anything"""


def narrow_ids(blocks: Sequence[tuple[Tensor, int]], device: torch.device) -> Tensor:
    """The message (uint8) of blocks of ids, one after the other: each a tensor and the bytes of one of its ids. Ids that may be
    negative have 8."""
    parts = [torch.empty(0, dtype=torch.uint8, device=device)]
    # Neighbours that are as wide are taken together: a call for each would take longer than the rest.
    for size, same in groupby(blocks, key=lambda block: block[1]):
        ids = torch.cat([part for part, _ in same])
        parts.append(ids.view(torch.uint8).view(-1, WHOLE)[:, :size].reshape(-1))
    return torch.cat(parts)


def widen_ids(message: Tensor, runs: npt.NDArray[np.int64]) -> Tensor:
    """The ids (int64) of such a message. runs: [blocks, 2], how many ids each has and the bytes of one."""
    if (runs[:, 1] == WHOLE).all():
        return message.view(torch.int64)
    whole = message.new_zeros(int(runs[:, 0].sum()), WHOLE)
    at = done = 0
    for size, same in groupby(runs[runs[:, 0] > 0].tolist(), key=lambda run: int(run[1])):
        count = sum(n for n, _ in same)
        whole[done : done + count, :size] = message[at : at + count * size].view(count, size)
        at, done = at + count * size, done + count
    return whole.view(torch.int64)[:, 0]
