"""`unequal calibrate`: measures this machine or cluster and writes the topology that plans and simulations are made with."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UserError
from .errors import one_line_errors, stoppable

if TYPE_CHECKING:
    from ..train.calibrate import Calibration, Quartiles

SECONDS = 20.0
WIDE = 100
"""columns of a terminal in which frames fit around everything"""
WORDS = {"all_to_all": "all-to-all", "all_reduce": "all-reduce", "reduce_scatter": "reduce-scatter"}
PLACES = {"inside": "inside a node", "across": "between nodes"}
KERNELS = {
    "reads": "rows read at random places",
    "updates": "rows and optimizer state updated",
    "copies": "rows copied",
    "ids": "ids made unique",
    "seconds_per_piece": "the host's work for a table and step",
}


def calibrate(
    out: Annotated[Path, typer.Option("--out", metavar="TOPOLOGY", help="The TOML file to write.")],
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", metavar="N", min=1, help="Ranks on this machine; by default one per GPU, or 2."),
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="S", min=1.0, help="How long to measure, about; longer is steadier.")
    ] = SECONDS,
    device: Annotated[
        str,
        typer.Option(
            "--device", metavar="DEVICE", help="What to measure: auto (a GPU where there is one), cpu, cuda or cuda:N."
        ),
    ] = "auto",
) -> None:
    """Measure how fast this machine's ranks exchange and compute, for `unequal plan --topology`.

    On several machines: torchrun --nnodes … --nproc-per-node … -m unequal calibrate --out TOPOLOGY
    """
    with one_line_errors(), stoppable():
        from .commands import _is_first_rank, _launch_if_asked
        from .show import counting

        check_file(out)
        started_by_others = "WORLD_SIZE" in os.environ and "RANK" in os.environ
        if ranks is None:
            ranks = 1 if started_by_others else _default_ranks(device)
        _launch_if_asked(ranks, "calibrate", out=out, seconds=seconds, device=device)
        from ..train.calibrate import calibrate as measure
        from ..train.processes import Ranks

        with Ranks(device) as job:
            if job.rank == 0:
                words = ranks_in_words(job.world)
                print(f"measuring {words} for about {seconds:g} s; let nothing else run meanwhile", flush=True)
                with counting("measuring") as progress:
                    found = measure(job, seconds, progress)
            else:
                found = measure(job, seconds)
        if _is_first_rank():
            found.topology.save(out)
            show_calibration(found)
            print(f"topology: {out}")
            print(f"plan with it: unequal plan RECIPE --topology {out}")


def check_file(out: Path) -> None:
    """Before the work and not after it: can the file be written?"""
    if out.is_dir():
        raise UserError(f"--out {out}: expected a file, got a folder; name the file")
    writable = os.access(out, os.W_OK) if out.exists() else out.parent.is_dir() and os.access(out.parent, os.W_OK)
    if not writable:
        raise UserError(f"--out {out}: expected a file in a folder that exists and is writable; choose another")


def _default_ranks(device: str) -> int:
    """One per GPU; where there are none, or the CPU was asked for, two."""
    import torch

    gpus = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    return 1 if device.startswith("cuda:") else gpus or 2


def show_calibration(found: Calibration) -> None:
    """Links and kernels, each with its spread; then what was not measured."""
    from rich.box import HEAVY_HEAD, SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from .show import size

    topology, console = found.topology, Console()
    box = SIMPLE_HEAD if console.width < WIDE else HEAVY_HEAD
    links = Table(title="between ranks, while all send and receive", title_justify="left", box=box)
    for name in ("links", "collective"):
        links.add_column(name, no_wrap=True)
    for name in ("speed of a rank", "per message"):
        links.add_column(name, justify="right")
    for (place, kind), fit in found.links.items():
        links.add_row(
            PLACES[place], WORDS[kind], with_quartiles(fit.rate, speed), with_quartiles(fit.message, duration)
        )
    if found.links:
        console.print(links)
    kernels = Table(title="a rank's own work, while all work", title_justify="left", box=box)
    kernels.add_column("what", no_wrap=True)
    kernels.add_column("speed", justify="right")
    for name, quartiles in found.kernels.items():
        kernels.add_row(KERNELS[name], with_quartiles(quartiles, duration if name == "seconds_per_piece" else speed))
    console.print(kernels)
    shape = (
        f"{topology.nodes} × {topology.ranks_per_node} ranks" if topology.nodes > 1 else ranks_in_words(topology.world)
    )
    lines = [f"{shape} ({topology.device}), {size(topology.memory_per_rank)} of memory each"]
    lines.append(f"medians of {found.rounds} rounds, quartiles in brackets; {found.seconds:.0f} s")
    for name, why in found.assumed.items():
        rates = getattr(topology, name)
        lines.append(
            f"{PLACES[name]}: not measured, {why}: {speed(rates.bytes_per_second)}, "
            f"{duration(rates.seconds_per_message)} per message; change them in the file"
        )
    if "reduce_scatter" in topology.measured:
        lines.append(f"reduce-scatter: {topology.measured['reduce_scatter']}")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def ranks_in_words(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def speed(bytes_per_second: float, like: float | None = None) -> str:
    return _number(bytes_per_second, like, (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)))


def duration(seconds: float, like: float | None = None) -> str:
    return _number(seconds, like, (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)))


def _number(value: float, like: float | None, units: tuple[tuple[str, float], ...]) -> str:
    """With the unit that suits it, or without one, in the unit that suits `like`."""
    leading = abs(value if like is None else like)
    unit, scale = next((pair for pair in units if leading >= pair[1]), units[-1])
    digits = f"{value / scale:.3g}" if abs(value) < 999.5 * scale else f"{value / scale:,.0f}"
    return digits + (f" {unit}" if like is None else "")


def with_quartiles(quartiles: Quartiles, words: Callable[[float, float | None], str]) -> str:
    low, high = (words(value, quartiles.median) for value in (quartiles.low, quartiles.high))
    return f"{words(quartiles.median, None)} ({low}–{high})"
