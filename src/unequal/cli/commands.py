"""The commands. Everything heavy (torch, pyarrow) is imported inside them, so that help comes at once."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .. import __version__
from ..allocator import keep_freed_memory
from ..errors import UserError
from ..train import lifeline
from .calibrate import calibrate as calibrate_command
from .errors import ask_for_traceback, one_line_errors, ranks_end_at_once, stoppable
from .export import export as export_command
from .launch import LAUNCHED, launch
from .plan import plan as plan_command
from .profile import profile as profile_command
from .show import counting, show_report, show_summary
from .simulate import simulate as simulate_command

app = typer.Typer(
    name="unequal",
    help="Trains recommendation models with huge embedding tables.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
importers = typer.Typer(help="Turns a public data set into Parquet with a ready recipe.", no_args_is_help=True)
app.add_typer(importers, name="import")
app.command("plan")(plan_command)
app.command("profile")(profile_command)
app.command("simulate")(simulate_command)
app.command("calibrate")(calibrate_command)
app.command("export")(export_command)

Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the numbers as JSON.")]
Where = Annotated[
    str,
    typer.Option(
        "--device", metavar="DEVICE", help="Where to compute: auto (a GPU where there is one), cpu, cuda or cuda:N."
    ),
]
Ranks = Annotated[
    int,
    typer.Option(
        "--ranks", metavar="N", min=1, help="Train as N processes of this machine, each with a part of the tables."
    ),
]
STARTED = "UNEQUAL_STARTED"
Source = Annotated[Path, typer.Argument(metavar="SOURCE", help="The raw file or the folder that holds it.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write into.")]


def main() -> None:
    """The entry point of the `unequal` command."""
    # Torch's large tensors on 2 MiB pages, as the tables are: gradients are read at random places. Torch looks when it first
    # allocates; who set it otherwise keeps that.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # Threads that wait for each other sleep after some microseconds. GNU's OpenMP lets them spin for milliseconds: beside other
    # busy programs the one that all wait for then gets no core, and a step takes a hundred times as long (docs/log.md).
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    keep_freed_memory()
    if LAUNCHED not in os.environ:
        os.environ[STARTED] = repr(time.time())
    lifeline.attach()
    with ranks_end_at_once():
        app()


def _version(asked: bool) -> None:
    if asked:
        print(f"unequal {__version__}")
        raise typer.Exit


@app.callback()
def options(
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show the full traceback of an error (also: UNEQUAL_TRACEBACK=1).")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    if traceback:
        ask_for_traceback()


@app.command()
def train(
    recipe: Annotated[
        Path | None,
        typer.Argument(metavar="RECIPE", help="A recipe file, or `default`; may be left out with --resume."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a field: --set run.epochs=3")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="RUN", help="Go on with the run in this folder.")
    ] = None,
    json: Json = None,
    device: Where = "auto",
    ranks: Ranks = 1,
    plan: Annotated[
        Path | None, typer.Option("--plan", metavar="PLAN", help="Spread the tables by this plan (see `unequal plan`).")
    ] = None,
) -> None:
    """Train a recipe and score it on its test part.

    On several machines: torchrun --nnodes … --nproc-per-node … -m unequal train RECIPE
    """
    with one_line_errors(), stoppable():
        _check_output(json)
        if recipe is None and resume is None:
            raise UserError("train: expected a recipe file or --resume RUN, got neither; try `unequal train default`")
        settings = [part for override in overrides or () for part in ("--set", override)]
        _launch_if_asked(ranks, "train", recipe, *settings, resume=resume, json=json, device=device, plan=plan)
        from ..recipe import load_recipe, load_run
        from ..train.trainer import train as train_recipe

        if resume is None:
            chosen = load_recipe(recipe or "default", overrides or ())
        else:
            chosen = load_run(resume, recipe, overrides or ())
        started = float(os.environ[STARTED]) if STARTED in os.environ else None
        report = train_recipe(chosen, resume=resume, device=device, plan=plan, started=started)
        if _is_first_rank():
            show_report(report)
            print(f"run: {report.run}")
            _write(json, report.to_json())


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a trained run.")],
    data: Annotated[
        str | None,
        typer.Argument(metavar="DATA", help="A Parquet file, folder or pattern in place of the recipe's files."),
    ] = None,
    part: Annotated[
        Literal["train", "validation", "test", "all"] | None,
        typer.Option("--part", help="Which part to score; by default test, or all rows of DATA."),
    ] = None,
    json: Json = None,
    device: Where = "auto",
    ranks: Ranks = 1,
) -> None:
    """Score a finished run, on its own test part or on other data, whatever number of ranks trained it."""
    with one_line_errors(), stoppable():
        _check_output(json)
        _launch_if_asked(ranks, "evaluate", run, data, part=part, json=json, device=device)
        from ..data.config import SplitConfig
        from ..recipe import load_run
        from ..train.evaluate import evaluate_run

        recipe = load_run(run)
        if data is not None:
            pattern = str(Path(data) / "*.parquet") if Path(data).is_dir() else data
            recipe = replace(recipe, data=replace(recipe.data, files=(os.path.abspath(pattern),), generate=None))
            if part is None:  # all rows are scored, so the data need not hold the column the training was split by
                recipe = replace(recipe, data=replace(recipe.data, split=SplitConfig()))
        report = evaluate_run(recipe, run, part=part or ("test" if data is None else "all"), device=device)
        if _is_first_rank():
            show_report(report)
            _write(json, report.to_json())


def _launch_if_asked(ranks: int, command: str, *arguments: object, **options: object) -> None:
    """With --ranks: runs the command as so many processes, and ends with them."""
    if ranks == 1 or LAUNCHED in os.environ:
        return
    if "WORLD_SIZE" in os.environ and "RANK" in os.environ:
        raise UserError(
            f"--ranks {ranks}: expected no such option where torchrun starts the ranks ({os.environ['WORLD_SIZE']} of them); "
            "leave it out"
        )
    given = [part for name, value in options.items() if value is not None for part in (f"--{name}", str(value))]
    raise typer.Exit(launch([command, *(str(part) for part in arguments if part is not None), *given], ranks))


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


@importers.command()
def criteo(source: Source, out: Out, json: Json = None) -> None:
    """Criteo Kaggle display advertising: train.txt, tab-separated, also .gz."""
    _import("import_criteo", source, out, json)


@importers.command()
def avazu(source: Source, out: Out, json: Json = None) -> None:
    """Avazu click-through rate: train.csv, also .gz."""
    _import("import_avazu", source, out, json)


@importers.command()
def movielens(
    source: Source,
    out: Out,
    split: Annotated[Literal["time", "random"], typer.Option("--split", help="How the test part is chosen.")] = "time",
    json: Json = None,
) -> None:
    """MovieLens-1M or latest, as clicks (rating ≥ 4) with each user's history."""
    _import("import_movielens", source, out, json, split=split)


