"""A plan in words: why each table is where it is, what is the bottleneck, and what to do where nothing fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .cost import MEMORY, Part, Pricer
from .workload import TableLoad

if TYPE_CHECKING:
    from .choose import Chooser, Priced, Solution
    from .plan import Plan

Floats = npt.NDArray[np.float64]
WORK = {
    Part.READ: "lookups",
    Part.UPDATE: "updates",
    Part.INDEX: "index",
    Part.COPY: "copies",
    Part.HOST: "host",
}
HELD = {
    Part.WEIGHTS: "weights",
    Part.OPTIMIZER: "optimizer",
    Part.DIRECTORY: "directory",
    Part.COPIES: "copies",
    Part.BUFFERS: "buffers",
    Part.INPUTS: "inputs",
}


def size(amount: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if amount >= scale:
            return f"{amount / scale:,.1f} {unit}"
    return f"{amount:,.0f} B"


def milliseconds(seconds: float) -> str:
    if seconds < 1e-4:
        return f"{seconds * 1e6:.1f} µs"
    return f"{seconds * 1e3:,.2f} ms" if seconds < 0.01 else f"{seconds * 1e3:,.1f} ms"


def work(pricer: Pricer, cost: Floats) -> dict[str, Floats]:
    """[ranks]: seconds by kind of work; exchange by the class of the link."""
    inside, across = pricer.link_seconds(cost)
    own: dict[str, Floats] = {name: cost[part] for part, name in WORK.items()}
    return {**own, "exchange inside nodes": inside, "exchange across nodes": across}


def sent(cost: Floats) -> tuple[Floats, Floats]:
    """[ranks]: bytes each rank sends inside its node and across."""
    inside: Floats = cost[Part.ROWS_SENT_INSIDE] + cost[Part.BACK_SENT_INSIDE] + cost[Part.PUSH_SENT_INSIDE]
    across: Floats = cost[Part.ROWS_SENT_ACROSS] + cost[Part.BACK_SENT_ACROSS] + cost[Part.PUSH_SENT_ACROSS]
    return inside, across


def reason(
    chooser: Chooser, solution: Solution, k: int, other: tuple[str, Floats, float] | None, options: Sequence[Priced]
) -> str:
    """One sentence. `other`: label, cost and step seconds of the next best."""
    load, limit = chooser.loads[k], solution.limit
    if chooser.topology.world == 1:
        return "one rank holds everything"
    asked = f"asked for as {load.sharding}" if load.sharding != "auto" else ""
    whole = next((one for one in options if one.candidate.kind == "table_wise" and not one.candidate.sums), None)
    if whole is not None and whole.peak_memory > limit and solution.candidates[k].kind != "table_wise":
        return f"too large for one rank: {size(whole.peak_memory)} of {size(limit)}"
    if other is None:
        return asked or "the only way on these ranks"
    label, cost, step = other
    now, own = float(solution.seconds.max()), chooser.pricer.own_seconds(solution.costs[k])
    then = chooser.pricer.own_seconds(cost)
    most = _largest_difference(chooser.pricer, solution.costs[k], cost)
    if then.mean() > own.mean():
        why = f"least work: {label} takes {milliseconds(float(then.mean() - own.mean()))} more of every rank, most of it {most}"
    elif step > now:
        why = f"balance: with {label} the slowest rank would take {milliseconds(step - now)} longer"
    else:
        why = f"as good as {label}"
    return f"{asked}; {why}" if asked else why


def without_tiers(load: TableLoad) -> str:
    """Why a table of a profile has no copies, where it could not or nothing was to be gained by those it was asked for with."""
    if load.popularity is None:
        return ""
    if load.table.admit_after > 1:
        return "; no tiers: rare ids share a row (admit_after)"
    return "; no copy of a row would gain anything" if load.sharding == "tiers" else ""


def _largest_difference(pricer: Pricer, cost: Floats, other: Floats) -> str:
    before, after = work(pricer, cost), work(pricer, other)
    return max(after, key=lambda name: float((after[name] - before[name]).sum()))


def bottleneck(chooser: Chooser, solution: Solution) -> str:
    """The slowest rank, what keeps it busy and which table most."""
    rank = int(solution.seconds.argmax())
    parts = {name: float(seconds[rank]) for name, seconds in work(chooser.pricer, solution.total).items()}
    parts["messages"] = chooser.pricer.messages(solution.total)
    most = max(parts, key=lambda name: parts[name])
    own = chooser.pricer.own_seconds(solution.costs[:, :, rank].T)
    table = int(own.argmax())
    total, mean = float(solution.seconds[rank]), float(solution.seconds.mean())
    return (
        f"rank {rank} with {milliseconds(total)} a step ({total / max(mean, 1e-30):.2f} × the mean); "
        f"{parts[most] / max(total, 1e-30):.0%} of it {most}; "
        f"its dearest table is '{chooser.loads[table].table.name}' ({milliseconds(float(own[table]))})"
    )


def infeasible(chooser: Chooser, solution: Solution) -> str:
    """How much is short, where, and what would help by how much."""
    setting, topology = chooser.pricer.setting, chooser.topology
    rank = int((solution.memory - solution.limit).argmax())
    needed = float(solution.memory[rank]) + sum(setting.fixed.values())
    short = needed - topology.usable_memory
    parts = {name: float(solution.total[part, rank]) for part, name in HELD.items()}
    parts |= {name: float(amount) for name, amount in setting.fixed.items()}
    largest = sorted(parts, key=lambda name: -parts[name])[:3]
    said = ", ".join(f"{name} {size(parts[name])}" for name in largest)
    remedies = _remedies(chooser, solution, rank)
    return (
        f"no plan fits: {size(short)} are short on rank {rank}, which needs {size(needed)} of the "
        f"{size(topology.usable_memory)} that may be used of its {size(topology.memory_per_rank)} ({said}); {'; '.join(remedies)}"
    )


def _remedies(chooser: Chooser, solution: Solution, rank: int) -> list[str]:
    half, states, found = 0.0, 0.0, []
    for k, load in enumerate(chooser.loads):
        own = solution.costs[k][:, rank]
        half += float(own[Part.WEIGHTS]) * max(0.0, 1 - 2 / load.table.dtype.itemsize)
        dim = load.table.dim
        row_wise, now = 4, load.optimizer.state_bytes_per_row(dim)
        states += float(own[Part.OPTIMIZER]) * (1 - row_wise / now) if now > row_wise else 0.0
    if half:
        found.append(f'tables.dtype = "fp16" saves {size(half)}')
    if states:
        found.append(f'optimizer.tables = "row_wise_adagrad" saves {size(states)}')
    ranks = ranks_needed(chooser)
    if ranks is not None:
        found.append(f"{ranks} ranks of this size would do")
    batch = float(solution.total[Part.BUFFERS : Part.INPUTS + 1, rank].sum()) / 2
    found.append(f"half the run.batch_size saves {size(batch)}")
    if topology_reserve := chooser.topology.reserve:
        kept = chooser.topology.memory_per_rank * topology_reserve
        found.append(f"the topology keeps {size(kept)} of each rank free (reserve = {topology_reserve:g})")
    return found


def ranks_needed(chooser: Chooser) -> int | None:
    """The fewest ranks, in whole nodes, over which all tables fit when their rows are dealt out evenly."""
    from dataclasses import replace

    from .candidates import Candidate

    setting, topology = chooser.pricer.setting, chooser.topology
    if setting.limit <= 0:
        return None
    held = float(sum(min(one.memory for one in each) for each in chooser.options)) * topology.world
    spread = Candidate("row_wise")

    def fits(nodes: int, size: int) -> bool:
        larger = replace(setting, topology=topology.resized(nodes, size))
        pricer = Pricer(larger)
        empty = np.zeros(nodes * size)
        total = sum(
            float(pricer.memory(pricer.price(load, spread.put(load.table.dim, larger.topology, empty))).max())
            for load in chooser.loads
        )
        return total <= larger.limit

    size = topology.ranks_per_node
    if topology.nodes == 1:
        options = [(1, count) for count in range(topology.world + 1, 64 * topology.world + 1)]
    else:
        options = [(count, size) for count in range(topology.nodes + 1, 64 * topology.nodes + 1)]
    low, high = 0, len(options) - 1
    if held <= 0 or not fits(*options[high]):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(*options[middle]) else (middle + 1, high)
    return options[low][0] * options[low][1]


def _columns(rows: Sequence[Sequence[str]], right: Sequence[int]) -> str:
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    lines = [
        "  ".join(cell.rjust(width) if k in right else cell.ljust(width) for k, (cell, width) in enumerate(zip(row, widths)))
        for row in rows
    ]  # fmt: skip
    return "\n".join(line.rstrip() for line in lines)


TABLE_HEADER = ("table", "chosen", "on", "memory", "time", "inside", "across", "why", "next best", "a step then")
RANK_HEADER = ("rank", "memory", "of", "time", "sent inside", "sent across")


def table_rows(plan: Plan, limit: int | None = None) -> tuple[list[tuple[str, ...]], int]:
    """What `TABLE_HEADER` names, the dearest tables first, and how many were left out."""
    names = sorted(plan.tables, key=lambda name: -plan.choices[name].seconds)
    rows: list[tuple[str, ...]] = []
    for name in names[:limit]:
        choice, placed = plan.choices[name], plan.tables[name]
        holders = sorted({rank for piece in placed.pieces for rank in piece.ranks})
        rows.append(
            (
                name, choice.label, _spans(holders), size(choice.memory), milliseconds(choice.seconds),
                size(choice.bytes_inside), size(choice.bytes_across), choice.reason, choice.next_best or "–",
                "–" if choice.next_step_seconds is None else milliseconds(choice.next_step_seconds),
            )
        )  # fmt: skip
    return rows, len(names) - len(rows)


def rank_rows(plan: Plan, limit: int | None = None) -> tuple[list[tuple[str, ...]], int]:
    """What `RANK_HEADER` names."""
    rows: list[tuple[str, ...]] = [
        (
            str(number), size(rank.total_memory), size(plan.memory_limit), milliseconds(rank.total_seconds),
            size(rank.bytes_inside), size(rank.bytes_across),
        )
        for number, rank in enumerate(plan.ranks[:limit])
    ]  # fmt: skip
    return rows, len(plan.ranks) - len(rows)


def _spans(numbers: Sequence[int]) -> str:
    """0–3, 6."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    said = [str(a) if a == b else f"{a}–{b}" for a, b in spans]
    return ", ".join(said) if len(said) <= 4 else f"{said[0]}, {said[1]} … {said[-1]}"


