"""The study with masks: models stay inside their budget, learn, and read what tables would give them."""

import numpy as np
import pytest
import torch
from benchmarks import width_columns, width_hindsight
from benchmarks.width_data import Builder, Study
from benchmarks.width_masks import DIM, WAYS, Batch, Model, Models, Score, chosen, train


@pytest.fixture(scope="module")
def study() -> Study:
    """Clicks that the item decides, and for half of the people the other way round."""
    draw, samples = np.random.default_rng(3), 6000
    item, person = draw.integers(0, 60, samples), draw.integers(0, 20, samples)
    labels = ((item % 2) ^ (person % 2)) ^ (draw.random(samples) < 0.05)
    train, validation, test = np.split(np.arange(samples), [4000, 5000])
    builder = Builder(train)
    builder.column("item", item)
    builder.column("person", person)
    first = np.maximum(np.arange(samples) - 3, 0)
    builder.bag("before", "item", item, first, np.arange(samples))
    return builder.study("tiny", labels, validation, test, batch_size=50, epochs=6, every=20)


def test_a_batch_averages_ids(study: Study) -> None:
    batch = Batch(study, np.array([0, 1, 5]), "cpu")
    rows = torch.arange(float(study.rows))[:, None]
    item, person, before = (batch.means @ rows).view(3, 3).tolist()
    assert item == study.ids[0, [0, 1, 5]].tolist()
    assert person == (study.ids[1, [0, 1, 5]] + study.tables["item"]).tolist()
    assert before == pytest.approx([0, study.ids[0, 0], study.ids[0, 2:5].mean()])
    gradient = torch.rand(batch.lines, 4)
    torch.testing.assert_close(batch.backwards @ gradient, batch.means.to_dense().T @ gradient)


def test_all_ways_stay_inside_the_budget(study: Study) -> None:
    models = [Model(way, keep, 0.1, 0) for way in WAYS for keep in (0.02, 0.3)]
    trained = Models(study, models, "cpu")
    before = trained.widths
    for first in range(0, 2000, 50):
        trained.step(Batch(study, study.train[first : first + 50], "cpu"))
        assert (trained.widths.sum(0) <= trained.keep * study.rows * DIM).all()
        assert not (trained.values * (trained.columns >= trained.widths[:, :, None])).any()
    assert (trained.widths != before).any(0).all(), "rounds change the rows of every model"
    assert len({tuple(own) for own in trained.widths.T.tolist()}) > len(WAYS), "ways differ"


def test_it_learns_and_chooses_on_validation_data(study: Study) -> None:
    scores = train(study, [Model("norms", 0.5, rate, seed) for rate in (1e-6, 0.2) for seed in (0, 1)], "cpu")
    best = chosen(scores)
    assert [score.model.rate for score in best] == [0.2, 0.2]
    assert all(score.validation > 0.85 and score.test > 0.85 for score in best)
    assert all(isinstance(score, Score) and 0 < score.live <= 1 for score in scores)


def test_the_best_rows_in_hindsight(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that nothing reads save nothing; without one that is read the loss is higher, about as much as it is said to be."""
    monkeypatch.setitem(width_hindsight.RATES, study.name, (0.2,))
    monkeypatch.setattr(width_hindsight, "KEPT", 0.03)
    found = width_hindsight.measure(study, 1, 2)
    assert found["kept_rows"] == int(0.03 * study.rows * DIM) and len(found["cells"]) == 3
    model = Model("norms", 1 / DIM, 0.2, 0)
    trained = width_hindsight.Fixed(study, [model], "cpu", torch.ones(study.rows, 1))
    train(study, [model], "cpu", 4, trained)
    assert (trained.widths == 1).all() and (trained.values[:, :, 1:] == 0).all()
    trained.values *= 0.2  # far from where logits no longer grow
    saved = trained.saved(study.test)[:, 0]

    @torch.no_grad()
    def loss(batch: Batch, values: torch.Tensor) -> float:
        logits = trained.logits((batch.means @ values.flatten(1)).view(batch.lines, -1, DIM), batch.size)
        return float(torch.nn.functional.binary_cross_entropy_with_logits(logits[0], batch.labels))

    parts = [Batch(study, study.test[first : first + 50], "cpu") for first in range(0, 1000, 50)]
    row = int(saved.abs().argmax())
    without = trained.values.clone()
    without[row] = 0
    rise = sum(loss(part, without) - loss(part, trained.values) for part in parts)
    assert float(saved[row]) == pytest.approx(rise, rel=0.3)
    result = {"kept": 0.03, "data": {"tiny": found}}
    assert width_hindsight.table(result).row_count == 3


def test_any_values(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as the budget holds, others after each round, and no others than these are there."""
    models = [Model("norms", keep, 0.1, seed) for keep in (0.02, 0.3) for seed in (0, 1)]
    trained = width_columns.Columns(study, models, "cpu")
    before = trained.live
    for first in range(0, 2000, 50):
        trained.step(Batch(study, study.train[first : first + 50], "cpu"))
        assert (trained.live.sum((0, 2)) <= trained.budget).all()
        assert not (trained.values * ~trained.live).any() and not (trained.squares * ~trained.live).any()
    assert (trained.live != before).any(2).any(0).all()
    assert (trained.live.sum((0, 2)) > 0.9 * trained.budget).all(), "the budget is spent"
    monkeypatch.setitem(width_columns.RATES, study.name, (0.2,))
    cells = width_columns.measure(study, 1, 3, "cpu")
    assert [cell["kept"] for cell in cells] == [0.125, 0.125, 0.02, 0.02]
    assert all(cell["test"] > 0.7 for cell in cells[:2])
    assert width_columns.table({"data": {"tiny": cells}}).row_count == 4
