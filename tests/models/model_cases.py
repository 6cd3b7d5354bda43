"""Small embedding modules and batches the model tests share."""

import torch

from unequal import Adagrad, Batch, Embeddings, Feature, Jagged, Table


def categorical_batch(features: dict[str, int], size: int, dense: int = 0, tasks: int = 1, seed: int = 0) -> Batch:
    """One random id per sample and feature, below the given number of rows."""
    generator = torch.Generator().manual_seed(seed)
    return Batch.from_jagged(
        {name: torch.randint(rows, (size,), generator=generator) for name, rows in features.items()},
        dense=torch.randn(size, dense, generator=generator) if dense else None,
        labels=torch.randint(2, (size, tasks), generator=generator).float(),
    )


def plain_embeddings(dims: dict[str, int], rows: int = 20, lr: float = 0.1) -> Embeddings:
    features = {name: Feature(Table(name, rows, dim=dim, init_std=0.3)) for name, dim in dims.items()}
    return Embeddings(features, optimizer=Adagrad(lr=lr))


def sequence_embeddings(dim: int = 8, target_dim: int | None = None, user_dim: int = 8, lr: float = 0.1) -> Embeddings:
    """A history and its target (of one table unless the target has its own dim) and a user."""
    item = Table("item", 30, dim=dim, init_std=0.5)
    target = item if target_dim is None else Table("target", 30, dim=target_dim, init_std=0.5)
    user = Table("user", 10, dim=user_dim, init_std=0.5)
    features = {"user": Feature(user), "history": Feature(item, pooling=None), "target": Feature(target)}
    return Embeddings(features, optimizer=Adagrad(lr=lr))


def sequence_batch(histories: list[list[int]], targets: list[int], users: list[int] | None = None) -> Batch:
    return Batch.from_jagged(
        {
            "user": torch.tensor(users if users is not None else [0] * len(targets)),
            "history": Jagged.from_lists(histories),
            "target": torch.tensor(targets),
        }
    )
