"""What the machine itself can do: copying, and reading random 256-byte rows. Other results are read against this."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from .report import spread

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor

DIM = 64
ROW_BYTES = DIM * 4


def allocate(values: int, huge: bool) -> Tensor:
    """A float32 vector on pages of 2 MiB, or of the system's plain size, whatever the default is."""
    import torch

    memory = mmap.mmap(-1, values * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32)


def seconds(action: Callable[[], object], repeats: int) -> list[float]:
    action()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        taken.append(time.perf_counter() - start)
    return taken


def run(quick: bool = False) -> dict[str, Any]:
    import torch

    size = 2**26 if quick else 2**31
    repeats = 3 if quick else 15
    threads_before = torch.get_num_threads()
    cases: list[dict[str, Any]] = []

    def add(what: str, pages: str, threads: int, moved: int, taken: list[float]) -> None:
        rate = spread([moved / second / 1e9 for second in taken])
        cases.append({"what": what, "pages": pages, "threads": threads, "gb_per_second": rate})

    ids = torch.randint(size // ROW_BYTES, (2**18,), generator=torch.Generator().manual_seed(0))
    for huge in (False, True):
        pages = "2 MiB" if huge else "plain"
        rows = allocate(size // 4, huge).fill_(1.0).view(-1, DIM)
        out = allocate(len(ids) * DIM, huge).fill_(0.0).view(-1, DIM)
        half = len(rows) // 2
        for threads in (1, 2):
            torch.set_num_threads(threads)
            copied = seconds(partial(rows[:half].copy_, rows[half:]), repeats)
            add("copy, bytes read + written", pages, threads, 2 * half * ROW_BYTES, copied)
            read = seconds(partial(torch.index_select, rows, 0, ids, out=out), repeats)
            add("random 256-byte rows, bytes read", pages, threads, len(ids) * ROW_BYTES, read)
        del rows, out
    torch.set_num_threads(threads_before)
    return {"table_bytes": size, "cases": cases}


def table(result: dict[str, Any]) -> Table:
    from rich.table import Table

    from .report import cell

    view = Table(title="the machine's limits")
    for heading in ("what", "pages", "threads", "GB/s"):
        view.add_column(heading, justify="right" if heading in ("threads", "GB/s") else "left")
    for case in result["cases"]:
        view.add_row(case["what"], case["pages"], str(case["threads"]), cell(case["gb_per_second"]))
    return view
