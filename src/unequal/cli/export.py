"""`unequal export`: a run's result as one compact file, with a loader that needs torch alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .errors import one_line_errors

if TYPE_CHECKING:
    from ..train.export import ExportReport

SHOWN_TABLES = 60


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a trained run.")],
    out: Annotated[
        Path,
        typer.Option(
            "--out", metavar="OUT", help="A file; or a folder (a name without an ending), which gets the loader, too."
        ),
    ],
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the numbers as JSON.")] = None,
) -> None:
    """Write a run's result compactly: live values only, without optimizer state, with a loader that needs torch alone."""
    with one_line_errors():
        from .commands import _check_output, _write

        _check_output(json)
        from ..recipe import load_run
        from ..train.export import LOADER, export_run

        report = export_run(load_run(run), run, out)
        show_export(report)
        print(f"export: {report.file}")
        loader = Path(report.file).with_name(LOADER)
        print(f"load it with: {f'load() of {loader}' if loader.is_file() else 'unequal.exported.load'}")
        _write(json, report.to_json())


def show_export(report: ExportReport) -> None:
    from rich.console import Console
    from rich.table import Table

    from .show import size

    table = Table(title=f"step {report.step:,}", title_justify="left")
    table.add_column("table")
    for name in ("rows", "values", "kept", "size"):
        table.add_column(name, justify="right")
    for number, (name, part) in enumerate(report.tables.items()):
        if number < SHOWN_TABLES:
            kept = f"{part.values / part.full:.1%}" if part.full else ""
            table.add_row(name, f"{part.rows:,}", f"{part.values:,}", kept, size(part.bytes))
    table.add_section()
    table.add_row("dense part", "", "", "", size(report.dense_bytes))
    table.add_row("all", "", "", "", size(report.bytes))
    console = Console()
    console.print(table)
    if len(report.tables) > SHOWN_TABLES:
        left = len(report.tables) - SHOWN_TABLES
        console.print(f"… and {left:,} more tables, all of them in --json", highlight=False, markup=False)
