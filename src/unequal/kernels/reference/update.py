"""Backward fused with the optimizer: gradients summed per row, every touched row updated once. Formulas: optim.py."""

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from ...optim import LAMB, LARS, SGD, Adagrad, Adam, Optimizer, RowWiseAdagrad, RowWiseAdam
from ..request import Request, TableRows
from .lookup import bags_of, scales_of
from .narrow import by_class, columns_of, read_records, set_values, values_of, write_records
from .rounding import round_rows
from .rows import read, write


def row_gradients(
    request: Request, table: int, pooled: Tensor | None, sequences: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor, Tensor]:
    """The slots of a table that were read, the sum of each one's gradients, and how often it was read."""
    slots, gradients = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, request.tables[table].dim)]
    for f, feature in enumerate(request.features):
        if feature.table != table:
            continue
        if feature.pooling is None:
            upstream = sequences[feature.place]
        elif pooled is not None:
            upstream = pooled[:, feature.place : feature.place + feature.dim][bags_of(request.offsets_of(f))]
            upstream = upstream * scales_of(request, f)[:, None]
        else:
            upstream = None
        if upstream is not None:
            slots.append(request.slots_of(f))
            gradients.append(upstream)
    all_slots, all_gradients = torch.cat(slots), torch.cat(gradients)
    live = all_slots >= 0
    distinct, inverse, reads = torch.unique(all_slots[live], return_inverse=True, return_counts=True)
    sums = torch.zeros(distinct.numel(), request.tables[table].dim, dtype=torch.float64)
    sums.index_add_(0, inverse, all_gradients[live].double())
    return distinct, sums.float(), reads


def steps(
    optimizer: Optimizer, w: Tensor, states: list[Tensor], g: Tensor, lr: float, step: int, dim: int
) -> Generator[Tensor, Tensor, Tensor]:
    """New weights [rows, columns]; the states of these rows are changed in place. `step` counts from 0. Where an optimizer needs
    sums over the `dim` columns of a row, it yields those over the columns at hand, [rows, sums], and is sent the whole ones."""
    decay = optimizer.weight_decay
    if isinstance(optimizer, SGD):
        return w - lr * (g + decay * w)
    if isinstance(optimizer, Adagrad):
        g = g + decay * w
        states[0] += g * g
        return w - lr * g / (states[0].sqrt() + optimizer.eps)
    if isinstance(optimizer, RowWiseAdagrad):
        g = g + decay * w
        squares = yield (g * g).sum(1, keepdim=True)
        states[0] += squares[:, 0] / dim
        return w - lr * g / (states[0].sqrt() + optimizer.eps)[:, None]
    if isinstance(optimizer, LARS):
        squares = yield torch.stack([(w * w).sum(1), (g * g).sum(1)], 1)
        size, length = squares.sqrt().split(1, 1)  # type: ignore[no-untyped-call]
        rate = torch.where((size > 0) & (length > 0), lr * optimizer.trust * size / (length + decay * size), lr)
        states[0].mul_(optimizer.momentum).add_(rate * (g + decay * w))
        return w - states[0]
    assert isinstance(optimizer, Adam)
    row_wise = isinstance(optimizer, RowWiseAdam)
    square = g * g
    if row_wise:
        square = (yield square.sum(1, keepdim=True))[:, 0] / dim
    states[0].mul_(optimizer.beta1).add_((1 - optimizer.beta1) * g)
    states[1].mul_(optimizer.beta2).add_((1 - optimizer.beta2) * square)
    first = states[0] / (1 - optimizer.beta1 ** (step + 1))
    second = states[1] / (1 - optimizer.beta2 ** (step + 1))
    direction = first / ((second[:, None] if row_wise else second).sqrt() + optimizer.eps) + decay * w
    if isinstance(optimizer, LAMB):
        squares = yield torch.stack([(w * w).sum(1), (direction * direction).sum(1)], 1)
        size, length = squares.sqrt().split(1, 1)  # type: ignore[no-untyped-call]
        direction = direction * torch.where((size > 0) & (length > 0), size / length, 1.0)
    return w - lr * direction


def apply(optimizer: Optimizer, w: Tensor, states: list[Tensor], g: Tensor, lr: float, step: int) -> Tensor:
    """`steps` where all columns are at hand."""
    work = steps(optimizer, w, states, g, lr, step, w.shape[1])
    try:
        sums = next(work)
        while True:
            sums = work.send(sums)
    except StopIteration as end:
        new: Tensor = end.value
        return new


def update_rows(rows: TableRows, slots: Tensor, gradients: Tensor, lr: float, step: int) -> None:
    states = [read(rows, slabs, slots) for slabs in rows.states]
    new = apply(rows.optimizer, read(rows, rows.weights, slots).float(), states, gradients, lr, step)
    if rows.dtype != torch.float32:
        new = round_rows(new, slots, rows.dtype, rows.rounding_key(step))
    write(rows, rows.weights, slots, new)
    for slabs, values in zip(rows.states, states):
        write(rows, slabs, slots, values)


def update_narrow_rows(rows: TableRows, slots: Tensor, gradients: Tensor, reads: Tensor, lr: float, step: int) -> None:
    """Rows of different width. How much a row matters is told by the gradient of its whole vector, whatever of it exists."""
    records = rows.records
    assert records is not None
    norms = gradients.view(slots.numel(), max(1, records.utilities), -1).norm(dim=2)
    gained = records.gain * (norms if records.kind & 1 else 1.0) * (reads[:, None] if records.kind & 2 else 1.0)
    for k, which, places in by_class(records, slots):
        part = read_records(records, k, places)
        _, *begins = records.layout[k].tolist()
        if records.kind:
            utilities = part[:, begins[2] : begins[2] + records.utilities]
            more = utilities + torch.as_tensor(gained).expand_as(norms)[which]
            # What is negative is none of a candidate, but says where a row is that it has got since; what is no number would be.
            counts = (
                (utilities.view(torch.int32) >= 0) & (more >= 0) if k == 0 else torch.ones_like(more, dtype=torch.bool)
            )
            utilities.copy_(torch.where(counts, more, utilities))
        if k:
            at = columns_of(records, k, part)
            states = [
                part[:, begin] if per == "row" else part[:, begin : begin + at.shape[1]]
                for begin, (_, per) in zip(begins, rows.optimizer.state)
            ]
            old = values_of(records, k, part).float()
            new = apply(rows.optimizer, old, states, gradients[which].gather(1, at), lr, step)
            if records.dtype != torch.float32:
                new = round_rows(new, slots[which], records.dtype, rows.rounding_key(step))
            set_values(records, k, part, new)
        write_records(records, k, places, part)


def update(
    request: Request, pooled: Tensor | None, sequences: Sequence[Tensor | None], *, lr_factor: float, step: int
) -> None:
    """Applies the gradients of the outputs (None: not used) to the tables. `step`: updates done before this one."""
    for t, rows in enumerate(request.tables):
        slots, gradients, reads = row_gradients(request, t, pooled, sequences)
        if slots.numel() and rows.records is not None:
            update_narrow_rows(rows, slots, gradients, reads, rows.optimizer.lr * lr_factor, step)
        elif slots.numel():
            update_rows(rows, slots, gradients, rows.optimizer.lr * lr_factor, step)
