"""Narrow tables against a dictionary: whatever the order of steps, rounds, rounds that fail, saves, loads and moves to ranks,
every id has the values, the optimizer state and the utility that it should have, and every place belongs to one row."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import unequal as uq
from unequal.kernels import backend
from unequal.storage import by_class
from unequal.storage.narrow import NarrowStorage
from unequal.storage.shards import NarrowShard

DIM, CHUNK, BOUND, LR = 8, 2, 40, 0.5
CHUNKS = DIM // CHUNK
NEVER = 10**9
SEEDS = st.integers(0, 2**31)
ROWS = st.lists(st.integers(0, BOUND - 1), min_size=1, max_size=24)


@dataclass
class Row:
    """What an id has: vectors of the full dim, with zeros where it has no chunk."""

    live: torch.Tensor
    """[CHUNKS]: which chunks"""
    values: torch.Tensor
    sums: torch.Tensor
    utility: torch.Tensor

    @property
    def columns(self):
        return self.live.repeat_interleave(CHUNK)


class Tables(RuleBasedStateMachine):
    """One table, and what is known of it."""

    policy = "water-filling"
    state = "row"
    rows: int | None = BOUND
    spread = 1
    """from a row's number to its id"""

    @initialize()
    def start(self):
        self.module = self.make()
        self.known: dict[int, Row] = {}
        self.seen: set[int] = set()

    def make(self):
        table = uq.Table("t", rows=self.rows, dim=DIM)
        width = uq.Width(
            budget="100 KB", policy=self.policy, chunk=CHUNK, every=NEVER, gradients="whole", state=self.state, rate=1
        )
        features = {"a": uq.Feature(table, pooling=None), "b": uq.Feature(table, pooling=None)}
        return uq.Embeddings(features, optimizer=uq.Adagrad(lr=LR), width=width)

    @property
    def storage(self) -> NarrowStorage:
        return self.module._storages["t"]

    @property
    def by_chunk(self):
        return self.policy == "fiited"

    def ids(self, numbers):
        return torch.tensor(numbers, dtype=torch.int64) * self.spread

    # What can happen

    @rule(first=ROWS, second=ROWS, purse=st.integers(0, 40), seed=SEEDS)
    def step(self, first, second, purse, seed):
        numbers = [*first, *second]
        ids = self.ids(numbers)
        purse_of = self.storage.how.purse
        purse_of.left = float(purse)
        start = self.storage.how.start
        missing = sorted({id_ for id_ in ids.tolist() if id_ not in self.known})
        new = missing[: purse // (start * CHUNK)]
        batch = uq.Batch(("a", "b"), ids, torch.tensor([len(first), len(second)]))
        out = self.module(batch)
        looked_up = torch.cat([out["a"].values, out["b"].values])
        for id_ in new:
            self.admit(id_, looked_up[ids.tolist().index(id_)].detach().clone(), start)
        gradients = torch.randint(-4, 5, looked_up.shape, generator=torch.Generator().manual_seed(seed)) / 4
        assert torch.equal(looked_up, torch.stack([self.vector(id_) for id_ in ids.tolist()]))
        (looked_up * gradients).sum().backward()
        for row in self.known.values():
            row.utility *= self.storage.how.decay
        for id_ in set(ids.tolist()):
            where = ids == id_
            self.update(id_, gradients[where].sum(0), int(where.sum()))
        self.seen |= set(ids.tolist())

    def admit(self, id_, values, start):
        live = values.view(CHUNKS, CHUNK).any(1)
        assert int(live.sum()) == start
        if not self.by_chunk:
            assert live[:start].all(), "the first chunks"
        self.known[id_] = Row(live, values, torch.zeros(DIM), torch.zeros(CHUNKS if self.by_chunk else 1))

    def vector(self, id_):
        return self.known[id_].values if id_ in self.known else torch.zeros(DIM)

    def update(self, id_, gradient, reads):
        if id_ not in self.known:
            return
        row = self.known[id_]
        if self.by_chunk:
            row.utility += reads * gradient.view(CHUNKS, CHUNK).norm(dim=1)
        else:
            row.utility += gradient.norm()
        gradient = gradient * row.columns
        row.sums += gradient**2
        row.values -= LR * gradient / (row.sums.sqrt() + 1e-8)

    @rule(seed=SEEDS, share=st.sampled_from([0.1, 0.5, 1.0]))
    def round(self, seed, share):
        census, wanted = self.wish(seed, share)
        self.storage.prepare(census, *self.asked(wanted))()
        self.module._generation += 1
        self.follow(census, wanted)

    def wish(self, seed, share):
        """Other chunks for some of the rows and candidates."""
        census = self.storage.census()
        for id_ in census.ids[census.live :].tolist():
            assert id_ in self.seen and id_ not in self.known
        generator = torch.Generator().manual_seed(seed)
        count = census.ids.numel()
        if self.by_chunk:
            wanted = torch.rand(count, CHUNKS, generator=generator) < torch.rand(1, generator=generator)
        else:
            wanted = torch.arange(CHUNKS) < torch.randint(0, CHUNKS + 1, (count, 1), generator=generator)
        stays = torch.rand(count, generator=generator) >= share
        for k, id_ in enumerate(census.ids.tolist()):
            if stays[k]:
                wanted[k] = self.known[id_].live if id_ in self.known else False
        return census, wanted

    def asked(self, wanted):
        masks = (wanted.long() << torch.arange(CHUNKS)).sum(1)
        chunks = wanted.sum(1).to(torch.int16)
        counts = by_class.counts(chunks, self.storage.records.chunks, self.storage.kernels.on_device)
        return chunks, masks if self.by_chunk else None, counts.tolist()

    def follow(self, census, wanted):
        """After a round: what stays is as it was, what is new is fresh, but for squares of gradients where rows hand them on."""
        state = self.rows_of(self.storage)
        for id_, live, utility in zip(census.ids.tolist(), wanted, census.utilities):
            before = self.known.pop(id_, None)
            if not live.any():
                continue
            now = state[id_]
            new = live if before is None else live & ~before.live
            fresh = new.repeat_interleave(CHUNK)
            assert now.values[fresh].all(), "new chunks begin with values of their own"
            most = 3**0.5 * self.module.tables["t"].init_std
            if before is not None and before.live.any() and self.state == "row":
                most = max(most, float(before.values.abs().max()) / 2)
            assert not fresh.any() or now.values[fresh].abs().max() <= most * 1.0001, "beside which they are not large"
            row = Row(live.clone(), torch.zeros(DIM), torch.zeros(DIM), utility.clone())
            if before is not None:
                row.values, row.sums, row.utility = (
                    before.values * row.columns,
                    before.sums * row.columns,
                    before.utility,
                )
                if self.state == "row":
                    row.sums[fresh] = 0.2 * before.sums.max()
            row.values = torch.where(fresh, now.values, row.values)
            self.known[id_] = row

    @rule(seed=SEEDS, after=st.integers(0, 3))
    def round_without_memory(self, seed, after):
        """Nothing may change, and nothing be lost, wherever memory ends."""
        census, wanted = self.wish(seed, 1.0)
        storage = self.storage
        left = [after]

        def short(k, rows):
            left[0] -= 1
            if left[0] < 0:
                raise MemoryError("no memory for a slab")
            return NarrowStorage._slab(storage, k, rows)

        storage._slab = short
        try:
            storage.prepare(census, *self.asked(wanted))  # where it needs no more slabs it is not put in place either
        except MemoryError:
            pass
        finally:
            del storage._slab

    @rule()
    def save_and_load(self):
        saved = {name: part.clone() for name, part in self.module.state_dict().items()}
        key = self.storage.rows.key
        self.module = self.make()
        self.module.load_state_dict(saved)
        self.storage.rows.key = key

    @precondition(lambda self: self.known)
    @rule(ranks=st.integers(2, 3))
    def move_between_ranks(self, ranks):
        """To shards that hold some of the ids each, and back into one table."""
        storage, whole = self.storage, self.storage.state()
        shards = []
        for part in range(ranks):
            rest = (storage.optimizer, 0, storage.kernels, storage.device, storage.how)
            shard = NarrowShard(storage.table, part, ranks, *rest)
            shard.load(self.cut(whole, part, ranks))
            shards.append(shard)
        assert sum(shard.live for shard in shards) == storage.live
        parts = [shard.state() for shard in shards]
        joined = {name: torch.cat([part[name] for part in parts]) for name in whole}
        storage.load(joined)
        self.module._generation += 1

    @staticmethod
    def cut(state, part, ranks):
        """What one rank has of a table's state."""
        mine = state["ids"] % ranks == part
        values = mine.repeat_interleave(state["widths"])
        candidates = state["candidates"] % ranks == part
        of = {"weight": values, "sum": values, "candidates": candidates, "candidate_utilities": candidates}
        return {name: tensor[of.get(name, mine)] for name, tensor in state.items()}

    # What must always hold

    def rows_of(self, storage):
        """All rows that the table says it has."""
        state, found, at = storage.state(), {}, 0
        for k, (id_, width) in enumerate(zip(state["ids"].tolist(), state["widths"].tolist())):
            live = torch.arange(CHUNKS) < width // CHUNK
            if self.by_chunk:
                live = (int(state["masks"][k]) >> torch.arange(CHUNKS)) & 1 > 0
            row = Row(live, torch.zeros(DIM), torch.zeros(DIM), state["utilities"][k])
            row.values[row.columns] = state["weight"][at : at + width]
            row.sums[row.columns] = state["sum"][at : at + width]
            found[id_] = row
            at += width
        return found

    @invariant()
    def rows_are_as_known(self):
        found = self.rows_of(self.storage)
        assert found.keys() == self.known.keys()
        for id_, row in self.known.items():
            assert torch.equal(found[id_].live, row.live)
            assert torch.equal(found[id_].sums, row.sums), "gradients are multiples of a quarter"
            torch.testing.assert_close(found[id_].values, row.values, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(found[id_].utility, row.utility, rtol=1e-4, atol=1e-5)
            row.values, row.utility = found[id_].values, found[id_].utility  # so that roundings do not add up

    @invariant()
    def places_belong_to_one_row(self):
        storage, bits = self.storage, self.storage.records.class_bits
        ids, slots = storage.directory.entries()
        assert sorted(ids.tolist()) == sorted(self.known) and storage.live == len(self.known)
        assert len(set(slots.tolist())) == len(slots), "two rows in one place"
        classes = (slots & ((1 << bits) - 1)).tolist()
        for id_, k, place in zip(ids.tolist(), classes, (slots >> bits).tolist()):
            assert k == int(self.known[id_].live.sum()) and place < storage.counts[k]
        for k in range(1, CHUNKS + 1):
            assert storage.counts[k] == classes.count(k)
            assert storage.counts[k] <= len(storage.records.slabs[k]) << storage.records.slab_log2

    @invariant()
    def lookups_find_them(self):
        """Bit for bit what the table holds; that this is what is known of it but for roundings is asked elsewhere."""
        ids, held = self.ids(range(BOUND)), self.rows_of(self.storage)
        self.module.eval()
        out = self.module(uq.Batch(("a", "b"), ids, torch.tensor([BOUND, 0])))["a"].values
        self.module.train()
        assert torch.equal(
            out, torch.stack([held[id_].values if id_ in held else torch.zeros(DIM) for id_ in ids.tolist()])
        )


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("rows", "spread", "state"), [(BOUND, 1, "row"), (2**31, 50_000_017, "fresh"), (None, 2**57 + 1, "row")]
)
@pytest.mark.parametrize("policy", ["water-filling", "fiited"])
def test_any_order_of_events(monkeypatch, policy, rows, spread, state, kernels):
    """With a directory that is an array, one of short ids and one of long ids."""
    monkeypatch.setenv("UNEQUAL_KERNELS", "" if kernels == "cpu" else kernels)
    assert backend("cpu").name == kernels
    machine = type("Machine", (Tables,), {"policy": policy, "rows": rows, "spread": spread, "state": state})
    run_state_machine_as_test(machine, settings=settings(max_examples=10, stateful_step_count=16, deadline=None))
