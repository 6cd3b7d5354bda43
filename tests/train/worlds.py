"""A world of ranks in one process, for tests of checkpoints: threads that talk through a mesh of their own, and shards of tables
with known contents."""

import json
import threading
from pathlib import Path

import torch

from unequal.kernels import backend
from unequal.optim import SGD, Adagrad, Adam, RowWiseAdagrad, RowWiseAdam
from unequal.plan.placement import Placement, part_of, place
from unequal.storage import HashedStorage, make_shard
from unequal.tables import Table
from unequal.train import checkpoint

CPU = torch.device("cpu")
OPTIMIZERS = (RowWiseAdagrad(), Adam(), RowWiseAdam(), SGD(), Adagrad())
PATIENCE = 30


class ThreadMesh:
    """Stands for exchange.mesh.Mesh: the ranks are threads."""

    def __init__(self, rank, world, ranks_per_node, room):
        self.rank, self.world, self.ranks_per_node = rank, world, ranks_per_node
        self.room = room

    def gather(self, value):
        barrier, texts = self.room
        texts[self.rank] = json.dumps(value)
        barrier.wait(PATIENCE)
        heard = [json.loads(text) for text in texts]
        barrier.wait(PATIENCE)
        return heard


def run_ranks(world, function, ranks_per_node=None):
    """function(mesh) on every rank at once: what each gives, or the exception it ends with. A rank that ends with one that is
    no Exception is like one that was killed: the others' collectives fail."""
    room = threading.Barrier(world), [None] * world
    results = [None] * world

    def work(rank):
        try:
            results[rank] = function(ThreadMesh(rank, world, ranks_per_node or world, room))
        except BaseException as error:
            results[rank] = error
            if not isinstance(error, Exception):
                room[0].abort()

    threads = [threading.Thread(target=work, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
        assert not thread.is_alive(), "a rank hangs"
    return results


def rank_of_thread():
    """The rank this code runs on, inside run_ranks."""
    return int(threading.current_thread().name.removeprefix("rank-"))


def good(results):
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


class Truth:
    """What a table holds: rows by id, their optimizer state, of unbounded ids also those that wait for a row."""

    def __init__(self, table, optimizer, ids=0, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.table, self.optimizer = table, optimizer
        self.hashed, self.shares_rare = table.rows is None, table.admit_after > 1
        if self.hashed:
            drawn = torch.randint(-(2**62), 2**62, (ids + ids // 2,), generator=generator)
            if ids:
                drawn[0] = -1  # what the table itself uses for the shared row
            self.ids = drawn[:ids]
            waiting = drawn[ids:] if self.shares_rare else drawn[:0]
            self.waiting = {int(id_): 1 + number % (table.admit_after - 1) for number, id_ in enumerate(waiting)}
        else:
            self.ids, self.waiting = torch.arange(table.rows), {}
        count = self.ids.numel() + self.shares_rare  # the last one is the shared row
        self.values = {"weight": torch.randn(count, table.dim, generator=generator).to(table.dtype)}
        for name, per in optimizer.state:
            shape = (count,) if per == "row" else (count, table.dim)
            self.values[name] = torch.rand(shape, generator=generator)

    def of(self, name, numbers, first, last):
        values = self.values[name][numbers]
        return values if values.dim() == 1 else values[:, first:last]

    def pour_into(self, shard, storage):
        mine = (part_of(self.ids, shard.parts, self.hashed) == shard.part).nonzero().flatten()
        if self.hashed:
            # Every shard has met its ids in an order of its own.
            mine = mine[
                torch.randperm(mine.numel(), generator=torch.Generator().manual_seed(shard.first * 99 + shard.part))
            ]
            waiting = torch.tensor(list(self.waiting), dtype=torch.int64)
            counts = torch.tensor(list(self.waiting.values()), dtype=torch.int64)
            chosen = part_of(waiting, shard.parts, True) == shard.part
            slots = torch.arange(mine.numel()) + self.shares_rare
            storage.restore(
                torch.cat([self.ids[mine], waiting[chosen]]),
                torch.cat([slots, -1 - counts[chosen]]),
                mine.numel() + self.shares_rare,
            )
            if self.shares_rare:
                mine = torch.cat([torch.tensor([self.ids.numel()]), mine])
        for name, slabs in zip(storage.parts, (storage.rows.weights, *storage.rows.states)):
            values, at = self.of(name, mine, shard.first, shard.last), 0
            for slab in slabs:
                part = values[at : at + slab.shape[0]]
                slab[: part.shape[0]] = part
                at += part.shape[0]

    def assert_in(self, shard, storage):
        mine = (part_of(self.ids, shard.parts, self.hashed) == shard.part).nonzero().flatten()
        state = storage.state()
        slots = storage.locate(self.ids[mine], False)
        assert storage.live == mine.numel() + self.shares_rare
        if self.hashed:
            assert sorted(slots.tolist()) == list(range(self.shares_rare, storage.live)), "each id has a row of its own"
            ids, entries = storage.directory.entries()
            waiting = {int(id_): -1 - int(entry) for id_, entry in zip(ids, entries) if entry < 0}
            expected = torch.tensor(list(self.waiting), dtype=torch.int64)
            chosen = expected[part_of(expected, shard.parts, True) == shard.part].tolist()
            assert waiting == {id_: self.waiting[id_] for id_ in chosen}
            if self.shares_rare:
                mine = torch.cat([torch.tensor([self.ids.numel()]), mine])
                slots = torch.cat([torch.tensor([0]), slots])
        for name in self.values:
            assert torch.equal(state[name][slots], self.of(name, mine, shard.first, shard.last)), (shard, name)


class RankTables:
    """What checkpoints see of sharded embeddings on one rank."""

    def __init__(self, truths, placement, mesh, kernels=None):
        self.tables = {name: truth.table for name, truth in truths.items()}
        self.optimizer, self.placement, self.mesh, self.step = SGD(), placement, mesh, 0
        self._storages = []
        for shard in placement.shards(mesh.rank):
            table = self.tables[shard.table]
            cut = (table, shard.first, shard.last, shard.part, shard.parts, table.optimizer or self.optimizer)
            self._storages.append((shard, make_shard(*cut, 7, kernels or backend(), CPU)))

    def shard_storages(self):
        return self._storages


def make_truths(optimizers=OPTIMIZERS, rows=23, ids=41, dim=9):
    """Dense and hashed tables, of every dtype, one with a shared row, one empty, one of a single row."""
    a, b, c, d, e = optimizers
    return {
        "dense": Truth(Table("dense", rows, dim=dim, optimizer=a), a, seed=1),
        "half": Truth(Table("half", rows + 6, dim=4, dtype="fp16", optimizer=b), b, seed=2),
        "one.row": Truth(Table("one.row", 1, dim=5, optimizer=e), e, seed=3),
        "hashed": Truth(Table("hashed", dim=dim, optimizer=c), c, ids, seed=4),
        "counted": Truth(Table("counted", dim=4, dtype="bf16", optimizer=d, admit_after=3), d, ids, seed=5),
        "empty": Truth(Table("empty", dim=3, optimizer=a), a, 0, seed=6),
    }


def make_placement(truths, kinds, world, ranks_per_node=None):
    """`kinds`: given to the tables in turn."""
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    placed = {
        name: place(kinds[number % len(kinds)], truth.table, world, ranks_per_node, first=number)
        for number, (name, truth) in enumerate(truths.items())
    }
    return Placement(world, ranks_per_node or world, placed)


def hold(truths, placement, mesh, pour=True, kernels=None):
    tables = RankTables(truths, placement, mesh, kernels=kernels)
    if pour:
        tables.step = 77
        for shard, storage in tables.shard_storages():
            truths[shard.table].pour_into(shard, storage)
    return tables


def save_world(folder, step, truths, placement, other=None, **options):
    def work(mesh):
        tables = hold(truths, placement, mesh)
        own = {"random": {"torch": torch.arange(mesh.rank, mesh.rank + 4)}, "rank": mesh.rank}
        state = {"head.bias": torch.arange(3.0)} if mesh.rank == 0 else {}
        return checkpoint.save(folder, step, state, other or {"n": step}, embeddings=tables, own=own, **options)

    return run_ranks(placement.world, work, placement.ranks_per_node)


def load_world(path, truths, placement, kernels=None):
    """Loads on another world; gives the ranks' tables."""

    def work(mesh):
        tables = hold(truths, placement, mesh, pour=False, kernels=kernels)
        checkpoint.load_embeddings(path, tables)
        return tables

    return run_ranks(placement.world, work, placement.ranks_per_node)


def assert_world(path, truths, placement, kernels=None):
    held = good(load_world(path, truths, placement, kernels))
    for tables in held:
        assert tables.step == 77
        for shard, storage in tables.shard_storages():
            truths[shard.table].assert_in(shard, storage)
    return held


def hidden(folder: Path):
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def is_hashed(storage):
    return isinstance(storage, HashedStorage)


def inspected(path, truths):
    """Everything again, through what looks into a checkpoint without the run."""
    saved = checkpoint.open(path)
    assert list(saved.tables) == list(truths)
    for name, truth in truths.items():
        table = saved.tables[name]
        assert (table.rows, table.dim, table.dtype) == (truth.ids.numel(), truth.table.dim, truth.table.dtype)
        assert table.hashed == truth.hashed and table.state == dict(truth.optimizer.state)
        seen = []
        for ids, rows in saved.table(name, at_once=7):
            assert 1 <= ids.numel() <= 7 and set(rows) == set(truth.values)
            seen.append((ids, rows))
        everything = torch.cat([ids for ids, _ in seen]) if seen else torch.empty(0, dtype=torch.int64)
        numbers = {int(id_): number for number, id_ in enumerate(truth.ids)}
        assert sorted(everything.tolist()) == sorted(numbers)
        order = torch.tensor([numbers[int(id_)] for id_ in everything], dtype=torch.int64)
        for part in truth.values if seen else ():
            assert torch.equal(torch.cat([rows[part] for _, rows in seen]), truth.values[part][order])
        some = truth.ids[torch.randint(max(1, len(truth.ids)), (len(truth.ids) // 3,))]
        got = saved.rows(name, some)
        for part, values in truth.values.items():
            assert torch.equal(got[part], values[[numbers[int(id_)] for id_ in some]])
        assert saved.has(name, some).all() and not saved.has(name, [2**62 + 5]).any()


TRUTHS = make_truths()
