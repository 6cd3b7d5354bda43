"""The dense part of workload S, the same code on both sides."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .distributed_side import HIDDEN


class MeanOfSequences(nn.Module):
    """For each feature the mean of a sample's vectors; all of them side by side through an MLP."""

    def __init__(self, features: int, dim: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(features * dim, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))

    def forward(self, sequences: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        out: Tensor = self.mlp(torch.cat([mean(values, lengths) for values, lengths in sequences], 1))
        return out


def mean(values: Tensor, lengths: Tensor) -> Tensor:
    """By index_add: with its backward a third of the time of torch's segment_reduce, on either side."""
    owner = torch.repeat_interleave(lengths, output_size=values.shape[0])
    sums = values.new_zeros(lengths.numel(), values.shape[1]).index_add(0, owner, values)
    return sums / lengths.unsqueeze(1)
