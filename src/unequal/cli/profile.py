"""`unequal profile`: who is read how often, and how many different rows a step reads, in one pass over the training data."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UserError
from .errors import one_line_errors, stoppable

if TYPE_CHECKING:
    from ..stats.profile import Profile

LINE_SECONDS = 10.0
LEAST_BYTES = 1 << 16
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
SHOWN_TABLES = 60
PERCENT = (0.1, 1.0, 10.0)
"""of the rows: what part of the reads they get"""


def profile(
    sources: Annotated[
        list[Path], typer.Argument(metavar="RECIPE", help="A recipe file, or `default`; with --merge, profiles.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="PROFILE", help="The file to write.")],
    merge: Annotated[bool, typer.Option("--merge", help="Merge the profiles A B … of parts of a data set.")] = False,
    samples: Annotated[
        int | None, typer.Option("--samples", metavar="N", min=1, help="Count so many samples from all over the data.")
    ] = None,
    share: Annotated[
        float | None, typer.Option("--share", metavar="PART", help="Count this part of the samples, such as 0.1.")
    ] = None,
    sketch_bytes: Annotated[
        str,
        typer.Option(
            "--sketch-bytes",
            metavar="SIZE",
            help="Memory per table. 16 bytes per id count exactly; with more ids, the most-read ones and a sample are kept.",
        ),
    ] = "64MiB",
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a field: --set data.max_length=200")
    ] = None,
    ranks: Annotated[
        int, typer.Option("--ranks", metavar="N", min=1, help="Read as N processes of this machine, each its share.")
    ] = 1,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the numbers as JSON.")] = None,
) -> None:
    """Count how often each row of a recipe's tables is read, and how many different ones a step reads.

    On several machines: torchrun --nnodes … --nproc-per-node … -m unequal profile RECIPE --out PROFILE
    """
    with one_line_errors(), stoppable():
        from .commands import _check_output, _is_first_rank, _launch_if_asked, _write

        _check_output(json)
        _check_out(out)
        memory = parse_bytes(sketch_bytes)
        started = time.monotonic()
        made: Profile | None
        batch_size: int | None = None
        if merge:
            made = _merged(sources, samples, share, overrides, ranks)
        else:
            if len(sources) != 1:
                raise UserError(f"profile: expected one recipe, got {len(sources)}; to merge profiles, add --merge")
            settings = [part for override in overrides or () for part in ("--set", override)]
            sketch = ["--sketch-bytes", str(memory)]
            _launch_if_asked(
                ranks, "profile", sources[0], *settings, *sketch, out=out, samples=samples, share=share, json=json
            )
            made, batch_size, started = _counted(sources[0], overrides, samples, share, memory)
        if made is None or not _is_first_rank():
            return
        made.save(out)
        seconds = time.monotonic() - started
        show_profile(made, batch_size, seconds)
        print(f"profile: {out} ({out.stat().st_size / 1e6:,.1f} MB)")
        _write(json, summary(made, batch_size, seconds))


def parse_bytes(text: str) -> int:
    """A size such as 65536, 64MiB or 1.5 GB."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?i?)b?\s*", text.lower())
    if found is None or found[2] not in UNITS:
        raise UserError(f"--sketch-bytes {text}: expected a number of bytes, such as 67108864 or 64MiB")
    size = int(float(found[1]) * UNITS[found[2]])
    if size < LEAST_BYTES:
        raise UserError(f"--sketch-bytes {text}: expected at least {LEAST_BYTES:,} bytes; give more, such as 64MiB")
    return size


def _check_out(out: Path) -> None:
    """Before the work and not after it: can the profile be written?"""
    if out.is_dir():
        raise UserError(f"--out {out}: expected a file, got a folder; name the file")
    folder = next((parent for parent in out.absolute().parents if parent.exists()), Path("/"))
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UserError(f"--out {out}: expected a file in a folder that is writable; choose another")


def _counted(
    recipe: Path, overrides: list[str] | None, samples: int | None, share: float | None, memory: int
) -> tuple[Profile | None, int, float]:
    """The profile, the size of a step, and when the counting began."""
    from ..recipe import load_recipe
    from ..train.profiling import profile_recipe

    chosen = load_recipe(recipe, overrides or ())
    started = time.monotonic()
    with _progress() as progress:
        made = profile_recipe(
            chosen,
            samples=samples,
            share=share,
            memory=memory,
            say=lambda line: print(line, flush=True),
            progress=progress,
        )
    return made, chosen.run.batch_size, started


