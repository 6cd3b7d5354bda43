"""Values into the records of copies: records are put together class by class, then placed in one pass."""

import torch
from torch import Tensor

from ..request import TableRows
from .narrow import place


def write_rows(rows: TableRows, slots: Tensor, values: Tensor, masks: Tensor | None) -> None:
    records = rows.records
    assert records is not None
    device, here = slots.device, (slots >= 0).nonzero()[:, 0]
    slots, values = slots[here], values[here].to(rows.dtype)
    chunks = slots & ((1 << records.class_bits) - 1)
    words = torch.from_numpy(records.layout[:, 5]).to(device)[chunks]
    starts = words.cumsum(0) - words
    made = torch.zeros(int(words.sum()), device=device)
    columns = torch.arange(rows.dim, device=device) // records.chunk
    for k in sorted(set(chunks.tolist())):
        which = (chunks == k).nonzero()[:, 0]
        width, size, item = int(records.layout[k, 0]), int(records.layout[k, 5]), rows.dtype.itemsize
        used = -(-width * item // 4)
        own = torch.zeros(which.numel(), used * 4 // item, dtype=rows.dtype, device=device)
        of_class = torch.zeros(which.numel(), size, device=device)
        if masks is None:
            own[:, :width] = values[which, :width]
        else:
            bits = masks[here][which]
            own[:, :width] = values[which][(bits[:, None] >> columns) & 1 > 0].view(-1, width)
            at = int(records.layout[k, 4])
            of_class[:, at : at + 2] = bits[:, None].contiguous().view(torch.float32)
        of_class[:, :used] = own.view(torch.float32)
        made[starts[which][:, None] + torch.arange(size, device=device)] = of_class
    place(rows, slots, made, starts)