@importers.command()
def events(
    source: Source,
    out: Out,
    user: Annotated[str, typer.Option("--user", metavar="COLUMN", help="Who.")] = "user_id",
    item: Annotated[str, typer.Option("--item", metavar="COLUMN", help="What.")] = "item_id",
    order: Annotated[
        str | None,
        typer.Option(
            "--order", metavar="COLUMN", help="By what a user's events are sorted: timestamp, time, position."
        ),
    ] = None,
    history: Annotated[int, typer.Option("--history", metavar="N", help="Longest history of a sample.")] = 50,
    negatives: Annotated[int, typer.Option("--negatives", metavar="N", help="Other items beside each event.")] = 1,
    json: Json = None,
) -> None:
    """Any Parquet of events, one user and one item each, as clicks with each user's history."""
    options = {"user": user, "item": item, "order": order, "history": history, "negatives": negatives}
    _import("import_events", source, out, json, **options)


def _import(function: str, source: Path, out: Path, json: Path | None, **options: Any) -> None:
    with one_line_errors():
        _check_output(json)
        from ..data import importers as readers

        with counting(f"importing {source}") as progress:
            summary = getattr(readers, function)(source, out, progress=progress, **options)
        show_summary(summary)
        print(f"train it with: unequal train {out / 'recipe.toml'}")
        _write(json, summary)


@app.command()
def generate(
    out: Out,
    rows: Annotated[int | None, typer.Option(help="Number of samples.")] = None,
    tables: Annotated[int | None, typer.Option(help="Number of categorical columns.")] = None,
    ids: Annotated[int | None, typer.Option(help="Distinct ids in all of them together.")] = None,
    dense: Annotated[int | None, typer.Option(help="Number of dense columns.")] = None,
    skew: Annotated[float | None, typer.Option(help="Zipf exponent of the ids' popularity; 0 is uniform.")] = None,
    length: Annotated[int | None, typer.Option(help="Longest history per sample; 0 for none.")] = None,
    drift: Annotated[float | None, typer.Option(help="0 to 1: how far the world has moved at the end.")] = None,
    positive_rate: Annotated[float | None, typer.Option(help="Share of clicks.")] = None,
    noise: Annotated[float | None, typer.Option(help="Share of labels drawn at random.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same files.")] = None,
    json: Json = None,
) -> None:
    """Write generated data with a known truth, and a ready recipe."""
    given = {"rows": rows, "tables": tables, "ids": ids, "dense": dense, "skew": skew, "sequence_length": length}
    given |= {"drift": drift, "positive_rate": positive_rate, "noise": noise, "seed": seed}
    with one_line_errors():
        _check_output(json)
        from ..data.config import GenerateConfig
        from ..data.generate import generate as generate_data

        chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        with counting(f"generating {out}") as progress:
            summary = generate_data(out, GenerateConfig(**chosen), progress)
        show_summary(summary)
        print(f"train it with: unequal train {out / 'recipe.toml'}")
        _write(json, summary)


def _check_output(json: Path | None) -> None:
    """Before the work and not after it: can the report be written?"""
    if json is None:
        return
    folder = json.parent
    if json.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UserError(f"--json {json}: expected a file in a folder that exists and is writable; choose another")


def _write(json: Path | None, content: dict[str, Any]) -> None:
    if json is not None:
        from ..train.run import write_json

        write_json(json, content)
