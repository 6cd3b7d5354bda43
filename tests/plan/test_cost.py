"""The cost model against what the exchange must move, counted id by id; and memory against what storages really hold."""

import numpy as np
import pytest
import torch

from unequal.batch import Batch, Jagged
from unequal.kernels import backend
from unequal.optim import SGD, Adam, RowWiseAdagrad
from unequal.plan.cost import MEMORY, SECONDS, Part, Pricer, Setting, row_bytes
from unequal.plan.placement import KINDS, Kind, TablePlacement, part_of, place
from unequal.plan.workload import TableLoad, measure
from unequal.storage import make_shard
from unequal.tables import Feature, Table

from .cases import machines

DIM, ROWS, BATCH, LENGTH = 16, 700, 64, 5
ID = 2
"""bytes of an id on the wire"""


def sample(seed: int = 0) -> np.ndarray:
    """[samples, ids]"""
    return np.minimum(np.random.default_rng(seed).zipf(1.3, (BATCH, LENGTH)) - 1, ROWS - 1).astype(np.int64)


def load_of(ids: np.ndarray, pooling: str | None = "sum", optimizer: object = None, **table: object) -> TableLoad:
    feature = Feature(Table("t", table.pop("rows", ROWS), dim=DIM, **table), pooling)  # type: ignore[arg-type]
    lists = Jagged(torch.from_numpy(ids.reshape(-1)), torch.full((len(ids),), LENGTH))
    return measure({"f": feature}, optimizer or SGD(), [Batch.from_jagged({"f": lists})])["t"]  # type: ignore[arg-type]


