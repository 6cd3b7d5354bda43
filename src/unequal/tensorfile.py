"""Reads and writes safetensors files with torch alone: 8 bytes of header length, a JSON header, the tensors' bytes.

Tensors are streamed in pieces that fit the cache, so that the checksums cost little beside writing, and no tensor that
lies contiguously in CPU memory is copied. Every block of a file has a checksum of its own, so that a few rows can be read
and verified without the rest. It is CRC-32: the fastest of those in every Python (2.0 GiB/s on one core of a 2.8 GHz Xeon,
where BLAKE2b has 0.5); it guards against damage, not against malice.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import CheckpointError

NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
PIECE = 1 << 20
BLOCK = 1 << 20
"""bytes of a file that share a checksum"""
LARGEST_COPY = 1 << 26
LONGEST_HEADER = 100_000_000
"""What other readers of the format accept."""
REMEDY = "choose another checkpoint"


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: its type, its shape and where its bytes lie."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Counted from the end of the header."""
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says about itself."""

    entries: dict[str, Entry]
    metadata: dict[str, str]
    data: int
    """Position in the file at which the tensors' bytes start."""


@dataclass(frozen=True, slots=True)
class Streamed:
    """A tensor that is written from parts, row after row. Each is asked for when it is its turn; they are never joined."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: Callable[[], Iterable[Tensor]]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


Source = Tensor | Streamed


@dataclass(frozen=True, slots=True)
class Checksums:
    """What a file must be: its size, and the CRC-32 of each of its blocks."""

    bytes: int
    block: int
    values: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        return {"bytes": self.bytes, "block": self.block, "checksums": "".join(f"{value:08x}" for value in self.values)}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Checksums:
        if "block" not in entry:  # format 1: one for the whole file
            return cls(entry["bytes"], entry["bytes"], (int(entry["checksum"].removeprefix("crc32:"), 16),))
        text = entry["checksums"]
        values = tuple(int(text[first : first + 8], 16) for first in range(0, len(text), 8))
        return cls(entry["bytes"], entry["block"], values)


class _Summing:
    """Checksums of what is written, block by block."""

    def __init__(self) -> None:
        self.bytes, self._running = 0, 0
        self._values: list[int] = []

    def add(self, piece: memoryview) -> None:
        while piece:
            part = piece[: BLOCK - self.bytes % BLOCK]
            self._running = zlib.crc32(part, self._running)
            self.bytes, piece = self.bytes + len(part), piece[len(part) :]
            if self.bytes % BLOCK == 0:
                self._values.append(self._running)
                self._running = 0

    def result(self) -> Checksums:
        rest = [self._running] if self.bytes % BLOCK else []
        return Checksums(self.bytes, BLOCK, tuple(self._values + rest))


def write(path: Path, tensors: Mapping[str, Source], metadata: Mapping[str, str] | None = None) -> Checksums:
    """Writes the file through to the disk and returns its checksums; raises OSError where the disk refuses."""
    text, order = _lay_out(tensors, metadata or {})
    sums = _Summing()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0), 0o666)
    try:
        for piece in _pieces(text, {name: tensors[name] for name in order}):
            sums.add(piece)
            while piece:
                piece = piece[os.write(descriptor, piece) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return sums.result()


def size_of(tensors: Mapping[str, Source], metadata: Mapping[str, str] | None = None) -> int:
    """Bytes `write` would write."""
    return len(_lay_out(tensors, metadata or {})[0]) + sum(tensor.nbytes for tensor in tensors.values())


def header(path: Path) -> Header:
    """Types, shapes and metadata of a file, without its tensors."""
    with TensorFile(path) as file:
        return file.header


def read(path: Path, names: Collection[str] | None = None, *, checksums: Checksums | None = None) -> dict[str, Tensor]:
    """The file's tensors, all or those named. With checksums everything that is read is verified."""
    with TensorFile(path, checksums) as file:
        entries = file.header.entries
        return {name: file.read(name) for name in file.known(entries if names is None else names)}


