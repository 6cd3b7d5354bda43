import numpy as np
import pytest
import torch

import unequal as uq
from unequal.errors import RecipeError, UserError
from unequal.plan.profiled import loads_from_profile
from unequal.plan.workload import measure

ITEMS = uq.Table("items", dim=8)
FEATURES = {
    "item": uq.Feature(ITEMS),
    "history": uq.Feature(ITEMS, pooling=None),
    "user": uq.Feature(uq.Table("users", 5000, dim=4, optimizer=uq.SGD(lr=0.1))),
}
SGD = uq.RowWiseAdagrad(lr=0.1)


def batches(count, size=250, seed=0, spread=100_000):
    random = np.random.default_rng(seed)

    def drawn(lengths):
        values = torch.from_numpy((spread ** random.random(int(lengths.sum()))).astype(np.int64))
        return uq.Jagged(values, torch.from_numpy(lengths))

    for _ in range(count):
        users = uq.Jagged(torch.from_numpy(random.integers(0, 5000, size)), torch.ones(size, dtype=torch.int64))
        lists = {"item": drawn(np.ones(size, np.int64)), "history": drawn(random.integers(0, 8, size)), "user": users}
        yield uq.Batch.from_jagged(lists)


def test_it_says_what_measuring_the_batches_says():
    sample = list(batches(16))
    profile = uq.Profile.of(FEATURES, sample, total_samples=40_000)
    found = loads_from_profile(profile, FEATURES, SGD, sharding={"items": "row_wise"})
    measured = measure(FEATURES, SGD, sample, total_samples=40_000, sharding={"items": "row_wise"})
    assert list(found) == list(measured)
    for name, load in measured.items():
        other = found[name]
        assert other.features == load.features and other.table is load.table and other.optimizer == load.optimizer
        assert other.sharding == load.sharding and other.source == "profile of 4,000 samples"
        assert other.rows == pytest.approx(load.rows, rel=0.1) and other.entries == pytest.approx(load.entries, rel=0.1)
        for size in (1, 64, 1000, 4000, 16_000):
            assert other.distinct(size) == pytest.approx(load.distinct(size), rel=0.05)
    assert found["users"].rows == 5000 and found["users"].entries == 0


def test_beyond_the_samples_the_rows_are_estimated():
    whole = list(batches(64))
    everything = uq.Profile.of(FEATURES, whole)
    part = uq.Profile.of(FEATURES, whole[:16], total_samples=16_000)
    loads = loads_from_profile(part, FEATURES, SGD)
    assert loads["items"].rows == pytest.approx(everything.tables["items"].rows_seen, rel=0.15)
    assert loads_from_profile(everything, FEATURES, SGD)["items"].rows == everything.tables["items"].rows_seen
    assert loads_from_profile(part, FEATURES, SGD, expected_rows={"items": 77})["items"].rows == 77


@pytest.mark.parametrize("epochs", [1, 2])
def test_rare_ids_share_a_row(epochs):
    features = {"item": uq.Feature(uq.Table("items", dim=4, admit_after=4))}
    whole = list(batches(64))
    profile = uq.Profile.of(features, whole)
    load = loads_from_profile(profile, features, SGD, epochs=epochs)["items"]
    _, counts = np.unique(torch.cat([batch["item"].values for batch in whole]).numpy(), return_counts=True)
    assert load.rows == (counts >= 4 / epochs).sum() + 1 and load.entries == len(counts)
    part = uq.Profile.of(features, whole[:32], total_samples=16_000)
    estimate = loads_from_profile(part, features, SGD, epochs=epochs)["items"]
    assert estimate.rows == pytest.approx(load.rows, rel=0.25) and estimate.rows <= estimate.entries


def test_a_profile_of_other_tables():
    profile = uq.Profile.of({"item": FEATURES["item"]}, batches(1))
    with pytest.raises(UserError, match=r"columns \['item'\], but \['history', 'item'\] read it; make it again"):
        loads_from_profile(profile, FEATURES, SGD)
    with pytest.raises(UserError, match="the profile lacks the table 'users'"):
        loads_from_profile(profile, {"user": FEATURES["user"]}, SGD)
    with pytest.raises(RecipeError, match=r"tables\.items\.sharding"):
        loads_from_profile(uq.Profile.of(FEATURES, batches(1)), FEATURES, SGD, sharding={"items": "by_row"})
