"""The stable hash that turns strings into ids: FNV-1a 64 over the UTF-8 bytes, then mix64, sign bit cleared."""

import ctypes
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..kernels.native import library

_WORD = 0xFFFFFFFFFFFFFFFF


def mix64(x: int) -> int:
    """The bijection of 64-bit words of `csrc/common.h`."""
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & _WORD
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & _WORD
    return x ^ x >> 31


def mix64_array(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`mix64` of every value; the argument is overwritten."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def hash_string(text: str | bytes) -> int:
    """The id of one string: what the reader gives a string column's value, in [0, 2⁶³)."""
    value = 0xCBF29CE484222325
    for byte in text.encode() if isinstance(text, str) else text:
        value = (value ^ byte) * 0x100000001B3 & _WORD
    return mix64(value) & 0x7FFFFFFFFFFFFFFF


MISSING_STRING = hash_string("")
"""The id of a null in a string column: the same as the empty string's."""


@cache
def _native(bits: int) -> Any:
    """The C++ function for offsets of that many bits, or None where the library was not built."""
    loaded = library()
    if loaded is None:
        return None
    function = getattr(loaded, f"uq_hash_strings_{bits}")
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    function.restype = None
    return function


def hash_strings(bytes_: NDArray[np.uint8], offsets: NDArray[Any]) -> NDArray[np.int64]:
    """Ids of the strings `bytes_[offsets[i]:offsets[i + 1]]`; `offsets` is int32 or int64."""
    offsets = np.ascontiguousarray(offsets)
    function = _native(offsets.dtype.itemsize * 8)
    if function is None:
        return hash_strings_reference(bytes_, offsets)
    out = np.empty(len(offsets) - 1, np.int64)
    function(bytes_.ctypes.data, offsets.ctypes.data, len(out), out.ctypes.data)
    return out


def hash_strings_reference(bytes_: NDArray[np.uint8], offsets: NDArray[Any]) -> NDArray[np.int64]:
    """The same in numpy: byte k of all strings at once, strings that have ended left alone."""
    starts, lengths = offsets[:-1].astype(np.int64), np.diff(offsets).astype(np.int64)
    value = np.full(len(lengths), 0xCBF29CE484222325, np.uint64)
    for k in range(int(lengths.max(initial=0))):
        live = np.flatnonzero(lengths > k)
        value[live] = (value[live] ^ bytes_[starts[live] + k]) * np.uint64(0x100000001B3)
    return (mix64_array(value) & np.uint64(0x7FFFFFFFFFFFFFFF)).view(np.int64)
