"""Works round a race in torch's CPU builds that would make two runs of one seed differ.

MKL's vector functions choose their kernel when each is first called; when that first call runs on several threads at
once, one of them may compute its share with a relative error of 1e-4, that once (torch issue 188792; MKL before 2025).
By that report one earlier call on one thread settles the choice; the race is too rare for a test to show either way.
"""

from functools import cache

import torch

FUNCTIONS = (
    *("exp", "expm1", "log", "log1p", "log2", "log10", "sqrt", "rsqrt", "erf", "erfc", "erfinv"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "ceil", "floor", "round", "trunc", "abs"),
)


@cache
def settle() -> None:
    """Calls each of the functions once, on one value, in both precisions. Later calls return at once."""
    for dtype in (torch.float32, torch.float64):
        value = torch.full((1,), 0.5, dtype=dtype)
        for name in FUNCTIONS:
            getattr(torch, name)(value)
