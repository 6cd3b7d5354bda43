"""A plan for a recipe: its tables' load is measured on a sample of the training data, the rest is read from the recipe."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..batch import Batch
from ..data.dataset import Dataset
from ..data.reader import Reader
from ..embeddings import Embeddings
from ..errors import UserError
from ..exchange.mesh import Mesh
from ..models import build_model
from ..plan.allocate import Objective
from ..plan.cost import Setting
from ..plan.memory import LOOKUP_BYTES
from ..plan.narrowed import within_budget
from ..plan.plan import Plan, inputs_of
from ..plan.planner import Planner
from ..plan.profiled import loads_from_profile
from ..plan.tiering import Copying, with_popularity
from ..plan.topology import Topology
from ..plan.workload import TableLoad, measure
from ..stats.profile import Profile
from ..stats.source import source_of
from ..width import Width
from .build import build_tables
from .config import Recipe
from .session import open_data

SAMPLE_IDS = 2**20
"""ids of the sample; by number, not by time, so that it is the same on every machine"""
SAMPLE_BATCHES = 32
SAMPLE_WINDOW = 2**23
"""values that are read and shuffled to take the sample from, at most"""
PASSED_THROUGH = 256
"""samples that a model is tried with, to see what it holds for its backward pass"""
STATES = {"adam": 2, "adamw": 2, "adagrad": 1, "sgd": 0}
"""numbers per parameter that the dense part's optimizer keeps"""
PROCESS = {"cpu": 467 << 20, "cuda": 600 << 20}
"""Resident before the first table: interpreter, torch, Arrow and their scratch; on a GPU the context and kernels there."""
VALUE_BYTES, LISTED_BYTES = 22, 48
"""of every value of a window, and of every one in a list: as it is read, converted, shuffled, and of the window that is next"""
ARROW_VALUES = 2**21
"""whose bytes Arrow keeps for itself while it reads, at most"""


def plan_recipe(
    recipe: Recipe,
    topology: Topology | None = None,
    *,
    world: int | None = None,
    ranks_per_node: int | None = None,
    device: str = "cpu",
    data: Dataset | None = None,
    profile: Profile | None = None,
    objective: Objective = "seconds",
    memory_budget: float | None = None,
    planner: Planner | None = None,
) -> Plan:
    """How the recipe's tables are best spread over these machines, or over `world` ranks of machines like this one.

    `data`: the recipe's, where it is open already. `profile`: of that data; with it hot rows get copies where that pays, within
    `memory_budget` bytes of each rank (see `Copying`). The plan depends on recipe, data, profile and machines alone."""
    topology = _topology(topology, world, ranks_per_node, device)
    data = open_data(recipe, Mesh()) if data is None else data
    if profile is not None:
        profile.check(source_of(recipe.data, build_tables(recipe), data))
    sample, total = _sample(recipe, data, SAMPLE_IDS if profile is None else 1)
    forward, backward = recipe.exchange.codecs(topology.device)
    loads = _loads(recipe, sample, total) if profile is None else profiled_loads(recipe, profile)
    copying = None if profile is None else Copying.of(profile, objective, memory_budget)
    setting = Setting(
        topology=topology,
        batch_size=recipe.run.batch_size,
        forward=forward,
        backward=backward,
        unique=recipe.exchange.unique,
        fixed=_fixed(recipe, topology, sample[0], data, loads),
    )
    del sample
    _give_back()
    return (planner or Planner()).plan(loads, setting, _inputs(recipe, topology), copying)


def profiled_loads(recipe: Recipe, profile: Profile) -> dict[str, TableLoad]:
    """The loads of a recipe's tables, as a profile has them, down to single rows."""
    loads = loads_from_profile(
        profile,
        build_tables(recipe),
        recipe.optimizer.build_tables(),
        epochs=recipe.run.epochs,
        expected_rows=recipe.expected_rows(),
        sharding=recipe.sharding_of(),
    )
    return with_popularity(within_budget(loads, _width(recipe)), profile)


def _give_back() -> None:
    """What the sample took, to the system: training reads its own windows, and what lies between could not be used for them."""
    import pyarrow

    pyarrow.default_memory_pool().release_unused()
    with suppress(OSError, AttributeError):  # a C library without it
        ctypes.CDLL(None).malloc_trim(0)


def load_plan(
    path: Path | str, recipe: Recipe, *, world: int, ranks_per_node: int | None = None, device: str = "cpu"
) -> Plan:
    """A saved plan, if it was made for this recipe and these ranks; else an error that says what differs."""
    plan = Plan.load(path)
    try:
        plan.check_inputs(recipe_inputs(recipe, world=world, ranks_per_node=ranks_per_node, device=device))
        plan.check({feature.table.name: feature.table for feature in build_tables(recipe).values()})
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return plan


def recipe_inputs(
    recipe: Recipe, *, world: int, ranks_per_node: int | None = None, device: str = "cpu"
) -> dict[str, Any]:
    """Everything of the recipe and the job that a plan depends on."""
    forward, backward = recipe.exchange.codecs(device)
    return inputs_of(
        build_tables(recipe),
        recipe.optimizer.build_tables(),
        batch_size=recipe.run.batch_size,
        world=world,
        ranks_per_node=ranks_per_node or world,
        device=device,
        forward=forward,
        backward=backward,
        unique=recipe.exchange.unique,
        sharding=recipe.sharding_of(),
        expected_rows=recipe.expected_rows(),
    )


def _inputs(recipe: Recipe, topology: Topology) -> dict[str, Any]:
    size = topology.ranks_per_node
    return recipe_inputs(recipe, world=topology.world, ranks_per_node=size, device=topology.device)


