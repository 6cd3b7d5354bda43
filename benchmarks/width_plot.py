"""The quality table as a picture: for every data set AUC over kept weights, a line per method. Plain SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from typing import Any

COLOURS = {
    "water-filling": "#d1495b", "fiited": "#00798c", "adaembed": "#edae49", "itep": "#66a182", "frequency": "#8d6a9f",
    "dim": "#2e4057", "hash": "#9a9a9a",
}  # fmt: skip
WORDS = {"dim": "uniform dims", "hash": "hashing"}
WIDTH, HEIGHT, LEFT, TOP, GAP = 300, 220, 58, 64, 74
COLUMNS = 3
SHOWN = 0.04
"""AUC below the best of a data set that is shown; lines leave the picture where they are lower"""


def plot(result: Mapping[str, Any]) -> str:
    panels = list(result["data"].items())
    across = min(COLUMNS, len(panels))
    down = -(-len(panels) // across)
    size = LEFT + across * (WIDTH + GAP), TOP + down * (HEIGHT + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" font-family="sans-serif" font-size="12">',
        f'<rect width="{size[0]}" height="{size[1]}" fill="white"/>',
        *legend(),
    ]
    for number, (name, data) in enumerate(panels):
        x, y = LEFT + number % across * (WIDTH + GAP), TOP + number // across * (HEIGHT + GAP)
        parts += panel(name, data, result["kept"], x, y)
    return "\n".join([*parts, "</svg>", ""])


def legend() -> list[str]:
    parts, x = [], LEFT
    for method, colour in COLOURS.items():
        parts.append(f'<path d="M{x} 24h22" stroke="{colour}" stroke-width="{thickness(method)}"/>')
        parts.append(f'<text x="{x + 28}" y="28">{WORDS.get(method, method)}</text>')
        x += 46 + 7 * len(WORDS.get(method, method))
    parts.append(f'<path d="M{x} 24h22" stroke="black" stroke-dasharray="5 3"/>')
    parts.append(f'<text x="{x + 28}" y="28">full model, the better of without and with weight decay</text>')
    return parts


def thickness(method: str) -> float:
    return 2.6 if method == "water-filling" else 1.4


def panel(name: str, data: Mapping[str, Any], kept: list[float], left: int, top: int) -> list[str]:
    methods = {method: data["methods"][method] for method in COLOURS if method in data["methods"]}
    whole = [data["methods"][which]["1"] for which in ("full", "full_decay") if which in data["methods"]]
    full = max(whole, key=lambda cell: float(cell["auc"]), default=None)
    scores = [cell["auc"] for cells in methods.values() for cell in cells.values()] + ([full["auc"]] if full else [])
    high = max(scores) + 0.002
    low = max(min(scores) - 0.002, high - SHOWN)
    first, last = math.log(max(kept)), math.log(min(kept))

    def x(keep: float) -> float:
        return round(left + (math.log(keep) - first) / ((last - first) or 1.0) * WIDTH, 1)

    def y(score: float) -> float:
        return round(top + (high - score) / (high - low) * HEIGHT, 1)

    parts = [
        f'<text x="{left}" y="{top - 8}" font-weight="bold">{escape(name)}</text>',
        f'<rect x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#bbb"/>',
    ]
    for keep in kept:
        parts.append(f'<text x="{x(keep)}" y="{top + HEIGHT + 16}" text-anchor="middle">{100 * keep:g}%</text>')
    step = 0.01 if high - low > 0.02 else 0.005 if high - low > 0.01 else 0.002
    for k in range(math.ceil(low / step), math.floor(high / step) + 1):
        height = y(k * step)
        parts.append(f'<path d="M{left} {height}h{WIDTH}" stroke="#eee"/>')
        parts.append(f'<text x="{left - 6}" y="{height + 4}" text-anchor="end">{k * step:.3f}</text>')
    if full:
        parts.append(f'<path d="M{left} {y(full["auc"])}h{WIDTH}" stroke="black" stroke-dasharray="5 3"/>')
    edge = f"edge-{escape(name)}"
    parts.append(
        f'<clipPath id="{edge}"><rect x="{left - 3}" y="{top}" width="{WIDTH + 6}" height="{HEIGHT}"/></clipPath>'
        f'<g clip-path="url(#{edge})">'
    )
    for method, cells in methods.items():
        points = sorted(((float(keep), cell) for keep, cell in cells.items()), key=lambda point: -point[0])
        line = " ".join(f"{x(keep)},{y(cell['auc'])}" for keep, cell in points)
        look = f'stroke="{COLOURS[method]}" stroke-width="{thickness(method)}"'
        parts.append(f'<polyline points="{line}" fill="none" {look}/>')
        for keep, cell in points:
            spread = cell["deviation"] or 0.0
            above, below = y(cell["auc"] + spread), y(cell["auc"] - spread)
            parts.append(f'<path d="M{x(keep)} {above}V{below}" {look}/>')
            parts.append(f'<circle cx="{x(keep)}" cy="{y(cell["auc"])}" r="2.4" fill="{COLOURS[method]}"/>')
    return [*parts, "</g>"]
