"""How fast tables inside a budget learn."""

import math

import numpy as np
import pytest
import torch

import unequal as uq
from unequal.train import checkpoint
from unequal.width.rates import expected_over_known, faster

from .test_width import batches, embeddings, train

ALL = [
    ({"budget": "25%"}, uq.RowWiseAdagrad(lr=0.1), 2.0),
    ({"budget": "50%"}, uq.Adam(lr=0.1), 2**0.5),
    ({"budget": "4%"}, uq.Adagrad(lr=0.1), 4.0),
    ({"budget": "100%"}, uq.RowWiseAdam(lr=0.1), 1.0),
    ({"budget": "25%"}, uq.SGD(lr=0.1), 1.0),
    ({"budget": "25%"}, uq.LAMB(lr=0.1), 1.0),
    ({"budget": "25%"}, uq.LARS(lr=0.1), 1.0),
    ({"budget": "25%", "rate": 3}, uq.RowWiseAdagrad(lr=0.1), 3.0),
    ({"budget": "25%", "rate": 3}, uq.SGD(lr=0.1), 3.0),
    ({"budget": "25%", "policy": "frequency"}, uq.RowWiseAdagrad(lr=0.1), 2.0),
    ({"budget": "25%", "policy": "fiited"}, uq.RowWiseAdagrad(lr=0.1), 2.0),
    ({"budget": "25%", "policy": "none"}, uq.RowWiseAdagrad(lr=0.1), 2.0),
    # Whole rows of 60 take 4 · 8 and 4 · 4 bytes, 4 for AdaGrad's number and some 24 for the rest.
    ({"budget": "3 KB", "policy": "itep"}, uq.RowWiseAdagrad(lr=0.1), (60 * (60 + 44) / 3000) ** 0.5),
    ({"budget": "1 MB"}, uq.RowWiseAdagrad(lr=0.1), 1.0),
    ({"budget": "1 KB"}, uq.RowWiseAdagrad(lr=0.1), 6.0**0.5),  # all rows have a value, of 8 and of 4
]


def all_ids(steps, rows=60):
    """Batches that read all of these ids: in the first bags of the first feature and of the second, which are of both tables."""
    every = torch.arange(rows)
    for batch in batches(steps, rows=rows):
        lengths = batch.lengths.view(3, -1).clone()
        first = int(lengths[0].sum())
        lengths[:2, 0] += rows
        ids = torch.cat([every, batch.ids[:first], every, batch.ids[first:]])
        yield uq.Batch(batch.features, ids, lengths.flatten())


@pytest.mark.parametrize(("options", "optimizer", "rate"), ALL)
def test_after_a_round_tables_learn_as_fast_as_what_is_kept_wants(options, optimizer, rate):
    """Where all rows are read."""
    module = embeddings(uq.Width(every=4, **options), optimizer)
    train(module, all_ids(4))
    assert module.width_rates == pytest.approx(dict.fromkeys(("first", "second"), rate))
    for storage in module._storages.values():
        assert storage.rows.optimizer.lr == pytest.approx(rate * optimizer.lr)
    assert module.optimizer == optimizer


@pytest.mark.parametrize("optimizer", [uq.RowWiseAdagrad(lr=0.1), uq.Adam(lr=0.01)])
def test_a_step_is_as_long_as_the_rate_says(optimizer):
    """Rates that rounds have found do what the same ones in a recipe do."""
    module = embeddings(uq.Width(budget="25%", every=4), optimizer)
    data = list(all_ids(9))
    train(module, data[:4])

    def stepped(rate):
        other = embeddings(uq.Width(budget="25%", every=4, rate=rate), optimizer)
        other.load_state_dict(module.state_dict())
        before = other(data[4]).pooled.detach()
        train(other, data[4:5])
        return other, other.eval()(data[4]).pooled.detach() - before

    (found, moved), (_, as_given), (_, twice) = stepped(None), stepped(1), stepped(2)
    assert found.width_rates == module.width_rates == pytest.approx({"first": 2.0, "second": 2.0})
    torch.testing.assert_close(moved, twice)
    torch.testing.assert_close(moved, 2 * as_given, rtol=1e-3, atol=1e-5)
    assert as_given.abs().sum() > 0


