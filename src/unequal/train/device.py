"""Where a run computes: which device that is, how batches get there, and what can be said of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from ..batch import Batch
from ..errors import UserError
from ..kernels import backend


def choose_device(asked: str, local: int = 0) -> torch.device:
    """The device `--device` means; refuses one that is not there. Ranks of a node are dealt out over its GPUs."""
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cpu":
        return torch.device("cpu")
    found = re.fullmatch(r"cuda(?::(\d{1,4}))?", asked)
    if found is None:
        raise UserError(
            f"--device: expected auto (a GPU where there is one), cpu, cuda or cuda:N such as cuda:0, got '{asked}'"
        )
    if not torch.cuda.is_available():
        built = torch.version.cuda is not None or torch.version.hip is not None
        why = "torch finds no GPU here" if built else f"torch {torch.__version__} is built for the CPU alone"
        remedy = "look at what nvidia-smi says" if built else "install a torch that is built for CUDA"
        raise UserError(f"--device {asked}: expected a GPU, but {why}; {remedy}, or choose --device cpu")
    count = torch.cuda.device_count()
    number = (torch.cuda.current_device() + local) % count if found[1] is None else int(found[1])
    if number >= count:
        there = "cuda:0 alone" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise UserError(f"--device: expected a GPU that is here ({there}), got '{asked}'")
    return torch.device("cuda", number)


class Device:
    """The device of a run. On a GPU nothing here waits for it except `synchronize`."""

    def __init__(self, asked: str = "auto", local: int = 0, per_node: int = 1) -> None:
        """`local`: which of its node's `per_node` ranks this process is."""
        self.torch = choose_device(asked, local)
        self.is_gpu = self.torch.type == "cuda"
        self.alone = per_node == 1 or (
            self.is_gpu and asked in ("auto", "cuda") and per_node <= torch.cuda.device_count()
        )
        """Whether no other rank of the node has the same GPU."""
        self.deferred = backend(self.torch).on_device
        """Whether results are read now and then instead of after every step, so that no step waits for the device."""
        if self.is_gpu:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            torch.cuda.set_device(self.torch)
            torch.cuda.reset_peak_memory_stats(self.torch)
            self._copying = torch.cuda.Stream(self.torch)  # type: ignore[no-untyped-call]

    @property
    def name(self) -> str:
        """What it is called: cpu, or the GPU's product name."""
        return torch.cuda.get_device_name(self.torch) if self.is_gpu else "cpu"

    @property
    def peak_memory_bytes(self) -> int | None:
        """The most that tensors have taken on the GPU since the run began; None on the CPU."""
        return torch.cuda.max_memory_allocated(self.torch) if self.is_gpu else None

    def synchronize(self) -> None:
        """Waits until all that was begun is done."""
        if self.is_gpu:
            torch.cuda.synchronize(self.torch)

    def move(self, batch: Batch) -> Batch:
        """The batch on the device. The copy runs beside the steps that are still computing there."""
        if not self.is_gpu:
            return batch
        pinned: dict[str, Any] = {name: part.pin_memory() for name, part in _tensors(batch).items()}
        computing = torch.cuda.current_stream(self.torch)
        with torch.cuda.stream(self._copying):
            moved = replace(batch, **pinned).to(self.torch, non_blocking=True)
        computing.wait_stream(self._copying)
        for part in _tensors(moved).values():
            part.record_stream(computing)
        return moved

    def fetch(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begins to copy the tensor to the CPU. What is returned waits for the copy, and gives it."""
        copy = tensor.to("cpu", non_blocking=True)
        if not self.is_gpu:
            return lambda: copy
        arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrival.record()

        def wait() -> Tensor:
            arrival.synchronize()
            return copy

        return wait

    @contextmanager
    def explained(self, remedy: str) -> Iterator[None]:
        """Turns the device's running out of memory into one line that says what is free and what to do."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            if not self.is_gpu:
                raise
            free, total = torch.cuda.mem_get_info(self.torch)
            used = torch.cuda.memory_allocated(self.torch)
            asked = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
            raise UserError(
                f"out of memory on {self.name} ({self.torch}){f' when {asked[1]} were asked for' if asked else ''}: "
                f"this run holds {used / 1e9:.2f} GB, {free / 1e9:.2f} of {total / 1e9:.2f} GB are free; {remedy}"
            ) from error


def _tensors(batch: Batch) -> dict[str, Tensor]:
    """The batch's tensors by field, offsets included: what is sent along need not be computed again over there."""
    if batch.features:
        _ = batch.offsets
    parts = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: part for name, part in parts.items() if isinstance(part, Tensor)}
