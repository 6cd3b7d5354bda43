"""One training for the quality of narrow rows: a DLRM with dot products over the library's tables, by one method at one budget.

The epoch is chosen on validation data. A training that diverges scores like a coin.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .width_data import Ints, Study

if TYPE_CHECKING:
    import torch

    import unequal as uq

DIM = 16
EVALUATED = 16_384
"""samples of a batch that is only predicted"""
POLICIES = ("water-filling", "fiited", "adaembed", "itep", "frequency")
METHODS = ("full", "full_decay", *POLICIES, "in_bytes", "dim", "hash")
KEPT = (0.5, 0.25, 0.125, 0.0625, 0.02, 0.01)
PATIENCE = 2
"""epochs without a better one on validation data after which a training ends"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What is tuned."""

    optimizer: str = "adagrad"
    lr: float = 0.1
    weight_decay: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    data: str
    method: str
    """a policy; "in_bytes": the default one, with a budget in bytes; "dim": all rows narrow; "hash": fewer rows, shared; "full"
    and "full_decay": all rows whole"""
    keep: float
    """of all weights; "in_bytes": of the bytes of all rows with row-wise AdaGrad"""
    setting: Setting
    seed: int

    def key(self) -> str:
        return f"{self.data} {self.method} {self.keep:g} {self.setting} {self.seed}"

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Job:
        return cls(**{**line["job"], "setting": Setting(**line["job"]["setting"])})


def optimizer_of(setting: Setting) -> uq.Optimizer:
    import unequal as uq

    kinds = {"adagrad": uq.Adagrad, "row_wise_adagrad": uq.RowWiseAdagrad}
    return kinds[setting.optimizer](lr=setting.lr, weight_decay=setting.weight_decay)


def whole_bytes(rows: int) -> int:
    """Of so many rows with row-wise AdaGrad: what shares of bytes are of."""
    return rows * (DIM + 1) * 4


def width_of(study: Study, job: Job) -> uq.Width | None:
    import unequal as uq

    if job.method not in (*POLICIES, "in_bytes"):
        return None
    # Rates are tuned for each share: they are taken as they are.
    if job.method == "in_bytes":
        return uq.Width(budget=f"{int(job.keep * whole_bytes(study.rows))} B", every=study.every, rate=1)
    return uq.Width(budget=job.keep, policy=job.method, every=study.every, rate=1)


def tables_of(study: Study, job: Job) -> uq.Embeddings:
    import unequal as uq

    dim = max(1, round(DIM * job.keep)) if job.method == "dim" else DIM
    tables = {name: uq.Table(name, rows=rows, dim=dim, init_std=0.05) for name, rows in study.tables.items()}
    return uq.Embeddings(
        {name: uq.Feature(tables[table], pooling="mean") for name, table in study.features.items()},
        optimizer=optimizer_of(job.setting),
        seed=job.seed,
        width=width_of(study, job),
    )


def train(study: Study, job: Job) -> dict[str, Any]:
    """The job's line: AUC of every epoch, which one is chosen, and what the tables take at the end."""
    import torch

    from unequal.models import ModelConfig, build_model

    start = time.monotonic()
    torch.manual_seed(job.seed)
    rows = study.rows
    if job.method == "hash":
        study = study.hashed(job.keep)
    embeddings = tables_of(study, job)
    model = build_model(ModelConfig(), embeddings, dense_features=study.dense.shape[1], tasks=1)
    dense = torch.optim.Adam(model.parameters(), lr=1e-3)
    draw = np.random.default_rng(job.seed)
    epochs = []
    for _ in range(study.epochs):
        order = draw.permutation(study.train) if study.shuffle else study.train
        for first in range(0, len(order) - study.batch_size + 1, study.batch_size):
            batch = study.batch(order[first : first + study.batch_size])
            dense.zero_grad(set_to_none=True)
            logits = model(batch)
            torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels).backward()
            dense.step()
        epochs.append([area(study, model, part) for part in (study.validation, study.test)])
        best = max(range(len(epochs)), key=lambda epoch: epochs[epoch][0])
        if len(epochs) - 1 - best >= PATIENCE:
            break
    values, live = size_of(embeddings)
    return {
        "job": asdict(job),
        "validation": epochs[best][0],
        "auc": epochs[best][1],
        "epoch": best + 1,
        "epochs": epochs,
        "kept": values / (rows * DIM),
        "rows": live,
        "of_rows": rows,
        "bytes": embeddings.memory(),
        "rounds": len(embeddings.width_reports),
        "seconds": round(time.monotonic() - start, 1),
    }


def area(study: Study, model: torch.nn.Module, samples: Ints) -> float:
    import torch

    from unequal.train.metrics import area_under_curve

    model.eval()
    with torch.no_grad():
        parts = [study.batch(samples[k : k + EVALUATED]) for k in range(0, len(samples), EVALUATED)]
        scores = torch.cat([model(part).squeeze(1) for part in parts])
    model.train()
    if not scores.isfinite().all():
        return 0.5
    found = area_under_curve(scores, torch.from_numpy(study.labels[samples].astype(np.float32)))
    assert found is not None, "a part of the data has one kind of label only"
    return round(found, 6)


def size_of(embeddings: uq.Embeddings) -> tuple[int, int]:
    """Values and rows that live."""
    if embeddings.width is None:
        return sum(t.dim * (t.rows or 0) for t in embeddings.tables.values()), sum(embeddings.rows().values())
    parts: list[Any] = [storage for _, storage in embeddings.shard_storages()]
    return sum(part.values for part in parts), sum(part.live for part in parts)
