"""The Triton kernels: the backend for GPUs. The tests run them in Triton's interpreter, too (TRITON_INTERPRET=1)."""

from ..reference.deal import deal, deal_bags
from .hash import HashDirectory
from .initialize import initialize
from .lookup import lookup
from .rounding import round_rows
from .unique import unique
from .update import update

__all__ = ["HashDirectory", "deal", "deal_bags", "initialize", "lookup", "round_rows", "unique", "update"]
