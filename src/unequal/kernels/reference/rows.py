"""Reading and writing rows of a table by slot, whatever slab they lie in, and the counter-based generator on tensors."""

import torch
from torch import Tensor

from ..request import GOLDEN, TableRows, slab_rows


def signed(x: int) -> int:
    """A 64-bit word as torch's int64 holds it."""
    return x - 2**64 if x >= 2**63 else x


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's >> on int64 keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix64(x: Tensor) -> Tensor:
    x = (x ^ shift_right(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ shift_right(x, 27)) * signed(0x94D049BB133111EB)
    return x ^ shift_right(x, 31)


def keys_of(key: int, numbers: Tensor) -> Tensor:
    """One generator key per number: mix(key + number · golden)."""
    return mix64(signed(key) + numbers * signed(GOLDEN))


def _parts(rows: TableRows, slots: Tensor) -> list[tuple[int, Tensor, Tensor]]:
    """(slab, which of the slots, their places in the slab) for each slab that is met."""
    if rows.slab_log2 < 0:
        return [(0, torch.arange(slots.numel(), device=slots.device), slots)]
    parts, first = [], 0
    for slab in range(len(rows.weights)):
        size = slab_rows(rows.slab_log2, slab)
        which = ((slots >= first) & (slots < first + size)).nonzero()[:, 0]
        if which.numel():
            parts.append((slab, which, slots[which] - first))
        first += size
    return parts


def read(rows: TableRows, slabs: list[Tensor], slots: Tensor) -> Tensor:
    out = slabs[0].new_empty((slots.numel(), *slabs[0].shape[1:]))
    for slab, which, places in _parts(rows, slots):
        out[which] = slabs[slab][places]
    return out


def write(rows: TableRows, slabs: list[Tensor], slots: Tensor, values: Tensor) -> None:
    for slab, which, places in _parts(rows, slots):
        slabs[slab][places] = values[which]
