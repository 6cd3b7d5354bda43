"""The C++ kernels (csrc/) behind the backend contract."""

from .hash import HashDirectory
from .narrow import NarrowDirectory, bucket_of, follow, place, rebuild
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

__all__ = [
    "HashDirectory",
    "NarrowDirectory",
    "bucket_of",
    "deal_bags",
    "follow",
    "initialize",
    "lookup",
    "offsets",
    "pair_dots",
    "pair_dots_gradient",
    "place",
    "rebuild",
    "round_rows",
    "route",
    "unique",
    "update",
]
