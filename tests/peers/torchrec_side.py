"""The checks of test_torchrec.py, run in the peers' environment. Prints one line per check that passed."""

import torch
from torchrec import KeyedJaggedTensor

import unequal as uq

LENGTHS = torch.tensor([2, 0, 1, 3, 1, 0])
IDS = torch.tensor([5, 5, 7, 1, 2**40, 3, -9])
WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0])


def same_memory(a, b):
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()


def from_torchrec(weights):
    features = KeyedJaggedTensor(keys=["a", "b"], values=IDS, lengths=LENGTHS, weights=weights)
    dense = torch.zeros(3, 2)
    batch = uq.Batch.from_torchrec(features, dense=dense).check()
    assert batch.features == ("a", "b") and batch.size == 3 and batch.dense is dense
    assert same_memory(batch.ids, features.values()) and same_memory(batch.lengths, features.lengths())
    assert batch.weights is None if weights is None else same_memory(batch.weights, features.weights())
    for name in ("a", "b"):
        assert torch.equal(batch[name].values, features[name].values())
        assert torch.equal(batch[name].lengths, features[name].lengths())
        assert torch.equal(batch[name].offsets, features[name].offsets())


def to_torchrec(weights):
    batch = uq.Batch(("a", "b"), IDS, LENGTHS, weights)
    features = batch.to_torchrec()
    assert features.keys() == ["a", "b"] and features.stride() == 3
    assert same_memory(features.values(), batch.ids) and same_memory(features.lengths(), batch.lengths)
    assert same_memory(features.offsets(), batch.offsets)
    assert features.weights_or_none() is None if weights is None else same_memory(features.weights(), batch.weights)
    back = uq.Batch.from_torchrec(features)
    assert back.features == batch.features
    assert same_memory(back.ids, batch.ids) and same_memory(back.lengths, batch.lengths)
    assert torch.equal(features["b"].values(), batch["b"].values)


def offsets_alone():
    """TorchRec makes the lengths of a tensor given by its offsets when they are asked for."""
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), LENGTHS.cumsum(0)])
    features = KeyedJaggedTensor(keys=["a", "b"], values=IDS, offsets=offsets)
    batch = uq.Batch.from_torchrec(features).check()
    assert same_memory(batch.ids, features.values()) and torch.equal(batch.lengths, LENGTHS)


def empty():
    nothing = torch.empty(0, dtype=torch.int64)
    batch = uq.Batch(("a", "b"), nothing, torch.zeros(6, dtype=torch.int64))
    back = uq.Batch.from_torchrec(batch.to_torchrec()).check()
    assert back.size == 3 and back.ids.numel() == 0


def lookup():
    """A module reads a converted batch as it reads its own."""
    table = uq.Table("t", rows=10, dim=4)
    module = uq.Embeddings({"a": uq.Feature(table), "b": uq.Feature(table, pooling=None)}).eval()
    features = KeyedJaggedTensor(keys=["a", "b"], values=IDS.remainder(10), lengths=LENGTHS)
    converted, own = module(uq.Batch.from_torchrec(features)), module(uq.Batch(("a", "b"), IDS.remainder(10), LENGTHS))
    assert torch.equal(converted["a"], own["a"]) and torch.equal(converted["b"].values, own["b"].values)


for name, check in {
    "from": lambda: from_torchrec(None),
    "from_weighted": lambda: from_torchrec(WEIGHTS),
    "to": lambda: to_torchrec(None),
    "to_weighted": lambda: to_torchrec(WEIGHTS),
    "offsets_alone": offsets_alone,
    "empty": empty,
    "lookup": lookup,
}.items():
    check()
    print("passed", name, flush=True)
