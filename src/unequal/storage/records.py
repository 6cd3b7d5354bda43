"""Records of rows of one width, from what they are made of."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..kernels.request import Records
from ..optim import Optimizer


def joined(records: Records, optimizer: Optimizer, k: int, parts: Mapping[str, Tensor]) -> Tensor:
    """[rows, words] of class k. Of `parts` by name, all of the same rows: "weight" and states of every value as [rows, values],
    states of rows as [rows], "utilities" and, where any chunks may live, "masks"."""
    count, device = parts["weight"].shape[0], parts["weight"].device
    width, *begins = records.layout[k].tolist()
    rows = torch.zeros(count, int(records.layout[k, 5]), device=device)
    words = -(-width * records.dtype.itemsize // 4)
    values = torch.zeros(count, words * 4 // records.dtype.itemsize, dtype=records.dtype, device=device)
    values[:, :width] = parts["weight"]
    rows[:, :words] = values.view(torch.float32)
    for (name, per), begin in zip(optimizer.state, begins):
        if per == "row":
            rows[:, begin] = parts[name]
        else:
            rows[:, begin : begin + width] = parts[name]
    rows[:, begins[2] : begins[2] + records.utilities] = parts["utilities"]
    if records.masked:
        rows[:, begins[3] : begins[3] + 2] = parts["masks"][:, None].contiguous().view(torch.float32)
    return rows
