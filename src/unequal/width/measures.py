"""Units in which what rows are worth is compared between tables. They are those of all ranks' rows together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
Totals = Callable[[Floats], Floats]
"""sums each number over all ranks, which all call it as often with as many"""
MANTISSA = 1 << 12
DIGIT = 8
"""bits of a number that are looked at together"""


def alone_in_all(values: Floats) -> Floats:
    """The sums over all ranks, where there is one."""
    return values


def means(columns: Mapping[str, int], utilities: Mapping[str, Tensor], totals: Totals) -> dict[str, Tensor]:
    """Of each table's rows, live and followed: of all their numbers, or of each column. `columns`: of every table, 1 or as many
    as its rows have numbers; `utilities`: of those that this rank has a part of."""
    own = []
    for name, count in columns.items():
        part = utilities.get(name)
        sums = torch.zeros(count, dtype=torch.float64)
        if part is not None:
            whole = part.sum(0, dtype=torch.float64).cpu()
            sums = whole if count > 1 else whole.sum()[None]
        numbers = 0 if part is None else part.numel() / count
        own.append(np.append(sums.numpy(), numbers))
    together = totals(np.concatenate(own))
    found, at = {}, 0
    for name, count in columns.items():
        added, numbers = together[at : at + count], together[at + count]
        found[name] = torch.tensor([rounded(value / numbers) if value > 0 else 1.0 for value in added])
        at += count + 1
    return found


def rounded(value: float) -> float:
    """To 12 bits: ranks add up in another order than one process, and must not choose otherwise for it."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(mantissa * MANTISSA) / MANTISSA, exponent)


def percentiles(
    tables: Sequence[str], utilities: Mapping[str, Tensor], share: float, totals: Totals
) -> dict[str, Tensor]:
    """Of each table's rows the one above such a share of them, exactly: digit by digit of the numbers' bits, which ascend with
    the numbers, as none is negative."""
    none = torch.empty(0, dtype=torch.int32)
    bits = [utilities[name].sum(1).view(torch.int32) if name in utilities else none for name in tables]
    counts = totals(np.array([part.numel() for part in bits], np.float64))
    left = [int(share * max(0, int(count) - 1)) for count in counts]
    prefixes = [0] * len(bits)
    for shift in range(32 - DIGIT, -1, -DIGIT):
        digits = []
        for part, prefix in zip(bits, prefixes):
            same = part[part >> shift >> DIGIT == prefix]
            digits.append(torch.bincount(same >> shift & (1 << DIGIT) - 1, minlength=1 << DIGIT).cpu().numpy())
        together = totals(np.concatenate(digits).astype(np.float64)).reshape(len(bits), -1).cumsum(1)
        for t, below in enumerate(together):
            digit = int(np.searchsorted(below, left[t], side="right")) if counts[t] else 0
            left[t] -= int(below[digit - 1]) if digit else 0
            prefixes[t] = prefixes[t] << DIGIT | digit
    found = torch.tensor(prefixes, dtype=torch.int64).to(torch.int32).view(torch.float32).clamp(min=1e-30)
    return {name: found[t : t + 1] for t, name in enumerate(tables)}
