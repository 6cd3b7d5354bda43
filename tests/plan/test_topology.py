"""Topologies: what a file means, what is said about one that is wrong, and what this machine has."""

from pathlib import Path

import pytest
import torch

from unequal.errors import UserError
from unequal.plan import topology as module
from unequal.plan.topology import COMPUTE, LINKS, Topology, machine_memory

GOOD = """
nodes = 2
ranks_per_node = 4
device = "cuda"
memory_per_rank = "24 GB"
[across]
bytes_per_second = "12.5 GB/s"
[measured]
date = 2026-01-02
spread = { inside = 0.1 }
by = "hand"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "machines.toml"
    path.write_text(GOOD)
    return path


def test_a_file_says_what_it_knows_and_the_class_the_rest(file: Path) -> None:
    topology = Topology.load(file)
    assert (topology.nodes, topology.ranks_per_node, topology.world) == (2, 4, 8)
    assert topology.memory_per_rank == 24 * 10**9 and topology.usable_memory == int(24 * 10**9 * 0.9)
    assert topology.across.bytes_per_second == 12.5e9
    assert topology.across.seconds_per_message == LINKS["cuda"]["across"].seconds_per_message
    assert topology.inside == LINKS["cuda"]["inside"] and topology.compute == COMPUTE["cuda"]


def test_what_was_measured_is_kept(file: Path, tmp_path: Path) -> None:
    topology = Topology.load(file)
    assert topology.measured == {"date": "2026-01-02", "spread": {"inside": 0.1}, "by": "hand"}
    copy = tmp_path / "copy.toml"
    topology.save(copy)
    again = Topology.load(copy)
    assert again == topology and again.measured == topology.measured
    assert again.to_toml() == topology.to_toml()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodse = 2", "topology.nodse: expected a field of [topology], got 'nodse'; did you mean 'nodes'?"),
        ("nodes = 0", "topology.nodes: expected 1 or more, got 0"),
        ('device = "gpu"', "topology.device: expected one of cpu, cuda, got 'gpu'"),
        ('memory_per_rank = "24 XB"', "topology.memory_per_rank: expected bytes, as a number or as a text such as"),
        ("reserve = 1.5", "topology.reserve: expected a share from 0 to below 1, got 1.5"),
        ("[inside]\nbytes_per_secnd = 3", "did you mean 'bytes_per_second'?"),
        ("[inside]\nbytes_per_second = 0", "topology.inside.bytes_per_second: expected a number above 0"),
        ("[compute]\nreads = 'fast'", "topology.compute.reads: expected bytes"),
        ("inside = 3", "topology.inside"),
        ("measured = 3", "topology.measured: expected a table [measured], got 3"),
    ],
)
def test_a_mistake_is_answered_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "machines.toml"
    given = "" if text.startswith("memory") else "memory_per_rank = 10\n"
    path.write_text(given + text + "\n")
    with pytest.raises(UserError) as caught:
        Topology.load(path)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_memory_must_be_given_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "machines.toml"
    path.write_text("nodes = 2\n")
    with pytest.raises(UserError, match=r"topology.memory_per_rank: expected an integer, got nothing"):
        Topology.load(path)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the topology"):
        Topology.load(tmp_path / "no.toml")
    (tmp_path / "bad.toml").write_text("nodes 2")
    with pytest.raises(UserError, match="not valid TOML"):
        Topology.load(tmp_path / "bad.toml")


def test_this_machine_is_shared_by_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "machine_memory", lambda: 12 * 10**9)
    here = Topology.here(4, 2)
    assert (here.nodes, here.ranks_per_node, here.memory_per_rank) == (2, 2, 6 * 10**9)
    with pytest.raises(UserError, match="expected a divisor of the 4 ranks"):
        Topology.here(4, 3)


def test_a_gpu_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="give --topology FILE"):
        Topology.here(2, device="cuda")


def test_control_groups_limit_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = machine_memory()
    assert whole > 2**28
    monkeypatch.setattr(module, "_group_limits", lambda: [2**30, 2**62])
    assert machine_memory() == 2**30


def test_the_example_is_valid() -> None:
    example = Path(__file__).parents[2] / "examples" / "topology.toml"
    assert Topology.load(example).world == 128
