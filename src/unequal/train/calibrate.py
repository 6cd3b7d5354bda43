"""Measures the machines a job runs on: how fast bytes move between ranks, what a message costs beside, and how fast the kernels
of each rank are. The result is the topology that plans and simulations are made with."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from ..exchange.mesh import Link
from ..plan.topology import ComputeRates, LinkRates, Topology
from .kernel_rates import KernelRates
from .processes import Ranks

Collective = Literal["all_to_all", "all_reduce", "reduce_scatter"]
COLLECTIVES: tuple[Collective, ...] = ("all_to_all", "all_reduce", "reduce_scatter")
SIZES = tuple(1 << bits for bits in (10, 14, 17, 19, 21, 23))
LARGE_SIZES = (1 << 25, 1 << 27)
"""Bytes that a rank sends in one collective, up to what a step of a large batch sends; GPUs send more."""
LARGE = 4
"""messages of at least one such part of the largest are large"""
TURNS = 30
"""of finding a line: what a message takes is found with what a byte does, and the other way round"""
FEWEST, MOST = 5, 100
"""rounds; every round measures everything once"""
SHORTEST = 1e-2
"""seconds: a collective that takes less is repeated for so long, and the mean counts"""
BARRIERS = 21
LONGEST = 0.05
"""Of the time there is: sizes that take longer are left out, so that the others are measured often."""
LINKS_SHARE = 0.6
"""Of the time there is, for links; kernels have the rest."""
Floats = npt.NDArray[np.float64]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Quartiles:
    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Any) -> Quartiles:
        low, median, high = np.quantile(np.asarray(values, np.float64), [0.25, 0.5, 0.75])
        return cls(float(low), float(median), float(high))

    def plain(self) -> list[float]:
        return [short(value) for value in (self.low, self.median, self.high)]


@dataclass(frozen=True, slots=True)
class Point:
    """One collective of one size over one class of links."""

    link: str
    collective: Collective
    ranks: int
    """that exchange among themselves"""
    sent: int
    """bytes that each of them sends"""
    seconds: Floats
    """of the slowest rank, round by round"""


@dataclass(frozen=True, slots=True)
class Fit:
    """seconds = a message's, for each other rank, + bytes / rate."""

    rate: Quartiles
    """bytes per second"""
    message: Quartiles
    """seconds"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """What was measured; `topology` is what plans are made with."""

    topology: Topology
    points: list[Point]
    links: dict[tuple[str, Collective], Fit]
    kernels: dict[str, Quartiles]
    assumed: dict[str, str]
    """what could not be measured, and why: the device's class has it"""
    rounds: int
    seconds: float


def short(value: float) -> float:
    """Four digits: what a measurement is worth."""
    return float(f"{value:.4g}")


def calibrate(ranks: Ranks, seconds: float = 20.0, progress: Progress | None = None) -> Calibration:
    """All ranks call it. `progress` hears how many milliseconds of how many are over."""
    begun = time.monotonic()
    clock = _Clock(ranks, seconds, progress)
    links = _Links(ranks)
    points = links.measure(clock, LINKS_SHARE * seconds)
    kernels = KernelRates(ranks.mesh, ranks.device)
    samples: list[dict[str, float]] = [kernels.once()]  # the first compiles and touches pages; it does not count
    while clock.goes_on(len(samples) - 1, seconds):
        samples.append(kernels.once())
    found = {name: Quartiles.of([sample[name] for sample in samples[1:]]) for name in samples[0]}
    rounds = min([len(samples) - 1, *(len(point.seconds) for point in points)])
    return _summary(ranks, links, points, found, rounds, time.monotonic() - begun)


class _Clock:
    """The first rank's: all ranks stop together."""

    def __init__(self, ranks: Ranks, seconds: float, progress: Progress | None) -> None:
        self.ranks, self.seconds, self.progress = ranks, seconds, progress
        self.begun = time.monotonic()

    def goes_on(self, rounds: int, until: float) -> bool:
        """Whether there is another round, given how many there were."""
        passed = time.monotonic() - self.begun
        if self.progress is not None:
            self.progress(round(1000 * min(passed, self.seconds)), round(1000 * self.seconds))
        return bool(self.ranks.mesh.share(rounds < FEWEST or (rounds < MOST and passed < until)))


