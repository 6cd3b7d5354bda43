"""width.svg in the run folder: how good the model is and what its tables take over the steps, and which rows are wide."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from ..errors import UserError
from .width_report import WIDTH, lines_of

PLOT = "width.svg"
WIDE, HIGH = 1000, 400
LEFT, BETWEEN, TOP, BOTTOM, PANEL = 64, 146, 84, 62, 374
INK, FAINT, GRID = "#1f2933", "#66727f", "#e4e8ec"
QUALITY, MEMORY = "#1764ab", "#c2570c"
TABLES = ("#2a9d6f", "#8e5ea2", "#d19a1b", "#3aa6b9", "#b8405e")
NAMED = len(TABLES)
"""largest tables that get a line of their own beside that of all"""

TICKS = 6
"""of an axis, at most about"""
LEAST = 0.004
"""of a number, around it: what changes less is not drawn as if it were much"""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Scale:
    """Numbers to places, straight or by their logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, low))
        return self.start + (self.end - self.start) * (value - low) / (high - low)

    def ticks(self) -> list[float]:
        if self.log:
            return [10.0**k for k in range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)]
        step = _round_step((self.high - self.low) / TICKS)
        first = math.ceil(self.low / step - 1e-9)
        return [k * step for k in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _round_step(rough: float) -> float:
    size = 10.0 ** math.floor(math.log10(rough))
    return next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * 0.999)


def _around(values: Sequence[float], start: float, end: float, *, from_zero: bool = False) -> Scale:
    low, high = (0.0 if from_zero else min(values)), max(values)
    room = max((high - low) * 0.08, abs(high) * LEAST) or 1.0
    return Scale(low if from_zero else low - room, high + room, start, end)


def write_plot(folder: Path, width: Mapping[str, Any]) -> None:
    """From the run's metrics and what its report says of widths."""
    path = folder / PLOT
    try:
        path.write_text(picture(lines_of(folder), width), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot write the plot: {error.strerror}; make the folder writable") from error


def picture(lines: Sequence[Mapping[str, Any]], width: Mapping[str, Any]) -> str:
    """The whole SVG."""
    parts = [_text(LEFT - 40, 30, _headline(width), size=17, weight=600)]
    parts += _over_time(lines, width.get("full_bytes"))
    curves = width.get("by_popularity", {})
    if curves:
        parts += _by_popularity(curves, width.get("full_rows"))
    else:
        at = LEFT + PANEL + BETWEEN
        parts.append(
            _text(
                at,
                TOP - 22,
                "all rows are equally wide"
                if width.get("uniform")
                else f"the policy '{width['policy']}' follows no row's worth",
                fill=FAINT,
            )
        )
    style = "font-family: -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {HIGH}" width="{WIDE}" height="{HIGH}" style="{style}">\n'
        f'<rect width="{WIDE}" height="{HIGH}" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _headline(width: Mapping[str, Any]) -> str:
    held = bytes_text(width["bytes"])
    if "kept" not in width:
        return f"Tables of {held}: {width['live_rows']:,} rows, {width['mean_width']:.0%} wide on average"
    return (
        f"{width['kept']:.1%} of the values kept: {held} instead of {bytes_text(width['full_bytes'])}, "
        f"{width['net_compression']:.1f}× less"
    )


def _over_time(lines: Sequence[Mapping[str, Any]], full: int | None) -> list[str]:
    name, quality = _quality(lines)
    memory = [(line["step"], line["bytes"]) for line in lines if line["kind"] == WIDTH]
    memory += [(line["step"], line["width_bytes"]) for line in lines if "width_bytes" in line]
    memory.sort()
    first = [_text(LEFT, TOP - 22, "Quality and memory while it trained", weight=600)]
    if not memory:
        return [*first, _text(LEFT, TOP + 20, "the run was too short to tell", fill=FAINT)]
    floor = HIGH - BOTTOM
    steps = Scale(0, max(step for step, _ in [*quality, *memory]), LEFT, LEFT + PANEL)
    right = _around([full or 0, *(size for _, size in memory)], floor, TOP, from_zero=True)
    parts = [*first, *_x_axis(steps, LEFT, "step", lambda value: f"{value:,.0f}")]
    drawn: list[str] = []
    if quality:
        left = _around([value for _, value in quality], floor, TOP)
        digits = max(2, 1 - math.floor(math.log10((left.high - left.low) / TICKS)))
        for value in left.ticks():
            parts.append(_rule(LEFT, LEFT + PANEL, left(value)))
            parts.append(_text(LEFT - 8, left(value) + 4, f"{value:.{digits}f}", anchor="end", fill=QUALITY, size=11))
        parts.append(_text(LEFT, TOP - 5, name, fill=QUALITY, size=11.5))
        drawn += _line([(steps(step), left(value)) for step, value in quality], QUALITY, dots=len(quality) <= 40)
    for value in right.ticks():
        text = bytes_text(value, short=True)
        parts.append(_text(LEFT + PANEL + 8, right(value) + 4, text, fill=MEMORY, size=11))
    if full:
        y = right(full)
        dashed = f'stroke="{MEMORY}" stroke-width="1.4" stroke-dasharray="5 4"'
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + PANEL}" y1="{y:.1f}" y2="{y:.1f}" {dashed}/>')
        # Where the quality's line is not: an area rises, a loss falls.
        x, anchor = (LEFT + 6, "start") if name.endswith("AUC") else (LEFT + PANEL - 6, "end")
        words = f"whole tables, {bytes_text(full)}"
        parts.append(_text(x, y + 15, words, anchor=anchor, fill=MEMORY, size=11, halo=True))
    parts += [*drawn, *_line([(steps(step), right(size)) for step, size in memory], MEMORY)]
    parts.append(_text(LEFT + PANEL, TOP - 5, "memory of the tables", anchor="end", fill=MEMORY, size=11.5))
    return parts


