"""Distinct ids in the order of their first appearance."""

import torch
from torch import Tensor


def unique(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(distinct, inverse, counts): ids == distinct[inverse]; counts[k] is how often distinct[k] appears."""
    distinct, inverse, counts = torch.unique(ids, return_inverse=True, return_counts=True)
    first = torch.full((distinct.numel(),), ids.numel()).scatter_reduce(0, inverse, torch.arange(ids.numel()), "amin")
    order = first.argsort()
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel())
    return distinct[order], place[inverse], counts[order]
