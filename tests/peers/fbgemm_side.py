"""FBGEMM's side of test_fbgemm.py: trains every case of a folder and writes its outputs, weights and optimizer state.

Runs in the peers' environment, where neither pytest nor our installed package is.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)

OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "row_wise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adam": EmbOptimType.ADAM,
    "row_wise_adam": EmbOptimType.PARTIAL_ROWWISE_ADAM,
    "lamb": EmbOptimType.LAMB,
    "lars": EmbOptimType.LARS_SGD,
}
POOLING = {"sum": PoolingMode.SUM, "mean": PoolingMode.MEAN, None: PoolingMode.NONE}


def build(case, optimizer):
    options = {"eps": case["eps"]} if "eps" in case else {}
    if case.get("weight_decay"):
        options |= {"weight_decay": case["weight_decay"], "weight_decay_mode": WeightDecayMode.L2}
    return SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows, dim in case["tables"]],
        feature_table_map=case["table_of_feature"],
        optimizer=OPTIMIZERS[optimizer],
        learning_rate=case["lr"],
        pooling_mode=POOLING[case["pooling"]],
        **options,
    )


def train(case, folder):
    with np.load(folder / f"{case['name']}.npz", allow_pickle=False) as file:
        data = {name: torch.from_numpy(file[name]) for name in file.files}
    module = build(case, case["optimizer"])
    for table, weights in enumerate(module.split_embedding_weights()):
        weights.data.copy_(data[f"weights{table}"])
    results = {}
    for step in range(case["steps"]):
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), data[f"lengths{step}"].cumsum(0)])
        out = module(data[f"ids{step}"], offsets, per_sample_weights=data.get(f"sample_weights{step}"))
        results[f"output{step}"] = out.detach().clone()
        out.backward(data[f"gradient{step}"])
    for table, weights in enumerate(module.split_embedding_weights()):
        results[f"weights{table}"] = weights.detach()
    if case["optimizer"] != "sgd":
        for table, (state, *_) in enumerate(module.split_optimizer_states()):
            results[f"state{table}"] = state.reshape(case["tables"][table][0], -1)
    np.savez(folder / f"{case['name']}.fbgemm.npz", **{name: part.numpy() for name, part in results.items()})


def supported(optimizer):
    """Whether the CPU build has the optimizer: it says so with an assertion as the module is built."""
    case = {"tables": [(4, 4)], "table_of_feature": [0], "lr": 0.1, "pooling": "sum"}
    try:
        build(case, optimizer)
    except AssertionError as error:
        if "not supported in CPU mode" in str(error):
            return False
        raise
    return True


def main():
    folder = Path(sys.argv[1])
    torch.manual_seed(0)
    for case in json.loads((folder / "cases.json").read_text()):
        train(case, folder)
    (folder / "supported.json").write_text(json.dumps({name: supported(name) for name in OPTIMIZERS}))


main()
