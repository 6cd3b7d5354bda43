"""The C++ kernels (csrc/) behind the backend contract."""

from .dealing import Dealer, follow_places, unique_tables
from .hash import HashDirectory
from .ids import narrow_ids, widen_ids
from .narrow import (
    Finder,
    NarrowDirectory,
    bucket_of,
    count_savings,
    fade,
    follow,
    lay_out,
    order_by_id,
    place,
    rebuild,
    worth,
)
from .pack import pack, packed_sizes, unpack, used_chunks, write_rows
from .steps import (
    deal_bags,
    initialize,
    lookup,
    offsets,
    pair_dots,
    pair_dots_gradient,
    round_rows,
    route,
    unique,
    update,
)
from .widths import chunks_between, class_sums, tally_widths, widths_between

__all__ = [
    "Dealer",
    "Finder",
    "HashDirectory",
    "NarrowDirectory",
    "bucket_of",
    "chunks_between",
    "class_sums",
    "count_savings",
    "deal_bags",
    "fade",
    "follow",
    "follow_places",
    "initialize",
    "lay_out",
    "lookup",
    "narrow_ids",
    "offsets",
    "order_by_id",
    "pack",
    "packed_sizes",
    "pair_dots",
    "pair_dots_gradient",
    "place",
    "rebuild",
    "round_rows",
    "route",
    "tally_widths",
    "unique",
    "unique_tables",
    "unpack",
    "update",
    "used_chunks",
    "widen_ids",
    "widths_between",
    "worth",
    "write_rows",
]
