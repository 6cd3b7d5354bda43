"""What ranks say to each other, and the bytes that are counted for it."""

import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist

from unequal.errors import UserError
from unequal.exchange.mesh import Mesh


def describe(mesh):
    return (
        mesh.rank, mesh.world, mesh.ranks_per_node, mesh.node, mesh.local, mesh.nodes,
        mesh.everyone.ranks, mesh.in_node.ranks, mesh.lane.ranks,
    )  # fmt: skip


def places(rank, world):
    return describe(Mesh())


def test_places_on_two_nodes(pool):
    everyone = (0, 1, 2, 3)
    assert pool.run(places, world=4, ranks_per_node=2) == [
        (0, 4, 2, 0, 0, 2, everyone, (0, 1), (0, 2)),
        (1, 4, 2, 0, 1, 2, everyone, (0, 1), (1, 3)),
        (2, 4, 2, 1, 0, 2, everyone, (2, 3), (0, 2)),
        (3, 4, 2, 1, 1, 2, everyone, (2, 3), (1, 3)),
    ]


def test_places_on_one_node(pool):
    for rank, place in enumerate(pool.run(places, world=3)):
        assert place == (rank, 3, 3, 0, rank, 1, (0, 1, 2), (0, 1, 2), (0, 1, 2))


def from_device_mesh(rank, world):
    from torch.distributed.device_mesh import init_device_mesh

    two = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("node", "rank"))
    one = init_device_mesh("cpu", (world,))
    mesh = Mesh(ranks_per_node=2)
    refused = []
    for wrong in (two["rank"], init_device_mesh("cpu", (1, 2, world // 2))):
        try:
            Mesh.of(wrong)
        except UserError as error:
            refused.append(str(error))
    return describe(Mesh.of(two)), describe(mesh), describe(Mesh.of(one)), Mesh.of(mesh) is mesh, refused


def test_a_device_mesh_is_accepted(pool):
    for two, mesh, one, same, refused in pool.run(from_device_mesh, world=4):
        assert two == mesh and same
        assert one[2:6] == (4, 0, one[0], 1)
        assert len(refused) == 2 and all("expected a device mesh over all ranks" in text for text in refused)


def wrong_nodes(rank, world):
    with pytest.raises(UserError, match="a mesh of 3 ranks: expected a divisor as the ranks of a node, got 2"):
        Mesh(ranks_per_node=2)


def test_nodes_of_different_sizes_are_refused(pool):
    pool.run(wrong_nodes, world=3)


def of_some_ranks(rank, world):
    """A job that is a part of the processes."""
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        # Every rank takes part in making the groups of a mesh: everyone, then both nodes, then the lane.
        for ranks in ([1, 3], [1], [3], [1, 3]):
            dist.new_group(ranks)
        return None
    mesh = Mesh(ranks_per_node=1, group=group)
    return describe(mesh), mesh.gather(rank), mesh.sum(torch.tensor([float(rank)])).tolist()


def test_a_group_of_some_ranks(pool):
    results = pool.run(of_some_ranks, world=4)
    assert results[1] == ((0, 2, 1, 0, 0, 2, (0, 1), (0,), (0, 1)), [1, 3], [4.0])
    assert results[3] == ((1, 2, 1, 1, 0, 2, (0, 1), (1,), (0, 1)), [1, 3], [4.0])


def say(rank, world):
    mesh = Mesh()
    value = {"rank": rank, "text": "é" * rank, "list": list(range(rank)), "none": None}
    rows = torch.arange(rank * 3, dtype=torch.float32).view(rank, 3) + 10 * rank
    mesh.barrier()
    return (
        mesh.gather(value),
        mesh.share(value, source=world - 1),
        mesh.share("" if rank else "zero"),
        mesh.gather_tensors(rows),
        mesh.sum(torch.tensor([[0.1, 1e8], [rank, -1e8]]) * (rank + 1)),
        mesh.sum(torch.tensor(rank + 1)),
    )


@pytest.mark.parametrize("world", [1, 2, 4])
def test_gather_share_and_sum(pool, world):
    results = pool.run(say, world=world)
    values = [{"rank": r, "text": "é" * r, "list": list(range(r)), "none": None} for r in range(world)]
    rows = [torch.arange(r * 3, dtype=torch.float32).view(r, 3) + 10 * r for r in range(world)]
    total = sum(range(1, world + 1))
    wanted = torch.tensor([[0.1 * total, 1e8 * total], [sum(r * (r + 1) for r in range(world)), -1e8 * total]])
    for gathered, shared, zero, tensors, sums, whole in results:
        assert gathered == values and shared == values[-1] and zero == "zero"
        assert all(torch.equal(a, b) for a, b in zip(tensors, rows)) and len(tensors) == world
        torch.testing.assert_close(sums, wanted)
        assert torch.equal(sums, results[0][4]), "the sum must have the same bits on every rank"
        assert int(whole) == total


def exchange(rank, world, counts):
    """Row k of what rank a sends to rank b is (a, b, k)."""
    mesh = Mesh()
    before = mesh.traffic.copy()
    sent, received = np.array(counts[rank]), np.array([row[rank] for row in counts])
    told = mesh.everyone.all_to_all_counts(np.stack([sent, sent * 10], 1))
    assert told.tolist() == np.stack([received, received * 10], 1).tolist()
    after_counts = mesh.traffic.copy()
    rows = [(rank, other, k) for other in range(world) for k in range(sent[other])]
    values = torch.tensor(rows, dtype=torch.int32).view(-1, 3)
    came = mesh.everyone.all_to_all(values, sent, received)
    wide = mesh.everyone.all_to_all(values[:, 0].contiguous().to(torch.bfloat16), sent, received)
    expected = [(other, rank, k) for other in range(world) for k in range(received[other])]
    assert came.tolist() == [list(row) for row in expected] and came.dtype == torch.int32
    assert wide.tolist() == [row[0] for row in expected] and wide.dtype == torch.bfloat16
    spent, told = mesh.traffic.since(after_counts), after_counts.since(before)
    assert mesh.traffic.seconds > 0 or world == 1
    return (told.inside, told.across, told.calls), (spent.inside, spent.across, spent.calls)


UNEVEN = [[3, 0, 2, 5], [1, 1, 0, 0], [0, 7, 4, 2], [6, 0, 0, 0]]
SILENT = [[0, 0, 0, 0], [2, 0, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0]]
NOTHING = [[0] * 4] * 4


@pytest.mark.parametrize("counts", [UNEVEN, SILENT, NOTHING], ids=["uneven", "one_sends", "nothing"])
def test_all_to_all_and_its_bytes_on_two_nodes(pool, counts):
    results = pool.run(exchange, counts, world=4, ranks_per_node=2)
    for rank, (told, spent) in enumerate(results):
        neighbour, far = rank ^ 1, [other for other in range(4) if other // 2 != rank // 2]
        inside, across = counts[rank][neighbour], sum(counts[rank][other] for other in far)
        assert told == (2 * 8, 2 * 2 * 8, 1), "two int64 for every other rank"
        assert spent == (inside * (3 * 4 + 2), across * (3 * 4 + 2), 2)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_to_all_and_its_bytes_on_one_node(pool, world):
    counts = [row[:world] for row in UNEVEN[:world]]
    for rank, (told, spent) in enumerate(pool.run(exchange, counts, world=world)):
        others = sum(counts[rank]) - counts[rank][rank]
        calls = 0 if world == 1 else 1
        assert told == ((world - 1) * 16, 0, calls) and spent == (others * 14, 0, 2 * calls)


def exchange_on_links(rank, world):
    mesh = Mesh()
    ids = torch.tensor([100 * rank + other for other in mesh.in_node.ranks])
    one = np.ones(2, np.int64)
    inside = mesh.in_node.all_to_all(ids, one, one).tolist()
    first = (mesh.traffic.inside, mesh.traffic.across, mesh.traffic.calls)
    ids = torch.tensor([100 * rank + other for other in mesh.lane.ranks])
    across = mesh.lane.all_to_all(ids, one, one).tolist()
    return inside, first, across, (mesh.traffic.inside, mesh.traffic.across, mesh.traffic.calls)


def test_links_inside_and_across_nodes(pool):
    results = pool.run(exchange_on_links, world=4, ranks_per_node=2)
    for rank, (inside, first, across, second) in enumerate(results):
        node, lane = rank // 2 * 2, rank % 2
        assert inside == [100 * node + rank, 100 * (node + 1) + rank] and first == (8, 0, 1)
        assert across == [100 * lane + rank, 100 * (lane + 2) + rank] and second == (8, 8, 2)


def test_without_torch_distributed_it_is_one_rank_alone():
    mesh = Mesh()
    assert describe(mesh) == (0, 1, 1, 0, 0, 1, (0,), (0,), (0,))
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    two = np.array([2])
    assert torch.equal(mesh.everyone.all_to_all(values, two, two), values)
    assert mesh.everyone.all_to_all_counts(np.array([[4, 5]])).tolist() == [[4, 5]]
    assert mesh.gather({"a": 1}) == [{"a": 1}] and mesh.share(3) == 3 and torch.equal(mesh.sum(values), values)
    mesh.barrier()
    assert (mesh.traffic.inside, mesh.traffic.across, mesh.traffic.calls) == (0, 0, 0)


THREADS = """
import atexit, pathlib, sys

def names():
    found = [(task / "comm").read_text().strip() for task in pathlib.Path("/proc/self/task").iterdir()]
    print(sum("gloo" in name for name in found))

atexit.register(names)  # runs after what is registered later
import torch.distributed as dist
from unequal.exchange.mesh import Mesh

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
mesh = Mesh()
names()
dist.destroy_process_group()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks for threads in /proc")
def test_groups_have_no_threads_once_the_interpreter_closes(tmp_path):
    """One that wants the interpreter's lock then would abort the process."""
    done = subprocess.run(
        [sys.executable, "-c", THREADS, str(tmp_path / "store")],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    before, after = map(int, done.stdout.split())
    assert before > 0 and after == 0
