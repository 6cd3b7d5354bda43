"""Rows of different width as they travel: of each its scale where values have 8 bits, its live values, and, where it is not whole
and that is asked for, the norm of all that it lacks. Rows are given at full width, run after run, in one flat tensor.

`live` says which chunks each row has: how many, the first ones (uint8), or which ones, as bits (int64; there are no norms then).
A row without a value has no scale. Norms are float32 on a wire of float32 and bfloat16 on others: they say what a row is worth,
to which two digits are enough.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..request import TableRows
from .codecs import SCALE_BYTES, WIRE_DTYPES, decode_rows, encode_rows

Runs = Sequence[tuple[int, int, int]]
"""(rows, width, values of a chunk) of rows of one table that lie one after the other"""


def used_chunks(rows: Tensor, runs: Runs) -> Tensor:
    """Bits of the chunks that are not all zero: no others need to travel."""
    parts = [torch.empty(0, dtype=torch.int64, device=rows.device)]
    for block, (count, width, chunk) in zip(torch.split(rows, [n * width for n, width, _ in runs]), runs):
        used = (block.view(count, width // chunk, chunk) != 0).any(2)
        parts.append((used.to(torch.int64) << torch.arange(width // chunk, device=rows.device)).sum(1))
    return torch.cat(parts)


def packed_sizes(live: Tensor, runs: Runs, codec: str, norms: bool) -> list[int]:
    """Elements of the wire's dtype that each run takes."""
    parts = [_chosen(own, run, codec, norms).sum() for own, run in _by_run(live, runs)]
    return torch.stack(parts).tolist() if parts else []


def pack(rows: Tensor, live: Tensor, runs: Runs, codec: str, norms: bool) -> Tensor:
    """The message, in the wire's dtype."""
    parts = [torch.empty(0, dtype=WIRE_DTYPES[codec], device=rows.device)]
    blocks = torch.split(rows, [count * width for count, width, _ in runs]) if runs else ()
    for block, (own, run) in zip(blocks, _by_run(live, runs)):
        count, width, _ = run
        if not count:
            continue
        values, has = block.view(count, width), _has(own, run)
        wire = encode_rows(torch.where(has, values, 0.0), codec)
        if norms:
            missing = torch.where(has, 0.0, values).double().square().sum(1).sqrt().float()
            bits = missing[:, None] if codec == "fp32" else missing[:, None].bfloat16()
            wire = torch.cat([wire, bits.view(wire.dtype)], 1)
        parts.append(wire[_chosen(own, run, codec, norms)])
    return torch.cat(parts)


def unpack(wire: Tensor, live: Tensor, runs: Runs, codec: str, norms: bool, out: Tensor) -> None:
    """Into rows at full width. What a row lacks is zeros; its norm is put where the first missing value would be."""
    at = done = 0
    for own, run in _by_run(live, runs):
        count, width, chunk = run
        if not count:
            continue
        chosen = _chosen(own, run, codec, norms)
        whole = wire.new_zeros(chosen.shape)
        size = int(chosen.sum())
        whole[chosen] = wire[at : at + size]
        extra = SCALE_BYTES if codec == "int8" else 0
        values = decode_rows(whole[:, : extra + width], codec)
        if norms:
            bits = whole[:, extra + width :].clone(memory_format=torch.contiguous_format)
            found = (bits if codec == "fp32" else bits.view(torch.bfloat16)).float()[:, 0]
            narrow = (own < width // chunk).nonzero()[:, 0]
            values[narrow, own[narrow].to(torch.int64) * chunk] = found[narrow]
        out[done : done + count * width] = values.reshape(-1)
        at, done = at + size, done + count * width


def _by_run(live: Tensor, runs: Runs) -> list[tuple[Tensor, tuple[int, int, int]]]:
    return list(zip(torch.split(live, [count for count, _, _ in runs]), runs)) if runs else []


def _has(live: Tensor, run: tuple[int, int, int]) -> Tensor:
    """[rows, width]: which values live."""
    _, width, chunk = run
    number = torch.arange(width, device=live.device) // chunk
    return number < live[:, None] if live.dtype == torch.uint8 else (live[:, None] >> number) & 1 > 0


def _chosen(live: Tensor, run: tuple[int, int, int], codec: str, norms: bool) -> Tensor:
    """[rows, elements]: which elements of rows at full width, with their scale before and their norm behind them, travel."""
    has = _has(live, run)
    parts = [has]
    if codec == "int8":
        parts.insert(0, (live != 0)[:, None].expand(-1, SCALE_BYTES))
    if norms:
        parts.append((live < run[1] // run[2])[:, None].expand(-1, 2 if codec == "int8" else 1))
    return torch.cat(parts, 1)


def write_rows(rows: TableRows, slots: Tensor, values: Tensor, masks: Tensor | None) -> None:
    """Puts values (float32, at full width) into the records of slots that are not negative; of those that a record has. `masks`:
    which chunks these are, as bits, where they need not be the first ones. Nothing else in the records is kept."""
    records = rows.records
    assert records is not None
    here = (slots >= 0).nonzero()[:, 0]
    slots, values = slots[here], values[here].to(rows.dtype)
    chunks, places = slots & ((1 << records.class_bits) - 1), slots >> records.class_bits
    for k in sorted(set(chunks.tolist())):
        which = (chunks == k).nonzero()[:, 0]
        width, size, item = int(records.layout[k, 0]), int(records.layout[k, 5]), rows.dtype.itemsize
        used = -(-width * item // 4)
        own = torch.zeros(which.numel(), used * 4 // item, dtype=rows.dtype, device=values.device)
        made = torch.zeros(which.numel(), size, device=values.device)
        if masks is None:
            own[:, :width] = values[which, :width]
        else:
            bits = masks[here][which]
            columns = torch.arange(rows.dim, device=values.device) // records.chunk
            own[:, :width] = values[which][(bits[:, None] >> columns) & 1 > 0].view(-1, width)
            at = int(records.layout[k, 4])
            made[:, at : at + 2] = bits[:, None].contiguous().view(torch.float32)
        made[:, :used] = own.view(torch.float32)
        slabs, within = places[which] >> records.slab_log2, (1 << records.slab_log2) - 1
        for slab in sorted(set(slabs.tolist())):
            own_slab = (slabs == slab).nonzero()[:, 0]
            records.slabs[k][slab][places[which[own_slab]] & within] = made[own_slab]
