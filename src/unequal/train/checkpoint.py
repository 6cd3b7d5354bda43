"""Checkpoints: RUN/checkpoints/step-00001234/ with state.json (the index) and a tensors-….safetensors of every rank.

All ranks write at once, into a hidden folder beside the checkpoint's place on a file system that they share; once all is
flushed to the disk, the first rank writes the index and renames the folder. Whatever happens in between, the ones already there
stay whole. Nothing is pickled.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from .. import tensorfile
from ..errors import CheckpointError
from ..exchange.mesh import Mesh
from ..width import Shifts
from ..width.evidence import part_of_shown, shown_together
from .packing import (
    dense_state,
    flatten_optimizer,
    load_dense_state,
    pack,
    random_state,
    restore_optimizer,
    set_random_state,
)
from .resharding import Tables, fill
from .saved import (
    FORMAT,
    FORMAT_WITH_WIDTH,
    MODEL,
    STATE,
    TABLES,
    OtherTables,
    SavedCheckpoint,
    SavedTable,
    file_name,
    own_prefix,
    sealed,
)
from .shardfiles import Listed, assign, list_shards, sources

__all__ = [
    "Checkpoint",
    "SavedCheckpoint",
    "dense_state",
    "flatten_optimizer",
    "latest",
    "list_steps",
    "load",
    "load_dense_state",
    "load_embeddings",
    "open",
    "path_of",
    "prune",
    "random_state",
    "restore_optimizer",
    "save",
    "set_random_state",
    "verify",
]

PARTIAL, REPLACED = ".partial-", ".replaced-"
_NAME = re.compile(r"step-(\d{8,})")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What was read of a checkpoint, and found whole."""

    path: Path
    step: int
    model_state: dict[str, Tensor]
    other: dict[str, Any]
    own: dict[str, Any] | None = None
    """what this rank alone saved; None where the checkpoint has no such rank"""
    world: int = 1
    """ranks that wrote it"""


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is, or would be."""
    return folder / f"step-{step:08d}"


def save(
    folder: Path,
    step: int,
    model_state: Mapping[str, Tensor],
    other: Mapping[str, Any],
    *,
    embeddings: Tables | None = None,
    own: Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    prefix: str = TABLES,
) -> Path:
    """Writes the checkpoint of a step, in place of an earlier one of that step, and returns its folder.

    With several ranks all of them call it. `model_state` and `other` are the first rank's; `embeddings` are the tables, of which
    each rank writes its shards, and whose names in `model_state` start with `prefix`; `own` is what differs from rank to rank.
    `other` and `own` may nest dictionaries, lists, tuples, numbers, text, bytes and tensors; `load` gives back the same.
    Without `mesh` it is that of the embeddings, or this process is alone. Where one rank fails, all raise.
    """
    ranks = _Ranks.of(mesh, embeddings)
    saving = _Saving(folder, step, ranks, embeddings)
    listed = ranks.gather(lambda: saving.collect(model_state, other, own, prefix))
    sizes = ranks.gather(lambda: saving.choose(listed))
    try:
        ranks.gather(lambda: saving.make_folder(sum(sizes)))
        files = ranks.gather(saving.write)
        ranks.gather(lambda: saving.finish(files))
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(saving.partial, ignore_errors=True)
        raise
    return saving.place


def load(
    path: Path,
    *,
    embeddings: Tables | None = None,
    mesh: Mesh | None = None,
    prefix: str = TABLES,
) -> Checkpoint:
    """Reads a checkpoint and verifies every byte it reads. For a damaged one the error names the newest whole one before it.

    With `embeddings` their shards are filled, whatever ranks or plan they were saved by, and `model_state` is the model's
    without them; all ranks call it, and where one fails, all raise. Without, `model_state` is as it was saved.
    """
    ranks = _Ranks.of(mesh, embeddings)

    def read() -> tuple[Checkpoint, SavedCheckpoint, bool]:
        with _remedied(path):
            saved = SavedCheckpoint(path, prefix)
            exact = embeddings is not None and fill(saved, embeddings)
            state = saved.model_state if embeddings is None else saved.dense_state
            found = Checkpoint(path, saved.step, state, saved.other, saved.own(ranks.rank), saved.world)
            return found, saved, exact

    found, saved, exact = ranks.together(read)
    if embeddings is not None:
        _settle(embeddings, saved, exact, ranks)
    return found


def load_embeddings(path: Path, embeddings: Tables, *, mesh: Mesh | None = None, prefix: str = TABLES) -> None:
    """The tables alone: fills the shards that each rank holds, whatever ranks or plan they were saved by."""

    ranks = _Ranks.of(mesh, embeddings)

    def read() -> tuple[SavedCheckpoint, bool]:
        with _remedied(path):
            saved = SavedCheckpoint(path, prefix)
            return saved, fill(saved, embeddings)

    _settle(embeddings, *ranks.together(read), ranks)


def _settle(embeddings: Tables, saved: SavedCheckpoint, exact: bool, ranks: _Ranks) -> None:
    """Tells tables with a width budget that they hold other rows now. All ranks do the same, as the budget is theirs together."""
    filled = getattr(embeddings, "tables_filled", None)
    if filled is None or getattr(embeddings, "width", None) is None:
        return
    all_exact = all(ranks.gather(lambda: exact and saved.world == ranks.world))
    filled(saved.purses if all_exact else None, saved.watched, part_of_shown(saved.shown, ranks.rank, ranks.world))


def open(path: Path | str, *, prefix: str = TABLES) -> SavedCheckpoint:
    """A checkpoint to look into, without the run or its recipe: its tables, single rows, and what else was saved."""
    with _remedied(Path(path)):
        return SavedCheckpoint(Path(path), prefix)


def verify(path: Path) -> None:
    """Raises a CheckpointError unless every file of the checkpoint is as it was written."""
    for name, checksums in SavedCheckpoint(path).files.items():
        with tensorfile.TensorFile(path / name, checksums) as file:
            file.verify()


def list_steps(folder: Path) -> list[int]:
    """The steps there are checkpoints of, oldest first."""
    return sorted(_found(folder))


def latest(folder: Path, *, mesh: Mesh | None = None) -> Path | None:
    """The checkpoint with the highest step, or None. It is not read: `load` says whether it is whole. With a mesh all ranks
    ask, and get what the first one sees."""

    def look() -> str | None:
        found = _found(folder)
        return str(found[max(found)]) if found else None

    seen = _Ranks(mesh).gather(look)[0]
    return None if seen is None else Path(seen)


def prune(folder: Path, keep: int, protect: Collection[int] = (), *, mesh: Mesh | None = None) -> list[Path]:
    """Removes all but the newest `keep` checkpoints and the protected steps; returns what was removed. With a mesh all ranks
    call it, and the first one does it."""
    if keep < 1:
        raise CheckpointError(f"expected to keep 1 checkpoint or more, got {keep}")
    ranks = _Ranks(mesh)

    def remove() -> list[str]:
        if ranks.rank:
            return []
        found = _found(folder)
        removed = [found[step] for step in sorted(found)[:-keep] if step not in protect]
        with _explained(folder, 0):
            for path in removed:
                _remove(path)
        return [str(path) for path in removed]

    return [Path(path) for path in ranks.gather(remove)[0]]


class _Ranks:
    """Ranks that work at the same time and hear of each other's failures."""

    def __init__(self, mesh: Mesh | None) -> None:
        self.mesh = mesh
        self.rank, self.world = (0, 1) if mesh is None else (mesh.rank, mesh.world)

    @classmethod
    def of(cls, mesh: Mesh | None, embeddings: Tables | None) -> _Ranks:
        return cls(mesh if mesh is not None else getattr(embeddings, "mesh", None))

    def gather(self, work: Callable[[], T]) -> list[T]:
        """Every rank's result, which JSON must be able to hold. Where the work of one fails, all raise."""
        if self.mesh is None or self.world == 1:
            return [work()]
        result, failure = None, None
        try:
            result = work()
        except (CheckpointError, OSError, RuntimeError, MemoryError) as error:
            failure = error
        cause = None if failure is None else f"{type(failure).__name__}: {failure}"
        if isinstance(failure, CheckpointError):
            cause = str(failure)
        heard = self.mesh.gather([cause, result])
        failed = [(rank, other) for rank, (other, _) in enumerate(heard) if other is not None]
        if failed:
            rank, first = failed[0]
            message = f"rank {rank} of {self.world}: {' '.join(first.split())}"
            more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
            raise CheckpointError(message + more) from failure
        return [value for _, value in heard]

    def together(self, work: Callable[[], T]) -> T:
        """This rank's own result. Where the work of one fails, all raise."""
        done: list[T] = []
        self.gather(lambda: done.append(work()))
        return done[0]


