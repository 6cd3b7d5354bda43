"""What one rank's kernels do in a second while all others work too, in the bytes that the cost model counts (plan/cost.py)."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import cycle

import numpy as np
import torch
from torch import Tensor

from ..batch import Batch
from ..embeddings import Embeddings, ShardedEmbeddings, shard
from ..exchange.mesh import Mesh
from ..exchange.rows import matrix_rows
from ..exchange.rows import read as read_rows
from ..kernels import backend
from ..kernels.request import FeatureSpec, FeatureSpecs, Request, TableRows
from ..optim import SGD, RowWiseAdagrad
from ..plan.parts import ID, LINE
from ..plan.placement import Placement, place
from ..plan.topology import Topology
from ..storage import make_storage
from ..tables import Feature, Table
from .device import Device

DIM = 64
TABLE_BYTES = {"cpu": 256 << 20, "cuda": 4 << 30}
"""far more than caches hold"""
MEMORY_SHARE = 16
"""of a rank's memory, at most 1/16 for the table"""
LOOKUPS = {"cpu": 1 << 16, "cuda": 1 << 23}
BATCHES = 8
"""that take turns, so that a row is not still in a cache because it was read in the last one"""
ZIPF = 1.05
"""how ids repeat: the r-th most popular is read in proportion to r to the power of −1.05"""
FEW, MANY = 1, 4
"""tables for each rank, of the two sizes of module whose difference is the host's work for a table"""
SAMPLES = 4
BLOCK = 1.25
"""pieces' work on the host for each table of a module placed table-wise: one of its own, a quarter for each block answered"""
WHILE = 0.02
"""seconds that a measurement takes at least"""


def popular(rows: int, count: int, seed: int, device: torch.device | str = "cpu") -> Tensor:
    """Ids in [0, rows) as Zipf's law has them, popular ones scattered over the table."""
    draw = torch.Generator(device).manual_seed(seed)
    shares = torch.arange(1, rows + 1, dtype=torch.float64, device=device).pow_(-ZIPF).cumsum(0)
    places = torch.rand(count, dtype=torch.float64, device=device, generator=draw) * shares[-1]
    ranks = torch.searchsorted(shares, places).clamp_(max=rows - 1)
    return torch.randperm(rows, device=device, generator=draw)[ranks]


class KernelRates:
    """The measurements, made ready: buffers, a large table, ids. `once` makes each of them once."""

    def __init__(self, mesh: Mesh, device: Device) -> None:
        self.mesh, self.device = mesh, device
        self.kernels = backend(device.torch)
        kind = device.torch.type
        memory = Topology.here(mesh.world, mesh.ranks_per_node, kind).memory_per_rank
        rows = min(TABLE_BYTES[kind], memory // MEMORY_SHARE) // (4 * DIM)
        ids = popular(rows, LOOKUPS[kind] * BATCHES, 1 + mesh.rank, device.torch)
        batches = torch.split(ids, LOOKUPS[kind])
        self.ids = cycle(batches)
        """of a large table, as samples read them"""
        found = [self.kernels.unique(part)[:2] for part in batches]
        self.distinct, self.places = cycle(part for part, _ in found), cycle(part for _, part in found)
        """each id once, and which of them every lookup reads"""
        self.lookups = LOOKUPS[kind]
        self.rows = sum(part.numel() for part, _ in found) / BATCHES
        """distinct ids of a batch"""
        self.optimizer = RowWiseAdagrad()
        table = Table("calibration", rows=rows, dim=DIM)
        self.large = make_storage(table, self.optimizer, 0, self.kernels, device.torch).rows
        self.came = torch.zeros(max(part.numel() for part, _ in found), DIM, device=device.torch)
        self.out = torch.zeros(self.lookups, DIM, device=device.torch)
        self.specs = FeatureSpecs([FeatureSpec("rows", 0, None, DIM, 0)])
        self.modules = {"few": self._module(FEW * mesh.world), "many": self._module(MANY * mesh.world)}
        self._counts: dict[str, int] = {}

    def once(self) -> dict[str, float]:
        """Rates as a topology has them."""
        wide, distinct, lookups = 4 * DIM, self.rows, self.lookups
        state = self.optimizer.state_bytes_per_row(DIM)
        read = self._timed("read", lambda: self._look_up(self.large, next(self.distinct)))
        spread = self._timed("spread", lambda: self._look_up(matrix_rows(self.came), next(self.places)))
        summed = self._timed("summed", lambda: self._update(matrix_rows(self.came), next(self.places)))
        updated = self._timed("updated", lambda: self._update(self.large, next(self.distinct)))
        unique = self._timed("unique", lambda: self.kernels.unique(next(self.ids)))
        few, many = (self._host_seconds(name) for name in ("few", "many"))
        tables = (MANY - FEW) * self.mesh.world
        bytes_updated = lookups * wide + distinct * (2 * wide + LINE)
        bytes_updated += distinct * wide + distinct * (2 * (wide + state) + 2 * LINE)
        return {
            "reads": distinct * (wide + LINE) / read,
            "updates": bytes_updated / (summed + updated),
            "copies": (lookups + distinct) * wide / spread,
            "ids": ID * lookups / unique,
            "seconds_per_piece": (many - few) / tables / BLOCK,
        }

    def _timed(self, name: str, work: Callable[[], object]) -> float:
        """Seconds of the work, done as often as fills a while in which the other ranks do the same: where ranks share cores, a
        short work may be over before another rank has its turn. As often on all ranks: steps of a module need them all."""
        count = self._counts.get(name, 1)
        self.device.synchronize()
        self.mesh.barrier()
        started = time.perf_counter()
        for _ in range(count):
            work()
        self.device.synchronize()
        seconds = (time.perf_counter() - started) / count
        if count == 1:
            self._counts[name] = self.mesh.share(max(1, round(WHILE / seconds)))
        return seconds

    def _look_up(self, rows: TableRows, slots: Tensor) -> None:
        read_rows(self.kernels, self._request(rows, slots), None, [self.out])

    def _update(self, rows: TableRows, slots: Tensor) -> None:
        self.kernels.update(self._request(rows, slots), None, [self.out], lr_factor=1.0, step=0)

    def _request(self, rows: TableRows, slots: Tensor) -> Request:
        ends = torch.tensor([0, slots.numel()], device=self.device.torch)
        return Request([rows], self.specs, 1, np.zeros(1, np.int64), slots, slots, ends)

    def _module(self, tables: int) -> tuple[ShardedEmbeddings, Batch]:
        """So many tables, each whole on one rank, and a batch so small that the host's work is nearly all there is."""
        features = {f"f{t}": Feature(Table(f"t{t}", rows=64, dim=4)) for t in range(tables)}
        whole = Embeddings(features, optimizer=SGD(lr=0.1), device="meta")
        world, size = self.mesh.world, self.mesh.ranks_per_node
        placed = {f"t{t}": place("table_wise", Table(f"t{t}", rows=64, dim=4), world, size, t) for t in range(tables)}
        placement = Placement(world, size, placed, unique="rank")
        module = shard(whole, placement, self.mesh, device=self.device.torch)
        ids = torch.arange(tables * SAMPLES, device=self.device.torch) % 64
        return module, Batch(tuple(features), ids, torch.ones_like(ids))

    def _host_seconds(self, name: str) -> float:
        """Of a step, without what passes in collectives."""
        module, batch = self.modules[name]
        before, steps = self.mesh.traffic.seconds, self._counts.get(name, 1)
        seconds = self._timed(name, lambda: module(batch).pooled.sum().backward())
        return seconds - (self.mesh.traffic.seconds - before) / steps
