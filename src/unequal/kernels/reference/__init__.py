"""The reference kernels: plain torch, one table and one feature at a time. What the fast kernels are compared with."""

from .hash import HashDirectory
from .ids import narrow_ids, widen_ids
from .initialize import initialize
from .lookup import lookup
from .narrow import FollowedDirectory, NarrowDirectory, bucket_of, follow, lay_out, place, rebuild
from .offsets import offsets
from .pack import pack, packed_sizes, unpack, used_chunks, write_rows
from .pair_dots import pair_dots, pair_dots_gradient
from .rounding import round_rows
from .route import deal_bags, route
from .unique import unique
from .update import update

__all__ = [
    "FollowedDirectory",
    "HashDirectory",
    "NarrowDirectory",
    "bucket_of",
    "deal_bags",
    "follow",
    "initialize",
    "lay_out",
    "lookup",
    "narrow_ids",
    "offsets",
    "pack",
    "packed_sizes",
    "pair_dots",
    "pair_dots_gradient",
    "place",
    "rebuild",
    "round_rows",
    "route",
    "unique",
    "unpack",
    "update",
    "used_chunks",
    "widen_ids",
    "write_rows",
]
