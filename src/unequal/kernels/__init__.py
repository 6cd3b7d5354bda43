"""Kernels behind one contract: `reference` (torch, short, obviously right), `cpu` (C++), `triton` (GPU). A backend has

lookup(request, pooled, sequences)         fills the outputs; gives the first wrong position or -1
update(request, pooled, sequences, ...)    sums gradients per row and applies the optimizer, in place
initialize(rows, ids, first, count, std)   fresh rows
round_rows(values, slots, dtype, key)      stochastic rounding
unique(ids)                                distinct ids, inverse, counts
offsets(lengths)                           where lists start, and the smallest length (CPU only)
route(ids, directory, cuts, ...)           ids sorted by tier and by the rank that answers, and how many each has
deal_bags(ids, lengths, parts, hashed)     bags dealt out by part, with the lengths of each part's share of them
narrow_ids(blocks, device)                 the message in which ids travel, in as many bytes as they need
widen_ids(message, runs)                   and back
unique_tables(ids, spans, tables)          `unique` for all tables of a step (CPU only)
Dealer(ways, order, ranks)                 the messages in which ids go to the ranks that answer for them (CPU only)
follow_places(numbers, spans, out)         of every lookup the place of its row (CPU only)
pair_dots(x, products)                     dot products of all pairs of a sample's vectors (CPU only)
pair_dots_gradient(x, gradient, out)       and their gradient (CPU only)
HashDirectory(...)                         id → slot for unbounded ids

For tables whose rows differ in width (csrc/narrow.h), which lookup and update take, too:
NarrowDirectory(bound, rows)               id → slot of live rows alone
FollowedDirectory(bound, part, of, worth)  the same, and what ids without a row are worth
follow(keys, utilities, stamps, ...)       gives ids without a row the slot of a candidate
rebuild(rows, ids, old, slots, ...)        the records that rows will have at new slots
place(rows, slots, made, starts)           puts them there
fade(rows, gain)                           divides all utilities (not in the reference: a loop over slabs does)
worth(rows, slots)                         their utilities and masks (not in the reference: class by class)
order_by_id(ids, slots)                    sorts them (CPU only: elsewhere torch does)
lay_out(slots, chunks, counts, class_bits) new slots of rows that change their width
widths_between(utilities, old, ends, ...)  how wide rows will be between two thresholds (CPU only: elsewhere torch compares)
chunks_between(utilities, old, ends, ...)  and how many chunks those of each table then have together
tally_widths(old, chunks, classes)         by how much rows shrink and grow, and how many there are of each width (CPU only)
class_sums(chunks, worth, classes)         what rows of each width are worth (CPU only)
count_savings(values, gradient, dims, ...) sums of products by feature and column (the reference: Savings, with torch)
moved(old, slots)                          which rows have another slot now (CPU only: elsewhere torch compares)
best_of_buckets(ids, worth, buckets)       which of them are candidates, and their places (CPU only: elsewhere torch sorts)
bucket_of(ids, buckets)                    where candidates belong
packed_sizes(live, runs, codec, norms)     how long messages of such rows are
pack(rows, live, runs, codec, norms)       rows at full width as they travel: live values alone
unpack(wire, live, runs, codec, norms, out)  and back
used_chunks(rows, runs)                    which chunks have a value that is not zero
write_rows(rows, slots, values, masks)     values at full width into the records of copies

`cpu` finds the rows of all tables of a module at once:
Finder(tables, readers)                    their directories and candidates: find, then follow

and `triton`, so that a step waits for nothing while no row is added:
Directories(tables, device)                where their rows and candidates are found
locate_all(request, directories, ...)      the slots of a batch
admit_all(request, directories, ...)       fresh rows for new ids

Those of `triton` can also work without waiting for the device: see `wrong` of its lookup, `clock` of its update, and its
directory's `insert_padded`.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any

import torch

from ..errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """One set of kernels."""

    name: str
    lookup: Callable[..., int]
    update: Callable[..., None]
    initialize: Callable[..., None]
    round_rows: Callable[..., torch.Tensor]
    unique: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    HashDirectory: Any
    route: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    deal_bags: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    narrow_ids: Callable[..., torch.Tensor]
    widen_ids: Callable[..., torch.Tensor]
    NarrowDirectory: Any = None
    FollowedDirectory: Any = None
    follow: Any = None
    lay_out: Any = None
    rebuild: Any = None
    place: Any = None
    bucket_of: Any = None
    packed_sizes: Any = None
    pack: Any = None
    unpack: Any = None
    used_chunks: Any = None
    write_rows: Any = None
    unique_tables: Any = None
    Dealer: Any = None
    follow_places: Callable[..., None] | None = None
    fade: Callable[..., None] | None = None
    worth: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] | None = None
    order_by_id: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None
    widths_between: Any = None
    chunks_between: Any = None
    tally_widths: Any = None
    class_sums: Callable[..., torch.Tensor] | None = None
    moved: Callable[..., torch.Tensor] | None = None
    best_of_buckets: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None
    count_savings: Callable[..., None] | None = None
    Finder: Any = None
    Directories: Any = None
    locate_all: Any = None
    admit_all: Any = None
    offsets: Callable[..., tuple[torch.Tensor, int]] | None = None
    pair_dots: Callable[..., None] | None = None
    pair_dots_gradient: Callable[..., None] | None = None

    @property
    def on_device(self) -> bool:
        """Whether sizes that depend on the data stay on the device, so that a step waits for nothing."""
        return self.name == "triton"


def _from_module(name: str, module: ModuleType) -> Backend:
    parts = {part.name: getattr(module, part.name) for part in fields(Backend) if hasattr(module, part.name)}
    return Backend(name=name, **parts)


def backend(device: torch.device | str = "cpu") -> Backend:
    """The kernels for a device. UNEQUAL_KERNELS asks for others on the CPU: reference, or triton in Triton's interpreter."""
    device = torch.device(device)
    asked = os.environ.get("UNEQUAL_KERNELS", "")
    if device.type == "cuda" or asked == "triton":
        try:
            from . import triton
        except ImportError as error:
            raise UserError(
                f"tables on device '{device}' need Triton: {error}; install it with `pip install triton`"
            ) from error
        return _from_module("triton", triton)
    if device.type != "cpu":
        raise UserError(f"tables on device '{device}': expected 'cpu' or 'cuda'")
    from . import native, reference

    if asked == "reference" or native.library() is None:
        return _from_module("reference", reference)
    from . import cpu

    return _from_module("cpu", cpu)
