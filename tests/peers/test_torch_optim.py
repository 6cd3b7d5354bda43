"""The fused optimizers against torch.optim, through the public module and autograd.

torch.optim has SGD, AdaGrad and Adam. Row-wise Adam, LAMB and LARS are put together from its moments and momentum.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import unequal as uq

ROWS, DIM, SIZE, STEPS = 40, 12, 24, 6
Optimizers = Callable[[list[Tensor]], torch.optim.Optimizer]


def draw_batches(every_row: bool) -> list[uq.Jagged]:
    """Bags with repeated ids and empty ones; with `every_row`, each batch reads all rows."""
    generator = torch.Generator().manual_seed(3)
    batches = []
    for _ in range(STEPS):
        lengths = torch.randint(0, 7, (SIZE,), generator=generator)
        ids = torch.randint(0, ROWS // 2, (int(lengths.sum()),), generator=generator) * 2
        if every_row:
            lengths[-1] += ROWS
            ids = torch.cat([ids, torch.arange(ROWS)])
        batches.append(uq.Jagged(ids, lengths))
    return batches


def start_weights() -> Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(4))


def upstream(batch: uq.Jagged, pooling: str | None, step: int) -> Tensor:
    """One sign per column and step. A row's gradients then do not cancel: where they do, AdaGrad and Adam divide two
    sums of rounding errors, and the order of summation, which torch does not fix, decides about the result."""
    rows = batch.values.numel() if pooling is None else SIZE
    generator = torch.Generator().manual_seed(100 + step)
    signs = torch.randint(0, 2, (DIM,), generator=generator) * 2 - 1
    return (1 + torch.rand(rows, DIM, generator=generator)) * signs


def module_with(weights: Tensor, optimizer: uq.Optimizer, pooling: str | None) -> uq.Embeddings:
    table = uq.Table("t", rows=ROWS, dim=DIM)
    module = uq.Embeddings({"f": uq.Feature(table, pooling=pooling)}, optimizer=optimizer)
    module.load_state_dict({**module.state_dict(), "t.weight": weights})
    return module


def train_ours(optimizer: uq.Optimizer, batches: list[uq.Jagged], pooling: str | None = "sum") -> Tensor:
    module = module_with(start_weights(), optimizer, pooling)
    for step, batch in enumerate(batches):
        out = module({"f": batch})["f"]
        out = out.values if isinstance(out, uq.Jagged) else out
        out.backward(upstream(batch, pooling, step))
    return module.state_dict()["t.weight"].clone()


def look_up(weights: Tensor, batch: uq.Jagged, pooling: str | None, sparse: bool) -> Tensor:
    if pooling is None:
        return torch.nn.functional.embedding(batch.values, weights, sparse=sparse)
    return torch.nn.functional.embedding_bag(
        batch.values, weights, batch.offsets, mode=pooling, sparse=sparse, include_last_offset=True
    )


def train_torch(make: Optimizers, batches: list[uq.Jagged], pooling: str | None = "sum", sparse: bool = True) -> Tensor:
    weights = torch.nn.Parameter(start_weights())
    optimizer = make([weights])
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        look_up(weights, batch, pooling, sparse).backward(upstream(batch, pooling, step))
        if sparse:
            assert weights.grad is not None
            weights.grad = weights.grad.coalesce()
        optimizer.step()
    return weights.detach()


def agree(ours: Tensor, theirs: Tensor) -> None:
    assert not torch.equal(theirs, start_weights())
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pooling", ["sum", "mean", None])
@pytest.mark.parametrize(
    "ours, theirs",
    [
        (uq.SGD(lr=0.05), lambda p: torch.optim.SGD(p, lr=0.05)),
        (uq.Adagrad(lr=0.05, eps=1e-8), lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-8)),
        (uq.Adam(lr=0.05, eps=1e-10), lambda p: torch.optim.SparseAdam(p, lr=0.05, eps=1e-10)),
    ],
    ids=["sgd", "adagrad", "adam"],
)
def test_sparse_gradients(ours: uq.Optimizer, theirs: Optimizers, pooling: str | None) -> None:
    """Rows that are not read stay as they are, in torch and here."""
    batches = draw_batches(every_row=False)
    result = train_ours(ours, batches, pooling)
    agree(result, train_torch(theirs, batches, pooling))
    assert torch.equal(result[1::2], start_weights()[1::2])


@pytest.mark.parametrize(
    "ours, theirs",
    [
        (uq.SGD(lr=0.05, weight_decay=0.1), lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.1)),
        (
            uq.Adagrad(lr=0.05, eps=1e-3, weight_decay=0.1),
            lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-3, weight_decay=0.1),
        ),
        (uq.Adam(lr=0.05, eps=1e-3), lambda p: torch.optim.Adam(p, lr=0.05, eps=1e-3)),
        (
            uq.Adam(lr=0.05, beta1=0.8, beta2=0.95, eps=1e-3, weight_decay=0.1),
            lambda p: torch.optim.AdamW(p, lr=0.05, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1),
        ),
    ],
    ids=["sgd", "adagrad", "adam", "adamw"],
)
def test_decay_and_eps_with_every_row_read(ours: uq.Optimizer, theirs: Optimizers) -> None:
    """torch decays all rows, so the comparison needs batches that read all of them."""
    batches = draw_batches(every_row=True)
    agree(train_ours(ours, batches), train_torch(theirs, batches, sparse=False))


def dense_gradient(weights: Tensor, batch: uq.Jagged, step: int) -> Tensor:
    leaf = weights.clone().requires_grad_()
    look_up(leaf, batch, "sum", sparse=False).backward(upstream(batch, "sum", step))
    assert leaf.grad is not None
    return leaf.grad


class Moments:
    """Runs torch.optim.Adam on a parameter of its own and gives the bias-corrected moments of what it is fed."""

    def __init__(self, shape: tuple[int, ...], beta1: float, beta2: float) -> None:
        self.parameter = torch.nn.Parameter(torch.zeros(shape))
        self.betas = (beta1, beta2)
        self.optimizer = torch.optim.Adam([self.parameter], betas=self.betas)

    def feed(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        self.parameter.grad = gradient
        self.optimizer.step()
        state = self.optimizer.state[self.parameter]
        step = int(state["step"])
        return state["exp_avg"] / (1 - self.betas[0] ** step), state["exp_avg_sq"] / (1 - self.betas[1] ** step)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_row_wise_adam(decay: float) -> None:
    """One second moment per row is Adam's of the root of the row's mean square."""
    ours = uq.RowWiseAdam(lr=0.05, beta1=0.8, beta2=0.95, eps=1e-3, weight_decay=decay)
    batches, weights = draw_batches(every_row=True), start_weights()
    values, rows = Moments((ROWS, DIM), 0.8, 0.95), Moments((ROWS, 1), 0.8, 0.95)
    for step, batch in enumerate(batches):
        gradient = dense_gradient(weights, batch, step)
        first, _ = values.feed(gradient)
        _, second = rows.feed(gradient.square().mean(1, keepdim=True).sqrt())
        weights = weights - 0.05 * (first / (second.sqrt() + 1e-3) + decay * weights)
    agree(train_ours(ours, batches), weights)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lamb(decay: float) -> None:
    """LAMB is Adam's direction, scaled row by row to the row's own norm."""
    ours = uq.LAMB(lr=0.05, beta1=0.8, beta2=0.95, eps=1e-3, weight_decay=decay)
    batches, weights = draw_batches(every_row=True), start_weights()
    moments = Moments((ROWS, DIM), 0.8, 0.95)
    for step, batch in enumerate(batches):
        first, second = moments.feed(dense_gradient(weights, batch, step))
        direction = first / (second.sqrt() + 1e-3) + decay * weights
        weights = weights - 0.05 * direction * weights.norm(dim=1, keepdim=True) / direction.norm(dim=1, keepdim=True)
    agree(train_ours(ours, batches), weights)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lars(decay: float) -> None:
    """LARS is torch's momentum SGD fed with gradients that carry each row's own learning rate."""
    ours = uq.LARS(lr=2.0, momentum=0.7, trust=0.02, weight_decay=decay)
    batches = draw_batches(every_row=True)
    weights = torch.nn.Parameter(start_weights())
    optimizer = torch.optim.SGD([weights], lr=1.0, momentum=0.7)
    for step, batch in enumerate(batches):
        gradient = dense_gradient(weights.detach(), batch, step)
        with torch.no_grad():
            norm = weights.norm(dim=1, keepdim=True)
            rate = 2.0 * 0.02 * norm / (gradient.norm(dim=1, keepdim=True) + decay * norm)
            weights.grad = rate * (gradient + decay * weights)
        optimizer.step()
    agree(train_ours(ours, batches), weights.detach())
