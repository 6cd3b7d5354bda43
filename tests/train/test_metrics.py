import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics.classification import BinaryAUROC

from unequal.errors import DataError, UserError
from unequal.train.metrics import Metrics, area_under_curve

FRACTIONS = st.sampled_from([0.0, 0.25, 0.5, 1.0])
ROWS = st.lists(
    st.tuples(st.sampled_from([-2.0, -1.0, 0.0, 0.5, 3.0]), FRACTIONS, st.sampled_from([0.0, 0.5, 1.0, 2.0])),
    min_size=1,
    max_size=12,
)


def compute(logits, labels, weights=None, **options):
    metrics = Metrics(["click"], **options)
    metrics.update(torch.as_tensor(logits), torch.as_tensor(labels), weights)
    return metrics.compute()


def area_by_pairs(scores, labels, weights):
    right = pairs = 0.0
    for s, y, w in zip(scores, labels, weights):
        for other, label, weight in zip(scores, labels, weights):
            pair = w * y * weight * (1 - label)
            pairs += pair
            right += pair * (1.0 if s > other else 0.5 if s == other else 0.0)
    return right / pairs if pairs else None


def test_area_agrees_with_torchmetrics():
    generator = torch.Generator().manual_seed(0)
    for decimals in (1, 6):
        logits = torch.randn(5000, generator=generator).round(decimals=decimals)
        labels = (torch.rand(5000, generator=generator) < torch.sigmoid(logits)).long()
        expected = BinaryAUROC()(torch.sigmoid(logits.double()), labels)
        assert compute(logits, labels)["auc"] == pytest.approx(float(expected), abs=1e-6)


@settings(max_examples=200, deadline=None)
@given(rows=ROWS)
def test_area_with_ties_weights_and_fractions_agrees_with_all_pairs(rows):
    scores, labels, weights = zip(*rows)
    got = area_under_curve(torch.tensor(scores), torch.tensor(labels), torch.tensor(weights))
    expected = area_by_pairs(scores, labels, weights)
    assert got is None if expected is None else got == pytest.approx(expected, abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(rows=ROWS, cut=st.integers(0, 12))
def test_sums_agree_with_the_definitions_however_the_samples_are_cut(rows, cut):
    scores, labels, weights = zip(*rows)
    metrics = Metrics(["click"])
    for part in (slice(None, cut), slice(cut, None)):
        metrics.update(torch.tensor(scores[part]), torch.tensor(labels[part]), torch.tensor(weights[part]))
    got, total = metrics.compute(), sum(weights)
    if total == 0:
        assert got["auc"] is got["log_loss"] is got["normalized_entropy"] is got["calibration"] is None
        return
    chances = [1 / (1 + math.exp(-s)) for s in scores]
    loss = sum(-w * (y * math.log(p) + (1 - y) * math.log(1 - p)) for p, y, w in zip(chances, labels, weights)) / total
    rate = sum(w * y for y, w in zip(labels, weights)) / total
    assert got["log_loss"] == pytest.approx(loss, rel=1e-12)
    if 0 < rate < 1:
        entropy = -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)
        assert got["normalized_entropy"] == pytest.approx(loss / entropy, rel=1e-12)
    if rate > 0:
        predicted = sum(w * p for p, w in zip(chances, weights)) / total
        assert got["calibration"] == pytest.approx(predicted / rate, rel=1e-12)
    assert got["samples"] == len(rows)


def test_weights_count_like_repetition():
    logits, labels = torch.tensor([0.3, -1.0, 2.0, 0.3]), torch.tensor([1.0, 0.0, 0.0, 0.0])
    times = torch.tensor([3, 1, 2, 1])
    weighted = compute(logits, labels, times.float())
    repeated = compute(logits.repeat_interleave(times), labels.repeat_interleave(times))
    for name in ("auc", "log_loss", "normalized_entropy", "calibration"):
        assert weighted[name] == pytest.approx(repeated[name], rel=1e-12)


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_one_class_leaves_the_area_undefined(label):
    got = compute([0.5, -0.5], [label, label])
    assert got["auc"] is None and got["normalized_entropy"] is None
    assert got["log_loss"] > 0
    assert (got["calibration"] is None) == (label == 0)
    json.dumps(got, allow_nan=False)


def test_no_samples():
    got = Metrics(["click"]).compute()
    assert got == {
        **dict.fromkeys(("auc", "normalized_entropy", "log_loss", "calibration")),
        "samples": 0,
        "tasks": {"click": dict.fromkeys(("auc", "normalized_entropy", "log_loss", "calibration"))},
    }


def test_extreme_logits_stay_finite():
    got = compute([1e4, -1e4, 1e4], [1.0, 0.0, 0.0])
    assert got["log_loss"] == pytest.approx(1e4 / 3)
    json.dumps(got, allow_nan=False)


def test_probabilities_in_place_of_logits():
    logits, labels = torch.randn(200), (torch.rand(200) < 0.3).float()
    with_logits = compute(logits.double(), labels)
    with_chances = compute(torch.sigmoid(logits.double()), labels, predictions="probabilities")
    for name in ("auc", "log_loss", "normalized_entropy", "calibration"):
        assert with_chances[name] == pytest.approx(with_logits[name], rel=1e-9)
    certain = compute(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0]), predictions="probabilities")
    assert math.isfinite(certain["log_loss"])


def test_every_task_has_its_metrics_and_the_first_is_on_top():
    metrics = Metrics(["click", "buy"])
    logits, labels = torch.randn(50, 2), (torch.rand(50, 2) < 0.5).float()
    metrics.update(logits, labels)
    got = metrics.compute()
    assert list(got["tasks"]) == ["click", "buy"]
    for number, name in enumerate(got["tasks"]):
        alone = compute(logits[:, number], labels[:, number])
        # not to the last bit: torch adds one column in another order than two
        assert got["tasks"][name] == pytest.approx({key: alone[key] for key in got["tasks"][name]}, rel=1e-12)
    assert all(got[key] == value for key, value in got["tasks"]["click"].items())
    json.dumps(got, allow_nan=False)


def test_later_changes_of_the_given_tensors_do_not_matter():
    metrics, logits, labels = Metrics(["click"]), torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0])
    metrics.update(logits, labels)
    logits.neg_()
    labels.zero_()
    assert metrics.compute()["auc"] == 1.0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_prediction_that_is_not_finite_is_refused(value):
    with pytest.raises(UserError, match=r"a prediction for 'click' is .*diverged"):
        compute([0.0, value], [0.0, 1.0])


@pytest.mark.parametrize(
    ("labels", "weights", "message"),
    [
        ([0.0, 1.5], None, r"column 'click': expected labels in \[0, 1\], got 1.5"),
        ([0.0, float("nan")], None, "got nan"),
        ([0.0, 1.0], torch.tensor([1.0, -1.0]), "sample weights of 0 or more"),
        ([0.0, 1.0], torch.tensor([1.0, float("nan")]), "sample weights of 0 or more"),
        ([0.0, 1.0], torch.tensor([1.0]), "1 sample weights for 2 samples"),
        ([0.0, 1.0, 1.0], None, r"predictions have shape \[2, 1\], labels \[3, 1\]"),
    ],
)
def test_wrong_input_is_refused(labels, weights, message):
    with pytest.raises(DataError, match=message):
        compute([0.0, 1.0], labels, weights)


def test_wrong_tasks_are_refused():
    with pytest.raises(UserError):
        Metrics([])
    with pytest.raises(DataError, match=r"2 tasks per sample, got shape \[4, 3\]"):
        Metrics(["a", "b"]).update(torch.zeros(4, 3), torch.zeros(4, 3))
