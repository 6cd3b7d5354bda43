"""Outputs, weights and optimizer state after several steps agree with FBGEMM's, from equal weights on equal batches."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import unequal as uq
from unequal.optim import OPTIMIZERS

SIZE, STEPS = 16, 5
MIXED = {"tables": [(60, 8), (7, 12), (300, 64)], "table_of_feature": [0, 0, 1, 2]}
"""Mixed dims (FBGEMM wants multiples of 4), a table smaller than a batch, and one that two features share. FBGEMM fails
unless such features are neighbours."""
SHARED = {"tables": [(60, 8), (300, 64)], "table_of_feature": [0, 0, 1, 1]}
"""For weight decay, which FBGEMM's CPU build applies only to tables that several features read."""
EVEN = {"tables": [(60, 16), (300, 16)], "table_of_feature": [0, 1]}
"""Without pooling FBGEMM wants one dim for all and one table per feature."""


def case(optimizer: str, pooling: str | None = "sum", **options: Any) -> dict[str, Any]:
    name = "-".join([optimizer, pooling or "unpooled", *(option for option in options if option not in SHARED)])
    rest = {"lr": 0.05, "steps": STEPS} | ({} if optimizer == "sgd" else {"eps": 1e-8})
    return {"name": name, "optimizer": optimizer, "pooling": pooling} | (MIXED if pooling else EVEN) | rest | options


TRAINED = ("sgd", "adagrad", "row_wise_adagrad")
CASES = [
    *(case(optimizer, pooling) for optimizer in TRAINED for pooling in ("sum", "mean", None)),
    *(case(optimizer, weighted=True) for optimizer in TRAINED),
    case("row_wise_adagrad", eps=1e-2, weight_decay=0.05, **SHARED),
]
# FBGEMM's CPU build has no others; these are compared with torch.optim in test_torch_optim.py.
ABSENT = ("adam", "row_wise_adam", "lamb", "lars")


def draw(case: dict[str, Any]) -> dict[str, Tensor]:
    """Weights, batches and upstream gradients. One sign per column of a table and step: sums that cancel would leave
    rounding errors alone, which AdaGrad then divides by each other."""
    generator = torch.Generator().manual_seed(len(case["name"]))
    data = {
        f"weights{t}": torch.randn(rows, dim, generator=generator) * 0.1 for t, (rows, dim) in enumerate(case["tables"])
    }
    dims = [case["tables"][table][1] for table in case["table_of_feature"]]
    for step in range(case["steps"]):
        lengths = torch.randint(0, 9, (len(dims), SIZE), generator=generator)
        ids = [
            torch.randint(0, case["tables"][table][0], (int(part.sum()),), generator=generator)
            for table, part in zip(case["table_of_feature"], lengths)
        ]
        shape = (SIZE, sum(dims)) if case["pooling"] else (int(lengths.sum()), dims[0])
        signs = [torch.randint(0, 2, (dim,), generator=generator) * 2 - 1 for _, dim in case["tables"]]
        columns = torch.cat([signs[t] for t in case["table_of_feature"]]) if case["pooling"] else signs[0]
        data[f"ids{step}"], data[f"lengths{step}"] = torch.cat(ids), lengths.reshape(-1)
        data[f"gradient{step}"] = (1 + torch.rand(shape, generator=generator)) * columns
        if case.get("weighted"):
            data[f"sample_weights{step}"] = 0.5 + torch.rand(int(lengths.sum()), generator=generator)
    return data


def train_ours(case: dict[str, Any], data: dict[str, Tensor]) -> dict[str, Tensor]:
    tables = [uq.Table(f"t{t}", rows=rows, dim=dim) for t, (rows, dim) in enumerate(case["tables"])]
    names = tuple(f"f{f}" for f in range(len(case["table_of_feature"])))
    options = {name: case[name] for name in ("lr", "eps", "weight_decay") if name in case}
    module = uq.Embeddings(
        {n: uq.Feature(tables[t], pooling=case["pooling"]) for n, t in zip(names, case["table_of_feature"])},
        optimizer=OPTIMIZERS[case["optimizer"]](**options),
    )
    module.load_state_dict(module.state_dict() | {f"t{t}.weight": data[f"weights{t}"] for t in range(len(tables))})
    results = {}
    for step in range(case["steps"]):
        batch = uq.Batch(names, data[f"ids{step}"], data[f"lengths{step}"], data.get(f"sample_weights{step}"))
        out = module(batch)
        gradient = data[f"gradient{step}"]
        if case["pooling"]:
            results[f"output{step}"] = out.pooled.detach().clone()
            out.pooled.backward(gradient)
        else:
            values = [out[name].values for name in names]
            results[f"output{step}"] = torch.cat(values).detach()
            torch.autograd.backward(values, gradient.split([len(part) for part in values]))
    state = module.state_dict()
    for t in range(len(tables)):
        results[f"weights{t}"] = state[f"t{t}.weight"]
        if case["optimizer"] != "sgd":
            results[f"state{t}"] = state[f"t{t}.sum"].reshape(len(state[f"t{t}.weight"]), -1)
    return results


@pytest.fixture(scope="module")
def fbgemm(run_with_peers: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with FBGEMM's results of all cases: its import is slow, so one process does them all."""
    folder = tmp_path_factory.mktemp("fbgemm")
    for case in CASES:
        np.savez(folder / f"{case['name']}.npz", **{name: part.numpy() for name, part in draw(case).items()})
    (folder / "cases.json").write_text(json.dumps(CASES))
    run_with_peers("fbgemm_side.py", str(folder))
    return folder


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_training_agrees(case: dict[str, Any], fbgemm: Path) -> None:
    data = draw(case)
    ours = train_ours(case, data)
    with np.load(fbgemm / f"{case['name']}.fbgemm.npz", allow_pickle=False) as theirs:
        assert sorted(theirs.files) == sorted(ours)
        for name in theirs.files:
            torch.testing.assert_close(
                ours[name],
                torch.from_numpy(theirs[name]),
                rtol=1e-5,
                atol=1e-6,
                msg=lambda text, n=name: f"{n}: {text}",
            )
        assert not np.array_equal(theirs["weights0"], data["weights0"].numpy())


def test_which_optimizers_fbgemm_has_on_the_cpu(fbgemm: Path) -> None:
    """A release that brings more of them should be compared here too."""
    supported = json.loads((fbgemm / "supported.json").read_text())
    assert supported == {name: name in TRAINED for name in (*TRAINED, *ABSENT)}
