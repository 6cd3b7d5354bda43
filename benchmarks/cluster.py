"""A small cluster on one machine: network namespaces as nodes, veth pairs to a bridge as their links.

    python benchmarks/cluster.py --nodes 2 --ranks 4 --mbit 400 -- COMMAND …

runs the command once per rank, with torchrun's environment. The first rank's output is shown, then, on stderr, a table of the
links. Ranks of a node talk over its loopback; between nodes everything crosses the nodes' links, which are shaped in both
directions, and whose byte counters say what the wire carried. The bridge has a namespace of its own: the host's network is not
touched. Needs root and iproute2, and nothing but Python's own library.

Nothing stays behind. A keeper, a process in a session of its own, waits for the end of this one, however it comes, kills what
still runs in the namespaces and removes them. Should the keeper be killed as well, the next start removes what is left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

PREFIX = "unequal-cluster"
NETWORK = "10.88.0"
LINK = "eth0"
MOST_NODES = 250
FIRST_PORT = 29500
PAUSE = 0.05
"""seconds between two looks at the ranks"""
END_SECONDS = 30.0
NAMESPACES = Path("/run/netns")
BURST, BURST_SECONDS, QUEUE = 128 * 1024, 0.001, "200ms"
"""What a shaped link lets through at once: at least the largest packet of 64 KiB, and a millisecond's worth on fast links.
What waits longer than the queue is dropped, and TCP sends it again."""
CONGESTION_CONTROL = "echo reno > /proc/sys/net/ipv4/tcp_congestion_control"
"""In every kernel, so that machines with other defaults measure alike. It does not pace: packets are as large as they can be."""
TAIL = 4000

# Kills and removes until the namespaces are gone. The first line of its input never comes: reading ends when the writer is gone.
KEEPER = f"""
read -r _
for name in "$@"; do
  [ -e {NAMESPACES}/"$name" ] || continue
  ip netns pids "$name" | xargs -r kill -9
done
for name in "$@"; do
  [ -e {NAMESPACES}/"$name" ] || continue
  ip netns pids "$name" | xargs -r kill -9
  ip netns del "$name"
done
"""


class ClusterError(Exception):
    """A cluster that cannot be made, or a command that failed on it."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code
        """exit code of the rank that failed"""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkBytes:
    """What crossed the link of a node, with all headers of the packets that were handed to it (up to 64 KiB of payload each)."""

    sent: int
    received: int

    def since(self, before: LinkBytes) -> LinkBytes:
        return LinkBytes(sent=self.sent - before.sent, received=self.received - before.received)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    links: list[LinkBytes]
    """of each node, while the command ran"""
    outputs: list[str]
    """of each rank, in order; empty for a rank whose output was shown"""
    errors: list[str]
    seconds: float


def link_bytes() -> LinkBytes:
    """Inside a rank: the counters of its node's link so far. To be read where no rank sends: between two barriers."""
    folder = Path("/sys/class/net") / os.environ["GLOO_SOCKET_IFNAME"] / "statistics"
    sent, received = (int((folder / name).read_text()) for name in ("tx_bytes", "rx_bytes"))
    return LinkBytes(sent=sent, received=received)


def missing() -> str | None:
    """Why there can be no cluster here, in one line; None where there can."""
    absent = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if absent:
        names = " and ".join(absent)
        return f"a cluster of network namespaces: expected the commands ip and tc, {names} not found; install iproute2"
    if os.geteuid() != 0:
        return f"a cluster of network namespaces: expected root, got user {os.geteuid()}; start it as root"
    name = f"{PREFIX}-{_identity(os.getpid())}-try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    if tried.returncode:
        return (
            f"a cluster of network namespaces: expected the right to make one, got: {_one_line(tried.stderr)}; "
            "a container needs the capabilities SYS_ADMIN and NET_ADMIN"
        )
    return None