def test_rows_that_begin_whole_begin_with_the_rate_of_whole_ones():
    whole = embeddings(uq.Width(budget="25%"), uq.RowWiseAdagrad(lr=0.1))
    assert whole.width_rates == {"first": 1.0, "second": 1.0}
    by_value = embeddings(uq.Width(budget="25%"), uq.Adagrad(lr=0.1))
    assert by_value.width_rates == whole.width_rates and by_value._rounds.how["first"].begins == 8
    given = embeddings(uq.Width(budget="25%", rate=2), uq.Adagrad(lr=0.1))
    assert given.width_rates == {"first": 2.0, "second": 2.0} and given._rounds.how["first"].begins == 2
    narrow = embeddings(uq.Width(budget="25%"), uq.Adam(lr=0.1))
    assert narrow.width_rates == {"first": 2.0, "second": 2.0} and narrow._rounds.how["first"].begins == 2
    tiny = embeddings(uq.Width(budget="4%"), uq.RowWiseAdagrad(lr=0.1))
    chunks = tiny._rounds.how["first"].start / 8, tiny._rounds.how["second"].start / 4
    assert tiny.width_rates == {name: faster(max(0.04, share)) for name, share in zip(("first", "second"), chunks)}
    train(whole, all_ids(16))
    assert whole.width_rates == pytest.approx({"first": 2.0, "second": 2.0})


def test_rows_that_nobody_reads_need_no_room():
    """Of 600 rows that are declared 60 are read, a tenth: so all of them are whole, and learn as such."""
    module = embeddings(uq.Width(budget="20%", every=4), uq.RowWiseAdagrad(lr=0.1), rows=600)
    train(module, all_ids(4))
    assert module.width_rates == {"first": 1.0, "second": 1.0}
    assert module._storages["first"].values == 60 * 8
    half = embeddings(uq.Width(budget="5%", every=4), uq.RowWiseAdagrad(lr=0.1), rows=600)
    train(half, all_ids(4))
    assert half.width_rates == pytest.approx({"first": 2**0.5, "second": 2**0.5})


def test_told_how_many_are_read_rows_begin_whole():
    features = embeddings(None, rows=600).features
    blind = uq.Embeddings(features, optimizer=uq.RowWiseAdagrad(lr=0.1), width=uq.Width(budget="5%"))
    told = uq.Embeddings(
        features, optimizer=uq.RowWiseAdagrad(lr=0.1), width=uq.Width(budget="5%", rows={"first": 60, "second": 60})
    )
    assert blind._rounds.how["first"].begins == 1 and told._rounds.how["first"].begins == 8
    assert blind.width_rates["first"] > 2 and told.width_rates["first"] == 1
    assert blind._rounds.groups[0].full == told._rounds.groups[0].full  # the share is of what is declared
    more = uq.Width(rows={"first": 10_000})
    assert more.read_of(features["a"].table) == 600


