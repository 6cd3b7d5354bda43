# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Which rank answers for an id: tier and place of every id in one pass, then one stable sort by both."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .hash import EMPTY, HashDirectory, block_of, find_slots
from .launch import ceil_div
from .random import mix64


@triton.jit(do_not_specialize=["capacity", "count", "parts", "divisor", "places"])
def _group(
    keys, slots, capacity, ids, count, cuts, parts, divisor, places, groups, numbers,
    CUTS: tl.constexpr, KNOWN: tl.constexpr, HASHED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    id_ = tl.load(ids + i, mask=inside, other=EMPTY)
    number = tl.full(id_.shape, -1, tl.int64)
    if KNOWN:
        number = tl.maximum(find_slots(keys, slots, capacity, id_, inside), -1)
    tl.store(numbers + i, number, mask=inside)
    tier = tl.full(id_.shape, 0, tl.int64)
    for c in tl.static_range(CUTS):
        tier += ((number < 0) | (number >= tl.load(cuts + c))).to(tl.int64)
    word = (mix64(id_.to(tl.uint64)) & 0x7FFFFFFFFFFFFFFF).to(tl.int64) if HASHED else id_
    place = (word % parts) // divisor % places
    tl.store(groups + i, (tier * places + place).to(tl.int32), mask=inside)


def route(
    ids: Tensor,
    directory: HashDirectory | None,
    cuts: Sequence[int],
    parts: int,
    divisor: int,
    places: int,
    hashed: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See kernels/reference/route.py."""
    ids, numbers, block = ids.contiguous(), torch.empty_like(ids), block_of(ids)
    groups = torch.empty(ids.numel(), dtype=torch.int32, device=ids.device)
    bounds = torch.tensor([*cuts], dtype=torch.int64).to(ids.device)
    keys, slots, capacity = (
        (ids, groups, 1) if directory is None else (directory._keys, directory._slots, directory.capacity)
    )
    if ids.numel():
        _group[ceil_div(ids.numel(), block),](
            keys, slots, capacity, ids, ids.numel(), bounds, parts, divisor, places, groups, numbers,
            CUTS=len(cuts), KNOWN=directory is not None, HASHED=hashed, BLOCK=block,
        )  # fmt: skip
    sizes = torch.bincount(groups, minlength=(len(cuts) + 1) * places).view(-1, places)
    return torch.argsort(groups, stable=True), sizes, numbers
