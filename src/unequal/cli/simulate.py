"""`unequal simulate`: what plans would cost on a cluster that is not here, and how that grows with its nodes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..errors import UserError
from .errors import one_line_errors

if TYPE_CHECKING:
    from ..plan.simulate import Outcome, Simulation
    from ..plan.workload import TableLoad

MULTIPLES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}


def simulate(
    recipe: Annotated[
        Path | None,
        typer.Argument(metavar="[RECIPE]", help="A recipe file, with --profile; or leave it out and describe a table."),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option("--profile", metavar="FILE", help="What `unequal profile` found in the recipe's data."),
    ] = None,
    nodes: Annotated[int, typer.Option("--nodes", metavar="N", min=1, help="Machines.")] = 16,
    ranks: Annotated[int, typer.Option("--ranks", metavar="N", min=1, help="Ranks of each machine.")] = 8,
    topology: Annotated[
        Path | None,
        typer.Option(
            "--topology",
            metavar="FILE",
            help="How fast and how large they are, as TOML; by default GPUs with 40 GB, 300 GB/s inside nodes, 7 GB/s across.",
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", metavar="N", min=1, help="Samples of all ranks; by default the recipe's."),
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", metavar="N", min=1, help="Samples of each rank instead.")
    ] = None,
    rows: Annotated[
        str | None, typer.Option("--rows", metavar="N", help="Without a recipe: rows of the table, such as 10M.")
    ] = None,
    zipf: Annotated[
        float, typer.Option("--zipf", metavar="S", min=0, help="The k-th row is read in proportion to 1/k^S.")
    ] = 1.05,
    dim: Annotated[int, typer.Option("--dim", metavar="N", min=1, help="Columns of the table.")] = 64,
    length: Annotated[
        float, typer.Option("--length", metavar="N", min=0, help="Rows that a sample reads, one by one.")
    ] = 50,
    tables: Annotated[int, typer.Option("--tables", metavar="N", min=1, help="So many such tables.")] = 1,
    objective: Annotated[
        Literal["seconds", "bytes"],
        typer.Option("--objective", help="What copies are to save: time of a step, or bytes over the network."),
    ] = "seconds",
    memory_budget: Annotated[
        str | None,
        typer.Option(
            "--memory-budget",
            metavar="SIZE",
            help='Memory of a rank in all with copies: "20 GB", or none for what it has; by default what row-wise takes.',
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a field: --set tables.dim=64")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the numbers as JSON.")] = None,
) -> None:
    """Compare plans on a cluster that is not here: traffic, time, memory, and how they grow to 256 nodes.

    unequal simulate RECIPE --profile FILE --nodes 16 --ranks 8

    unequal simulate --rows 10M --zipf 1.05 --dim 64 --batch 4096 --length 500 --nodes 16 --ranks 8
    """
    with one_line_errors():
        from .commands import _check_output, _write
        from .plan import parse_budget

        _check_output(json)
        from ..plan.simulate import Simulation, cluster
        from ..plan.topology import Topology

        if batch is not None and batch_size is not None:
            raise UserError("--batch and --batch-size: expected samples of each rank or of all, got both; give one")
        budget = parse_budget(memory_budget)
        machines = cluster(nodes, ranks, None if topology is None else Topology.load(topology))
        if recipe is None:
            loads, said = _described(rows, zipf, dim, length, tables, profile)
            own_batch = None
        else:
            loads, said, own_batch = _profiled(recipe, profile, rows, overrides or ())
        samples = batch or -(-(batch_size or own_batch or 4096 * machines.world) // machines.world)
        simulation = Simulation(
            loads, machines, samples=samples, fixed=_process(machines.device), objective=objective, memory_budget=budget
        )
        plans, growth = simulation.plans(), simulation.growth()
        show(simulation, said, plans, growth)
        _write(json, _content(simulation, said, plans, growth))


def _described(
    rows: str | None, zipf: float, dim: int, length: float, tables: int, profile: Path | None
) -> tuple[list[TableLoad], str]:
    from ..plan.simulate import zipf_load

    if profile is not None:
        raise UserError("--profile: expected the recipe that it is of, got none; name the recipe first")
    if rows is None:
        raise UserError(
            "simulate: expected a recipe with --profile, or a table as --rows 10M --zipf 1.05 --dim 64 --length 500, got neither"
        )
    if not length > 0:
        raise UserError(f"--length {length:g}: expected more than 0 rows that a sample reads")
    count = parse_count(rows, "--rows")
    if not 1 <= count < 2**32:
        raise UserError(f"--rows {rows}: expected 1 to {2**32 - 1:,} rows of a table; use --tables for more")
    one = zipf_load(rows=count, skew=zipf, dim=dim, length=length)
    said = f"{tables} table{'s' if tables > 1 else ''} of {count:,} rows, dim {dim}; a sample reads {length:g} by Zipf {zipf:g}"
    return [one] * tables, said


def parse_count(text: str, where: str) -> int:
    """10M → 10,000,000."""
    number, unit = text.strip().replace("_", "").replace(",", ""), ""
    if number and number[-1].upper() in MULTIPLES:
        number, unit = number[:-1], number[-1].upper()
    try:
        amount = float(number) * MULTIPLES[unit]
    except ValueError:
        raise UserError(f"{where} {text}: expected a number such as 10M, 1.5B or 200000") from None
    if not amount.is_integer():
        raise UserError(f"{where} {text}: expected a whole number")
    return int(amount)


def _profiled(
    recipe: Path, profile: Path | None, rows: str | None, overrides: list[str] | tuple[str, ...]
) -> tuple[list[TableLoad], str, int]:
    from ..recipe import build_tables, load_recipe
    from ..stats.source import source_of
    from ..train.planning import profiled_loads
    from .plan import load_profile

    if profile is None:
        raise UserError("simulate: expected --profile with a recipe, got none; make one with `unequal profile`")
    if rows is not None:
        raise UserError("--rows: expected it without a recipe, whose profile knows the rows; leave it out")
    chosen = load_recipe(recipe, overrides)
    known = load_profile(profile)
    # The data need not be here: its files are not compared.
    known.check(source_of(chosen.data, build_tables(chosen)))
    loads = profiled_loads(chosen, known)
    said = f"{len(loads)} tables of {chosen.name}, as a profile of {known.samples:,} samples has them"
    return list(loads.values()), said, chosen.run.batch_size


def _process(device: str) -> dict[str, int]:
    from ..plan.planner import PROCESS_BYTES

    return {"process": PROCESS_BYTES[device]}


def show(simulation: Simulation, said: str, plans: list[Outcome], growth: list[Outcome]) -> None:
    """The plans codec by codec, then the growth."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from ..plan.explain import milliseconds, size
    from ..plan.simulate import GROWING, REPEATED, TIERS_NODE, TIERS_REPEATED, fewer

    console, machines = Console(), simulation.topology
    for line in heading(simulation, said):
        console.print(line, highlight=False, markup=False)
    table = Table(title="plans, per rank and step", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("")
    for name in ("network", "inside", "exchange", "memory", "fewer"):
        table.add_column(name, justify="right", no_wrap=True)
    codec = ""
    for outcome in plans:
        if outcome.codec != codec:
            codec = outcome.codec
            table.add_section()
            table.add_row(f"as {codec}", *[""] * 5, style="bold")
        table.add_row(
            outcome.plan, size(outcome.bytes_across), size(outcome.bytes_inside), milliseconds(outcome.exchange_seconds),
            size(outcome.memory) + ("" if outcome.fits else " !"), f"{fewer(outcome, plans[0]):.1%}",
        )  # fmt: skip
    console.print(table)
    notes = [
        "network, inside: sent by a rank to other nodes and within its own, on average; exchange: of the slowest rank",
        f"fewer: bytes over the network than {REPEATED.name} as fp32"
        + (" (inside: one node)" if machines.nodes == 1 else ""),
    ]
    if not all(outcome.fits for outcome in plans):
        notes.append(f"!: more than the {size(machines.usable_memory)} that may be used of a rank")
    notes += [
        f"{outcome.plan}: {outcome.replicated_rows:,} rows replicated, {outcome.node_rows:,} in every node"
        if outcome.replicated_rows + outcome.node_rows
        else f"{outcome.plan}: no copy of a row pays"
        for outcome in plans
        if outcome.codec == "fp32" and outcome.plan.startswith("tiers")
    ]
    for line in notes:
        console.print(line, highlight=False, markup=False)
    shown = (REPEATED, TIERS_REPEATED, TIERS_NODE)
    grown = Table(
        title="as fp32 on more nodes: over the network, exchange", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )  # fmt: skip
    grown.add_column("nodes", justify="right")
    for way in shown:
        grown.add_column(way.name.replace(", ", ",\n"), justify="right", no_wrap=True)
    grown.add_column("fewer", justify="right")
    for first in range(0, len(growth), len(GROWING)):
        of = {one.plan: one for one in growth[first : first + len(GROWING)]}
        cells = [f"{size(of[way.name].bytes_across)} {milliseconds(of[way.name].exchange_seconds):>8}" for way in shown]
        saved = fewer(of[TIERS_NODE.name], of[REPEATED.name])
        grown.add_row(str(growth[first].nodes), *cells, f"{saved:.1%}")
    console.print(grown)


def heading(simulation: Simulation, said: str) -> list[str]:
    from ..plan.explain import size

    machines = simulation.topology
    inside, across = machines.inside.bytes_per_second, machines.across.bytes_per_second
    return [
        said,
        f"{machines.nodes} nodes of {machines.ranks_per_node} ranks, {size(machines.memory_per_rank)} each; "
        f"{simulation.samples:,} samples a rank and step",
        f"a rank sends {size(inside)}/s inside its node, {size(across)}/s to others",
    ]


def _content(simulation: Simulation, said: str, plans: list[Outcome], growth: list[Outcome]) -> dict[str, Any]:
    from ..plan.simulate import fewer

    first = {one.nodes: one for one in reversed(growth) if one.plan == plans[0].plan}
    return {
        "tables": said,
        "topology": simulation.topology.to_mapping(),
        "samples_per_rank": simulation.samples,
        "objective": simulation.objective,
        "plans": [asdict(one) | {"fewer": fewer(one, plans[0])} for one in plans],
        "growth": [asdict(one) | {"fewer": fewer(one, first[one.nodes])} for one in growth],
    }
