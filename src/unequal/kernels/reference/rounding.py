"""Stochastic rounding to float16 and bfloat16: up or down in proportion to the distance, decided by (seed, step, row)."""

import torch
from torch import Tensor

from ..request import GOLDEN
from .rows import keys_of, mix64, signed


def random_words(key: int, slots: Tensor, dim: int) -> Tensor:
    """16 random bits for every value of every row: [rows, dim]; one generator word serves four neighbouring values."""
    groups = torch.arange((dim + 3) // 4) + 1
    words = mix64(keys_of(key, slots)[:, None] + groups * signed(GOLDEN))
    return ((words[:, :, None] >> (16 * torch.arange(4))) & 0xFFFF).flatten(1)[:, :dim]


def round_rows(values: Tensor, slots: Tensor, dtype: torch.dtype, key: int) -> Tensor:
    """Rows of float32 [n, dim] in the narrower dtype; row i is that of slots[i]. Infinity and NaN stay; float16 saturates."""
    random = random_words(key, slots, values.shape[1])
    finite = values.isfinite()
    bits = values.view(torch.int32).long() & 0xFFFFFFFF
    if dtype == torch.bfloat16:
        rounded = (bits + random) >> 16 << 16
        exact = torch.where(rounded >= 2**31, rounded - 2**32, rounded).int().view(torch.float32)
    else:
        size = ((bits & 0x7FFFFFFF) + (random & 0x1FFF)) >> 13 << 13
        normal = size.clamp(max=0x7F7FE000).int().view(torch.float32).clamp(max=65504.0)
        tiny = torch.floor(values.abs() * 2.0**24 + (random & 0x1FFF).float() * 2.0**-13) * 2.0**-24
        exact = torch.where(values.abs() < 2.0**-14, tiny, normal).copysign(values)
    return torch.where(finite, exact, values).to(dtype)
