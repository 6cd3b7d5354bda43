"""Histories to vectors: a list of past ids and a target in, one vector per sample out; an empty history gives zeros."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..batch import Jagged


class TargetAttention(nn.Module):
    """Each past vector h is weighed by how it meets the target q: softmax over the list of an MLP of [h, q⊙h, q−h].

    Works on the lists as they lie, end to end: on batches of 2048 lists of up to 50 that is 2 to 5 times as fast as
    padding, and one very long list costs no memory for the others.
    """

    def __init__(self, dim: int, target_dim: int, hidden: int = 32) -> None:
        super().__init__()
        self.project = _projection(target_dim, dim)
        self.inner = nn.Linear(3 * dim, hidden)
        self.activation = nn.PReLU()
        self.outer = nn.Linear(hidden, 1)

    def forward(self, history: Jagged, target: Tensor) -> Tensor:
        past, query = history.values, self.project(target)
        owner, offsets = _owners(history), history.offsets
        # W·[h, q⊙h, q−h] = (W₁−W₃)h + W₂(q⊙h) + W₃q: the last term once per sample, and nothing is concatenated.
        of_past, of_product, of_difference = torch.split(self.inner.weight, past.shape[1], 1)
        inner = nn.functional.linear(past, of_past - of_difference)
        inner = inner + nn.functional.linear(spread(query, owner, offsets) * past, of_product)
        of_query = nn.functional.linear(query, of_difference, self.inner.bias)
        inner = inner + spread(of_query, owner, offsets)
        scores = self.outer(self.activation(inner))
        weights = _softmax_of_lists(scores, owner, offsets)
        return sums(weights * past, owner, offsets)


class TransformerEncoder(nn.Module):
    """The newest `max_positions` past vectors and the target as the last position, through pre-norm encoder layers.

    The answer is the target's position, so the last layer computes that one alone. Positions count back from the
    target: what a sample's history gives does not depend on how long other histories are.
    """

    def __init__(
        self, dim: int, target_dim: int, *, layers: int, heads: int, max_positions: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.max_positions = max_positions
        self.project = _projection(target_dim, dim)
        self.positions = nn.Parameter(torch.randn(max_positions + 1, dim) * 0.02)
        self.layers = nn.ModuleList(_Layer(dim, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)

    def forward(self, history: Jagged, target: Tensor) -> Tensor:
        past, present = padded_at_the_front(history, self.max_positions)
        x = torch.cat([past, self.project(target).unsqueeze(1)], 1)
        x = x + self.positions[: x.shape[1]].flip(0)
        present = nn.functional.pad(present, (0, 1), value=True)
        for number, layer in enumerate(self.layers, 1):
            x = layer(x, present, last_only=number == len(self.layers))
        out: Tensor = self.norm(x[:, -1]) * (history.lengths > 0).unsqueeze(1)
        return out


class _Layer(nn.Module):
    """Self-attention and a two-layer MLP, each on normalised input and added to its input."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before_attention, self.before_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query = nn.Linear(dim, dim)
        self.key_value = nn.Linear(dim, 2 * dim)
        self.out = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, present: Tensor, *, last_only: bool) -> Tensor:
        normal = self.before_attention(x)
        if last_only:
            x = x[:, -1:]
        query = self._split(self.query(normal[:, -1:] if last_only else normal))
        key, value = (self._split(part) for part in self.key_value(normal).chunk(2, -1))
        dropout = self.dropout if self.training else 0.0
        met = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=present[:, None, None, :], dropout_p=dropout
        )
        x = x + nn.functional.dropout(self.out(met.transpose(1, 2).flatten(2)), dropout)
        return x + nn.functional.dropout(self.mlp(self.before_mlp(x)), dropout)

    def _split(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], self.heads, x.shape[2] // self.heads).transpose(1, 2)


def padded_at_the_front(lists: Jagged, longest: int) -> tuple[Tensor, Tensor]:
    """[samples, length, dim] with each list's newest values at the end, and where values are; length ≤ `longest`."""
    values, samples = lists.values, lists.lengths.numel()
    # On a GPU this waits for the device, once a step; always padding to `longest` would cost more for short lists.
    real = int(lists.lengths.max()) if samples else 0
    length = min(real, longest)
    owner = _owners(lists)
    place = lists.offsets[1:].index_select(0, owner) - 1 - torch.arange(values.shape[0], device=values.device)
    cut, on_cpu = real > length, values.device.type == "cpu"
    if cut and on_cpu:
        kept = (place < length).nonzero().squeeze(1)
        values, owner, place = (part.index_select(0, kept) for part in (values, owner, place))
    target = owner * length + (length - 1 - place)
    if cut and not on_cpu:
        padded = without_the_rest(values, target, place < length, samples * length)
    else:
        padded = values.new_zeros(samples * length, values.shape[1]).index_copy(0, target, values)
    present = torch.arange(length, device=values.device) >= length - lists.lengths.unsqueeze(1)
    return padded.view(samples, length, values.shape[1]), present


def without_the_rest(values: Tensor, target: Tensor, kept: Tensor, rows: int) -> Tensor:
    """[rows, dim] with the kept values at their targets. How many these are need not be known: the others go to a row
    that is cut off."""
    target = torch.where(kept, target, rows)
    return values.new_zeros(rows + 1, values.shape[1]).index_copy(0, target, values)[:-1]


def _owners(lists: Jagged) -> Tensor:
    """For each value the sample whose list it is in."""
    return torch.repeat_interleave(lists.lengths.long(), output_size=lists.values.shape[0])


def spread(values: Tensor, owner: Tensor, offsets: Tensor) -> Tensor:
    """values [samples, n] → for each place in the lists its sample's row."""
    return _Spread.apply(values, owner, offsets)  # type: ignore[no-any-return,no-untyped-call]


def sums(values: Tensor, owner: Tensor, offsets: Tensor) -> Tensor:
    """values [places in the lists, n] → for each sample the sum over its list."""
    return _Sum.apply(values, owner, offsets)  # type: ignore[no-any-return,no-untyped-call]


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, owner: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(owner, offsets)
        return values.index_select(0, owner)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _sum_of_lists(gradient, *ctx.saved_tensors), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, owner: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(owner)
        return _sum_of_lists(values, owner, offsets)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (owner,) = ctx.saved_tensors
        return gradient.index_select(0, owner), None, None


def _sum_of_lists(values: Tensor, owner: Tensor, offsets: Tensor) -> Tensor:
    """[samples, n]. In the order of the lists on every device: a GPU's index_add would add in another order each time."""
    if values.device.type == "cpu" or not values.shape[0]:
        return values.new_zeros(offsets.numel() - 1, values.shape[1]).index_add(0, owner, values)
    return sum_by_segment(values, offsets)


def sum_by_segment(values: Tensor, offsets: Tensor) -> Tensor:
    return torch.segment_reduce(values.contiguous(), "sum", offsets=offsets, axis=0, unsafe=True)


def _softmax_of_lists(scores: Tensor, owner: Tensor, offsets: Tensor) -> Tensor:
    """scores [places in the lists, 1]"""
    top = scores.new_full((offsets.numel() - 1,), -torch.inf)
    top = top.scatter_reduce(0, owner, scores.detach().squeeze(1), "amax").unsqueeze(1)
    grown = torch.exp(scores - top.index_select(0, owner))
    return grown / spread(sums(grown, owner, offsets), owner, offsets)


def _projection(size: int, dim: int) -> nn.Module:
    return nn.Identity() if size == dim else nn.Linear(size, dim, bias=False)