def moved(ids: np.ndarray, placed: TablePlacement, nodes: int, size: int, two_hops: bool) -> np.ndarray:
    """[2, ranks]: bytes that every rank sends inside its node and across, fp32, counted one message at a time."""
    world = nodes * size
    sent = np.zeros((2, world))

    def send(source: int, target: int, amount: float) -> None:
        if source != target:
            sent[int(source // size != target // size), source] += amount

    shares = np.array_split(ids, world)
    for piece in placed.pieces:
        row = 4 * piece.width
        asked = [np.unique(share) for share in shares]
        if placed.kind == "data_parallel":
            for rank, mine in enumerate(asked):
                for other in range(world):
                    send(rank, other, len(mine) * (ID + row))
            continue
        if placed.sums:
            for rank, share in enumerate(shares):
                owner = np.array(piece.ranks)[part_of(torch.from_numpy(share.reshape(-1)), len(piece.ranks), False)]
                for other in piece.ranks:
                    count = (owner == other).sum()
                    send(rank, other, count * ID + len(share) * ((1 if count < 256 else 2) + row))
                    send(other, rank, len(share) * row)
            continue
        hops: dict[tuple[int, int], np.ndarray] = {}
        for rank, mine in enumerate(asked):
            owner = np.array(piece.ranks)[part_of(torch.from_numpy(mine), len(piece.ranks), False)]
            for other in piece.ranks:
                hops[rank, other] = mine[owner == other]
        if not two_hops:
            for (rank, other), found in hops.items():
                send(rank, other, len(found) * (ID + row))
                send(other, rank, len(found) * row)
            continue
        for node in range(nodes):
            for other in piece.ranks:
                lane = node * size + other % size
                parts = [hops[rank, other] for rank in range(node * size, (node + 1) * size)]
                for rank, found in zip(range(node * size, (node + 1) * size), parts):
                    send(rank, lane, len(found) * (ID + row))
                    send(lane, rank, len(found) * row)
                once = np.unique(np.concatenate(parts))
                send(lane, other, len(once) * (ID + row))
                send(other, lane, len(once) * row)
    return sent


CASES = [(kind, False) for kind in KINDS] + [(kind, True) for kind in KINDS if kind != "data_parallel"]


@pytest.mark.parametrize(("nodes", "size", "two_hops"), [(1, 2, True), (1, 3, True), (2, 2, True), (2, 2, False)])
@pytest.mark.parametrize(("kind", "sums"), CASES)
def test_bytes_on_the_links(kind: Kind, sums: bool, nodes: int, size: int, two_hops: bool) -> None:
    """In all, and of every rank; only which ids share a rank is left to chance, so many batches come near the model."""
    batches = [sample(seed) for seed in range(40)]
    load = load_of(np.concatenate(batches))
    setting = Setting(topology=machines(nodes, size), batch_size=BATCH, unique="node" if two_hops else "rank")
    placed = place(kind, load.table, nodes * size, size, first=1, sums=sums)
    cost = Pricer(setting).price(load, placed)
    model = np.stack([
        cost[Part.ROWS_SENT_INSIDE] + cost[Part.BACK_SENT_INSIDE],
        cost[Part.ROWS_SENT_ACROSS] + cost[Part.BACK_SENT_ACROSS],
    ])  # fmt: skip
    counted = np.mean([moved(ids, placed, nodes, size, setting.two_hops) for ids in batches], axis=0)
    np.testing.assert_allclose(model.sum(1), counted.sum(1), rtol=0.05)
    np.testing.assert_allclose(model, counted, rtol=0.12, atol=0.02 * counted.max())


@pytest.mark.parametrize(("kind", "sums"), CASES)
def test_what_one_sends_another_receives(kind: Kind, sums: bool) -> None:
    load = load_of(sample(), optimizer=RowWiseAdagrad())
    cost = Pricer(Setting(topology=machines(2, 2), batch_size=BATCH)).price(
        load, place(kind, load.table, 4, 2, sums=sums)
    )
    for part in (Part.ROWS_SENT_INSIDE, Part.ROWS_SENT_ACROSS, Part.BACK_SENT_INSIDE, Part.BACK_SENT_ACROSS):
        assert cost[part].sum() == pytest.approx(cost[part + 1].sum())
    assert (cost >= 0).all() and (cost[SECONDS].sum(0) > 0).all() and (cost[MEMORY].sum(0) > 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", [SGD(), RowWiseAdagrad(), Adam()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_table_memory_is_what_shards_hold(kind: Kind, optimizer: object, dtype: torch.dtype) -> None:
    load = load_of(sample(), optimizer=optimizer, dtype=dtype)
    placed = place(kind, load.table, 4, 2)
    cost = Pricer(Setting(topology=machines(2, 2), batch_size=BATCH)).price(load, placed)
    held = np.zeros(4)
    for shard in placed.shards("t"):
        storage = make_shard(
            load.table, shard.first, shard.last, shard.part, shard.parts, load.optimizer, 0, backend(), torch.device("cpu")
        )  # fmt: skip
        held[shard.rank] += sum(storage.memory().values())
    model = cost[Part.WEIGHTS : Part.DIRECTORY + 1].sum(0)
    np.testing.assert_allclose(model, held, atol=4 * (DIM * 4 * 3))


def test_a_directory_is_counted_with_the_one_it_grew_from() -> None:
    ids = sample()
    load = load_of(ids, rows=None)
    cost = Pricer(Setting(topology=machines(), batch_size=BATCH)).price(load, place("table_wise", load.table, 2))
    storage = make_shard(load.table, 0, DIM, 0, 1, load.optimizer, 0, backend(), torch.device("cpu"))
    storage.locate(torch.from_numpy(np.unique(ids)), True)
    assert cost[Part.DIRECTORY, 0] == 1.5 * storage.memory()["directory"]


def test_codecs_shrink_rows_and_gradients_apart() -> None:
    load = load_of(sample(), None)
    placed = place("row_wise", load.table, 2)

    def sent(**codecs: str) -> tuple[float, float]:
        cost = Pricer(Setting(topology=machines(), batch_size=BATCH, **codecs)).price(load, placed)  # type: ignore[arg-type]
        return float(cost[Part.ROWS_SENT_INSIDE, 0]), float(cost[Part.BACK_SENT_INSIDE, 0])

    plain, rows, back = sent(), sent(forward="fp16"), sent(backward="int8")
    assert rows[0] == plain[0] / 2 and rows[1] == plain[1]
    assert back[0] == plain[0] and back[1] < plain[1] / 2
    assert [row_bytes(16, codec) for codec in ("fp32", "fp16", "bf16", "int8")] == [64, 32, 32, 20]


def test_column_pieces_of_row_wise_optimizers_are_dearer() -> None:
    def seconds(optimizer: object) -> float:
        load = load_of(sample(), optimizer=optimizer)
        pricer = Pricer(Setting(topology=machines(), batch_size=BATCH))
        return float(pricer.seconds(pricer.price(load, place("column_wise", load.table, 2))).max())

    assert seconds(RowWiseAdagrad()) > 1.2 * seconds(SGD())


def test_many_tables_are_priced_as_each_alone() -> None:
    loads = [load_of(sample(seed), optimizer=RowWiseAdagrad()) for seed in range(5)]
    pricer = Pricer(Setting(topology=machines(2, 2), batch_size=BATCH))
    for kind, sums in CASES:
        placed = place(kind, loads[0].table, 4, 2, sums=sums)
        together = pricer.price_many(pricer.numbers(loads), len(loads), placed)
        for k, load in enumerate(loads):
            np.testing.assert_allclose(together[:, k], pricer.price(load, placed))


def test_ids_are_priced_as_they_travel() -> None:
    """As long as the largest of the table, 8 bytes where they may be anything, more where it is told how often they were read."""

    def each(**table: object) -> float:
        load = load_of(sample(), None, **table)
        cost = Pricer(Setting(topology=machines(), batch_size=BATCH)).price(load, place("row_wise", load.table, 2))
        return float(cost[Part.BACK_SENT_INSIDE, 0] / cost[Part.ROWS_SENT_INSIDE, 0]) * 4 * DIM - 4 * DIM

    assert each() == pytest.approx(ID)
    assert each(rows=2**24) == pytest.approx(3) and each(rows=2**24 + 1) == pytest.approx(4)
    assert each(rows=None) == pytest.approx(8) and each(rows=None, admit_after=2) == pytest.approx(10)
