"""Launching a kernel again without looking at all its arguments again: of the time a step takes the host, most went there."""

from collections.abc import Hashable
from typing import Any

import triton
from torch import Tensor

INTERPRETED = bool(triton.knobs.runtime.interpret)


# Triton's own, with which kernels compute constants, take the host some microseconds a call.
def ceil_div(count: int, size: int) -> int:
    return -(-count // size)


def power_of_two(number: int) -> int:
    """The least one that is not below the number."""
    return 1 << max(0, number - 1).bit_length()


def aligned(*tensors: Tensor | None) -> bool:
    """Whether all start on 16-byte borders. Triton compiles other code where one does not."""
    return all(part is None or part.data_ptr() % 16 == 0 for part in tensors)


def alignments(*tensors: Tensor | None) -> tuple[bool, ...]:
    """The same of each."""
    return tuple(aligned(part) for part in tensors)


def launch(
    compiled: dict[Hashable, Any],
    key: Hashable,
    kernel: Any,
    programs: int,
    arguments: tuple[Any, ...],
    constants: tuple[Any, ...] = (),
    *,
    warps: int = 1,
    registers: int | None = None,
) -> None:
    """`compiled` keeps what Triton made, by the kernel and `key`, which must tell apart everything that Triton makes different
    code for: the constants, which arguments are None, dtypes, alignments, numbers beyond 32 bits. Numbers that change from step
    to step are not to be specialised on. `registers`: of a thread, at the most."""
    if not programs:
        return
    known = compiled.get((kernel.__name__, key))
    if known is not None:
        # What made[programs, 1, 1] does, less what it gathers for the hooks of profilers: that is half of its time.
        run, function, metadata = known
        driver = triton.runtime.driver.active
        stream = driver.get_current_stream(driver.get_current_device())
        run(programs, 1, 1, stream, function, metadata, None, None, None, *arguments, *constants)
        return
    made = kernel[(programs,)](*arguments, *constants, num_warps=warps, maxnreg=registers)
    if not INTERPRETED:
        compiled[kernel.__name__, key] = made.run, made.function, made.packed_metadata