def _topology(topology: Topology | None, world: int | None, ranks_per_node: int | None, device: str) -> Topology:
    if topology is None:
        if world is None:
            raise UserError(
                "a plan: expected a topology or the number of ranks, got neither; give --topology or --ranks"
            )
        return Topology.here(world, ranks_per_node, device)
    if world is None and ranks_per_node is None:
        return topology
    world = topology.nodes * (ranks_per_node or topology.ranks_per_node) if world is None else world
    size = ranks_per_node or min(world, topology.ranks_per_node)
    if world < 1 or world % size:
        raise UserError(f"a plan for {world} ranks: expected a divisor of them as the ranks of a node, got {size}")
    return topology.resized(world // size, size)


def _sample(recipe: Recipe, data: Dataset, most: int) -> tuple[list[Batch], int]:
    """Batches of the training part in an order in which training could read them, until they have so many ids; and how many
    samples the part has."""
    # Dense columns are not looked at: their mean and deviation need not be known.
    plain = dict.fromkeys(recipe.data.dense, (0.0, 1.0))
    size = min(recipe.run.batch_size, 1024)
    reader = Reader(data, part="train", batch_size=size, seed=recipe.run.seed, shuffle=True, statistics=plain)
    if not reader.rows:
        raise UserError("a plan: expected samples to train on, got none; check data.files and data.split")
    batches = -(-SAMPLE_BATCHES * recipe.run.batch_size // size)
    # As training mixes rows, so does the sample: how many ids are distinct depends on it.
    reader.config = replace(reader.config, window=min(reader.config.window, SAMPLE_WINDOW))
    sample: list[Batch] = []
    ids = 0
    for batch in reader:
        sample.append(batch)
        ids += batch.ids.numel()
        if ids >= most or len(sample) >= batches:
            break
    if not sample:
        raise UserError("a plan: expected samples to train on, but all rows were dropped; check data.bad_rows")
    return sample, reader.rows


def _loads(recipe: Recipe, sample: list[Batch], total: int) -> dict[str, TableLoad]:
    loads = measure(
        build_tables(recipe),
        recipe.optimizer.build_tables(),
        sample,
        total_samples=total,
        epochs=recipe.run.epochs,
        expected_rows=recipe.expected_rows(),
        sharding=recipe.sharding_of(),
    )
    return within_budget(loads, _width(recipe))


def _width(recipe: Recipe) -> Width | None:
    return None if recipe.width is None or recipe.width.searches else recipe.width.build()


def _fixed(
    recipe: Recipe, topology: Topology, batch: Batch, data: Dataset, loads: Mapping[str, TableLoad]
) -> dict[str, int]:
    """Bytes of every rank that no plan changes."""
    parameters, held = dense_bytes(recipe, batch)
    run, world = recipe.run, topology.world
    share, scored = -(-run.batch_size // world), -(-run.evaluation_batch_size // world)
    outputs = sum(load.output_rows * load.table.dim * 4 for load in loads.values())
    ids = sum(load.ids for load in loads.values()) * LOOKUP_BYTES
    # Backward makes a gradient of all that was held; an evaluation holds less of a sample, but its batches may be larger.
    more = scored * (held + outputs + ids) - share * (2 * held + 2 * outputs + ids)
    fixed = {
        "process": PROCESS[topology.device],
        "dense part": parameters * (2 + STATES[recipe.optimizer.dense]),
        "activations": round(2 * held * share),
        "evaluation": max(0, round(more)),
    }
    if topology.device == "cpu":
        fixed["reader"] = _reader_bytes(recipe, data, loads)
    return fixed


def _reader_bytes(recipe: Recipe, data: Dataset, loads: Mapping[str, TableLoad]) -> int:
    values = sum(group.values for group in data.row_groups)
    reads = {name: feature.ids for load in loads.values() for name, feature in load.features.items()}
    listed = sum(reads[name] for name in recipe.data.sequences) / max(
        1e-9, sum(reads.values()) + len(recipe.data.dense)
    )
    each = VALUE_BYTES + (LISTED_BYTES - VALUE_BYTES) * listed
    return round(min(recipe.data.window, values) * each) + min(values, ARROW_VALUES) * VALUE_BYTES


def dense_bytes(recipe: Recipe, batch: Batch) -> tuple[int, float]:
    """Bytes of the dense part's parameters, and of what one sample leaves behind for the backward pass. Found by a small step."""
    with torch.random.fork_rng(devices=[]):
        features = {name: replace(f, table=replace(f.table, rows=None)) for name, f in build_tables(recipe).items()}
        embeddings = Embeddings(features, optimizer=recipe.optimizer.build_tables(), seed=recipe.run.seed)
        config = recipe.data
        model = build_model(recipe.model, embeddings, dense_features=len(config.dense), tasks=len(config.labels))
        part = _first_samples(batch, PASSED_THROUGH)
        known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        held: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                held[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            logits = model(part)
        parameters = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        del logits
    return parameters, sum(held.values()) / part.size


def _first_samples(batch: Batch, count: int) -> Batch:
    if batch.size <= count:
        return batch
    cut: dict[str, Any] = {
        name: None if part is None else part[:count]
        for name, part in (("dense", batch.dense), ("labels", batch.labels), ("sample_weights", batch.sample_weights))
    }
    features = dict(_cut_features(batch, count))
    return Batch.from_jagged(features, **cut)


def _cut_features(batch: Batch, count: int) -> Iterator[tuple[str, Any]]:
    for name in batch.features:
        jagged = batch[name]
        last = int(jagged.offsets[count])
        jagged.values, jagged.lengths = jagged.values[:last], jagged.lengths[:count]
        jagged.weights = None if jagged.weights is None else jagged.weights[:last]
        jagged._offsets = None
        yield name, jagged
