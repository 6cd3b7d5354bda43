"""Where lists start."""

from torch import Tensor

from ...batch import offsets_of


def offsets(lengths: Tensor) -> tuple[Tensor, int]:
    """(int64 offsets, one more than lengths; the smallest length, or 0 where none is negative)."""
    return offsets_of(lengths), min(0, int(lengths.min())) if lengths.numel() else 0
