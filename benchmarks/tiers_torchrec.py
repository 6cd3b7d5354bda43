"""The peer's side of the cluster benchmark: TorchRec's EmbeddingCollection, every table dealt out by rows over all ranks.

Runs in the peers' environment (`make peers`). Its exchange time is what a rank spends in the collectives that TorchRec calls and
in waiting for them, which is what our own counters hold; torch's DDP, which both sides use for the dense part, is in neither.
"""

from __future__ import annotations

from .distributed_side import Task
from .distributed_torchrec import TorchRec, import_torchrec
from .tiers_side import Blocked, serve

COLLECTIVES = ("all_to_all_single", "all_to_all", "all_reduce", "all_gather", "reduce_scatter", "broadcast")


class OnCluster(TorchRec):
    def __init__(self, task: Task) -> None:
        import torch.distributed as dist

        super().__init__(task)
        self.blocked = Blocked()
        self.blocked.watch(dist, *COLLECTIVES)
        self.blocked.watch(dist.Work, "wait")

    def counters(self) -> dict[str, float]:
        return {"collective_seconds": self.blocked.seconds}


if __name__ == "__main__":
    serve(OnCluster, import_torchrec)
