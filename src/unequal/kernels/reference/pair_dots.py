"""Dot products of all pairs of a sample's feature vectors, and their gradient."""

import torch
from torch import Tensor


def pair_dots(x: Tensor, products: Tensor) -> None:
    """x [samples, features, dim] → products [samples, pairs]: x_i · x_j for all i < j, ordered by i, then j."""
    first, second = torch.triu_indices(x.shape[1], x.shape[1], 1)
    products.copy_((x @ x.transpose(1, 2))[:, first, second])


def pair_dots_gradient(x: Tensor, gradient: Tensor, out: Tensor) -> None:
    """The gradient with regard to the products → out, the one with regard to x."""
    first, second = torch.triu_indices(x.shape[1], x.shape[1], 1)
    both = gradient.new_zeros(x.shape[0], x.shape[1], x.shape[1])
    both[:, first, second] = both[:, second, first] = gradient
    out.copy_(both @ x)
