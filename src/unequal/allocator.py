"""How the C library keeps freed memory. By default it gives every large buffer back to the system and asks for it anew in the
next step, and fresh pages cost more than what is written to them."""

import ctypes
import os

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
GIB = 1 << 30


def keep_freed_memory() -> bool:
    """Buffers below 1 GiB are used again instead of going back to the system. Commands call it at their start; whoever has set
    glibc's own variables keeps them. Says whether it was done: other C libraries have no such settings."""
    if any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    wanted = {M_MMAP_THRESHOLD: GIB, M_TRIM_THRESHOLD: 2**31 - 1, M_TOP_PAD: 64 << 20}
    return all(mallopt(setting, value) for setting, value in wanted.items())
