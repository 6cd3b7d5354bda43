"""A plain multi-layer perceptron."""

from collections.abc import Sequence

from torch import nn


def mlp(inputs: int, hidden: Sequence[int], outputs: int, dropout: float = 0.0) -> nn.Sequential:
    """Linear layers with ReLU (and dropout) after each but the last."""
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [nn.Linear(inputs, size), nn.ReLU()]
        if dropout:
            layers.append(nn.Dropout(dropout))
        inputs = size
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))
