"""Which part of a spread table an id belongs to."""

import torch
from torch import Tensor

from .rows import mix64


def part_of(ids: Tensor, parts: int, hashed: bool) -> Tensor:
    """Dense ids are dealt out in turn, so that popular neighbours are spread; others by their mixed bits."""
    if parts == 1:
        return torch.zeros_like(ids)
    return ((mix64(ids) & (2**63 - 1)) if hashed else ids) % parts


def deal(ids: Tensor, parts: int, hashed: bool) -> tuple[Tensor, Tensor]:
    """(order, sizes): ids[order] lie part by part, each in their old order; sizes[p] is how many part p has."""
    part = part_of(ids, parts, hashed)
    return torch.argsort(part, stable=True), torch.bincount(part, minlength=parts)


def deal_bags(ids: Tensor, lengths: Tensor, parts: int, hashed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, lengths, sizes): the ids part by part, [parts, bags] how many of each bag a part has, and how many in all."""
    part, size = part_of(ids, parts, hashed), lengths.numel()
    bag = torch.repeat_interleave(torch.arange(size, device=ids.device), lengths, output_size=ids.numel())
    shares = torch.bincount(part * size + bag, minlength=parts * size).view(parts, size)
    return ids[torch.argsort(part, stable=True)], shares, shares.sum(1)
