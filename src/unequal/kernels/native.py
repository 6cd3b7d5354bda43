"""Loads the C++ library built by `make native`. Where it is missing the reference kernels serve, and that is said once."""

import ctypes
import sys
import warnings
from functools import cache
from pathlib import Path


@cache
def library() -> ctypes.CDLL | None:
    """The native library, or None (announced once) where it was not built."""
    import torch  # noqa: F401  torch's OpenMP runtime must be in the process first, so that both share one thread pool

    path = Path(__file__).parent / ("libunequal.dylib" if sys.platform == "darwin" else "libunequal.so")
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        warnings.warn(
            f"the native kernels are not available ({error}): the much slower reference kernels are used; "
            "run `make native` or reinstall where cmake and a C++ compiler are installed",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
