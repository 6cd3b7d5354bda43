"""How fast tables inside a budget learn."""

import pytest
import torch

import unequal as uq

from .test_width import batches, embeddings, train

RATES = [
    ({"budget": "25%"}, uq.RowWiseAdagrad(lr=0.1), 2.0),
    ({"budget": "50%"}, uq.Adam(lr=0.1), 2**0.5),
    ({"budget": "1%"}, uq.Adagrad(lr=0.1), 4.0),
    ({"budget": "100%"}, uq.RowWiseAdam(lr=0.1), 1.0),
    ({"budget": "25%"}, uq.SGD(lr=0.1), 1.0),
    ({"budget": "25%"}, uq.LAMB(lr=0.1), 1.0),
    ({"budget": "25%"}, uq.LARS(lr=0.1), 1.0),
    ({"budget": "25%", "rate": 3}, uq.RowWiseAdagrad(lr=0.1), 3.0),
    ({"budget": "25%", "rate": 3}, uq.SGD(lr=0.1), 3.0),
    ({"budget": "25%", "policy": "frequency"}, uq.RowWiseAdagrad(lr=0.1), 2.0),
    # Whole rows of 60 take 4 · 8 and 4 · 4 bytes, 4 for AdaGrad's number and some 24 for the rest.
    ({"budget": "3 KB", "policy": "itep"}, uq.RowWiseAdagrad(lr=0.1), (60 * (60 + 44) / 3000) ** 0.5),
    ({"budget": "1 MB"}, uq.RowWiseAdagrad(lr=0.1), 1.0),
    ({"budget": "2 KB"}, uq.RowWiseAdagrad(lr=0.1), 2.0**0.5),  # all rows have 3 values, of 8 and of 4
]


@pytest.mark.parametrize(("options", "optimizer", "rate"), RATES)
def test_narrow_rows_learn_faster(options, optimizer, rate):
    """The first step of every value is so many times as long."""

    def stepped(**more):
        module = embeddings(uq.Width(**{**options, **more}), optimizer)
        data = list(batches(1))
        before = [module(batch).pooled.detach() for batch in data]  # rows are there
        train(module, data)
        module.eval()
        return module, module(data[0].to(module.device)).pooled.detach() - before[0]

    (module, found), (as_given, expected) = stepped(), stepped(rate=1)
    assert module.width_rates == pytest.approx(dict.fromkeys(("first", "second"), rate))
    assert as_given.width_rates == {"first": 1, "second": 1} and module.optimizer == optimizer
    assert expected.abs().sum() > 0
    torch.testing.assert_close(found, rate * expected, rtol=1e-3, atol=1e-5)


def test_where_it_is_not_known_what_is_kept_rates_stay_as_they_are():
    tables = uq.Table("t", dim=8), uq.Table("u", dim=8, rows=1000)
    features = {table.name: uq.Feature(table) for table in tables}
    unknown = uq.Embeddings(features, width=uq.Width(budget="10 KB"))
    known = uq.Embeddings(features, width=uq.Width(budget="10 KB", rows={"t": 500}))
    assert unknown.width_rates == {"t": 1, "u": 1}
    assert known.width_rates == pytest.approx(dict.fromkeys("tu", (1500 * 60 / 10_000) ** 0.5))


@pytest.mark.parametrize("rate", [0, -1, float("inf"), float("nan")])
def test_a_rate_is_a_number_above_0(rate):
    with pytest.raises(uq.RecipeError, match="width rate: expected a number above 0"):
        uq.Width(rate=rate)