class _Links:
    """The classes of links that there are, each used by all ranks at the same time, as in a step."""

    def __init__(self, ranks: Ranks) -> None:
        self.mesh, self.device = ranks.mesh, ranks.device
        self.classes: dict[str, Link] = {}
        if self.mesh.ranks_per_node > 1:
            self.classes["inside"] = self.mesh.in_node
        if self.mesh.nodes > 1:
            self.classes["across"] = self.mesh.lane
        self.sizes = (*SIZES, *LARGE_SIZES) if self.device.is_gpu else SIZES
        self.notes: dict[str, str] = {}
        self.scatters = self.mesh.world > 1 and self._can_scatter()
        self._barrier = self._barrier_seconds()

    def _can_scatter(self) -> bool:
        try:
            self._reduce_scatter(self.mesh.everyone, torch.zeros(self.mesh.world, device=self._place))
        except RuntimeError as error:
            why = " ".join(str(error).split())
            self.notes["reduce_scatter"] = f"as an all-to-all and a sum, because the backend has none: {why}"
            return False
        return True

    @property
    def _place(self) -> torch.device:
        """Where a collective's values are: gloo exchanges memory of the host."""
        return torch.device("cpu") if self.mesh.gloo else self.device.torch

    def measure(self, clock: _Clock, until: float) -> list[Point]:
        plan = [(name, kind, size) for name in self.classes for kind in COLLECTIVES for size in self.sizes]
        if not plan:
            return []
        repeats = {}
        for key in plan:  # connects, warms up, and shows how long each takes
            self._trial(*key, 1)
            repeats[key] = self._trial(*key, 1)
        longest = np.array([self._slowest([taken])[0] for taken in repeats.values()])
        plan = [key for key, taken in zip(plan, longest) if taken < LONGEST * clock.seconds or key[2] == SIZES[0]]
        counts = {key: max(1, int(SHORTEST / taken)) for key, taken in zip(repeats, longest)}
        own: list[list[float]] = []
        while clock.goes_on(len(own), until):
            own.append([self._trial(*key, counts[key]) for key in plan])
        by_round = np.stack([self._slowest(taken) for taken in own])
        return [
            Point(name, kind, self.classes[name].size, self._sent(kind, self.classes[name], size), by_round[:, k])
            for k, (name, kind, size) in enumerate(plan)
        ]

    def _slowest(self, seconds: list[float]) -> Floats:
        gathered: Floats = np.max(self.mesh.gather(seconds), axis=0)
        return gathered

    @staticmethod
    def _values(kind: Collective, link: Link, size: int) -> int:
        """Floats of the vector that makes a rank send about so many bytes; a multiple of the ranks."""
        share = {"all_to_all": 1.0, "reduce_scatter": 1.0, "all_reduce": 2.0}[kind]
        each = size / 4 / share / (link.size - 1)
        return max(1, round(each)) * link.size

    @classmethod
    def _sent(cls, kind: Collective, link: Link, size: int) -> int:
        """Bytes to other ranks, as a ring sends them."""
        values = cls._values(kind, link, size)
        return 4 * values * (link.size - 1) // link.size * (2 if kind == "all_reduce" else 1)

    def _trial(self, name: str, kind: Collective, size: int, count: int) -> float:
        """Seconds of one such collective, the mean of so many one after the other, until all ranks are done with theirs: where
        several share a link, one that has it for itself would seem too fast."""
        link = self.classes[name]
        place = self.device.torch if kind == "all_to_all" else self._place
        values = torch.zeros(self._values(kind, link, size), device=place)
        self.device.synchronize()
        self.mesh.barrier()
        started = time.perf_counter()
        for _ in range(count):
            if kind == "all_to_all":
                self._all_to_all(link, values)
            elif kind == "all_reduce":
                dist.all_reduce(values, group=link.group)
            elif self.scatters:
                self._reduce_scatter(link, values)
            else:
                self._all_to_all(link, values).view(link.size, -1).sum(0)
        self.device.synchronize()
        own = time.perf_counter() - started
        self.mesh.barrier()
        return max(own, time.perf_counter() - started - self._barrier) / count

    def _barrier_seconds(self) -> float:
        """Of a barrier for which nobody waits."""
        taken = []
        for _ in range(BARRIERS):
            started = time.perf_counter()
            self.mesh.barrier()
            taken.append(time.perf_counter() - started)
        return float(np.median(taken))

    @staticmethod
    def _all_to_all(link: Link, values: Tensor) -> Tensor:
        each = np.full(link.size, values.numel() // link.size, np.int64)
        return link.all_to_all(values, each, each)

    @staticmethod
    def _reduce_scatter(link: Link, values: Tensor) -> Tensor:
        parts = list(values.chunk(link.size))
        out = torch.empty_like(parts[0])
        dist.reduce_scatter(out, parts, group=link.group)
        return out


def fit(points: list[Point]) -> Fit:
    """Of the medians, and round by round for the spread."""
    sent = np.array([point.sent for point in points], np.float64)
    taken = np.stack([point.seconds for point in points])
    others = points[0].ranks - 1
    whole = line(sent, np.median(taken, 1))
    rounds = np.array([line(sent, column) for column in taken.T])
    low, high = np.quantile(rounds, 0.25, 0), np.quantile(rounds, 0.75, 0)
    return Fit(
        Quartiles(1 / max(high[1], whole[1]), 1 / whole[1], 1 / min(low[1], whole[1])),
        Quartiles(min(low[0], whole[0]) / others, whole[0] / others, max(high[0], whole[0]) / others),
    )


def line(sent: Floats, seconds: Floats) -> tuple[float, float]:
    """Seconds at no bytes, none below 0, and seconds for each byte: always more than none.

    The large messages say what a byte takes, in relative errors; the others what a message takes beside its bytes, at the median,
    for a step has messages of all sizes. Links are not straight lines: where ranks share cores the smallest messages take longest
    beside their bytes, they wait for their turn, and what a buffer on the way holds seems to take no time."""
    large = sent >= sent.max() / LARGE
    small = ~large if not large.all() else sent == sent.min()
    scaled = sent[large] / seconds[large]
    start = slope = 0.0
    for _ in range(TURNS):
        slope = float((scaled * (1 - start / seconds[large])).sum() / (scaled**2).sum())
        if slope <= 0:  # so fast that the noise of a message hides what a byte takes
            slope = float((seconds / sent).min())
        start = float(np.median(np.maximum(seconds[small] - sent[small] * slope, 0)))
    return start, slope


def _summary(
    ranks: Ranks, links: _Links, points: list[Point], kernels: dict[str, Quartiles], rounds: int, seconds: float
) -> Calibration:
    mesh, device = ranks.mesh, ranks.device
    fits: dict[tuple[str, Collective], Fit] = {}
    for name in links.classes:
        for kind in COLLECTIVES:
            fits[name, kind] = fit([point for point in points if (point.link, point.collective) == (name, kind)])
    # The host's work is a difference of two times, which may come out below 0 where it is lost in the noise.
    compute = {name: max(0.0, short(rate.median)) for name, rate in kernels.items()}
    rates: dict[str, Any] = {"compute": ComputeRates(**compute)}
    assumed = {}
    for name, lacking in (("inside", "a node has one rank"), ("across", "there is one node")):
        found = fits.get((name, "all_to_all"))
        if found is None:
            assumed[name] = f"{lacking}, so these are the rates of the class '{device.torch.type}'"
        else:
            rates[name] = LinkRates(
                bytes_per_second=short(found.rate.median), seconds_per_message=short(found.message.median)
            )
    here = Topology.here(mesh.world, mesh.ranks_per_node, device.torch.type)
    memory = min(mesh.gather(here.memory_per_rank))
    measured: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "rounds": rounds,
        "seconds": round(seconds, 1),
        "ranks": f"{mesh.nodes} nodes × {mesh.ranks_per_node}",
        "device": device.name,
        "threads_per_rank": torch.get_num_threads(),
        "cores_per_node": os.cpu_count() or 0,
        "exchange": "gloo" if mesh.gloo else "nccl" if mesh.world > 1 else "none",
        "torch": torch.__version__,
        "assumed": assumed,
        **links.notes,
        "compute_quartiles": {name: rate.plain() for name, rate in kernels.items()},
    }
    for (name, kind), found in fits.items():
        measured[f"{name}_{kind}"] = {
            "bytes_per_second": found.rate.plain(),
            "seconds_per_message": found.message.plain(),
        }
    measured["columns"] = ["link", "collective", "ranks", "bytes sent by each", "seconds: low", "median", "high"]
    measured["points"] = [
        [point.link, point.collective, point.ranks, point.sent, *Quartiles.of(point.seconds).plain()]
        for point in points
    ]
    topology = Topology.make(
        nodes=mesh.nodes,
        ranks_per_node=mesh.ranks_per_node,
        device=here.device,
        memory_per_rank=memory,
        measured=measured,
        **rates,
    )
    return Calibration(
        topology=topology, points=points, links=fits, kernels=kernels, assumed=assumed, rounds=rounds, seconds=seconds
    )
