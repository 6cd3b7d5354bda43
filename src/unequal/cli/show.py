"""What a user sees at the end: small tables, on a terminal and in a log alike."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..train.run import Report

METRICS = {
    "auc": "AUC",
    "normalized_entropy": "normalized entropy",
    "log_loss": "log loss",
    "calibration": "calibration",
}


def show_report(report: Report) -> None:
    """AUC, normalized entropy, log loss, calibration (per task where there are several), speed and memory."""
    from rich.console import Console
    from rich.table import Table

    several = len(report.tasks) > 1
    title = f"{report.part} part, {report.samples:,} samples" if report.part else "no test or validation part to score"
    table = Table(title=title, title_justify="left", show_header=several or bool(report.ceiling))
    table.add_column("")
    for name in report.tasks if several else [""]:
        table.add_column(name or "value", justify="right")
    if report.ceiling:
        table.add_column("ceiling", justify="right", style="dim")
    for key, words in METRICS.items():
        values = [task.get(key) for task in report.tasks.values()] if several else [getattr(report, key)]
        ceiling = [number(report.ceiling.get(key))] if report.ceiling else []
        table.add_row(words, *map(number, values), *ceiling)
    table.add_section()
    table.add_row("samples/s", f"{report.samples_per_second:,.0f}")
    table.add_row("embedding memory", size(sum(report.embedding_bytes.values())))
    if report.width.get("full_bytes"):
        table.add_row("  of whole tables", size(report.width["full_bytes"]))
    for kind, amount in report.embedding_bytes.items():
        more = ", utilities" if report.width and kind == "directory" else ""
        table.add_row(f"  {kind}{more}", size(amount))
    of_a_rank = " of a rank" if report.world > 1 else ""
    if of_a_rank:
        table.add_row("  most of a rank", size(report.embedding_bytes_per_rank))
    table.add_row(f"peak memory{of_a_rank}", size(report.peak_memory_bytes))
    if report.peak_device_memory_bytes is not None:
        table.add_row(f"peak device memory{of_a_rank}", size(report.peak_device_memory_bytes))
    table.add_row("device", report.device)
    if report.width:
        table.add_section()
        for words, value in width_rows(report.width):
            table.add_row(words, value)
    if of_a_rank:
        table.add_section()
        nodes = report.world // report.ranks_per_node
        table.add_row("ranks", f"{report.world}" if nodes == 1 else f"{nodes} × {report.ranks_per_node}")
        if report.exchange:
            table.add_row("exchanged per step", size(round(exchanged(report))))
            table.add_row("  of the time", f"{report.exchange['time_share']:.0%}")
    console = Console()
    console.print(table)
    for line in [*width_lines(report.width), *explanation(report)]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for part, causes in report.dropped.items():
        for cause, count in causes.items():
            console.print(f"{count:,} bad rows of the {part} part dropped: {cause}", markup=False, highlight=False)


def exchanged(report: Report) -> float:
    """Bytes of rows and gradients that all ranks sent in a step."""
    return report.exchange["inside_bytes_per_step"] + report.exchange["across_bytes_per_step"]


def explanation(report: Report) -> list[str]:
    """What several ranks shared and saved, in plain words."""
    lines = [f"tables are spread {line}" for line in report.plan]
    if not report.exchange:
        return lines
    sent, repeated = exchanged(report), report.exchange["repeated_ids_bytes_per_step"]
    if repeated > sent:
        lines.append(
            f"each row travels once for all ids that read it: {size(round(sent))} a step between ranks instead of "
            f"{size(round(repeated))}, {1 - sent / repeated:.0%} less"
        )
    lines += [tiers_line(name, own) for name, own in report.tiers.items()]
    across = report.exchange["across_bytes_per_step"]
    if across:
        lines.append(f"{size(round(across))} of it cross the network between nodes")
    held = sum(report.embedding_bytes.values())
    if held > report.embedding_bytes_per_rank:
        lines.append(
            f"no rank holds more than {size(report.embedding_bytes_per_rank)} of the {size(held)} that tables take on all ranks"
        )
    return lines


def width_rows(width: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a budget came to, in numbers."""
    rows = [("values kept", f"{width['values']:,}")]
    if "kept" in width:
        rows = [
            ("values kept", f"{width['kept']:.1%}"),
            ("smaller by, values alone", f"{width['gross_compression']:.1f}×"),
            ("smaller by, all bytes", f"{width['net_compression']:.1f}×"),
        ]
    live = f"{width['live_rows']:,}"
    rows.append(("rows that live", live if width["full_rows"] is None else f"{live} of {width['full_rows']:,}"))
    rows.append(("  mean width of these", f"{width['mean_width']:.0%}"))
    if width.get("uniform"):
        rows.append(("  uniform: all of the same", f"{len(width['uniform']):,} tables"))
    if (rates := width.get("rates", {}).values()) and max(rates) != 1:
        least, most = (f"{rate:.1f}×" for rate in (min(rates), max(rates)))
        rows.append(("tables' learning rate", most if least == most else f"{least} to {most}"))
    rows.append(("rounds", f"{width['rounds']:,}"))
    if width["rounds"]:
        rows += [("  values pruned", f"{width['pruned']:,}"), ("  values regained", f"{width['regained']:,}")]
    if width["failed_rounds"]:
        rows.append(("  without memory", f"{width['failed_rounds']:,}"))
    return rows


