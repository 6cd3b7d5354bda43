"""The test cluster: counters tell the truth, links are as fast as they should be, and nothing stays behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks import cluster as clusters
from benchmarks.cluster import Cluster, ClusterError

from unequal.plan.topology import Topology

PROBLEM = clusters.missing()
needs_namespaces = pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))
SCRIPT = Path(clusters.__file__)
PATIENCE = 60
pytestmark = pytest.mark.alone

# Every rank listens; the ranks named in SENDERS send so many bytes to the rank RECEIVER, and print how long that took.
TRANSFER = """
import os, socket, sys, time
rank, size, receiver = int(os.environ["RANK"]), int(sys.argv[1]), int(sys.argv[2])
senders = [int(part) for part in sys.argv[3].split(",")]
address = os.environ["MASTER_ADDR"].rpartition(".")[0] + "." + str(receiver // int(os.environ["LOCAL_WORLD_SIZE"]) + 1)
if rank == receiver:
    server = socket.create_server((address, 29400))
    lines = [server.accept()[0] for _ in senders]
    begun, got = time.monotonic(), 0
    for line in lines:
        while part := line.recv(1 << 20):
            got += len(part)
    assert got == size * len(senders)
    print(time.monotonic() - begun)
elif rank in senders:
    for _ in range(500):
        try:
            line = socket.create_connection((address, 29400))
            break
        except OSError:
            time.sleep(0.01)
    line.sendall(bytes(size))
    line.close()
"""


def transfer(cluster: Cluster, size: int, receiver: int, *senders: int) -> tuple[clusters.Result, float]:
    """Sends, and gives the seconds that the receiver took."""
    names = ",".join(map(str, senders))
    result = cluster.run([sys.executable, "-c", TRANSFER, str(size), str(receiver), names], timeout=PATIENCE)
    return result, float(result.outputs[receiver])


def namespaces(of: int | None = None) -> list[str]:
    whose = "" if of is None else f"{of}-"
    return [path.name for path in clusters.NAMESPACES.glob(f"{clusters.PREFIX}-{whose}*")]


def mine() -> list[str]:
    return namespaces(os.getpid())


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_for(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)


@needs_namespaces
def test_counters_say_what_crossed_the_links() -> None:
    size = 20_000_000
    with Cluster(2, 2) as cluster:
        result, _ = transfer(cluster, size, 2, 0, 1)
        assert result.links[0].sent == pytest.approx(2 * size, rel=0.03) and result.links[0].sent > 2 * size
        assert result.links[1].received == pytest.approx(result.links[0].sent, abs=2000)
        assert result.links[1].sent < 0.03 * size and result.links[0].received < 0.03 * size
        result, _ = transfer(cluster, size, 1, 0)
        assert all(link.sent + link.received < 1000 for link in result.links), "ranks of a node use its loopback"
    assert mine() == []


@needs_namespaces
def test_links_are_shaped_in_both_directions() -> None:
    size, mbit = 5_000_000, 80.0
    expected = size * 8 / (mbit * 1e6)
    with Cluster(3, 1, mbit) as cluster:
        for receiver, sender in ((1, 0), (0, 1)):
            assert 0.9 * expected < transfer(cluster, size, receiver, sender)[1] < 1.4 * expected
        # What two nodes send arrives over the link of one.
        assert 1.8 * expected < transfer(cluster, size, 0, 1, 2)[1] < 2.8 * expected
    with Cluster(2, 1) as cluster:
        assert transfer(cluster, size, 1, 0)[1] < 0.5 * expected


@needs_namespaces
def test_ranks_have_torchruns_environment() -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "OWN"]
    with Cluster(2, 2) as cluster:
        result = cluster.run(["sh", "-c", "echo " + " ".join(f"${name}" for name in names)], {"OWN": "x"}, PATIENCE)
        ports = {cluster.run(["sh", "-c", "echo $MASTER_PORT"], timeout=PATIENCE).outputs[0] for _ in range(2)}
    assert [line.split() for line in result.outputs] == [
        [str(rank), "4", str(rank % 2), "2", str(rank // 2), "10.88.0.1", "x"] for rank in range(4)
    ]
    assert len(ports) == 2, "a job does not meet the one before it"


@needs_namespaces
def test_gloo_meets_over_the_links_and_steps_can_be_counted_from_inside(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(SCRIPT.parents[1])!r})\n"
        "import torch, torch.distributed as dist\n"
        "from benchmarks.cluster import link_bytes\n"
        "dist.init_process_group('gloo')\n"
        "values, out = torch.ones(4_000_000), torch.empty(4_000_000)\n"
        "dist.all_to_all_single(out, values)\n"
        "sent = []\n"
        # A machine that was busy acknowledges late, and TCP sends again: the least of several is what there is to send.
        "for _ in range(4):\n"
        "    dist.barrier(); before = link_bytes(); dist.barrier()\n"
        "    dist.all_to_all_single(out, values)\n"
        "    dist.barrier(); sent.append(link_bytes().since(before).sent)\n"
        "print(min(sent))\n"
        "dist.destroy_process_group()\n"
    )
    with Cluster(2, 1) as cluster:
        result = cluster.run([sys.executable, str(script)], timeout=PATIENCE)
    for sent in result.outputs:
        assert float(sent) == pytest.approx(4 * 2_000_000, rel=0.03)


@needs_namespaces
def test_calibration_finds_the_speed_of_shaped_links(tmp_path: Path) -> None:
    file, mbit = tmp_path / "topology.toml", 200.0
    command = [sys.executable, "-m", "unequal", "calibrate", "--out", str(file), "--seconds", "6", "--device", "cpu"]
    with Cluster(2, 2, mbit) as cluster:
        cluster.run(command, timeout=PATIENCE)
    found = Topology.load(file)
    assert (found.nodes, found.ranks_per_node) == (2, 2) and not found.measured["assumed"]
    # Two ranks share a link. Gloo does not fill both of its directions all the time; small messages pass in a burst.
    assert 0.4 < found.across.bytes_per_second / (mbit * 1e6 / 8 / 2) < 1.2
    assert found.inside.bytes_per_second > 2 * found.across.bytes_per_second


@needs_namespaces
def test_the_first_failure_ends_all_ranks_and_their_children(tmp_path: Path) -> None:
    program = (
        "if [ $RANK = 2 ]; then sleep 0.5; echo 'what went wrong' >&2; exit 7; fi; "
        f"sleep 1000 & echo $$ $! > {tmp_path}/$RANK; wait"
    )
    with Cluster(2, 2) as cluster:
        begun = time.monotonic()
        with pytest.raises(ClusterError, match=r"rank 2 ended with exit code 7:\nwhat went wrong") as raised:
            cluster.run(["sh", "-c", program], timeout=PATIENCE)
        assert time.monotonic() - begun < 10 and raised.value.code == 7
        pids = [int(pid) for file in tmp_path.iterdir() for pid in file.read_text().split()]
        assert len(pids) == 6 and all(map(gone, pids))
        assert cluster.run(["true"], timeout=PATIENCE).outputs == [""] * 4, "the cluster can be used again"


@needs_namespaces
def test_a_rank_that_hangs_is_ended() -> None:
    with Cluster(2, 1) as cluster, pytest.raises(ClusterError, match=r"not done within 0\.5 s: rank 1"):
        cluster.run(["sh", "-c", "[ $RANK = 0 ] || exec sleep 1000"], timeout=0.5)
    assert mine() == []


@needs_namespaces
def test_an_error_in_the_middle_leaves_nothing() -> None:
    with pytest.raises(KeyError), Cluster(2, 1, 100.0):
        assert len(mine()) == 3
        raise KeyError("a fault")
    assert mine() == []


def started(tmp_path: Path) -> tuple[subprocess.Popen, list[int]]:
    """The command line with ranks that never end, and their numbers."""
    program = [sys.executable, str(SCRIPT), "--ranks", "2", "--", "sh", "-c", f"echo $$ > {tmp_path}/$RANK; sleep 1000"]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: len([file for file in tmp_path.iterdir() if file.read_text().strip()]) == 4)
    return process, [int(file.read_text()) for file in tmp_path.iterdir()]


@needs_namespaces
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_end_of_the_command_is_the_end_of_everything(tmp_path: Path, how: signal.Signals) -> None:
    process, ranks = started(tmp_path)
    assert len(namespaces(process.pid)) == 3
    process.send_signal(how)
    _, said = process.communicate(timeout=20)
    wait_for(lambda: namespaces(process.pid) == [] and all(map(gone, ranks)))
    if how == signal.SIGINT:
        assert process.returncode == 130 and said == "interrupted\n"


@needs_namespaces
def test_what_a_killed_keeper_left_is_removed_at_the_next_start(tmp_path: Path) -> None:
    process, ranks = started(tmp_path)
    below = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    keeper = next(
        int(pid) for pid in below if int(pid) not in ranks and b"keeper" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    for pid in (keeper, process.pid):
        os.kill(pid, signal.SIGKILL)
    process.wait(timeout=20)
    assert len(namespaces(process.pid)) == 3 and not any(map(gone, ranks))
    with Cluster(1, 1):
        assert namespaces(process.pid) == []
        wait_for(lambda: all(map(gone, ranks)))
    process.communicate(timeout=20)


@needs_namespaces
def test_the_command_line_shows_and_writes_the_counters(tmp_path: Path) -> None:
    file = tmp_path / "links.json"
    program = [sys.executable, str(SCRIPT), "--nodes", "2", "--ranks", "1", "--mbit", "0", "--json", str(file)]
    done = subprocess.run(
        [*program, "--", "sh", "-c", "echo rank $RANK"], capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stdout) == (0, "rank 0\n")
    assert "2 nodes × 1 ranks, links unshaped" in done.stderr
    written = json.loads(file.read_text())
    assert (written["nodes"], written["ranks"], written["mbit"]) == (2, 1, 0) and len(written["links"]) == 2
    failed = subprocess.run(
        [*program, "--", "sh", "-c", "exit $((3 * RANK))"], capture_output=True, text=True, timeout=PATIENCE
    )
    assert failed.returncode == 3 and failed.stderr == "error: rank 1 ended with exit code 3\n"


def test_what_is_missing_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("ip", "tc"):
        (tmp_path / name).write_text("#!/bin/sh\necho 'mount failed: not permitted' >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert clusters.missing() == "a cluster of network namespaces: expected root, got user 1000; start it as root"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert "expected the right to make one, got: mount failed: not permitted; a container needs" in str(
        clusters.missing()
    )
    (tmp_path / "tc").unlink()
    with (
        pytest.raises(ClusterError, match="expected the commands ip and tc, tc not found; install iproute2"),
        Cluster(1, 1),
    ):
        pass
    assert shutil.which("ip") is not None


@pytest.mark.parametrize(("nodes", "ranks", "mbit"), [(0, 1, 0), (251, 1, 0), (1, 0, 0), (1, 1, -1)])
def test_impossible_clusters_are_refused(nodes: int, ranks: int, mbit: float) -> None:
    with pytest.raises(ClusterError, match="expected 1 to 250 nodes, 1 or more ranks and 0 or more Mbit/s"):
        Cluster(nodes, ranks, mbit)