def _merged(
    files: list[Path], samples: int | None, share: float | None, overrides: list[str] | None, ranks: int
) -> Profile:
    from ..stats.profile import Profile

    if samples is not None or share is not None or overrides or ranks > 1:
        raise UserError("profile --merge: expected profiles and --out alone; leave the other options out")
    if len(files) < 2:
        raise UserError(f"profile --merge: expected two profiles or more, got {len(files)}")
    parts = [Profile.load(file) for file in files]
    while len(parts) > 1:
        parts = [a.merge(b) for a, b in zip(parts[::2], parts[1::2])] + (parts[-1:] if len(parts) % 2 else [])
    return parts[0]


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar with samples/s and the time left; elsewhere a line now and then. Of several ranks the first shows its share."""
    world = os.environ.get("WORLD_SIZE", "1")
    words = "profiling" if world == "1" else f"profiling, rank 0 of {world}"
    if os.environ.get("RANK", "0") != "0":
        yield lambda done, total: None
        return
    if not sys.stdout.isatty():
        yield _lines(words)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    bar = RichProgress(
        TextColumn(words),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]} samples/s"),
        TimeRemainingColumn(),
    )
    task = bar.add_task("", total=None, speed="–")
    started = time.monotonic()

    def update(done: int, total: int) -> None:
        speed = f"{done / max(1e-9, time.monotonic() - started):,.0f}" if done else "–"
        bar.update(task, completed=done, total=total, speed=speed)

    with bar:
        yield update


def _lines(words: str) -> Callable[[int, int], None]:
    started = last = time.monotonic()

    def update(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < LINE_SECONDS or not done:
            return
        last = now
        speed = done / (now - started)
        print(
            f"{words}: {done:,}/{total:,} samples  {speed:,.0f} samples/s  {(total - done) / speed:,.0f} s left",
            flush=True,
        )

    return update


def summary(profile: Profile, batch_size: int | None = None, seconds: float | None = None) -> dict[str, Any]:
    """The numbers that are shown, as JSON."""
    tables = {}
    for name, table in profile.tables.items():
        rows, reads = table.popularity()
        tables[name] = {
            "reads_per_sample": table.reads_per_sample,
            "feature_ids": table.feature_ids,
            "rows_seen": table.rows_seen,
            "rows_seen_error": table.rows_seen_error,
            "exact": table.exact,
            "kept": table.kept,
            "count_error": table.count_error,
            "share_of_reads": {f"{part:g}%": reads_of(rows, reads, part / 100) for part in PERCENT},
            "distinct_per_step": None if batch_size is None else table.distinct(batch_size),
        }
    return {
        "recipe": profile.recipe,
        "samples": profile.samples,
        "total_samples": profile.total_samples,
        "sampled": profile.sampled,
        "dropped": profile.dropped,
        "batch_size": batch_size,
        "seconds": seconds,
        "tables": tables,
    }


def reads_of(rows: Any, reads: Any, part: float) -> float:
    """What part of the reads goes to this part of the rows, the most-read ones."""
    import numpy as np

    if not len(rows):
        return 0.0
    ends, sums = np.cumsum(rows), np.cumsum(rows * reads)
    return float(np.interp(part * ends[-1], [0.0, *ends], [0.0, *sums]) / sums[-1])


def show_profile(profile: Profile, batch_size: int | None, seconds: float) -> None:
    """A line per table, those with most reads first."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    part = f" of {profile.total_samples:,}" if profile.sampled else ""
    speed = f", {profile.samples / seconds:,.0f} samples/s" if batch_size is not None and seconds else ""
    say(f"{profile.samples:,}{part} samples in {seconds:,.1f} s{speed}")
    step = [] if batch_size is None else ["rows/step"]
    heads = ["table", "ids/sample", "rows seen", *(f"top {share:.4g}%" for share in PERCENT), *step, "counted"]
    shown = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, head in enumerate(heads):
        shown.add_column(head, justify="left" if number in (0, len(heads) - 1) else "right", overflow="fold")
    tables = sorted(profile.tables.values(), key=lambda table: -table.reads_per_sample)
    for table in tables[:SHOWN_TABLES]:
        rows, reads = table.popularity()
        error = f" ±{table.rows_seen_error:.1%}" if table.rows_seen_error else ""
        shown.add_row(
            escape(table.name),
            f"{table.reads_per_sample:,.2f}",
            f"{table.rows_seen:,}{error}",
            *(f"{reads_of(rows, reads, share / 100):.1%}" for share in PERCENT),
            *([] if batch_size is None else [f"{table.distinct(batch_size):,.0f}"]),
            "all ids" if table.exact else f"{table.kept:,} ids",
        )
    console.print(shown)
    if len(tables) > SHOWN_TABLES:
        say(f"… and {len(tables) - SHOWN_TABLES:,} more, all of them in the file")
    say(f"top {PERCENT[0]:g}%: the share of all reads that goes to the most-read {PERCENT[0]:g}% of the rows seen")
    if batch_size is not None:
        say(f"rows/step: different rows that a step of {batch_size:,} samples reads")
    if not all(table.exact for table in tables):
        say(
            "counted: of the tables with more ids than --sketch-bytes holds the most-read ones; others are known from a sample"
        )
    for cause, count in profile.dropped.items():
        say(f"{count:,} bad rows dropped: {cause}")
