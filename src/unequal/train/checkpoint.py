"""Checkpoints: RUN/checkpoints/step-00001234/ with state.json (the index) and tensors.safetensors.

A checkpoint is written into a hidden folder beside its place, flushed to the disk, and renamed: whatever happens in
between, the ones already there stay whole. state.json names every file of the checkpoint with size and checksum, so
that several processes can later write a file each. Nothing is pickled.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import CheckpointError
from . import tensorfile
from .packing import flatten_optimizer, pack, random_state, restore_optimizer, set_random_state, unpack

__all__ = [
    "Checkpoint",
    "flatten_optimizer",
    "latest",
    "list_steps",
    "load",
    "path_of",
    "prune",
    "random_state",
    "restore_optimizer",
    "save",
    "set_random_state",
    "verify",
]

FORMAT = 1
STATE, TENSORS = "state.json", "tensors.safetensors"
MODEL = "model/"
PARTIAL, REPLACED = ".partial-", ".replaced-"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was read and found whole."""

    path: Path
    step: int
    model_state: dict[str, Tensor]
    other: dict[str, Any]


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is, or would be."""
    return folder / f"step-{step:08d}"


def save(folder: Path, step: int, model_state: Mapping[str, Tensor], other: Mapping[str, Any]) -> Path:
    """Writes the checkpoint of a step, in place of an earlier one of that step, and returns its folder.

    `other` may nest dictionaries, lists, tuples, numbers, text, bytes and tensors; `load` gives back the same.
    """
    state, tensors = pack(dict(other))
    for name, tensor in model_state.items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"model state '{name}': expected a tensor, got {type(tensor).__name__}")
        tensors[MODEL + name] = tensor
    metadata = {"format": "pt", "step": str(step)}
    size = tensorfile.size_of(tensors, metadata)
    place = path_of(folder, step)
    partial = folder / (PARTIAL + place.name)
    with _explained(folder, size):
        folder.mkdir(parents=True, exist_ok=True)
        _clean(folder)
        free = shutil.disk_usage(folder).free
        if free < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        try:
            partial.mkdir()
            checksum = tensorfile.write(partial / TENSORS, tensors, metadata)
            files = {TENSORS: {"bytes": size, "checksum": checksum}}
            _write_text(partial / STATE, _sealed({"format": FORMAT, "step": step, "files": files, "state": state}))
            _flush_folder(partial)
            _put_in_place(partial, place)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        _flush_folder(folder)
    return place


def load(path: Path) -> Checkpoint:
    """Reads a checkpoint and verifies every byte. For a damaged one the error names the newest whole one before it."""
    try:
        content, tensors = _read(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_remedy(path)}") from None
    other = {name: tensor for name, tensor in tensors.items() if not name.startswith(MODEL)}
    model_state = {name[len(MODEL) :]: tensor for name, tensor in tensors.items() if name.startswith(MODEL)}
    return Checkpoint(path, content["step"], model_state, unpack(content["state"], other))


def verify(path: Path) -> None:
    """Raises a CheckpointError unless every file of the checkpoint is as it was written."""
    for name, entry in _index(path)["files"].items():
        tensorfile.read(path / name, (), checksum=entry["checksum"])


def list_steps(folder: Path) -> list[int]:
    """The steps there are checkpoints of, oldest first."""
    return sorted(_found(folder))


def latest(folder: Path) -> Path | None:
    """The checkpoint with the highest step, or None. It is not read: `load` says whether it is whole."""
    found = _found(folder)
    return found[max(found)] if found else None


def prune(folder: Path, keep: int, protect: Collection[int] = ()) -> list[Path]:
    """Removes all but the newest `keep` checkpoints and the protected steps; returns what was removed."""
    if keep < 1:
        raise CheckpointError(f"expected to keep 1 checkpoint or more, got {keep}")
    found = _found(folder)
    removed = [found[step] for step in sorted(found)[:-keep] if step not in protect]
    with _explained(folder, 0):
        for path in removed:
            _remove(path)
    return removed


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    index = _index(path)
    tensors: dict[str, Tensor] = {}
    for name, entry in index["files"].items():
        tensors |= tensorfile.read(path / name, checksum=entry["checksum"])
    return index, tensors


def _index(path: Path) -> dict[str, Any]:
    """state.json, once its own checksum is found right and its files are there in full size."""
    where = path / STATE
    try:
        text = where.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{where}: cannot be read ({error.strerror or error}); not a whole checkpoint") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{where}: is damaged: it is not UTF-8 text") from None
    try:
        index = json.loads(text)
        version, checksum = index["format"], index["checksum"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{where}: is damaged: it is not a checkpoint's index ({error})") from None
    if version != FORMAT:
        raise CheckpointError(
            f"{where}: expected checkpoint format {FORMAT}, got {version!r}; "
            "read it with the version of unequal that wrote it"
        )
    if checksum != json.loads(_sealed({key: index[key] for key in index if key != "checksum"}))["checksum"]:
        raise CheckpointError(f"{where}: is damaged: it does not match its checksum")
    for name, entry in index["files"].items():
        size = (path / name).stat().st_size if (path / name).is_file() else None
        if size != entry["bytes"]:
            got = "no such file" if size is None else f"{size} bytes"
            raise CheckpointError(f"{path / name}: is damaged: expected {entry['bytes']} bytes, got {got}")
    found: dict[str, Any] = index
    return found


def _sealed(content: dict[str, Any]) -> str:
    """The content as JSON, with a checksum of itself."""
    compact = json.dumps(content, separators=(",", ":"), allow_nan=False)
    checksum = tensorfile.checksum_text(zlib.crc32(compact.encode()))
    return json.dumps({"checksum": checksum} | content, indent=1, allow_nan=False) + "\n"


def _found(folder: Path) -> dict[int, Path]:
    """Step → folder. A checkpoint whose replacement was cut off between its two renames still counts."""
    found: dict[int, Path] = {}
    if not folder.is_dir():
        return found
    with _explained(folder, 0):
        for path in sorted(folder.iterdir()):
            name = path.name.removeprefix(REPLACED)
            match = _NAME.fullmatch(name)
            if match and path.is_dir() and (path.name == name or int(match[1]) not in found):
                found[int(match[1])] = path
    return found


def _put_in_place(partial: Path, place: Path) -> None:
    if not place.exists():
        partial.rename(place)
        return
    aside = place.with_name(REPLACED + place.name)
    place.rename(aside)
    try:
        partial.rename(place)
    except OSError:
        aside.rename(place)
        raise
    _remove(aside)


def _clean(folder: Path) -> None:
    """Ends what a killed process left unfinished: removes partial checkpoints, puts half-replaced ones back."""
    for path in folder.iterdir():
        if path.name.startswith(PARTIAL):
            shutil.rmtree(path)
        elif path.name.startswith(REPLACED):
            place = path.with_name(path.name.removeprefix(REPLACED))
            if place.exists():
                shutil.rmtree(path)
            else:
                path.rename(place)


def _remove(path: Path) -> None:
    """Hides the checkpoint before its files go, so that a removal that is cut off leaves no broken checkpoint."""
    hidden = path.with_name(PARTIAL + "removed-" + path.name.removeprefix(REPLACED))
    path.rename(hidden)
    shutil.rmtree(hidden)


def _remedy(path: Path) -> str:
    match = _NAME.fullmatch(path.name)
    found = _found(path.parent) if match else {}
    for step in sorted(found, reverse=True):
        if match and step < int(match[1]):
            try:
                verify(found[step])
            except CheckpointError:
                continue
            return f"; the newest whole checkpoint before it is {found[step]}: remove {path} to go on from there"
    return f"; there is no whole checkpoint before it in {path.parent}: start the run anew" if match else ""


def _write_text(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        content = memoryview(text.encode())
        while content:
            content = content[os.write(descriptor, content) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flush_folder(path: Path) -> None:
    """Makes names and renames in the folder last through a power cut, where the system lets folders be opened."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _explained(folder: Path, size: int) -> Iterator[None]:
    """Turns the system's refusals into one line that says what was needed and what to do."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise CheckpointError(
                f"{folder}: the checkpoint needs {size:,} bytes, {_free(folder):,} are free ({reason}); "
                "earlier checkpoints are untouched: make room, or choose another run.folder"
            ) from error
        raise CheckpointError(
            f"{folder}: cannot write or remove checkpoints there ({reason}); "
            "make the folder writable, or choose another run.folder"
        ) from error


def _free(folder: Path) -> int:
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free
