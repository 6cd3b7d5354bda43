"""One rank of the drift benchmark: python -m benchmarks.drift_worker FOLDER JOB UNIQUE, on every rank of a cluster."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from .cluster import link_bytes
from .drift import EVERY, SAMPLED, SAMPLES, as_batch, features


def main() -> None:
    import torch
    import torch.distributed as dist

    import unequal as uq

    folder, job, unique = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    batches = np.load(folder / "batches.npz")["ids"]
    plan = uq.Plan.load(folder / f"{'second' if job == 'fresh' else 'first'}.plan.json")
    plan = replace(plan, unique=unique)
    module = uq.shard(
        uq.Embeddings(features(), optimizer=uq.RowWiseAdagrad(lr=0.01), seed=1, device="meta"),
        plan,
        drift=uq.Drift(mode="on" if job == "moving" else "report", every=EVERY, sample=SAMPLED),
    )
    module.check_copies()
    sent, losses = [], []
    for whole in batches:
        own = as_batch(whole[rank * SAMPLES : (rank + 1) * SAMPLES])
        dist.barrier()
        before = link_bytes()
        dist.barrier()
        loss = (module(own)["history"].values - 0.1).square().mean()
        loss.backward()
        module.wait_for_copies()
        dist.barrier()
        sent.append(link_bytes().since(before).sent)
        losses.append(loss.item())
    reports = [asdict(report) for report in module.tier_reports["item"]]
    print(json.dumps({"sent": sent, "losses": losses, "reports": reports}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
