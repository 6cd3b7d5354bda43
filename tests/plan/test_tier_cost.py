"""Prices of tables with tiers against what the exchange must move, counted id by id."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from unequal.batch import Batch, Jagged
from unequal.errors import UserError
from unequal.optim import RowWiseAdagrad
from unequal.plan.allocate import counted, row_wise
from unequal.plan.cost import Part, Pricer, Setting
from unequal.plan.memory import MAP_BYTES
from unequal.plan.placement import UNIQUES, Tiers, Unique, part_of, place
from unequal.plan.popularity import Popularity
from unequal.plan.workload import TableLoad, measure
from unequal.storage.copies import Copies
from unequal.tables import Feature, Table

from .cases import machines

DIM, ROWS, BATCH, LENGTH, BATCHES = 16, 700, 64, 5, 60
ID = 2
"""bytes of an id on the wire, and of the number of a row with copies"""
Array = np.ndarray[Any, Any]
Send = Callable[[int, int, float], None]


def sample(seed: int) -> Array:
    """[samples, ids]"""
    return np.minimum(np.random.default_rng(seed).zipf(1.3, (BATCH, LENGTH)) - 1, ROWS - 1).astype(np.int64)


@pytest.fixture(scope="module")
def batches() -> list[Array]:
    return [sample(seed) for seed in range(BATCHES)]


@pytest.fixture(scope="module")
def load(batches: list[Array]) -> TableLoad:
    return load_of(np.concatenate(batches))


def load_of(ids: Array) -> TableLoad:
    lists = Jagged(torch.from_numpy(ids.reshape(-1)), torch.full((len(ids),), LENGTH))
    features = {"f": Feature(Table("t", ROWS, dim=DIM), None)}
    found = measure(features, RowWiseAdagrad(), [Batch.from_jagged({"f": lists})])["t"]
    counts = np.sort(np.bincount(ids.reshape(-1), minlength=ROWS))[::-1] / len(ids)
    return TableLoad(
        table=found.table, optimizer=found.optimizer, features=found.features, distinct=found.distinct, rows=ROWS,
        popularity=Popularity(np.ones(ROWS), counts),
    )  # fmt: skip


def most_read(batches: list[Array]) -> Array:
    counts = np.bincount(np.concatenate(batches).reshape(-1), minlength=ROWS)
    return np.lexsort((np.arange(ROWS), -counts))


def moved(ids: Array, tiers: Tiers, nodes: int, size: int, unique: Unique, codecs: tuple[int, int]) -> Array:
    """[2, ranks]: bytes that every rank sends inside its node and across, counted one message at a time."""
    world, (forward, backward) = nodes * size, codecs
    sent = np.zeros((2, world))

    def send(source: int, target: int, amount: float) -> None:
        if source != target:
            sent[int(source // size != target // size), source] += amount

    shares = np.array_split(ids, world)
    everyone = np.concatenate([tiers.replicated, tiers.node])
    owner_of = part_of(torch.arange(ROWS), world, False).numpy()
    for rank, share in enumerate(shares):
        rest = share[~np.isin(share, everyone)]
        rest = np.unique(rest) if unique != "none" else rest.reshape(-1)
        if unique == "node" and nodes > 1:
            continue
        for other in range(world):
            asked = int((owner_of[rest] == other).sum())
            send(rank, other, asked * (ID + backward))
            send(other, rank, asked * forward)
    through = [(tiers.replicated, 0, 0), (tiers.node, forward, 0)]
    if unique == "node" and nodes > 1:
        through.append((np.setdiff1d(np.arange(ROWS), everyone), forward, forward))
    for rows, inside, across in through:
        _in_two_hops(shares, rows, owner_of, nodes, size, (inside, across, backward), send)
    _push(shares, tiers, owner_of, nodes, size, ID + forward, send)
    return sent


def _in_two_hops(
    shares: list[Array], rows: Array, owner_of: Array, nodes: int, size: int, bytes_: tuple[int, int, int], send: Send
) -> None:
    """Ids and gradients to the lane's rank and on to the owner; rows back, where they are not read where they are."""
    inside, across, backward = bytes_
    for node in range(nodes):
        asked = {
            rank: np.unique(shares[rank][np.isin(shares[rank], rows)]) for rank in range(node * size, (node + 1) * size)
        }
        for owner in range(nodes * size):
            lane = node * size + owner % size
            parts = []
            for rank, ids in asked.items():
                own = ids[owner_of[ids] == owner]
                send(rank, lane, len(own) * (ID + backward))
                send(lane, rank, len(own) * inside)
                parts.append(own)
            once = len(np.unique(np.concatenate(parts)))
            send(lane, owner, once * (ID + backward))
            send(owner, lane, once * across)


def _push(shares: list[Array], tiers: Tiers, owner_of: Array, nodes: int, size: int, row: int, send: Send) -> None:
    """New rows from their owner along the lane, and of replicated ones from there to the others of the node."""
    changed = np.unique(np.concatenate([share.reshape(-1) for share in shares]))
    for rows, everywhere in ((tiers.replicated, True), (tiers.node, False)):
        for id in np.intersect1d(changed, rows):
            owner = int(owner_of[id])
            for node in range(nodes):
                lane = node * size + owner % size
                send(owner, lane, row)
                for rank in range(node * size, (node + 1) * size) if everywhere else ():
                    send(lane, rank, row)


