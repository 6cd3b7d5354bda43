"""Which part of a spread table an id belongs to, and which rank answers for it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .rows import mix64


def part_of(ids: Tensor, parts: int, hashed: bool) -> Tensor:
    """Dense ids are dealt out in turn, so that popular neighbours are spread; others by their mixed bits."""
    if parts == 1:
        return torch.zeros_like(ids)
    return ((mix64(ids) & (2**63 - 1)) if hashed else ids) % parts


def route(
    ids: Tensor, directory: Any, cuts: Sequence[int], parts: int, divisor: int, places: int, hashed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts ids by tier and, within it, by the rank that answers.

    An id that the directory (or None) knows by a number below cuts[0] is in the first tier, below cuts[1] in the second, and so
    on; all others are in the last. Its place is part_of(id) // divisor % places.
    Gives (order, sizes, numbers): ids[order] lie tier by tier and place by place, each in their old order; [tiers, places] how
    many there are; and what the directory gave for every id, -1 where it knows none."""
    numbers = torch.full_like(ids, -1) if directory is None else directory.find(ids)
    return *sorted_by_group(ids, numbers, cuts, parts, divisor, places, hashed), numbers


def sorted_by_group(
    ids: Tensor, numbers: Tensor, cuts: Sequence[int], parts: int, divisor: int, places: int, hashed: bool
) -> tuple[Tensor, Tensor]:
    tier = torch.full_like(ids, len(cuts))
    for number, cut in reversed(list(enumerate(cuts))):
        tier[(numbers >= 0) & (numbers < cut)] = number
    group = tier * places + part_of(ids, parts, hashed) // divisor % places
    sizes = torch.bincount(group, minlength=(len(cuts) + 1) * places)
    return torch.argsort(group, stable=True), sizes.view(-1, places)


def deal_bags(ids: Tensor, lengths: Tensor, parts: int, hashed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, lengths, sizes): the ids part by part, [parts, bags] how many of each bag a part has, and how many in all."""
    part, size = part_of(ids, parts, hashed), lengths.numel()
    bag = torch.repeat_interleave(torch.arange(size, device=ids.device), lengths, output_size=ids.numel())
    shares = torch.bincount(part * size + bag, minlength=parts * size).view(parts, size)
    return ids[torch.argsort(part, stable=True)], shares, shares.sum(1)
