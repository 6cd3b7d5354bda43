"""Workloads: distinct ids measured and carried on, live rows estimated, assumptions that agree with draws."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from unequal.batch import Batch, Jagged
from unequal.errors import UserError
from unequal.optim import LAMB, SGD, Adam, RowWiseAdagrad
from unequal.plan.workload import Curve, TableLoad, assume, measure, zipf_curve
from unequal.tables import Feature, Table


def draws(rows: int, count: int, skew: float, seed: int = 0) -> np.ndarray:
    weights = np.arange(1, rows + 1.0) ** -skew
    return np.random.default_rng(seed).choice(rows, count, p=weights / weights.sum())


def batch(**columns: np.ndarray) -> Batch:
    return Batch.from_jagged({name: torch.from_numpy(ids) for name, ids in columns.items()})


def test_a_curve_goes_through_its_points_and_never_falls() -> None:
    curve = Curve((16, 32, 64), (10.0, 18.0, 30.0))
    assert curve(16) == pytest.approx(10) and curve(64) == pytest.approx(30)
    assert curve(8) == pytest.approx(5) and curve(0) == 0
    values = [curve(n) for n in range(1, 2000, 7)]
    assert all(a <= b for a, b in pairwise(values))
    assert Curve((16, 32), (10.0, 18.0), limit=20)(10**9) == 20


@pytest.mark.parametrize("rows", [2_000, 20_000, 1_000_000])
@pytest.mark.parametrize("skew", [0.0, 0.8, 1.05, 1.3])
def test_live_rows_are_estimated_from_a_sixteenth(skew: float, rows: int) -> None:
    """Within a third of what there really is, for popularity from even to steep, few rows and many."""
    total = 128_000
    ids = draws(rows, total, skew)
    load = measure({"f": Feature(Table("t", dim=4))}, SGD(), [batch(f=ids[: total // 16])], total_samples=total)["t"]
    true = len(np.unique(ids))
    assert load.rows == pytest.approx(true, rel=0.33)
    assert load.entries == load.rows and load.source == "measured on 8,000 samples"


def test_a_sample_that_is_all_is_exact() -> None:
    ids = draws(500, 2000, 1.0)
    load = measure({"f": Feature(Table("t", dim=4))}, SGD(), [batch(f=ids[:1000]), batch(f=ids[1000:])])["t"]
    assert load.rows == len(np.unique(ids))
    assert load.distinct(2000) == pytest.approx(load.rows)


def test_features_of_one_table_are_counted_together() -> None:
    table = Table("t", 100, dim=4)
    lists = Jagged.from_lists([[1, 2, 3], [3], [], [4, 4]] * 8)
    sample = Batch.from_jagged({"a": torch.tensor([1, 2, 3, 9] * 8), "b": lists})
    load = measure({"a": Feature(table), "b": Feature(table, None)}, SGD(), [sample])["t"]
    assert load.distinct(32) == 5
    assert load.ids == pytest.approx(2.5) and load.pooled == 1 and not load.may_sum
    assert load.output_rows == pytest.approx(1 + 1.5)
    assert load.rows == 100 and load.entries == 0


def test_rare_ids_get_no_row_but_an_entry() -> None:
    ids = np.concatenate([np.repeat(np.arange(100), 5), np.arange(1000, 1500)])
    table = Table("t", dim=4, admit_after=3)
    load = measure({"f": Feature(table)}, SGD(), [batch(f=ids)])["t"]
    assert load.rows == 101 and load.entries == 600
    often = measure({"f": Feature(table)}, SGD(), [batch(f=ids)], epochs=3)["t"]
    assert often.rows == 600, "an id that is seen once an epoch gets its row in the third"


def test_the_user_may_know_better() -> None:
    load = measure({"f": Feature(Table("t", dim=4))}, SGD(), [batch(f=np.arange(64))], expected_rows={"t": 10**9})["t"]
    assert load.rows == 10**9 == load.entries


def test_nothing_to_measure() -> None:
    with pytest.raises(UserError, match="expected at least one sample"):
        measure({"f": Feature(Table("t", dim=4))}, SGD(), [])


@pytest.mark.parametrize("skew", [0.0, 0.8, 1.05])
def test_assumed_distinct_ids_are_those_of_zipfs_law(skew: float) -> None:
    curve = zipf_curve(20_000, 3.0, skew)
    weights = np.arange(1, 20_001.0) ** -skew
    for samples in (64, 1024, 8192, 100, 10_000):
        exact = (1 - (1 - weights / weights.sum()) ** (3 * samples)).sum()
        between_points = samples & (samples - 1)
        assert curve(samples) == pytest.approx(exact, rel=0.02 if between_points else 0.002)
    assert zipf_curve(1, 1.0, skew)(10) == pytest.approx(1)


def test_assumptions_are_said() -> None:
    table, other = Table("t", 1000, dim=4), Table("u", dim=8)
    loads = assume({"a": Feature(table), "b": Feature(other, None)}, SGD(), ids={"a": 5.0})
    assert loads["t"].ids == 5 and loads["u"].ids == 50 and loads["u"].rows == 1_000_000
    assert loads["t"].source.startswith("assumed")
    with pytest.raises(UserError, match="did you mean 'a'"):
        assume({"a": Feature(table)}, SGD(), ids={"aa": 5.0})
    with pytest.raises(UserError, match=r"tables.t.sharding: expected one of auto, .*did you mean 'row_wise'"):
        assume({"a": Feature(table)}, SGD(), sharding={"t": "rowwise"})


def test_statistics_of_whole_rows() -> None:
    def numbers(optimizer: object) -> int:
        table = Table("t", 10, dim=4, optimizer=optimizer)  # type: ignore[arg-type]
        load: TableLoad = assume({"a": Feature(table)}, SGD())["t"]
        return load.statistics

    assert [numbers(o) for o in (SGD(), Adam(), RowWiseAdagrad(), LAMB())] == [0, 0, 1, 2]
