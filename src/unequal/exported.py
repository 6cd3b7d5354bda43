"""Loads what `unequal export` wrote. Needs torch alone and nothing else of this package: the file can be copied.

    model = load("model.safetensors")
    model.tables["item"].lookup(torch.tensor([17, 42]))  # [2, dim], zeros where a row or a part of it does not exist
    model.tables["item"].pooled(ids, offsets, "mean")  # [bags, dim]
    model.dense, model.features, model.description

Tables are read where they lie in the file, which the system keeps in memory as far as there is room.
"""

from __future__ import annotations

import json
import math
import mmap
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

FORMAT = 1
KIND = "unequal export"
FILE = "model.safetensors"
BLOCK = 64
"""rows whose widths are added up to find where the values of one begin"""
AT_ONCE = 1 << 22
"""values that are looked up at a time"""
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
POOLINGS = ("sum", "mean")


class ExportError(ValueError):
    """A file that cannot be loaded, or a question that a table cannot answer."""


class Feature(NamedTuple):
    """A column of ids, and how the model reads it."""

    table: str
    pooling: str | None
    """sum, mean, or None: one vector per id"""


class Export(NamedTuple):
    """A model without its optimizer state."""

    tables: dict[str, Table]
    features: dict[str, Feature]
    dense: dict[str, Tensor]
    """parameters and buffers of the rest of the model"""
    description: dict[str, Any]
    """the model and its inputs, as the recipe describes them; the step"""


