"""The reference kernels: plain torch, one table and one feature at a time. What the fast kernels are compared with."""

from .deal import deal, deal_bags
from .hash import HashDirectory
from .initialize import initialize
from .lookup import lookup
from .offsets import offsets
from .rounding import round_rows
from .unique import unique
from .update import update

__all__ = ["HashDirectory", "deal", "deal_bags", "initialize", "lookup", "offsets", "round_rows", "unique", "update"]