class Cluster:
    """`nodes` of `ranks` each, as a context. Links of `mbit` Mbit/s in both directions; 0: as fast as the machine is."""

    def __init__(self, nodes: int, ranks: int, mbit: float = 0.0) -> None:
        if not 1 <= nodes <= MOST_NODES or ranks < 1 or mbit < 0:
            raise ClusterError(
                f"expected 1 to {MOST_NODES} nodes, 1 or more ranks and 0 or more Mbit/s, got {nodes}, {ranks} and {mbit:g}"
            )
        self.nodes, self.ranks, self.mbit = nodes, ranks, mbit
        base = f"{PREFIX}-{_identity(os.getpid())}-{os.urandom(2).hex()}"
        self._switch = f"{base}-switch"
        self._names = [f"{base}-{node}" for node in range(nodes)]
        self._keeper: subprocess.Popen[bytes] | None = None
        self._runs = 0

    @property
    def world(self) -> int:
        return self.nodes * self.ranks

    def __enter__(self) -> Cluster:
        problem = missing()
        if problem is not None:
            raise ClusterError(problem)
        remove_stale()
        self._keeper = subprocess.Popen(
            ["sh", "-c", KEEPER, "keeper", *self._names, self._switch],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends what runs and removes the namespaces: by letting the keeper know, as at any other end."""
        if self._keeper is not None and self._keeper.stdin is not None:
            self._keeper.stdin.close()
            self._keeper.wait()
            self._keeper = None

    def _build(self) -> None:
        switch = self._switch
        _call("ip", "netns", "add", switch)
        _call("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _call("ip", "-n", switch, "link", "set", "bridge", "up")
        for node, name in enumerate(self._names):
            port = f"port{node}"
            _call("ip", "netns", "add", name)
            _call("ip", "link", "add", LINK, "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
            for place, device in ((name, LINK), (switch, port)):  # IPv6 would talk to itself over the counted links
                _call("ip", "-n", place, "link", "set", device, "addrgenmode", "none")
            _call("ip", "-n", name, "addr", "add", f"{self.address(node)}/24", "dev", LINK)
            _call("ip", "-n", switch, "link", "set", port, "master", "bridge")
            for place, device in ((name, "lo"), (name, LINK), (switch, port)):
                _call("ip", "-n", place, "link", "set", device, "up")
            _call("ip", "netns", "exec", name, "sh", "-c", CONGESTION_CONTROL)
            if self.mbit:
                self._shape(name, LINK)
                self._shape(switch, port)

    def _shape(self, namespace: str, device: str) -> None:
        burst = max(BURST, int(self.mbit * 1e6 / 8 * BURST_SECONDS))
        _call(
            *("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf"),
            *("rate", f"{round(self.mbit * 1e6)}bit", "burst", str(burst), "latency", QUEUE),
        )

    def address(self, node: int) -> str:
        return f"{NETWORK}.{node + 1}"

    def counters(self) -> list[LinkBytes]:
        """Of every node's link, since the cluster was made."""
        found = []
        for name in self._names:
            shown = json.loads(_call("ip", "-n", name, "-s", "-j", "link", "show", "dev", LINK))
            statistics = shown[0]["stats64"]
            found.append(LinkBytes(sent=statistics["tx"]["bytes"], received=statistics["rx"]["bytes"]))
        return found

    def environment(self, rank: int) -> dict[str, str]:
        """What torchrun would set for this rank, and the interface that gloo is to use."""
        node, local = divmod(rank, self.ranks)
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "GROUP_RANK": str(node),
            "GROUP_WORLD_SIZE": str(self.nodes),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(FIRST_PORT + self._runs % 1000),
            "GLOO_SOCKET_IFNAME": LINK,
        }

    def run(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        timeout: float = 300.0,
        *,
        show: bool = False,
    ) -> Result:
        """The command on every rank. When one fails, or time is up, all are killed and a ClusterError says which and why.
        `show`: the first rank's output goes where ours goes."""
        if self._keeper is None:
            raise ClusterError("expected a cluster inside its context, got one that is closed; use `with Cluster(…)`")
        self._runs += 1
        outputs = [(tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")) for _ in range(self.world)]  # noqa: SIM115
        processes: list[subprocess.Popen[str]] = []
        before, begun = self.counters(), time.monotonic()
        try:
            for rank in range(self.world):
                shown = show and rank == 0
                processes.append(
                    subprocess.Popen(
                        ["ip", "netns", "exec", self._names[rank // self.ranks], *command],
                        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {}), **self.environment(rank)},
                        stdin=subprocess.DEVNULL,
                        stdout=None if shown else outputs[rank][0],
                        stderr=None if shown else outputs[rank][1],
                        text=True,
                    )
                )
            self._watch(processes, begun + timeout, timeout, outputs)
            seconds = time.monotonic() - begun
            return Result(
                links=[after.since(first) for after, first in zip(self.counters(), before)],
                outputs=[_text(out) for out, _ in outputs],
                errors=[_text(error) for _, error in outputs],
                seconds=seconds,
            )
        finally:
            self._end(processes)
            for pair in outputs:
                for file in pair:
                    file.close()

    def _watch(
        self, processes: list[subprocess.Popen[str]], end: float, timeout: float, outputs: list[tuple[IO[str], IO[str]]]
    ) -> None:
        while True:
            codes = [process.poll() for process in processes]
            for rank, code in enumerate(codes):
                if code:
                    raise ClusterError(_failure(rank, code, outputs[rank]), code if code > 0 else 128 - code)
            if all(code == 0 for code in codes):
                return
            if time.monotonic() > end:
                left = ", ".join(str(rank) for rank, code in enumerate(codes) if code is None)
                raise ClusterError(f"not done within {timeout:g} s: rank {left}", 124)
            time.sleep(PAUSE)

    def _end(self, processes: list[subprocess.Popen[str]]) -> None:
        """Whatever still runs in the namespaces, children of ranks too, and what they start meanwhile."""
        end = time.monotonic() + END_SECONDS
        while pids := {*(process.pid for process in processes if process.poll() is None), *self._pids()}:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > end:
                raise ClusterError(f"processes {sorted(pids)} do not end though they were killed")
            time.sleep(PAUSE / 10)

    def _pids(self) -> list[int]:
        return [int(pid) for name in self._names for pid in _call("ip", "netns", "pids", name).split()]


def remove_stale() -> None:
    """Namespaces of processes that are gone, and what runs in them. Only a killed keeper leaves any."""
    if not NAMESPACES.is_dir():
        return
    for path in NAMESPACES.glob(f"{PREFIX}-*"):
        pid, started = path.name.removeprefix(f"{PREFIX}-").split("-")[:2]
        if _identity(int(pid)) != f"{pid}-{started}":
            done = subprocess.run(
                ["sh", "-c", KEEPER, "keeper", path.name], stdin=subprocess.DEVNULL, capture_output=True, text=True
            )
            if path.exists():
                raise ClusterError(f"cannot remove the old namespace {path.name}: {_one_line(done.stderr)}")


def _identity(pid: int) -> str:
    """The number of a process and when it started, so that another one with its number later is not taken for it."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    state, *fields = line.rpartition(")")[2].split()
    return "gone" if state == "Z" else f"{pid}-{fields[18]}"


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ClusterError(f"`{' '.join(command)}` failed: {_one_line(done.stderr)}")
    return done.stdout


def _one_line(text: str) -> str:
    return " ".join(text.split()) or "no message"


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _failure(rank: int, code: int, outputs: tuple[IO[str], IO[str]]) -> str:
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    said = "\n".join(part for part in (_text(file)[-TAIL:].rstrip() for file in outputs) if part)
    return f"rank {rank} {how}" + (f":\n{said}" if said else "")


def show(cluster: Cluster, result: Result) -> str:
    """Node by node what crossed its link."""
    speed = f"{cluster.mbit:g} Mbit/s" if cluster.mbit else "unshaped"
    lines = [f"{cluster.nodes} nodes × {cluster.ranks} ranks, links {speed}, {result.seconds:.1f} s"]
    lines.append(f"{'node':>4} {'sent':>14} {'received':>14}  bytes")
    lines += [f"{node:>4} {link.sent:>14,} {link.received:>14,}" for node, link in enumerate(result.links)]
    return "\n".join(lines)


def to_json(cluster: Cluster, result: Result) -> dict[str, Any]:
    return {
        "nodes": cluster.nodes,
        "ranks": cluster.ranks,
        "mbit": cluster.mbit,
        "seconds": round(result.seconds, 3),
        "links": [asdict(link) for link in result.links],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/cluster.py",
        description="Runs a command on a cluster of network namespaces and counts what crosses its links. Needs root.",
    )
    parser.add_argument("--nodes", type=int, default=2, help="how many nodes (default: 2)")
    parser.add_argument("--ranks", type=int, default=4, help="ranks on each node (default: 4)")
    parser.add_argument(
        "--mbit", type=float, default=400.0, help="speed of each node's link in Mbit/s; 0: unshaped (default: 400)"
    )
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds until all is killed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the counters as JSON")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND …", help="what every rank runs")
    arguments = parser.parse_args()
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        parser.error("expected a command after --")
    try:
        with Cluster(arguments.nodes, arguments.ranks, arguments.mbit) as cluster:
            result = cluster.run(command, timeout=arguments.timeout, show=True)
            print(show(cluster, result), file=sys.stderr)
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(to_json(cluster, result), indent=1) + "\n")
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
