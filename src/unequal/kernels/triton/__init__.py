"""The Triton kernels: the backend for GPUs. The tests run them in Triton's interpreter, too (TRITON_INTERPRET=1)."""

from ..reference.ids import narrow_ids, widen_ids
from ..reference.narrow import FollowedDirectory, lay_out
from ..reference.pack import pack, packed_sizes, unpack, used_chunks
from ..reference.route import deal_bags
from .directory import NarrowDirectory, bucket_of, follow
from .hash import HashDirectory
from .initialize import initialize
from .locating import Directories, admit_all, locate_all
from .lookup import lookup
from .narrow import fade, place, rebuild, worth
from .rounding import round_rows
from .route import route
from .savings import count_savings
from .unique import unique
from .update import update
from .writing import write_rows

__all__ = [
    "Directories",
    "FollowedDirectory",
    "HashDirectory",
    "NarrowDirectory",
    "admit_all",
    "bucket_of",
    "count_savings",
    "deal_bags",
    "fade",
    "follow",
    "initialize",
    "lay_out",
    "locate_all",
    "lookup",
    "narrow_ids",
    "pack",
    "packed_sizes",
    "place",
    "rebuild",
    "round_rows",
    "route",
    "unique",
    "unpack",
    "update",
    "used_chunks",
    "widen_ids",
    "worth",
    "write_rows",
]
