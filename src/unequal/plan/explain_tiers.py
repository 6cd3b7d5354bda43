"""Tiers in words: where each table was cut, why there, and what it changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .allocate import ALL_ROWS, FULL, MOST, NO_GAIN, UNNAMED, Objective
from .explain import milliseconds, size

if TYPE_CHECKING:
    from .plan import Plan

SHOWN = 20
"""tables that are explained, those that change most first"""
HELD = {"replicated": "a copy on every rank", "node": "a copy in every node", "global": "at its owner alone"}
WHY = {
    FULL: "the memory for copies is full",
    NO_GAIN: "nothing more to gain",
    UNNAMED: "the profile names no more rows",
    ALL_ROWS: "no more rows are read",
}


def tiers_text(plan: Plan, limit: int | None = SHOWN) -> str:
    """All of it: what copies were given, then table by table."""
    if plan.copying is None:
        return "no tiers: no copy of a row makes the step faster than the plan without copies"
    names = sorted(
        plan.tiers, key=lambda name: plan.tiers[name].after.bytes_across - plan.tiers[name].before.bytes_across
    )
    parts = [summary(plan), *(table_text(plan, name) for name in names[:limit])]
    if limit is not None and len(names) > limit:
        parts.append(f"… and {len(names) - limit:,} more tables with tiers, all of them in the file")
    return "\n\n".join(parts)


def summary(plan: Plan) -> str:
    """How much was copied, for what memory, and what a step takes without."""
    copying, tiers = plan.copying, plan.tiers.values()
    assert copying is not None
    replicated, node = sum(choice.replicated for choice in tiers), sum(choice.node for choice in tiers)
    copies = sum(choice.replicated_bytes + choice.node_bytes + choice.map_bytes for choice in tiers)
    used = max((rank.total_memory for rank in plan.ranks), default=0)
    full = f"memory is full: one more MB would save {_gain(copying.price, copying.objective)} a step"
    lines = [
        f"tiers of {_tables(len(plan.tiers))}: {replicated:,} rows replicated, {node:,} in every node; "
        f"copies take {size(copies)} of a rank",
        f"a step takes {milliseconds(plan.step_seconds)}, at best {milliseconds(copying.step_seconds)} without copies",
        f"a rank uses {size(used)} of the {size(copying.budget)} that it may",
        f"row-wise it would use {size(copying.repeated_ids_memory)} with repeated ids, "
        f"{size(copying.row_wise_memory)} with ids as unique as here",
        full if copying.price else "more memory would not help",
    ]
    return "\n".join(lines)


def _tables(count: int) -> str:
    return f"{count:,} table" + ("s" if count > 1 else "")


def table_text(plan: Plan, name: str) -> str:
    """One table: tiers, cuts, before and after. 80 columns."""
    choice = plan.tiers[name]
    objective: Objective = plan.copying.objective if plan.copying is not None else "seconds"
    copied = {"replicated": choice.replicated_bytes, "node": choice.node_bytes}
    rows = [("tier", "rows", "copies per rank", "")]
    for tier, count in (("replicated", choice.replicated), ("node", choice.node), ("global", choice.rest)):
        rows.append((tier, f"{count:,}", size(copied[tier]) if tier in copied else "–", HELD[tier]))
    flows = [
        ("per rank and step", "row-wise", "with tiers", ""),
        _change("sent over the network", choice.before.bytes_across, choice.after.bytes_across, size),
        _change("sent inside the node", choice.before.bytes_inside, choice.after.bytes_inside, size),
        _change("time", choice.before.seconds, choice.after.seconds, milliseconds),
        _change("memory", choice.before.memory, choice.after.memory, size),
    ]
    return "\n".join(
        [
            f"table '{name}'",
            _columns(rows, (1, 2)),
            *_cut("replicated", choice.replicated, choice.replicated_last, choice.replicated_next, objective),
            f"    {WHY[choice.replicated_why]}",
            *_cut("copied at all", choice.replicated + choice.node, choice.copied_last, choice.copied_next, objective),
            f"    {WHY[choice.copied_why]}",
            _columns(flows, (1, 2, 3)),
        ]
    )  # fmt: skip


def _change(words: str, before: float, after: float, say: Callable[[float], str]) -> tuple[str, str, str, str]:
    changed = f"{after / before - 1:+.0%}" if before else ""
    return words, say(before), say(after), "0%" if changed[1:] == "0%" else changed.replace("-", "−")


def _cut(words: str, rows: int, last: float | None, behind: float | None, objective: Objective) -> list[str]:
    said = [f"  rows up to {rows:,} are {words}" if rows else f"  no row is {words}"]
    if last is not None and rows:
        saved = f"saves {_gain(last, objective)} a step per MB of copies" if last < MOST else "saves memory, too"
        said.append(f"    the last one {saved}")
    if behind is not None:
        said.append(f"    the next would {'save' if behind > 0 else 'cost'} {_gain(abs(behind), objective)} per MB")
    return said


def _gain(per_byte: float, objective: Objective) -> str:
    """Of one MB."""
    if objective == "bytes":
        return f"{per_byte:,.2g} MB"
    return f"{per_byte * 1e15:.3g} ns" if per_byte < 1e-12 else milliseconds(per_byte * 1e6)


def _columns(rows: Sequence[Sequence[str]], right: Sequence[int]) -> str:
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if k in right else cell.ljust(width) for k, (cell, width) in enumerate(zip(row, widths))
        ]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(lines)
