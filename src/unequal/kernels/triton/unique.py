"""Distinct ids in the order of their first appearance: the numbers that an empty hash directory would give them."""

import torch
import triton
from torch import Tensor

from .hash import assign, empty_table


def unique_padded(ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(distinct, inverse, counts, number of distinct ids), all as long as ids but the last, which is one number on the
    device; distinct and counts go on with zeros. Waits for nothing."""
    ids = ids.contiguous()
    keys, slots = empty_table(triton.next_power_of_2(max(16, 2 * ids.numel())), ids.device)
    counters = torch.zeros(2, dtype=torch.int64, device=ids.device)
    inverse, distinct, number, _ = assign(keys, slots, counters, ids, admit_after=1, rare=-1)
    counts = torch.zeros_like(ids).scatter_add_(0, inverse, torch.ones_like(ids))
    return distinct, inverse, counts, number


def unique(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(distinct, inverse, counts): ids == distinct[inverse]; counts[k] is how often distinct[k] appears."""
    distinct, inverse, counts, number = unique_padded(ids)
    found = int(number)
    return distinct[:found], inverse, counts[:found]