def _quality(lines: Sequence[Mapping[str, Any]]) -> tuple[str, list[tuple[float, float]]]:
    """Validation AUC where there is one, else the loss."""
    scored = [line for line in lines if line["kind"] == "validation"]
    for key, name in (("auc", "validation AUC"), ("log_loss", "validation loss")):
        if scored and all(line.get(key) is not None for line in scored):
            return name, [(line["step"], line[key]) for line in scored]
    return "training loss", [(line["step"], line["loss"]) for line in lines if line["kind"] == "train"]


def _by_popularity(curves: Mapping[str, Sequence[Sequence[float]]], full_rows: int | None) -> list[str]:
    start = LEFT + PANEL + BETWEEN
    floor = HIGH - BOTTOM
    most = max(10.0, *(point[0] for curve in curves.values() for point in curve))
    places = Scale(1, max(most, float(full_rows or 0)), start, start + PANEL, log=True)
    widths = Scale(0, 1.04, floor, TOP)
    parts = [_text(start, TOP - 22, "Width by popularity", weight=600)]
    parts += _x_axis(places, start, "rows, from the most useful on", _count)
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(_rule(start, start + PANEL, widths(value)))
        parts.append(_text(start - 8, widths(value) + 4, f"{value:.0%}", anchor="end", fill=FAINT, size=11))
    parts.append(_text(start, TOP - 5, "mean width, of a whole row", fill=FAINT, size=11.5))
    by_size = sorted((name for name in curves if name), key=lambda name: -curves[name][-1][0])[:NAMED]
    legend = [(name, color, 1.6) for name, color in zip(by_size, TABLES)]
    if "" in curves:
        legend.append(("", INK, 3.0))
    for name, color, thick in legend:
        points = [(places(place), widths(wide)) for place, wide in curves[name]]
        parts += _line(points, color, thick, dots=len(points) == 1)
    for row, (name, color, thick) in enumerate(reversed(legend)):
        y = TOP + 14 + 16 * row
        x = start + PANEL - 18
        parts.append(
            f'<line x1="{x}" x2="{x + 18}" y1="{y - 4}" y2="{y - 4}" stroke="{color}" stroke-width="{thick}"/>'
        )
        words = name if name else "all tables"
        words = words if len(words) <= 24 else words[:23] + "…"
        parts.append(_text(x - 6, y, words, anchor="end", fill=FAINT, size=11, halo=True))
    return parts


def _x_axis(scale: Scale, start: float, name: str, words: Callable[[float], str]) -> list[str]:
    floor = HIGH - BOTTOM
    parts = [
        f'<line x1="{start}" x2="{start + PANEL}" y1="{floor}" y2="{floor}" stroke="{FAINT}" stroke-width="1"/>',
        _text(start + PANEL / 2, floor + 38, name, anchor="middle", fill=FAINT, size=11.5),
    ]
    for value in scale.ticks():
        x = scale(value)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{floor}" y2="{floor + 4}" stroke="{FAINT}"/>')
        parts.append(_text(x, floor + 18, words(value), anchor="middle", fill=FAINT, size=11))
    return parts


def _rule(start: float, end: float, y: float) -> str:
    return f'<line x1="{start}" x2="{end}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRID}" stroke-width="1"/>'


def _line(points: Points, color: str, thick: float = 2.2, *, dots: bool = False) -> list[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    parts = [
        f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{thick}" stroke-linejoin="round" '
        'stroke-linecap="round"/>'
    ]
    if dots:
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{color}"/>' for x, y in points]
    return parts


def _text(
    x: float, y: float, words: str, *, anchor: str = "start", fill: str = INK, size: float = 13, weight: int = 400,
    halo: bool = False,
) -> str:  # fmt: skip
    more = ' stroke="#ffffff" stroke-width="4" paint-order="stroke"' if halo else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" fill="{fill}"{more}>'
        f"{escape(words)}</text>"
    )


def _count(value: float) -> str:
    for unit, scale in (("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:,.0f} {unit}"
    return f"{value:.0f}"


def bytes_text(amount: float, *, short: bool = False) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if amount >= scale:
            return f"{amount / scale:,.3g} {unit}" if short else f"{amount / scale:,.1f} {unit}"
    return f"{amount:.0f} B"
