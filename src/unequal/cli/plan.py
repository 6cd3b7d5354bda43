"""`unequal plan`: where the tables of a recipe would go on given machines, why, and at what cost, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..errors import UserError
from .errors import one_line_errors

if TYPE_CHECKING:
    from ..plan.plan import Plan
    from ..plan.topology import Topology
    from ..stats.profile import Profile

SHOWN_TABLES, SHOWN_RANKS = 60, 16
WIDE = 180
"""columns of a terminal in which a table's reason fits beside the rest"""


def plan(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe file, or `default`.")],
    topology: Annotated[
        Path | None,
        typer.Option("--topology", metavar="FILE", help="The machines, as TOML; without it, machines like this one."),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks", metavar="N", min=1, help="Ranks in all; by default the topology's, the GPUs here, or 2."
        ),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", metavar="N", min=1, help="Machines that the ranks are on; by default 1.")
    ] = None,
    device: Annotated[
        Literal["cpu", "cuda"] | None,
        typer.Option("--device", help="What the ranks compute on, where no topology says it."),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile", metavar="FILE", help="What `unequal profile` found: hot rows get copies where that pays."
        ),
    ] = None,
    memory_budget: Annotated[
        str | None,
        typer.Option(
            "--memory-budget",
            metavar="SIZE",
            help='Memory of a rank in all that a plan with copies may use: "20 GB", or none for what the machines have. '
            "By default what row-wise sharding takes, so that copies need no more memory.",
        ),
    ] = None,
    objective: Annotated[
        Literal["seconds", "bytes"],
        typer.Option("--objective", help="What copies are to save: time of a step, or bytes over the network."),
    ] = "seconds",
    explain: Annotated[
        bool, typer.Option("--explain", help="Say of every table with tiers where it was cut, why, and what changes.")
    ] = False,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a field: --set run.batch_size=4096")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="PLAN", help="Where the plan is saved; by default RECIPE's name.plan.json."),
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the numbers as JSON.")] = None,
) -> None:
    """Say where a recipe's tables would go on some machines, and why, and save that for `unequal train --plan`."""
    with one_line_errors():
        from .commands import _check_output, _write

        _check_output(json)
        from ..recipe import load_recipe
        from ..train.planning import plan_recipe

        chosen = load_recipe(recipe, overrides or ())
        path = Path(f"{chosen.name}.plan.json") if out is None else out
        if path.is_dir():
            raise UserError(f"--out {path}: expected a file, got a folder; name the file")
        if profile is None and (explain or memory_budget is not None or objective != "seconds"):
            raise UserError(
                "--explain, --memory-budget, --objective: expected --profile with them, got none; make one with `unequal profile`"
            )
        machines, budget = _machines(topology, ranks, nodes, device), parse_budget(memory_budget)
        known = None if profile is None else load_profile(profile)
        made = plan_recipe(chosen, machines, profile=known, objective=objective, memory_budget=budget)
        made.save(path)
        show_plan(made)
        if known is not None:
            show_tiers(made, explain)
        print(f"plan: {path}")
        _write(json, made.to_json())


def parse_budget(text: str | None) -> float | None:
    """Bytes; without a text None, which means what row-wise sharding takes; for "none" infinitely many."""
    if text is None:
        return None
    if text.strip().lower() == "none":
        return float("inf")
    from ..plan.topology import parse_bytes

    return float(parse_bytes(text, "--memory-budget"))


def load_profile(path: Path) -> Profile:
    from ..stats.profile import Profile

    return Profile.load(path)


def show_tiers(plan: Plan, explained: bool) -> None:
    """What has copies, in a few lines; explained: of every table."""
    from rich.console import Console

    from ..plan import explain_tiers

    console = Console()
    said = explain_tiers.tiers_text(plan) if explained or not plan.tiers else explain_tiers.summary(plan)
    console.print(said, highlight=False, markup=False)
    if plan.tiers and not explained:
        console.print("where each table was cut and why: --explain", highlight=False, markup=False)


def _machines(file: Path | None, ranks: int | None, nodes: int | None, device: str | None) -> Topology:
    """The topology that the options mean together."""
    from ..plan.topology import Topology

    if file is not None:
        known = Topology.load(file)
        if device is not None and device != known.device:
            raise UserError(f"--device {device}: expected {known.device}, as {file} says; leave the option out")
        count = nodes or (known.nodes if ranks is None or ranks % known.nodes == 0 else 1)
        size = known.ranks_per_node if ranks is None else ranks // count
        _check(ranks, count)
        return known.resized(count, size)
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = device or ("cuda" if gpus else "cpu")
    count = nodes or 1
    ranks = ranks or count * (gpus if device == "cuda" and gpus else 2)
    _check(ranks, count)
    return Topology.here(ranks, ranks // count, device)


def _check(ranks: int | None, nodes: int) -> None:
    if ranks is not None and (ranks % nodes or ranks < nodes):
        raise UserError(f"--ranks {ranks}: expected as many on each of the {nodes} nodes; choose a multiple of {nodes}")


def show_plan(plan: Plan) -> None:
    """Tables, ranks, bottleneck and both balances."""
    from rich.box import HEAVY_HEAD, SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from ..plan import explain

    console = Console()
    console.print(explain.heading(plan), highlight=False, markup=False)
    narrow = console.width < WIDE
    for title, names, right, (rows, left) in (
        ("tables", explain.TABLE_HEADER, (3, 4, 5, 6, 9), explain.table_rows(plan, SHOWN_TABLES)),
        ("ranks", explain.RANK_HEADER, range(6), explain.rank_rows(plan, SHOWN_RANKS)),
    ):
        # Reasons are sentences: in a narrow terminal they stand under the table rather than in a column of it.
        shown = [k for k, name in enumerate(names) if not (narrow and name == "why")]
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD if narrow else HEAVY_HEAD)
        table.padding = (0, 0 if narrow else 1)
        for k in shown:
            table.add_column(names[k], justify="right" if k in right else "left", overflow="fold")
        for row in rows:
            table.add_row(*(escape(row[k]) for k in shown))
        console.print(table)
        if len(shown) < len(names):
            for row in rows:
                console.print(f"{row[0]}: {row[names.index('why')]}", highlight=False, markup=False)
        if left:
            console.print(f"… and {left:,} more, all of them in the file", highlight=False, markup=False)
    console.print(f"bottleneck: {plan.bottleneck}", highlight=False, markup=False)
    console.print(f"balance: {explain.balance_text(plan)}", highlight=False, markup=False)
