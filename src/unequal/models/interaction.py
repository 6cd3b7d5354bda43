"""How feature vectors meet: dot products of all pairs (DLRM), or cross layers over all values (DCN-v2).

Both take the vectors of a sample side by side, [batch, sum of dims], as the embeddings give them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import Backend, backend
from ..storage.memory import OutputPool


class _PairDots(torch.autograd.Function):
    """x [batch, features, dim] → x_i · x_j for all i < j.

    Its own backward because the matrix of products is symmetric: one product with the symmetric gradient gives what
    autograd would get from two, and the gradient is gathered instead of scattered.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, pairs: Tensor, pair_of: Tensor) -> Tensor:
        ctx.save_for_backward(x, pair_of)
        return torch.bmm(x, x.transpose(1, 2)).flatten(1).index_select(1, pairs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        x, pair_of = ctx.saved_tensors
        features = x.shape[1]
        both = nn.functional.pad(gradient, (0, 1)).index_select(1, pair_of).view(-1, features, features)
        # Under autocast the products, and so their gradient, have a narrower dtype than x.
        return torch.bmm(both, x.to(both.dtype)).to(x.dtype), None, None


class _PairDotsOnCPU(torch.autograd.Function):
    """The same by the kernels, which compute each product once and write it straight where it belongs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernels: Backend, memory: OutputPool) -> Tensor:
        assert kernels.pair_dots is not None
        ctx.kernels, ctx.memory = kernels, memory
        ctx.save_for_backward(x)
        samples, features, _ = x.shape
        products = memory.take(samples, features * (features - 1) // 2)
        kernels.pair_dots(x, products)
        return products

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        out: Tensor = ctx.memory.take(x.shape[0], x.shape[1] * x.shape[2]).view(x.shape)
        ctx.kernels.pair_dots_gradient(x, gradient, out)
        return out, None, None


def _pair_dots_kernels(x: Tensor) -> Backend | None:
    """The kernels, where they take x as it is: float32 on the CPU, not under autocast."""
    if x.device.type != "cpu" or x.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
        return None
    kernels = backend("cpu")
    return None if kernels.pair_dots is None else kernels


class DotInteraction(nn.Module):
    """Dot products of all pairs of feature vectors; vectors of another dim are first projected to `dim`.

    A single feature has no pairs: its vector is passed on.
    """

    pairs: Tensor
    pair_of: Tensor

    def __init__(self, dims: Sequence[int], dim: int) -> None:
        super().__init__()
        self.dims, self.dim = list(dims), dim
        count = len(self.dims)
        self.projections: nn.ModuleList | None = None
        if any(size != dim for size in self.dims):
            self.projections = nn.ModuleList(
                nn.Identity() if size == dim else nn.Linear(size, dim, bias=False) for size in self.dims
            )
        first, second = torch.triu_indices(count, count, 1)
        number_of_pairs = first.numel()
        pair_of = torch.full((count, count), number_of_pairs)  # the diagonal reads a column of zeros
        pair_of[first, second] = pair_of[second, first] = torch.arange(number_of_pairs)
        self.register_buffer("pairs", first * count + second, persistent=False)
        self.register_buffer("pair_of", pair_of.flatten(), persistent=False)
        self.outputs = number_of_pairs if count > 1 else dim
        self._memory = OutputPool()

    def forward(self, vectors: Tensor) -> Tensor:
        if self.projections is None:
            x = vectors.reshape(-1, len(self.dims), self.dim)
        else:
            parts = torch.split(vectors, self.dims, 1)
            x = torch.stack([project(part) for project, part in zip(self.projections, parts)], 1)
        if len(self.dims) == 1:
            return x.squeeze(1)
        kernels = _pair_dots_kernels(x)
        if kernels is not None:
            return _PairDotsOnCPU.apply(x, kernels, self._memory)  # type: ignore[no-any-return,no-untyped-call]
        return _PairDots.apply(x, self.pairs, self.pair_of)  # type: ignore[no-any-return,no-untyped-call]


class CrossInteraction(nn.Module):
    """DCN-v2 cross layers: x ← x₀ ⊙ (W x + b) + x, with W full or of rank `rank`."""

    def __init__(self, dims: Sequence[int], layers: int, rank: int = 0) -> None:
        super().__init__()
        size = sum(dims)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(size, rank, bias=False), nn.Linear(rank, size)) if rank else nn.Linear(size, size)
            for _ in range(layers)
        )
        self.outputs = size

    def forward(self, vectors: Tensor) -> Tensor:
        x = vectors
        for layer in self.layers:
            x = torch.addcmul(x, vectors, layer(x))
        return x