class _Saving:
    """One checkpoint on its way to the disk: the steps of `save`, between which the ranks wait for each other."""

    def __init__(self, folder: Path, step: int, ranks: _Ranks, embeddings: Tables | None) -> None:
        self.folder, self.step, self.ranks, self.embeddings = folder, step, ranks, embeddings
        self.place = path_of(folder, step)
        self.partial = folder / (PARTIAL + self.place.name)
        self.tensors: dict[str, tensorfile.Source] = {}
        self.metadata = {"format": "pt", "step": str(step), "rank": str(ranks.rank)}
        self.state: Any = None
        self.owns: list[Any] | None = None
        self.tables: dict[str, SavedTable] = {}
        self.watched: dict[str, Any] | None = None
        self.shown: dict[str, Any] | None = None
        self.size = self.total = 0

    def collect(
        self, model_state: Mapping[str, Tensor], other: Mapping[str, Any], own: Mapping[str, Any] | None, prefix: str
    ) -> dict[str, Any]:
        """What this rank has, for the others to know."""
        if self.ranks.rank == 0:
            self.state, tensors = pack(dict(other))
            self.tensors |= tensors
            for name, tensor in model_state.items():
                if not isinstance(tensor, Tensor):
                    raise CheckpointError(f"model state '{name}': expected a tensor, got {type(tensor).__name__}")
                if self.embeddings is None or not name.startswith(prefix):
                    self.tensors[MODEL + name] = tensor
        packed = None
        if own is not None:
            packed, tensors = pack(dict(own), own_prefix(self.ranks.rank))
            self.tensors |= tensors
        watched, shown = (getattr(self.embeddings, name, None) for name in ("watched", "shown"))
        return {
            "own": packed,
            "shards": [] if self.embeddings is None else list_shards(self.embeddings),
            "watched": None if watched is None else watched(),
            "shown": None if shown is None else shown(),
        }

    def choose(self, listed: list[dict[str, Any]]) -> int:
        """Which shards are this rank's to write; returns the bytes of its file."""
        if any(content["own"] is not None for content in listed):
            self.owns = [content["own"] or {} for content in listed]
        if all(content["watched"] is not None for content in listed):
            self.watched = Shifts.together([content["watched"] for content in listed])
        self.shown = shown_together([content["shown"] for content in listed])
        if self.embeddings is not None:
            placement = getattr(self.embeddings, "placement", None)
            kinds = {} if placement is None else {name: table.kind for name, table in placement.tables.items()}
            shards: list[list[Listed]] = [content["shards"] for content in listed]
            self.tables = assign(self.embeddings, shards, kinds)
            self.tensors |= sources(self.embeddings, self.tables, self.ranks.rank)
        self.size = tensorfile.size_of(self.tensors, self.metadata)
        return self.size

    def make_folder(self, total: int) -> None:
        self.total = total
        if self.ranks.rank:
            return
        with _explained(self.folder, total):
            self.folder.mkdir(parents=True, exist_ok=True)
            _clean(self.folder)
            if shutil.disk_usage(self.folder).free < total:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.partial.mkdir()

    def write(self) -> dict[str, Any]:
        """This rank's file; returns what the index says of it."""
        if not self.partial.is_dir():
            raise CheckpointError(
                f"{self.folder}: the folder that rank 0 made there is not seen here; "
                "choose a run.folder on a file system that all ranks share"
            )
        with _explained(self.folder, self.total):
            checksums = tensorfile.write(self.partial / file_name(self.ranks.rank), self.tensors, self.metadata)
            _flush_folder(self.partial)
        return checksums.to_json()

    def finish(self, files: list[dict[str, Any]]) -> None:
        if self.ranks.rank:
            return
        version = FORMAT if all(table.width is None for table in self.tables.values()) else FORMAT_WITH_WIDTH
        index: dict[str, Any] = {"format": version, "step": self.step, "world": self.ranks.world}
        if self.ranks.mesh is not None:
            index["ranks_per_node"] = self.ranks.mesh.ranks_per_node
        index["files"] = {file_name(rank): entry for rank, entry in enumerate(files)}
        if self.embeddings is not None:
            index["tables_step"] = self.embeddings.step
            index["tables"] = {name: table.to_json() for name, table in self.tables.items()}
        if self.watched is not None:
            index["watched"] = self.watched
        if self.shown is not None:
            index["shown"] = self.shown
        if self.owns is not None:
            index["ranks"] = self.owns
        index["state"] = self.state
        with _explained(self.folder, self.total):
            _write_text(self.partial / STATE, sealed(index))
            _flush_folder(self.partial)
            _put_in_place(self.partial, self.place)
            _flush_folder(self.folder)


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


@contextmanager
def _remedied(path: Path) -> Iterator[None]:
    """Adds to what is wrong with a checkpoint the way back to a whole one, except where it is whole but of another recipe."""
    try:
        yield
    except OtherTables:
        raise
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_remedy(path)}") from None


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
