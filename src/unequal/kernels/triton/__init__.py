"""The Triton kernels: the backend for GPUs. The tests run them in Triton's interpreter, too (TRITON_INTERPRET=1)."""

from ..reference.route import deal_bags
from .hash import HashDirectory
from .initialize import initialize
from .lookup import lookup
from .rounding import round_rows
from .route import route
from .unique import unique
from .update import update

__all__ = ["HashDirectory", "deal_bags", "initialize", "lookup", "round_rows", "route", "unique", "update"]