def tables_text(plan: Plan, limit: int | None) -> str:
    rows, left = table_rows(plan, limit)
    return _columns([TABLE_HEADER, *rows], (3, 4, 5, 6, 9)) + (f"\n… and {left:,} cheaper tables" if left else "")


def ranks_text(plan: Plan, limit: int | None) -> str:
    rows, left = rank_rows(plan, limit)
    return _columns([RANK_HEADER, *rows], (0, 1, 2, 3, 4, 5)) + (f"\n… and {left:,} more ranks" if left else "")


def heading(plan: Plan) -> str:
    return (
        f"{len(plan.tables)} tables on {plan.world} ranks, {plan.ranks_per_node} a node; rows travel as {plan.forward_codec}, "
        f"gradients as {plan.backward_codec}; the tables' part of a step takes {milliseconds(plan.step_seconds)}"
    )


def balance_text(plan: Plan) -> str:
    """Both methods, and what single changes made of the better."""
    said = [
        f"{name} {'does not fit' if seconds is None else milliseconds(seconds)}"
        for name, seconds in plan.balanced.items()
    ]
    return f"{', '.join(said)}; after single changes {milliseconds(plan.step_seconds)}"


def text(plan: Plan) -> str:
    """The whole plan."""
    parts = [heading(plan)]
    if plan.choices:
        parts += [tables_text(plan, 60), ranks_text(plan, 16)]
    if plan.tiers:
        from .explain_tiers import tiers_text

        parts.append(tiers_text(plan))
    parts += [f"bottleneck: {plan.bottleneck}", f"balance: {balance_text(plan)}", f"inputs: {plan.hash}"]
    return "\n\n".join(parts)


def memory_parts(pricer: Pricer, cost: Floats, rank: int) -> dict[str, int]:
    """Bytes of one rank by what holds them, the fixed part included."""
    held = {name: round(float(cost[part, rank])) for part, name in HELD.items()}
    assert len(held) == MEMORY.stop - MEMORY.start
    return {**{name: int(amount) for name, amount in pricer.setting.fixed.items()}, **held}


def describe_load(load: TableLoad) -> dict[str, float | int | str]:
    """What was known of a table's load, as inputs of a plan."""
    where = f"load.{load.table.name}"
    return {
        f"{where}.rows": load.rows,
        f"{where}.ids_per_sample": round(load.ids, 6),
        f"{where}.source": load.source,
    }
