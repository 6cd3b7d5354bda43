"""The benchmark of drift: its two laws differ as they should, rounds can be stopped, and it runs."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks import width_drift
from benchmarks.width_drift import BAR, POINTS, QUICK, Training, changed, made, summarised

from .commands import command


@pytest.mark.parametrize(("moved", "stay"), [(0.0, 1000), (0.5, 500), (1.0, 0)])
def test_so_many_ids_change_places(moved: float, stay: int) -> None:
    places = changed(np.random.default_rng(0), 1000, moved)
    assert sorted(places.tolist()) == list(range(1000))
    assert int((places == np.arange(1000)).sum()) == stay


def test_other_ids_are_popular_after_the_shift() -> None:
    data = made(QUICK, seed=0, moved=1.0)
    largest = max(range(len(data.columns)), key=lambda column: data.tables[data.columns[column]])
    rows = data.tables[data.columns[largest]]

    def popular(samples: np.ndarray) -> set[int]:
        return set(np.bincount(data.ids[largest, samples], minlength=rows).argsort()[-5:].tolist())

    first, second, test = (popular(samples) for samples in (data.validation, data.train, data.test))
    assert len(second & test) >= 3 > len(first & second)
    steps = QUICK.before * QUICK.every
    assert len(data.validation) == steps * QUICK.batch_size
    assert len(data.train) == (steps + int(POINTS[-1] * QUICK.every)) * QUICK.batch_size


def test_without_rounds_rows_stay_as_wide_as_they_are() -> None:
    data = made(QUICK, seed=0, moved=1.0)
    training = Training(data, 0.1, 0)
    training.steps(data.validation)
    state, rows = training.state(), training.embeddings.rows()
    with_rounds = training.scores(data.train)
    training.back(state)
    assert training.embeddings.rows() == rows
    training.stop_rounds()
    reports = len(training.embeddings.width_reports)
    without = training.scores(data.train)
    assert len(training.embeddings.width_reports) == reports and training.embeddings.rows() == rows
    assert with_rounds[0] == without[0] and with_rounds[-1] != without[-1]


def test_rows_can_be_made_as_wide_as_those_of_another_model() -> None:
    """And then they stay so. Rows that they had before keep what they had learnt."""
    data = made(QUICK, seed=0, moved=1.0)
    one, other = Training(data, 0.1, 0), Training(data, 0.1, 1)
    one.steps(data.train)
    other.steps(data.validation)
    wanted = one.widths()
    assert any(not torch.equal(chunks, wanted[table]) for table, chunks in other.widths().items())
    other.stop_rounds()
    other.give(wanted)
    assert all(torch.equal(chunks, wanted[table]) for table, chunks in other.widths().items())
    assert sum(int((chunks > 0).sum()) for chunks in wanted.values()) == sum(other.embeddings.rows().values())
    other.steps(data.train)
    assert all(torch.equal(chunks, wanted[table]) for table, chunks in other.widths().items())


def test_the_bar_is_held_against_the_mean_after_one_interval() -> None:
    lines = [
        {"moved": 1.0, "budget": budget, "seed": seed, "knew": [0.8] * len(POINTS), "shifted": scores}
        for budget in (None, *width_drift.BUDGETS)
        for seed, scores in enumerate(([0.7, 0.78, 0.79, 0.799, 0.8], [0.7, 0.78, 0.79, 0.794, 0.8]))
    ]
    for line in lines:
        if line["budget"] == 0.02:
            line["knew"] = [0.79] * len(POINTS)
    plain, tenth, fiftieth = summarised(QUICK, lines)
    assert "reached" not in plain and plain["behind"] == pytest.approx([0.1, 0.02, 0.01, 0.0035, 0.0])
    assert tenth["bar"] == BAR and not tenth["reached"] and fiftieth["reached"]
    assert tenth["deviation"][POINTS.index(1.0)] == pytest.approx(0.0025)


def test_quick_run(tmp_path: Path) -> None:
    output = tmp_path / "width.json"
    command("benchmarks", "--only", "width_drift", "--quick", "--output", str(output))
    part = json.loads(output.read_text())["width_drift"]
    assert part["quick"] is True and len(part["results"]["cases"]) == 3
    for case in part["results"]["cases"]:
        assert len(case["knew"]) == len(case["shifted"]) == len(POINTS)
        if case["budget"] is not None:
            assert all(line["kept"] <= case["budget"] + 1e-9 for line in case["lines"])
            assert case["frozen"][0] == case["shifted"][0]
