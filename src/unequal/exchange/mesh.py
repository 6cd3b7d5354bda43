"""The ranks of a job as nodes × ranks, what they say to each other, and how many bytes of it cross which links."""

from __future__ import annotations

import atexit
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import UserError
from ..storage.memory import OutputPool

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class Traffic:
    """Bytes this rank has sent to other ranks, by the class of the link."""

    inside: int = 0
    """to ranks of its own node"""
    across: int = 0
    """to ranks of other nodes"""
    seconds: float = 0.0
    """spent in collectives, waiting for slower ranks included"""
    calls: int = 0

    def since(self, before: Traffic) -> Traffic:
        return Traffic(
            self.inside - before.inside,
            self.across - before.across,
            self.seconds - before.seconds,
            self.calls - before.calls,
        )

    def copy(self) -> Traffic:
        return Traffic(self.inside, self.across, self.seconds, self.calls)


class Mesh:
    """Rank r is number r % ranks_per_node of node r // ranks_per_node. Without torch.distributed it is one rank alone."""

    def __init__(self, ranks_per_node: int | None = None, group: dist.ProcessGroup | None = None) -> None:
        """`ranks_per_node`: by default what torchrun says (LOCAL_WORLD_SIZE), or all ranks on one node.
        `group`: the ranks of the job, by default all. Collectives run in groups of their own, beside DDP's."""
        self.distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if self.distributed else 0
        self.world = dist.get_world_size(group) if self.distributed else 1
        if ranks_per_node is None:
            ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", self.world)) if self.distributed else 1
        if ranks_per_node < 1 or self.world % ranks_per_node:
            raise UserError(
                f"a mesh of {self.world} ranks: expected a divisor as the ranks of a node, got {ranks_per_node}; "
                "start the same number of ranks on every node"
            )
        self.ranks_per_node = ranks_per_node
        self.node, self.local = divmod(self.rank, ranks_per_node)
        self.nodes = self.world // ranks_per_node
        self.traffic = Traffic()
        self.buffers = OutputPool()
        everyone = (
            list(range(self.world)) if group is None or not self.distributed else dist.get_process_group_ranks(group)
        )
        self._job = group
        self.gloo = self.distributed and dist.get_backend(group) == "gloo"
        self.everyone = Link(self, tuple(range(self.world)), self._group(everyone))
        self.in_node = self.lane = self.everyone
        if self.nodes > 1:
            self.in_node = self._link(
                everyone, [range(n * ranks_per_node, (n + 1) * ranks_per_node) for n in range(self.nodes)]
            )
            self.lane = self._link(everyone, [range(g, self.world, ranks_per_node) for g in range(ranks_per_node)])

    def apart(self) -> Mesh:
        """The same ranks with groups, buffers and counters of their own. All ranks call it."""
        return Mesh(self.ranks_per_node, self._job)

    def _group(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        return dist.new_group(list(ranks)) if self.distributed else None

    def _link(self, everyone: Sequence[int], parts: Sequence[range]) -> Link:
        """Every rank makes all groups, as torch asks, and keeps the one it belongs to."""
        mine = None
        for part in parts:
            group = self._group([everyone[rank] for rank in part])
            if self.rank in part:
                mine = Link(self, tuple(part), group)
        assert mine is not None
        return mine

    @classmethod
    def of(cls, mesh: Any) -> Mesh:
        """From a Mesh, a torch DeviceMesh with the dimensions (node, rank) or (rank,), or None for the whole job."""
        if mesh is None:
            return cls()
        if isinstance(mesh, cls):
            return mesh
        shape = tuple(mesh.mesh.shape)
        if len(shape) not in (1, 2) or mesh.mesh.flatten().tolist() != list(range(dist.get_world_size())):
            raise UserError(f"expected a device mesh over all ranks in order, (node, rank) or (rank,), got {mesh}")
        return cls(ranks_per_node=shape[-1])

    def empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Uninitialised, and on the CPU from memory that was used before: fresh pages cost more than what is written there."""
        if like.device.type != "cpu" or like.dtype != torch.float32:
            return like.new_empty(shape)
        count = int(np.prod(shape, dtype=np.int64))
        return self.buffers.take(count, 1).view(shape)

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier(self.everyone.group)

    def share(self, value: Any, source: int = 0) -> Any:
        """What `source` gives, which JSON must be able to hold, on every rank."""
        return self.gather(value)[source]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, which JSON must be able to hold, on every rank."""
        if self.world == 1:
            return [value]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        parts = self.gather_tensors(text if self.gloo else text.cuda())
        return [json.loads(part.cpu().numpy().tobytes()) for part in parts]

    def gather_tensors(self, part: Tensor) -> list[Tensor]:
        """Every rank's tensor, equal but for the length of the first dimension, on every rank."""
        if self.world == 1:
            return [part]
        lengths = self.everyone.all_to_all_counts(np.full((self.world, 1), part.shape[0], np.int64))[:, 0]
        whole = torch.cat([part] * self.world)
        received = self.everyone.all_to_all(whole, np.full(self.world, part.shape[0]), lengths)
        return list(torch.split(received, lengths.tolist()))

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, in rank order, so that it is the same everywhere and every time."""
        if self.world == 1:
            return values
        return torch.stack(self.gather_tensors(values[None])).sum(0)[0]

    def total(self, value: float) -> float:
        """The sum of a number over all ranks, in rank order: the same on all of them."""
        return float(self.totals(np.array([value]))[0])

    def totals(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The same of many numbers."""
        if self.world == 1:
            return values
        bits = np.tile(np.ascontiguousarray(values, np.float64).view(np.int64), (self.world, 1))
        parts = self.everyone.all_to_all_counts(bits).view(np.float64)
        return np.asarray(sum(parts[1:], parts[0]))

    def sum_exactly(self, counts: Tensor) -> Tensor:
        """The sum of whole numbers over all ranks, which no order changes, on the CPU."""
        if self.world == 1:
            return counts
        assert not counts.is_floating_point()
        total = self.to_link(counts.clone())
        dist.all_reduce(total, group=self.everyone.group)
        return total.cpu()

    def to_link(self, tensor: Tensor) -> Tensor:
        """Where collectives can reach it."""
        return tensor if self.gloo or self.world == 1 else tensor.cuda()


class Link:
    """Ranks that exchange among themselves, and the counters of what crosses."""

    def __init__(self, mesh: Mesh, ranks: tuple[int, ...], group: dist.ProcessGroup | None) -> None:
        self.mesh, self.ranks, self.group = mesh, ranks, group
        _links.add(self)
        self.size = len(ranks)
        self.place = ranks.index(mesh.rank)
        self._inside = np.array([r // mesh.ranks_per_node == mesh.node and r != mesh.rank for r in ranks])
        self._across = np.array([r // mesh.ranks_per_node != mesh.node for r in ranks])

    def all_to_all(self, values: Tensor, sent: Ints, received: Ints) -> Tensor:
        """values: along the first dimension `sent[k]` entries for each rank k of the link, one after the other; gives what
        came, `received[k]` entries of each."""
        out = self.mesh.empty((int(received.sum()), *values.shape[1:]), values)
        if self.size == 1:
            return out.copy_(values)
        started = time.perf_counter()
        entry = values.element_size() * (values[0].numel() if values.dim() > 1 and values.shape[0] else 1)
        traffic = self.mesh.traffic
        traffic.inside += int(sent[self._inside].sum()) * entry
        traffic.across += int(sent[self._across].sum()) * entry
        traffic.calls += 1
        splits = [int(n) for n in received], [int(n) for n in sent]
        if values.is_cuda and self.mesh.gloo:  # gloo exchanges memory of the host
            landed = torch.empty_like(out, device="cpu")
            self._exchange(landed, values.cpu(), *splits)
            out.copy_(landed)
        else:
            self._exchange(out, values.contiguous(), *splits)
        traffic.seconds += time.perf_counter() - started
        return out

    def _exchange(self, out: Tensor, values: Tensor, received: list[int], sent: list[int]) -> None:
        """Gloo's all-to-all sends before it is ready to receive, and two nodes then often use one direction of their link at a
        time. Between nodes all ranks are ready before they send; inside one the collective has less to do."""
        if not (self.mesh.gloo and self._across.any()):
            dist.all_to_all_single(out, values, received, sent, group=self.group)
            return
        came, gone = torch.split(out, received), torch.split(values, sent)
        others = [(self.place + step) % self.size for step in range(1, self.size)]
        works = [dist.irecv(came[k], group=self.group, group_src=k) for k in reversed(others) if received[k]]
        works += [dist.isend(gone[k], group=self.group, group_dst=k) for k in others if sent[k]]
        came[self.place].copy_(gone[self.place])
        for work in works:
            assert work is not None
            work.wait()

    def swap(
        self, messages: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]], like: Tensor
    ) -> list[list[Tensor]]:
        """Flat tensors for every rank of the link, and how long those are that each of them has for this one: gives these."""
        sent = np.array([sum(part.numel() for part in parts) for parts in messages], np.int64)
        received = np.array([sum(parts) for parts in sizes], np.int64)
        flat = torch.cat([like.new_empty(0), *(part for parts in messages for part in parts)])
        by_rank = torch.split(self.all_to_all(flat, sent, received), received.tolist())
        return [list(torch.split(part, list(cuts))) if cuts else [] for part, cuts in zip(by_rank, sizes)]

    def all_to_all_counts(self, counts: Ints) -> Ints:
        """counts: [ranks, n]; gives what the ranks have for this one: [ranks, n]."""
        if self.size == 1:
            return counts.copy()
        flat = torch.from_numpy(np.ascontiguousarray(counts, np.int64).reshape(-1))
        each = np.full(self.size, flat.numel() // self.size)
        device = flat if self.mesh.gloo else flat.cuda()
        return self.all_to_all(device, each, each).cpu().numpy().reshape(counts.shape)


_links: WeakSet[Link] = WeakSet()


@atexit.register
def _let_go() -> None:
    """Of all groups, before the interpreter closes: once destroyed and held by nobody they end their threads. One that goes on
    and wants the interpreter's lock while that is taken apart aborts the process."""
    for link in _links:
        link.group = None