@pytest.mark.parametrize("unique", UNIQUES)
@pytest.mark.parametrize(("nodes", "size"), [(1, 4), (2, 2), (2, 4), (4, 1)])
@pytest.mark.parametrize(("replicated", "node"), [(0, 0), (12, 0), (0, 60), (12, 60), (700, 0), (30, 670)])
def test_bytes_on_the_links(
    load: TableLoad, batches: list[Array], unique: Unique, nodes: int, size: int, replicated: int, node: int
) -> None:
    if nodes == 1 and node:
        replicated, node = replicated + node, 0
    ranked = most_read(batches)
    tiers = Tiers(ranked[:replicated], ranked[replicated : replicated + node])
    setting = Setting(topology=machines(nodes, size), batch_size=BATCH, unique=unique, forward="fp16", backward="int8")
    cost = Pricer(setting).price(load, row_wise(load, setting.topology, tiers))
    codecs = (2 * DIM, DIM + 4)
    found = np.mean([moved(ids, tiers, nodes, size, unique, codecs) for ids in batches], axis=0)
    model = np.stack([
        cost[Part.ROWS_SENT_INSIDE] + cost[Part.BACK_SENT_INSIDE] + cost[Part.PUSH_SENT_INSIDE],
        cost[Part.ROWS_SENT_ACROSS] + cost[Part.BACK_SENT_ACROSS] + cost[Part.PUSH_SENT_ACROSS],
    ])  # fmt: skip
    np.testing.assert_allclose(model.sum(1), found.sum(1), rtol=0.03)
    for part in (Part.ROWS_SENT_INSIDE, Part.BACK_SENT_INSIDE, Part.PUSH_SENT_INSIDE, Part.PUSH_SENT_ACROSS):
        assert cost[part].sum() == pytest.approx(cost[part + 1].sum())


@pytest.mark.parametrize("unique", UNIQUES)
@pytest.mark.parametrize(("nodes", "size"), [(1, 3), (2, 2), (3, 1), (16, 8)])
def test_without_copies_it_is_a_row_wise_table(load: TableLoad, unique: Unique, nodes: int, size: int) -> None:
    """What a row without copies costs is what the table's rows cost without tiers; only the map and the host's work are more."""
    setting = Setting(topology=machines(nodes, size), batch_size=4096, unique=unique, forward="fp16")
    pricer = Pricer(setting)
    plain = pricer.price(load, place("row_wise", load.table, nodes * size, size))
    tiered = pricer.price(load, row_wise(load, setting.topology, counted(0, 0)))
    for part in Part:
        if part not in (Part.HOST, Part.INDEX):
            np.testing.assert_allclose(tiered[part], plain[part], rtol=1e-9, err_msg=part.name)
    assert (tiered[Part.INDEX] >= plain[Part.INDEX]).all() and (tiered[Part.HOST] > plain[Part.HOST]).all()
    assert pricer.messages(tiered) == pricer.messages(plain)


def test_messages_of_copies(load: TableLoad) -> None:
    """Along the lanes, and inside nodes where every rank has copies; beside ids that take one hop, two more."""
    seconds = {}
    for unique in UNIQUES:
        setting = Setting(topology=machines(2, 2), batch_size=BATCH, unique=unique)
        pricer = Pricer(setting)
        for counts in ((0, 0), (0, 9), (9, 0)):
            cost = pricer.price(load, row_wise(load, setting.topology, counted(*counts)))
            seconds[unique, counts] = pricer.messages(cost)
    for unique in UNIQUES:
        assert seconds[unique, (0, 0)] < seconds[unique, (0, 9)] < seconds[unique, (9, 0)]
    more = {unique: seconds[unique, (0, 9)] - seconds[unique, (0, 0)] for unique in UNIQUES}
    assert more["none"] == pytest.approx(more["rank"]) and more["rank"] > 2 * more["node"]


@pytest.mark.parametrize(("replicated", "node"), [(0, 200), (100, 0), (100, 200), (5, 3)])
def test_memory_is_what_copies_hold(load: TableLoad, replicated: int, node: int) -> None:
    from unequal.kernels import backend

    setting = Setting(topology=machines(2, 2), batch_size=BATCH)
    cost = Pricer(setting).price(load, row_wise(load, setting.topology, counted(replicated, node)))
    held = []
    for rank in range(4):
        copies = Copies(
            load.table, torch.arange(replicated), torch.arange(replicated, replicated + node), rank=rank, world=4,
            ranks_per_node=2, kernels=backend(), device=torch.device("cpu"),
        )  # fmt: skip
        held.append(copies.memory())
    mean = np.mean([each["copies"] for each in held])
    model = float(cost[Part.COPIES, 0]) - MAP_BYTES * (replicated + node)
    assert mean == pytest.approx(model, abs=DIM * 4)
    smallest = 64 * 12  # a map begins with so many entries
    assert all(each["directory"] <= MAP_BYTES * (replicated + node) + smallest for each in held)


def test_repeated_ids_travel_as_often_as_they_are_read(load: TableLoad) -> None:
    def sent(unique: Unique) -> float:
        setting = Setting(topology=machines(2, 2), batch_size=BATCH, unique=unique)
        cost = Pricer(setting).price(load, place("row_wise", load.table, 4, 2))
        return float((cost[Part.ROWS_SENT_ACROSS] + cost[Part.BACK_SENT_ACROSS]).sum())

    assert sent("none") == pytest.approx(BATCH * LENGTH / 2 * (ID + 2 * 4 * DIM), rel=1e-6)
    assert sent("none") > sent("rank") > sent("node")


def test_tiers_of_unknown_rows_have_no_price(load: TableLoad) -> None:
    unknown = TableLoad(
        table=load.table, optimizer=load.optimizer, features=load.features, distinct=load.distinct, rows=ROWS
    )
    topology = machines(2, 2)
    with pytest.raises(UserError, match="plan with a profile"):
        Pricer(Setting(topology=topology, batch_size=BATCH)).price(unknown, row_wise(unknown, topology, counted(1, 1)))
