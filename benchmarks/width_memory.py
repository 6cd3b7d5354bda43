"""Memory of tables whose rows are narrow beside plain ones: what the system says of a fresh process, from outside.

Four tables of several million rows, row-wise AdaGrad, float32. Every row is read once, so that all of them ask for a place, then
rows are read by a Zipf law while rounds decide. Counted is the resident memory of that process at its end, as it is, less that of
one that takes steps of the same kinds and sizes with tables of 64 rows: the interpreter, torch, threads, ids, outputs, gradients
and what a step needs besides are the same in both. So counted are values, optimizer state, directories, utilities, candidates,
what slabs and directories have to spare, all that grows with them, and what the C library keeps of what was freed. Plain tables
are measured the same way. `parts` says what of it the tables know of, `heap` what the C library holds, in use and freed.
"""

from __future__ import annotations

import ctypes
import json
import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .processes import Worker, status
from .workloads import ZIPF, Integers

if TYPE_CHECKING:
    from rich.table import Table

    import unequal as uq

MILLION = 1_000_000
CASES = {
    (10 * MILLION, 64): (0.1, 0.01),
    (10 * MILLION, 16): (0.02, 0.01),
    (20 * MILLION, 64): (0.1, 0.01),
    (20 * MILLION, 16): (0.02,),
}
"""(rows, dim) → kept shares"""
QUICK = {(200_000, 64): (0.1,), (200_000, 16): (0.1,)}
SHARES = (0.5, 0.25, 0.15, 0.1)
"""of the rows that the tables have"""
BARS = {(64, 0.1): 1 / 0.16, (64, 0.01): 40.0, (16, 0.02): 12.0}
"""(dim, kept) → how many times less memory than plain tables, at least"""
TINY = 64
"""rows of a table in the process that is taken off"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reads:
    """What is read in each step: every id once, then by Zipf's law, the popular ones anywhere. Nothing of it is kept."""

    rows: list[int]
    first: int = 16384
    """ids of a table in a step, while every row is read once"""
    size: int = 2048
    """and after that"""
    after: int = 200
    every: int = 200
    """steps between rounds"""

    @property
    def once(self) -> int:
        """Steps in which every row is read."""
        return -(-max(self.rows) // self.first)

    def __iter__(self) -> Iterator[list[Integers]]:
        """The ids of each table, step by step."""
        for step in range(self.once + self.after):
            yield [scattered(self._ranks(rows, step), rows) for rows in self.rows]

    def _ranks(self, rows: int, step: int) -> Integers:
        if step < self.once:
            return np.arange(step * self.first, (step + 1) * self.first) % rows
        least, most = 0.5 ** (1 - ZIPF), (rows + 0.5) ** (1 - ZIPF)
        drawn = np.random.default_rng([rows, step]).random(self.size)
        ranks = np.rint((least + drawn * (most - least)) ** (1 / (1 - ZIPF))).astype(np.int64)
        return np.asarray(ranks.clip(1, rows) - 1)


def scattered(ranks: Integers, rows: int) -> Integers:
    stride = int(rows * 0.618) | 1
    while math.gcd(stride, rows) != 1:
        stride += 2
    return np.asarray(ranks * stride % rows)


def reads_of(rows: int, quick: bool = False) -> Reads:
    sizes = [int(rows * share) for share in SHARES]
    return Reads(rows=sizes, first=1024, size=512, after=20, every=20) if quick else Reads(rows=sizes)


def resident(reads: Reads, dim: int, kept: float | None) -> dict[str, Any]:
    """Of a process that takes these steps."""
    with ExitStack() as stack:
        order = json.dumps(asdict(reads) | {"dim": dim, "kept": kept})
        worker = Worker("unequal", "benchmarks.width_memory", [order], peer=False, threads=1)
        stack.callback(worker.close)
        worker.read()
        now, peak = (status(worker.process.pid, field) for field in ("VmRSS", "VmHWM"))
        return {"rss": now, "rss_peak": peak} | worker.ask()


def measured(reads: Reads, dim: int, kept: float | None) -> dict[str, Any]:
    found = resident(reads, dim, kept)
    tiny = Reads(**asdict(reads) | {"rows": [TINY] * len(reads.rows), "after": 2 * reads.every})
    without = resident(tiny, dim, kept)["rss"]
    sizes = {"without": without, "resident": found.pop("rss") - without, "peak": found.pop("rss_peak") - without}
    return {"rows": sum(reads.rows), "dim": dim, "budget": kept} | sizes | found


def run(quick: bool = False) -> dict[str, Any]:
    cases = []
    for (rows, dim), shares in (QUICK if quick else CASES).items():
        reads = reads_of(rows, quick)
        plain = measured(reads, dim, None)
        for kept in shares:
            found = measured(reads, dim, kept)
            found["times_less"] = round(plain["resident"] / max(1, found["resident"]), 3)
            found["times_less_counted"] = round(sum(plain["bytes"].values()) / sum(found["bytes"].values()), 3)
            bar = BARS.get((dim, kept))
            cases.append(found | ({} if bar is None else {"bar": bar, "reached": found["times_less"] >= bar}))
        cases.append(plain)
    return {"unit": "bytes", "optimizer": "row-wise AdaGrad", "dtype": "fp32", "cases": cases}


def table(result: dict[str, Any]) -> Table:
    from rich.table import Table

    view = Table(title="memory of tables, MiB: the process less one with tables of 64 rows")
    columns = ("rows", "dim", "kept", "live rows", "resident", "peak", "counted", "spare", "× less", "counted", "bar")
    for name in columns:
        view.add_column(name, justify="right")
    for case in result["cases"]:
        share = "plain" if case["budget"] is None else f"{100 * case['budget']:g}%"
        sizes = [case["resident"], case["peak"], sum(case["bytes"].values()), case["parts"].get("spare", 0)]
        less = [f"{case[name]:.2f}" if name in case else "" for name in ("times_less", "times_less_counted")]
        bar = f"{case['bar']:.4g} " + ("kept" if case["reached"] else "MISSED") if "bar" in case else ""
        what = [f"{case['rows'] / MILLION:g} M", str(case["dim"]), share, f"{case['live']:,}"]
        view.add_row(*what, *(f"{n / 2**20:.1f}" for n in sizes), *less, bar)
    return view


# The process that is measured


def train(reads: Reads, dim: int, kept: float | None, device: str = "cpu") -> uq.Embeddings:
    import torch

    import unequal as uq

    features = {
        f"f{t}": uq.Feature(uq.Table(f"t{t}", rows=n, dim=dim), pooling="sum") for t, n in enumerate(reads.rows)
    }
    width = None if kept is None else uq.Width(budget=kept, every=reads.every)
    embeddings = uq.Embeddings(features, optimizer=uq.RowWiseAdagrad(lr=0.01), width=width, device=device)
    draw = np.random.default_rng(1)
    gradient = torch.from_numpy(draw.standard_normal((reads.first, len(features) * dim), np.float32) * np.float32(1e-3))
    gradient = gradient.to(device)
    for parts in reads:
        ids = torch.from_numpy(np.concatenate(parts))
        batch = uq.Batch(tuple(features), ids, torch.ones_like(ids)).to(device)
        embeddings(batch).pooled.backward(gradient[: len(parts[0])])
    return embeddings


class Heap(ctypes.Structure):
    """mallinfo2 of the C library."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def heap() -> dict[str, int]:
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = Heap
    found: Heap = ask()
    return {"in_use": found.uordblks, "freed": found.fordblks, "mapped": found.hblkhd}


def sizes(embeddings: uq.Embeddings) -> dict[str, Any]:
    from unequal.storage.narrow import NarrowStorage

    parts: dict[str, int] = {}
    for _, storage in embeddings.shard_storages():
        if isinstance(storage, NarrowStorage):
            records = storage.records
            words = records.layout[:, 5]
            held = sum(slab.nbytes for slabs in records.slabs[1:] for slab in slabs)
            used = sum(count * int(words[k]) * 4 for k, count in enumerate(storage.counts))
            followed = records.slabs[0][0].nbytes + storage.followed.nbytes + storage._stamps.nbytes
            found = {
                "records": used,
                "spare": held - used,
                "directory": storage.directory.bytes,
                "candidates": followed,
            }
            parts = {name: parts.get(name, 0) + size for name, size in found.items()}
    reports = embeddings.width_reports
    rounds = {"kept": reports[-1].kept if reports else None, "rounds": len(reports)}
    live = sum(embeddings.rows().values())
    return {"bytes": embeddings.memory(), "parts": parts, "heap": heap(), "live": live} | rounds


def main() -> None:
    import torch

    order = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dim, kept = order.pop("dim"), order.pop("kept")
    embeddings = train(Reads(**order), dim, kept)
    print(json.dumps({}), flush=True)
    sys.stdin.readline()
    print(json.dumps(sizes(embeddings)), flush=True)


if __name__ == "__main__":
    main()