class Table:
    """Rows of an embedding table, as far as they exist."""

    def __init__(self, name: str, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.name = name
        self.dim, self.rows = int(about["dim"]), int(about["rows"])
        self.chunk = int(about.get("chunk") or self.dim)
        self._values = tensors["values"]
        self._ids, self._widths = tensors.get("ids"), tensors.get("widths")
        self._masks, self._rare = tensors.get("masks"), tensors.get("rare")
        self._check()
        if self._widths is not None:
            self._widths = self._widths.view(-1, BLOCK)
            sums = self._widths.sum(1, dtype=torch.int64)
            self._starts = sums.cumsum(0) - sums
            if int(sums.sum()) * self.chunk != self._values.numel():
                raise self._wrong("widths that make up another number of values")

    def _check(self) -> None:
        blocks = -(-self.rows // BLOCK) * BLOCK
        expected = {"ids": self.rows, "widths": blocks, "masks": self.rows, "rare": self.dim}
        held = {"ids": self._ids, "widths": self._widths, "masks": self._masks, "rare": self._rare}
        if self._widths is None:
            expected["values"], held["values"] = self.rows * self.dim, self._values
        for part, tensor in held.items():
            if tensor is not None and tensor.numel() != expected[part]:
                raise self._wrong(f"{tensor.numel()} {part} where {expected[part]} are expected")

    def _wrong(self, what: str) -> ExportError:
        return ExportError(f"table '{self.name}' has {what}; the file is damaged: export the model again")

    def __repr__(self) -> str:
        return f"Table('{self.name}', {self.rows:,} rows, dim {self.dim}, {self._values.numel():,} values)"

    @property
    def dtype(self) -> torch.dtype:
        """in which values are kept"""
        return self._values.dtype

    @property
    def values(self) -> int:
        """that exist"""
        return self._values.numel()

    def has(self, ids: Tensor) -> Tensor:
        """Of every id, whether it has a row."""
        return self._find(_flat(ids))[1].view(ids.shape)

    def widths(self, ids: Tensor) -> Tensor:
        """Of every id, how many values its row has."""
        at, known = self._find(_flat(ids))
        if self._widths is None:
            return (known * self.dim).view(ids.shape)
        found = torch.zeros(at.shape, dtype=torch.int64, device=at.device)
        found[known] = self._widths.view(-1)[at[known]].long() * self.chunk
        return found.view(ids.shape)

    def lookup(self, ids: Tensor) -> Tensor:
        """[…, dim] in float32; zeros where a row or a part of it does not exist."""
        flat = _flat(ids)
        out = torch.zeros(flat.numel(), self.dim, device=flat.device)
        size = max(1, AT_ONCE // self.dim)
        for first in range(0, flat.numel(), size):
            self._fill(flat[first : first + size], out[first : first + size])
        return out.view(*ids.shape, self.dim)

    def pooled(self, ids: Tensor, offsets: Tensor, pooling: str = "sum", weights: Tensor | None = None) -> Tensor:
        """[bags, dim]: the rows of ids[offsets[k] : offsets[k + 1]], each times its weight, summed or averaged; zeros for none.
        An average divides by the number of ids, also of those that have no row."""
        if pooling not in POOLINGS:
            raise ExportError(f"table '{self.name}': expected a pooling of 'sum' or 'mean', got {pooling!r}")
        lengths = offsets.diff()
        whole = offsets.numel() > 0 and int(offsets[0]) == 0 and int(offsets[-1]) == ids.numel()
        if not whole or bool((lengths < 0).any()):
            raise ExportError(
                f"table '{self.name}': expected offsets that rise from 0 to the number of ids, {ids.numel()}; one more than bags"
            )
        if lengths.numel() == 0:
            return torch.zeros(0, self.dim, device=ids.device)
        if pooling == "mean":
            share = (1.0 / lengths.clamp(min=1).float()).repeat_interleave(lengths)
            weights = share if weights is None else weights.float() * share
        numbers = torch.arange(ids.numel(), device=ids.device)
        return torch.nn.functional.embedding_bag(
            numbers, self.lookup(ids), offsets.long(), mode="sum", include_last_offset=True,
            per_sample_weights=None if weights is None else weights.float(),
        )  # fmt: skip

    def _find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The number of every id's row, and whether it has one."""
        if not self.rows:
            return torch.zeros_like(ids), torch.zeros(ids.shape, dtype=torch.bool, device=ids.device)
        if self._ids is None:
            known = (ids >= 0) & (ids < self.rows)
            return torch.where(known, ids, 0), known
        low, high = int(self._ids[0]), int(self._ids[-1])
        at = torch.searchsorted(self._ids, ids.clamp(low, high).to(self._ids.dtype))
        return at, self._ids[at] == ids

    def _fill(self, ids: Tensor, out: Tensor) -> None:
        at, known = self._find(ids)
        if self._rare is not None:
            out.copy_(self._rare.float().expand_as(out))
        which = known.nonzero()[:, 0]
        if not which.numel():
            return
        at = at[which]
        if self._widths is None:
            out[which] = self._values.view(-1, self.dim)[at].float()
            return
        places, live = self._places(at)
        values = self._values[torch.where(live, places, 0)].float()
        out[which] = torch.where(live, values, 0.0)

    def _places(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, dim]: where each value of a row lies, and whether it exists."""
        assert self._widths is not None
        block, within = at // BLOCK, at % BLOCK
        windows, numbers = self._widths[block], torch.arange(BLOCK, device=at.device)
        before = (windows * (numbers < within[:, None])).sum(1, dtype=torch.int64)
        starts = ((self._starts[block] + before) * self.chunk)[:, None]
        columns = torch.arange(self.dim, device=at.device)
        if self._masks is None:
            return starts + columns, columns < (self._widths.view(-1)[at].long() * self.chunk)[:, None]
        chunks = torch.arange(self.dim // self.chunk, device=at.device)
        bits = (self._masks[at].long()[:, None] >> chunks) & 1
        first = (bits.cumsum(1) - bits) * self.chunk
        places = starts + first.repeat_interleave(self.chunk, 1) + columns % self.chunk
        return places, bits.repeat_interleave(self.chunk, 1) > 0


def load(path: str | Path, *, device: torch.device | str = "cpu", verify: bool = True) -> Export:
    """The model of a file, or of the folder that `unequal export` made. `verify`: every byte is compared with its checksum, which
    reads the whole file once."""
    path = Path(path)
    path = path / FILE if path.is_dir() else path
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    except OSError as error:
        raise ExportError(
            f"{path}: cannot be read ({error.strerror or error}); name what `unequal export` wrote"
        ) from None
    entries, metadata, begin = _header(path, content)
    about = _description(path, metadata)
    try:
        sums = json.loads(metadata["checksums"])
        if header_sum(entries) != sums["header"]:
            raise ExportError(f"{path}: its header does not match its checksum; the file is damaged: export it again")
        tensors = {}
        for name, entry in entries.items():
            first, last = (begin + int(offset) for offset in entry["data_offsets"])
            if verify and zlib.crc32(memoryview(content)[first:last]) != int(sums[name], 16):
                raise ExportError(
                    f"{path}: tensor '{name}' does not match its checksum; the file is damaged: export it again"
                )
            tensors[name] = _tensor(content, DTYPES[entry["dtype"]], entry["shape"], first, last).to(device)
        tables = {
            name: Table(name, table, {part: tensors[f"tables/{name}/{part}"] for part in table["tensors"]})
            for name, table in about["tables"].items()
        }
        features = {name: Feature(feature["table"], feature["pooling"]) for name, feature in about["features"].items()}
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if isinstance(error, ExportError):
            raise ExportError(str(error) if str(error).startswith(str(path)) else f"{path}: {error}") from None
        raise ExportError(f"{path}: cannot be understood ({error!r}); it is damaged: export the model again") from None
    dense = {name.removeprefix("dense/"): tensor for name, tensor in tensors.items() if name.startswith("dense/")}
    return Export(tables, features, dense, {key: about[key] for key in about if key not in ("tables", "features")})


def string_id(text: str) -> int:
    """The id of a string, as columns of strings are read: FNV-1a over its UTF-8 bytes, mixed, without its highest bit."""
    word, value = 2**64 - 1, 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 & word
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ value >> shift) * factor & word
    return (value ^ value >> 31) & 2**63 - 1


def header_sum(entries: Mapping[str, Any]) -> str:
    """The checksum of what a file says of its tensors."""
    return f"{zlib.crc32(json.dumps(entries, sort_keys=True, separators=(',', ':')).encode()):08x}"


def _header(path: Path, content: Any) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Tensors, metadata, and where the tensors' bytes begin. The file is in the safetensors format."""
    size = len(content)
    length = int.from_bytes(content[:8], "little") if size >= 8 else size
    if length > size - 8:
        raise ExportError(
            f"{path}: has {size} bytes and no whole header; name what `unequal export` wrote, or export it again"
        )
    try:
        entries = json.loads(content[8 : 8 + length])
        metadata = entries.pop("__metadata__", {})
        kind = metadata.get("kind")
        end = max([0, *(int(entry["data_offsets"][1]) for entry in entries.values())])
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ExportError(
            f"{path}: has no header that can be understood ({error}); name what `unequal export` wrote"
        ) from None
    if kind != KIND:
        raise ExportError(
            f"{path}: expected a file of the kind '{KIND}', got {kind!r}; name what `unequal export` wrote"
        )
    if 8 + length + end != size:
        raise ExportError(f"{path}: has {size} bytes where {8 + length + end} were written; export the model again")
    return entries, metadata, 8 + length


def _description(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    text = metadata.get("description", "")
    if f"{zlib.crc32(text.encode()):08x}" != metadata.get("checksum"):
        raise ExportError(
            f"{path}: its description does not match its checksum; the file is damaged: export the model again"
        )
    about: dict[str, Any] = json.loads(text)
    if about.get("format") != FORMAT:
        raise ExportError(
            f"{path}: expected format {FORMAT}, got {about.get('format')!r}; load it with the loader of the version that "
            "wrote it"
        )
    return about


def _tensor(content: Any, dtype: torch.dtype, shape: list[int], first: int, last: int) -> Tensor:
    count = math.prod(shape)
    if count * dtype.itemsize != last - first:
        raise ValueError(f"{last - first} bytes for {shape} of {dtype}")
    if not count:
        return torch.empty(shape, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it cannot be written to
        return torch.frombuffer(content, dtype=dtype, count=count, offset=first).view(shape)


def _flat(ids: Tensor) -> Tensor:
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise ExportError(f"expected ids of an integer type, got {ids.dtype}; strings have ids from string_id")
    return ids.reshape(-1).long()