class TensorFile:
    """A file that is read in parts. With checksums, no byte is given out that was not verified, the header included."""

    def __init__(self, path: Path, checksums: Checksums | None = None, *, remedy: str = REMEDY) -> None:
        """`remedy`: what to do where the file is damaged, for the error."""
        self.path, self._checksums, self._remedy = path, checksums, remedy
        self._held, self._content = -1, memoryview(b"")
        """the block read last, as neighbours are often asked for one after the other"""
        with self._readable():
            self._file = FileIO(path)
        try:
            with self._readable():
                size = os.fstat(self._file.fileno()).st_size
                if checksums is not None and size != checksums.bytes:
                    raise self._broken(f"has {size} bytes where {checksums.bytes} were written")
            self.header = _parse(self._broken, self._bytes, size)
            if checksums is not None:
                self._fill(0, memoryview(bytearray(self.header.data)))
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def known(self, names: Collection[str]) -> list[str]:
        """The names, in the file's order; all of them must be there."""
        entries, wanted = self.header.entries, set(names)
        unknown = sorted(wanted - set(entries))
        if unknown:
            raise CheckpointError(
                f"{self.path}: holds no tensor '{unknown[0]}'; it holds {', '.join(entries) or 'none'}"
            )
        return [name for name in entries if name in wanted]

    def read(self, name: str, first: int = 0, last: int | None = None, out: Tensor | None = None) -> Tensor:
        """A tensor, or its rows [first, last), into `out` where that is given: contiguous and on the CPU."""
        self.known([name])
        entry = self.header.entries[name]
        shape, start, width = entry.shape, entry.start, entry.dtype.itemsize
        if entry.shape and (first or last is not None):
            shape = ((entry.shape[0] if last is None else last) - first, *entry.shape[1:])
            start += first * prod(entry.shape[1:]) * width
        if out is None:
            out = torch.empty(shape, dtype=entry.dtype)
        assert out.shape == shape and out.dtype == entry.dtype and start + out.nbytes <= entry.end
        self._fill(self.header.data + start, _bytes_of(out))
        return out

    def gather(self, name: str, rows: Tensor, start: int = 0, width: int | None = None) -> Tensor:
        """These rows of a tensor; their numbers ascend. Neighbours are read together, what lies far between is not. With a width,
        a flat tensor's values from `start` on are taken for rows of so many."""
        self.known([name])
        entry = self.header.entries[name]
        shape = entry.shape[1:] if width is None else (width,)
        row_bytes = max(1, prod(shape) * entry.dtype.itemsize)
        numbers = rows.numpy()
        out = torch.empty((len(numbers), *shape), dtype=entry.dtype)

        def read(first: int, last: int, into: Tensor | None) -> Tensor:
            if width is None:
                return self.read(name, first, last, into)
            flat = None if into is None else into.view(-1)
            return self.read(name, start + first * width, start + last * width, flat).view(-1, width)

        apart = (np.flatnonzero(np.diff(numbers) > max(1, BLOCK // row_bytes)) + 1).tolist()
        for begin, end in pairwise([0, *apart, len(numbers)]):
            while begin < end:
                first = int(numbers[begin])
                limit = first + max(1, LARGEST_COPY // row_bytes)
                stop = begin + int(np.searchsorted(numbers[begin:end], limit))
                last = int(numbers[stop - 1]) + 1
                if last - first == stop - begin:
                    read(first, last, out[begin:stop])
                else:
                    out[begin:stop] = read(first, last, None)[rows[begin:stop] - first]
                begin = stop
        return out

    def verify(self) -> None:
        """Reads everything that is not verified yet."""
        for number in range(len(self._checksums.values) if self._checksums is not None else 0):
            self._verified(number)

    def _fill(self, start: int, out: memoryview) -> None:
        """Fills `out` with the file's bytes from `start` on, block by block where they must be verified."""
        sums = self._checksums
        if sums is not None and len(sums.values) == 1 and sums.bytes > PIECE:  # format 1: all of it, once
            self._verify_at_once(sums)
            self._checksums = sums = None
        if sums is None:
            self._read_into(start, out)
            return
        at = 0
        while at < len(out):
            number, offset = divmod(start + at, sums.block)
            length = min(sums.block, sums.bytes - number * sums.block)
            if offset == 0 and len(out) - at >= length:
                self._read_into(start + at, out[at : at + length])
                self._check(number, zlib.crc32(out[at : at + length]))
                at += length
            else:
                part = self._verified(number)[offset : offset + len(out) - at]
                out[at : at + len(part)] = part
                at += len(part)

    def _verified(self, number: int) -> memoryview:
        assert self._checksums is not None
        if number != self._held:
            start = number * self._checksums.block
            content = memoryview(bytearray(min(self._checksums.block, self._checksums.bytes - start)))
            self._read_into(start, content)
            self._check(number, zlib.crc32(content))
            self._held, self._content = number, content
        return self._content

    def _verify_at_once(self, sums: Checksums) -> None:
        running, scratch = 0, memoryview(bytearray(PIECE))
        for start in range(0, sums.bytes, PIECE):
            part = scratch[: sums.bytes - start]
            self._read_into(start, part)
            running = zlib.crc32(part, running)
        self._check(0, running)

    def _check(self, number: int, got: int) -> None:
        assert self._checksums is not None
        expected, block = self._checksums.values[number], self._checksums.block
        if got != expected:
            last = min((number + 1) * block, self._checksums.bytes)
            raise self._broken(
                f"has the checksum {checksum_text(got)} in bytes {number * block} to {last} where "
                f"{checksum_text(expected)} was written",
            )

    def _bytes(self, start: int, count: int) -> bytes:
        content = bytearray(count)
        self._read_into(start, memoryview(content))
        return bytes(content)

    def _read_into(self, start: int, out: memoryview) -> None:
        with self._readable():
            self._file.seek(start)
            while out:
                count = self._file.readinto(out[:PIECE])
                if not count:
                    raise self._broken(f"ends at byte {start}, in the middle of a tensor")
                start, out = start + count, out[count:]

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read ({error.strerror or error}); {self._remedy}") from None

    def _broken(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: the file {what}; it is damaged or incomplete: {self._remedy}")


def checksum_text(value: int) -> str:
    return f"crc32:{value:08x}"


def _lay_out(tensors: Mapping[str, Source], metadata: Mapping[str, str]) -> tuple[bytes, list[str]]:
    """The header, length included, and the order of the tensors: wide types first, so that all are aligned."""
    for name, tensor in tensors.items():
        if name == "__metadata__":
            raise CheckpointError("a tensor cannot be named '__metadata__': the file format keeps that name for itself")
        layout = tensor.layout if isinstance(tensor, Tensor) else torch.strided
        if tensor.dtype not in NAMES or layout != torch.strided:
            raise CheckpointError(
                f"tensor '{name}': expected a dense tensor of one of {', '.join(NAMES.values())}, "
                f"got {tensor.dtype} ({layout}); convert it before it is saved"
            )
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    start, places = 0, {}
    for name in order:
        places[name] = [start, start + tensors[name].nbytes]
        start = places[name][1]
    content: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for name, tensor in tensors.items():
        content[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": places[name]}
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > LONGEST_HEADER:
        raise CheckpointError(
            f"{len(tensors)} tensors need a header of {len(text)} bytes; the format allows {LONGEST_HEADER}"
        )
    return len(text).to_bytes(8, "little") + text, order


def _pieces(text: bytes, tensors: Mapping[str, Source]) -> Iterator[memoryview]:
    yield memoryview(text)
    for name, tensor in tensors.items():
        written = 0
        for part in tensor.parts() if isinstance(tensor, Streamed) else [tensor]:
            for block in _contiguous_blocks(part.detach()):
                view = _bytes_of(block)
                written += len(view)
                for first in range(0, len(view), PIECE):
                    yield view[first : first + PIECE]
        if written != tensor.nbytes:
            raise CheckpointError(
                f"tensor '{name}': expected {tensor.nbytes} bytes, got {written}; it changed while it was saved"
            )


def _contiguous_blocks(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor as contiguous CPU tensors: itself where it is one, else copies of some rows at a time."""
    if tensor.is_contiguous() and tensor.device.type == "cpu":
        yield tensor
    elif tensor.nbytes <= LARGEST_COPY or tensor.dim() == 0:
        yield tensor.contiguous().cpu()
    else:
        rows = max(1, LARGEST_COPY * tensor.shape[0] // tensor.nbytes)
        for block in torch.split(tensor, rows):
            yield block.contiguous().cpu()


def _bytes_of(tensor: Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(b"")
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _parse(broken: Callable[[str], CheckpointError], read_bytes: Callable[[int, int], bytes], size: int) -> Header:
    length = int.from_bytes(read_bytes(0, 8), "little") if size >= 8 else LONGEST_HEADER
    if length > min(LONGEST_HEADER, size - 8):
        raise broken(f"of {size} bytes is too short for its header, or is not a safetensors file")
    try:
        content = json.loads(read_bytes(8, length), object_pairs_hook=_without_repeats)
        metadata = content.pop("__metadata__", {})
        entries = {
            str(name): Entry(
                DTYPES[part["dtype"]], tuple(map(_count, part["shape"])), *map(_count, part["data_offsets"])
            )
            for name, part in content.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise broken(f"has a header that cannot be understood ({error})") from None
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        count = 1
        for extent in entry.shape:
            count *= extent
        if entry.start != end or entry.end - entry.start != count * entry.dtype.itemsize:
            raise broken(
                f"gives tensor '{name}' bytes {entry.start} to {entry.end}, which do not fit its shape or place"
            )
        end = entry.end
    if 8 + length + end != size:
        raise broken(f"has {size} bytes where its header describes {8 + length + end}")
    return Header(entries, {str(key): str(value) for key, value in dict(metadata).items()}, 8 + length)


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a name comes twice")
    return content
