"""The file beside a plan that names the rows of its tiers: a tensor of ids for every table and tier."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import tensorfile
from ..errors import CheckpointError, UserError
from .placement import TablePlacement, Tiers

TIERS = ("replicated", "node")
REMEDY = "make the plan again with `unequal plan --profile`"


def rows_path(plan: Path) -> Path:
    """job.plan.json → job.plan.rows"""
    return plan.with_suffix(".rows") if plan.suffix == ".json" else plan.with_name(f"{plan.name}.rows")


def save_rows(plan: Path, tables: Mapping[str, TablePlacement]) -> dict[str, Any] | None:
    """Writes the rows of all tiers; gives what the plan says of the file. None where there are no tiers."""
    tensors = {
        f"{name}/{tier}": torch.from_numpy(np.ascontiguousarray(getattr(placed.tiers, tier), np.int64))
        for name, placed in tables.items()
        if placed.tiers is not None
        for tier in TIERS
    }
    if not tensors:
        return None
    path = rows_path(plan)
    partial = path.with_name(f".{path.name}.partial")
    checksums = tensorfile.write(partial, tensors, {"format": "unequal rows of tiers"})
    os.replace(partial, path)
    return {"file": path.name, "checksums": checksums.to_json()}


def load_rows(plan: Path, told: Mapping[str, Any], tables: Mapping[str, TablePlacement]) -> dict[str, Tiers]:
    """The tiers of the tables that have some, from the file that a plan names."""
    path = plan.parent / str(told["file"])
    if not path.is_file():
        raise UserError(f"the plan's rows are missing: expected {path} beside it; bring both files, or {REMEDY}")
    names = [name for name, placed in tables.items() if placed.tiers is not None]
    checksums = tensorfile.Checksums.from_json(told["checksums"])
    try:
        with tensorfile.TensorFile(path, checksums, remedy=REMEDY) as file:
            wanted = file.known([f"{name}/{tier}" for name in names for tier in TIERS])
            found = {name: file.read(name) for name in wanted}
    except CheckpointError as error:
        raise UserError(f"not the rows of this plan: {error}") from error
    tiers = {}
    for name in names:
        ids = [found[f"{name}/{tier}"] for tier in TIERS]
        expected = tables[name].tiers
        assert expected is not None
        sizes = len(expected.replicated), len(expected.node)
        if any(part.dtype != torch.int64 or part.dim() != 1 for part in ids) or tuple(map(len, ids)) != sizes:
            raise UserError(
                f"not the rows of this plan: {path}: expected {sizes[0]:,} and {sizes[1]:,} ids of table '{name}', "
                f"got {len(ids[0]):,} and {len(ids[1]):,}; {REMEDY}"
            )
        tiers[name] = Tiers(ids[0].numpy(), ids[1].numpy())
    return tiers