def test_where_ids_are_crowded_out_all_that_are_expected_count():
    tables = {"t": uq.Table("t", dim=8, rows=100_000)}
    module = uq.Embeddings({"t": uq.Feature(tables["t"])}, width=uq.Width(budget="10%"))
    storages = module._narrow_storages()
    places = storages["t"].how.candidates
    assert not storages["t"].how.by_id

    def over(live, followed):
        return expected_over_known({"t": 100_000}, tables, storages, {"t": (live, followed)}, lambda x: x)

    assert over(1000, places // 2) == pytest.approx(100_000 / (1000 + places // 2))
    assert over(1000, places // 2 + 1) == 1.0
    assert over(0, 0) == 1.0
    # Other ranks' parts are added, and one that is crowded is enough.
    both = expected_over_known(
        {"t": 100_000}, tables, storages, {"t": (1000, 0)}, lambda x: x + np.array([4000.0, 0.0])
    )
    assert both == 20.0
    crowded = expected_over_known({"t": 100_000}, tables, storages, {}, lambda x: x + np.array([4000.0, 1.0]))
    assert crowded == 1.0


def test_rows_that_shrink_from_whole_ones_learn_faster_step_by_step():
    width = uq.Width(budget="4%", start="full", ramp=16, every=4)
    module = embeddings(width, uq.RowWiseAdagrad(lr=0.1))
    rates = [module.width_rates["first"]]
    for batch in all_ids(20):
        train(module, [batch])
        rates.append(module.width_rates["first"])
    assert rates[:4] == [1.0] * 4 and rates == sorted(rates) and rates[-1] == pytest.approx(4.0)
    assert rates[8] == pytest.approx(1 / math.sqrt(0.04 + 0.96 * 0.5**3))


def test_rates_are_saved(tmp_path):
    """They are those of the last round, until the next one; a recipe that says another has its own."""
    options = {"budget": "5%", "every": 4}
    module = embeddings(uq.Width(**options), uq.RowWiseAdagrad(lr=0.1), rows=600)
    data = list(all_ids(10))
    train(module, data[:6])
    path = checkpoint.save(tmp_path, 6, {}, {}, embeddings=module)
    loaded = embeddings(uq.Width(**options), uq.RowWiseAdagrad(lr=0.1), rows=600)
    assert loaded.width_rates != module.width_rates
    checkpoint.load(path, embeddings=loaded)
    assert loaded.width_rates == module.width_rates == pytest.approx(dict.fromkeys(("first", "second"), 2**0.5))
    assert loaded._storages["first"].rows.optimizer.lr == module._storages["first"].rows.optimizer.lr
    own = embeddings(uq.Width(rate=3, **options), uq.RowWiseAdagrad(lr=0.1), rows=600)
    checkpoint.load(path, embeddings=own)
    assert own.width_rates == {"first": 3, "second": 3}
    for name in ("first", "second"):
        assert own._storages[name].rows.optimizer.lr == pytest.approx(0.3)


def test_without_them_they_are_those_of_all_rows(tmp_path, monkeypatch):
    """Checkpoints from before they were saved."""
    module = embeddings(uq.Width(budget="5%", every=4), uq.RowWiseAdagrad(lr=0.1), rows=600)
    train(module, all_ids(6))
    path = checkpoint.save(tmp_path, 6, {}, {}, embeddings=module)
    saved = checkpoint.open(path)
    old = {name: part for name, part in saved.shown.items() if name != "rates"}
    monkeypatch.setattr(type(saved), "shown", old)
    loaded = embeddings(uq.Width(budget="5%", every=4), uq.RowWiseAdagrad(lr=0.1), rows=600)
    checkpoint.load(path, embeddings=loaded)
    assert loaded.width_rates == {"first": 4.0, "second": 4.0}


def test_where_it_is_not_known_what_is_kept_rates_stay_as_they_are():
    tables = uq.Table("t", dim=8), uq.Table("u", dim=8, rows=1000)
    features = {table.name: uq.Feature(table) for table in tables}
    unknown = uq.Embeddings(features, width=uq.Width(budget="10 KB", policy="none"))
    known = uq.Embeddings(features, width=uq.Width(budget="10 KB", policy="none", rows={"t": 500}))
    assert unknown.width_rates == {"t": 1, "u": 1}
    assert known.width_rates == pytest.approx(dict.fromkeys("tu", (1500 * 60 / 10_000) ** 0.5))


@pytest.mark.parametrize("rate", [0, -1, float("inf"), float("nan")])
def test_a_rate_is_a_number_above_0(rate):
    with pytest.raises(uq.RecipeError, match="width rate: expected a number above 0"):
        uq.Width(rate=rate)