def width_lines(width: Mapping[str, Any]) -> list[str]:
    """The same in plain words."""
    if not width:
        return []
    lines = []
    if width.get("search"):
        tried = [
            f"{entry['budget']} {entry['loss']:.4f} ({entry['change']:+.2%}{'' if entry['holds'] else ', too much'})"
            for entry in width["search"]
        ]
        lines.append(f"budgets that were tried, with their validation loss: {'; '.join(tried)}")
    held = size(width["bytes"])
    if "kept" not in width:
        words = f"the tables take {held}, with optimizer state, directory and all that is followed"
        if width["budget_bytes"] is not None and not width["table_budgets"]:
            over = width["bytes"] / width["budget_bytes"]
            words += f", of a budget of {size(width['budget_bytes'])}" + (f", {over:.1f}× as much" if over > 1 else "")
        return [*lines, f"{words}; how large whole ones would be is not known, as ids are unbounded"]
    net, full = width["net_compression"], size(width["full_bytes"])
    times = f"{net:.1f}× less" if net >= 1 else f"{1 / net:.1f}× as much"
    lines.append(
        f"the tables take {held} instead of {full}, {times} with optimizer state, directory and all that is followed: "
        f"{width['kept']:.1%} of the values are kept, by the policy {width['policy']}"
    )
    if width.get("uniform"):
        names = f"{', '.join(width['uniform'][:3])}{' …' if len(width['uniform']) > 3 else ''}"
        lines.append(f"the budget is so small that rows of {names} are all equally wide: to follow them would not pay")
    if net < 1:
        lines.append("that is more than whole tables take: they are too small for a budget to pay")
    return lines


def tiers_line(table: str, own: Mapping[str, float]) -> str:
    """Where a table's rows have copies, and what that is worth."""
    every, node = own["replicated_rows"], own["node_rows"]
    line = f"of table '{table}' {every:,.0f} rows are on every rank"
    line += f" and {node:,.0f} in every node" if node else ""
    if "age" in own:
        line += f"; they serve {own['replicated_reads'] + own['node_reads']:.0%} of the reads"
        line += f", chosen anew they would serve {own['chosen_anew']:.0%}" if own["age"] >= 0.01 else ""
        line += f"; {own['moved_rows']:,.0f} rows have moved" if own["moved_rows"] else ""
        line += '; plan again or set tiers.drift = "on"' if own["age"] >= 0.05 and not own["moved_rows"] else ""
    return line


def show_summary(summary: Mapping[str, Any]) -> None:
    """The outcome of an import or a generation, a line per entry."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    for key, value in summary.items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{name} {number(item)}" for name, item in value.items())
        elif isinstance(value, list | tuple):
            value = ", ".join(map(str, value)) if len(value) <= 8 else f"{len(value)}: {value[0]} … {value[-1]}"
        table.add_row(key.replace("_", " "), number(value))
    Console().print(table)


@contextmanager
def counting(words: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar for work that reports (done, in all); nothing where the output is no terminal."""
    if not sys.stdout.isatty():
        yield None
        return
    from rich.progress import Progress

    with Progress() as bar:
        task = bar.add_task(words, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def number(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


def size(amount: int) -> str:
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if amount >= scale:
            return f"{amount / scale:,.1f} {unit}"
    return f"{amount} B"
