"""A profile of a recipe's training data, by one process or by the ranks of a job, each of which reads its share."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import UserError
from ..exchange.mesh import Mesh
from ..stats.collect import profile_dataset
from ..stats.profile import Profile
from ..stats.profilefile import pack, unpack
from ..stats.reads import MEMORY
from ..tensorfile import DTYPES, NAMES
from .build import build_tables
from .config import Recipe
from .processes import Ranks
from .session import open_data

PIECE = 1 << 28
"""bytes that are sent at once"""


def profile_recipe(
    recipe: Recipe,
    *,
    samples: int | None = None,
    share: float | None = None,
    memory: int = MEMORY,
    say: Callable[[str], None] = lambda line: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Profile | None:
    """Of the whole training part, of so many samples, or of a share of them. All ranks of a job call it; rank 0 gets the profile.

    `memory`: bytes per table; `progress` is told how many samples this rank has counted, of how many."""
    if samples is not None and share is not None:
        raise UserError("a profile: expected a number of samples or a share of them, got both; give one")
    if samples is not None and samples < 1:
        raise UserError(f"a profile of {samples} samples: expected 1 or more")
    if share is not None and not 0 < share <= 1:
        raise UserError(f"a profile of a share of {share}: expected more than 0 and at most 1")
    with Ranks("cpu") as ranks:
        data = open_data(recipe, ranks.mesh, say)
        if share is not None:
            samples = max(1, round(share * data.split.rows("train")))
        own = profile_dataset(
            data,
            build_tables(recipe),
            memory=memory,
            samples=samples,
            rank=ranks.rank,
            world=ranks.world,
            workers=max(1, recipe.run.workers),
            progress=progress,
        )
        merged = gather(replace(own, recipe=recipe.name), ranks.mesh)
    if merged is not None and not merged.samples:
        raise UserError("a profile: all rows were dropped; check data.bad_rows")
    return merged


def gather(profile: Profile, mesh: Mesh) -> Profile | None:
    """The profiles of all ranks as one, on rank 0: merged two by two, so that their number of different ids is known for the
    samples of 2, 4, 8 … ranks."""
    step = 1
    while step < mesh.world:
        if mesh.rank % (2 * step):
            _send(profile, mesh, mesh.rank - step)
            return None
        if mesh.rank + step < mesh.world:
            profile = profile.merge(_receive(mesh, mesh.rank + step))
        step *= 2
    return profile


def _send(profile: Profile, mesh: Mesh, to: int) -> None:
    content, tensors = pack(profile)
    shapes = [[name, NAMES[tensor.dtype], tensor.numel()] for name, tensor in tensors.items()]
    text = torch.frombuffer(bytearray(json.dumps([content, shapes]).encode()), dtype=torch.uint8)
    dist.send(torch.tensor([text.numel()]), to, group=mesh.everyone.group)
    for part in (text, *tensors.values()):
        for piece in _pieces(part):
            dist.send(piece, to, group=mesh.everyone.group)


def _receive(mesh: Mesh, sender: int) -> Profile:
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, sender, group=mesh.everyone.group)

    def get(kind: torch.dtype, count: int) -> Tensor:
        tensor = torch.empty(count, dtype=kind)
        for piece in _pieces(tensor):
            dist.recv(piece, sender, group=mesh.everyone.group)
        return tensor

    content, shapes = json.loads(get(torch.uint8, int(length)).numpy().tobytes())
    return unpack(content, {name: get(DTYPES[kind], count) for name, kind, count in shapes})


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    return torch.split(tensor.view(torch.uint8), PIECE) if tensor.numel() else ()
