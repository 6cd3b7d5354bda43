"""The file of a profile: safetensors, with everything that is no tensor as JSON in its metadata (docs/formats.md)."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import tensorfile
from ..errors import UserError
from .growth import Growth
from .profile import FeatureReads, Profile, TableProfile
from .reads import EVERYTHING, Reads, Sample

FORMAT = 1
KIND = "unequal profile"
REMEDY = "make it again with `unequal profile`"
Packed = tuple[dict[str, Any], dict[str, Tensor]]


def pack(profile: Profile) -> Packed:
    """As JSON and tensors."""
    tensors: dict[str, Tensor] = {}
    tables: dict[str, Any] = {}
    for name, table in profile.tables.items():
        reads = table.reads
        reads.settle()
        order = np.lexsort((reads.ids, -reads.counts))
        columns: dict[str, Any] = {"ids": reads.ids[order], "counts": reads.counts[order]}
        if reads.sample is not None and reads.slack is not None:
            columns["slack"] = reads.slack[order]
            columns["sample_hashes"] = reads.sample.hashes.view(np.int64)
            columns["sample_counts"] = reads.sample.counts
        tensors |= {
            f"tables/{name}/{key}": torch.from_numpy(np.ascontiguousarray(value)) for key, value in columns.items()
        }
        sizes = sorted(table.growth.seen)
        tables[name] = {
            "features": {key: [feature.ids, feature.pooled] for key, feature in table.features.items()},
            "rows": table.rows,
            "reads": reads.total,
            "exact": reads.sample is None,
            "rows_seen": table.rows_seen,
            "rows_seen_error": table.rows_seen_error,
            "count_error": reads.error,
            "sample_limit": None if reads.sample is None else str(reads.sample.limit),
            "memory": reads.memory,
            "distinct": {
                "samples": sizes,
                "stretches": [table.growth.seen[size][0] for size in sizes],
                "ids": [table.growth.seen[size][1] for size in sizes],
            },
        }
    return {
        "format": FORMAT,
        "recipe": profile.recipe,
        "samples": profile.samples,
        "total_samples": profile.total_samples,
        "sampled": profile.sampled,
        "source": profile.source,
        "dropped": profile.dropped,
        "tables": tables,
    }, tensors


def unpack(content: dict[str, Any], tensors: dict[str, Tensor]) -> Profile:
    samples = int(content["samples"])
    tables = {}
    for name, entry in content["tables"].items():
        reads = Reads(entry["memory"])
        ids = tensors[f"tables/{name}/ids"].numpy()
        order = np.argsort(ids)
        reads.ids, reads.counts = ids[order], tensors[f"tables/{name}/counts"].numpy()[order]
        reads.total, reads.error = entry["reads"], entry["count_error"]
        if not entry["exact"]:
            reads.slack = tensors[f"tables/{name}/slack"].numpy()[order]
            limit = int(entry["sample_limit"])
            hashes = tensors[f"tables/{name}/sample_hashes"].numpy().view(np.uint64)
            counts = tensors[f"tables/{name}/sample_counts"].numpy()
            if not 0 < limit <= EVERYTHING or len(hashes) != len(counts):
                raise ValueError(f"table '{name}': a sample that does not fit its limit")
            reads.sample = Sample(reads.sampled_ids, hashes, counts, limit)
        told = entry["distinct"]
        tables[name] = TableProfile(
            name=name,
            samples=samples,
            features={key: FeatureReads(int(ids), bool(pooled)) for key, (ids, pooled) in entry["features"].items()},
            reads=reads,
            growth=Growth(dict(zip(told["samples"], zip(told["stretches"], told["ids"])))),
            rows=entry["rows"],
        )
    return Profile(
        tables=tables,
        samples=samples,
        total_samples=int(content["total_samples"]),
        recipe=content["recipe"],
        source=content["source"],
        dropped=content["dropped"],
    )


def save(profile: Profile, path: Path) -> None:
    content, tensors = pack(profile)
    content["checksums"] = {name: _checksum(tensor) for name, tensor in tensors.items()}
    text = json.dumps(content, allow_nan=False, ensure_ascii=False)
    metadata = {"kind": KIND, "profile": text, "checksum": _text_checksum(text)}
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            tensorfile.write(partial, tensors, metadata)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"{path}: cannot write the profile: {error.strerror or error}; choose another file or free some space"
        ) from error


def load(path: Path) -> Profile:
    if not path.is_file():
        what = "a folder" if path.is_dir() else "no such file"
        raise UserError(f"{path}: expected a profile, got {what}; {REMEDY}")
    with tensorfile.TensorFile(path, remedy=REMEDY) as file:
        metadata = file.header.metadata
        if metadata.get("kind") != KIND:
            raise UserError(f"{path}: expected a profile, got another safetensors file; {REMEDY}")
        tensors = {name: file.read(name) for name in file.header.entries}
    text = metadata.get("profile", "")
    if _text_checksum(text) != metadata.get("checksum"):
        raise UserError(f"{path}: the description of the profile is damaged; {REMEDY}")
    content = json.loads(text)
    if content.get("format") != FORMAT:
        raise UserError(f"{path}: expected a profile of format {FORMAT}, got {content.get('format')!r}; {REMEDY}")
    for name, checksum in content["checksums"].items():
        if name not in tensors or _checksum(tensors[name]) != checksum:
            raise UserError(f"{path}: the tensor '{name}' of the profile is damaged; {REMEDY}")
    return unpack(content, tensors)


def _checksum(tensor: Tensor) -> str:
    content = tensor.contiguous().numpy()
    return tensorfile.checksum_text(zlib.crc32(content.data) if content.size else 0)


def _text_checksum(text: str) -> str:
    return tensorfile.checksum_text(zlib.crc32(text.encode()))
