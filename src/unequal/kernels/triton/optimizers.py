# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""What each optimizer does to a tile of rows, given their summed gradients. The formulas are those of optim.py."""

import triton
import triton.language as tl

SGD: tl.constexpr = tl.constexpr(0)
ADAGRAD: tl.constexpr = tl.constexpr(1)
ROW_WISE_ADAGRAD: tl.constexpr = tl.constexpr(2)
ADAM: tl.constexpr = tl.constexpr(3)
ROW_WISE_ADAM: tl.constexpr = tl.constexpr(4)
LAMB: tl.constexpr = tl.constexpr(5)
LARS: tl.constexpr = tl.constexpr(6)

# Places in a slab's record of numbers, which layout.py makes.
RATE: tl.constexpr = tl.constexpr(0)
DECAY: tl.constexpr = tl.constexpr(1)
BETA1: tl.constexpr = tl.constexpr(2)
BETA2: tl.constexpr = tl.constexpr(3)
EPS: tl.constexpr = tl.constexpr(4)
TRUST: tl.constexpr = tl.constexpr(5)
REST1: tl.constexpr = tl.constexpr(6)
REST2: tl.constexpr = tl.constexpr(7)
LOG1: tl.constexpr = tl.constexpr(8)
LOG2: tl.constexpr = tl.constexpr(10)
NUMBERS: tl.constexpr = tl.constexpr(12)


@triton.jit
def correction(numbers, step, LOG: tl.constexpr):
    """1 / (1 − βᵗ). In float64: 1 − 0.999 in float32 is off by 5e-5; the logarithm of β is therefore kept as a sum of two."""
    log = tl.load(numbers + LOG).to(tl.float64) + tl.load(numbers + LOG + 1).to(tl.float64)
    return (1.0 / (1.0 - tl.exp(step * log))).to(tl.float32)[:, None]


@triton.constexpr_function
def state_width(which, optimizer):
    """How much of state `which` (0 or 1) a row has: nothing (0), one number (1), or one per value (2)."""
    return {1: (2, 0), 2: (1, 0), 3: (2, 2), 4: (2, 1), 5: (2, 2), 6: (2, 0)}.get(optimizer, (0, 0))[which]


@triton.jit
def sum_over_row(x):
    """[rows, columns] → [rows, 1]"""
    return tl.sum(x, 1)[:, None]


@triton.jit
def norm(x):
    return tl.sqrt(sum_over_row(x * x))


@triton.jit
def apply(w, g, first, second, numbers, clock, DIM, OPTIMIZER: tl.constexpr):
    """New weights and states of a tile [rows, columns]. `first` and `second` are the states, of the same shape or [rows, 1] where
    there is one per row. `numbers` points to those of each row's slab, `clock` to the number of this step, from 1, and the
    factor of the rate. What lies beyond DIM must be 0, which is one number, or [rows, 1] where rows differ in width."""
    rate = (tl.load(numbers + RATE) * tl.load(clock + 1).to(tl.float32))[:, None]
    decay, eps = tl.load(numbers + DECAY)[:, None], tl.load(numbers + EPS)[:, None]
    beta1, rest1 = tl.load(numbers + BETA1)[:, None], tl.load(numbers + REST1)[:, None]
    if OPTIMIZER == SGD:
        w -= rate * (g + decay * w)
    elif OPTIMIZER == ADAGRAD:
        g += decay * w
        first += g * g
        w -= rate * g / (tl.sqrt(first) + eps)
    elif OPTIMIZER == ROW_WISE_ADAGRAD:
        g += decay * w
        first += sum_over_row(g * g) / DIM
        w -= rate / (tl.sqrt(first) + eps) * g
    elif OPTIMIZER == LARS:
        size, length = norm(w), norm(g)
        known = (size > 0) & (length > 0)
        # The divisor is made safe first: a quotient that is not chosen must not be 0 / 0.
        ratio = tl.load(numbers + TRUST)[:, None] * size / tl.where(known, length + decay * size, 1.0)
        first = beta1 * first + rate * tl.where(known, ratio, 1.0) * (g + decay * w)
        w -= first
    else:
        step = tl.load(clock)
        beta2, rest2 = tl.load(numbers + BETA2)[:, None], tl.load(numbers + REST2)[:, None]
        first = beta1 * first + rest1 * g
        if OPTIMIZER == ROW_WISE_ADAM:
            second = beta2 * second + rest2 * (sum_over_row(g * g) / DIM)
        else:
            second = beta2 * second + rest2 * (g * g)
        scale = correction(numbers, step, LOG1) / (tl.sqrt(second * correction(numbers, step, LOG2)) + eps)
        direction = first * scale + decay * w
        if OPTIMIZER == LAMB:
            size, length = norm(w), norm(direction)
            known = (size > 0) & (length > 0)
            direction *= tl.where(known, size / tl.where(known, length, 1.0), 1.0)
        w -= rate * direction
    return w, first, second
