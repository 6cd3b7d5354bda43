"""The benchmarks of width: their data is what it says, a training cut off goes on, and all of them run."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from benchmarks import width_data, width_memory, width_quality, width_summary, width_training
from benchmarks.quality import DATA
from benchmarks.report import BenchmarkError
from benchmarks.width_plot import plot
from benchmarks.width_training import KEPT, METHODS, Job

from .commands import command

REAL = pytest.mark.skipif(not DATA.is_dir(), reason="real data not found: ../shared/data")


def line(method: str, keep: float, seed: int, auc: float, lr: float = 0.1, size: int = 1000) -> dict[str, Any]:
    setting = {"optimizer": "adagrad", "lr": lr, "weight_decay": 0.0}
    job = {"data": "frappe", "method": method, "keep": keep, "setting": setting, "seed": seed}
    numbers = {"validation": auc, "auc": auc - 0.01, "epoch": 1, "kept": keep, "rows": 10, "of_rows": 100, "seconds": 1}
    return {"job": job, "bytes": {"weights": size, "optimizer": size, "directory": 0}} | numbers


def test_unknown_ids_have_no_row_and_lists_are_cut_out() -> None:
    builder = width_data.Builder(np.array([0, 1]))
    builder.column("item", np.array([7, 5, 9]))
    builder.bag("history", "item", np.array([7, 9, 5, 5]), np.array([0, 0, 1]), np.array([0, 2, 4]))
    builder.bag("genre", "genre", np.array(["a", "b", "c"]), np.array([0, 1, 2]), np.array([1, 2, 3]))
    study = builder.study("tiny", [1, 0, 1], np.array([2]), np.array([2]), batch_size=2, epochs=1, every=1)
    assert study.tables == {"item": 2, "genre": 2} and study.features == {
        "item": "item",
        "history": "item",
        "genre": "genre",
    }
    batch = study.batch(np.array([2, 1]))
    assert batch["item"].to_lists() == [[], [0]]
    assert batch["history"].to_lists() == [[0, 0], [1]], "9 is not in the training part"
    assert batch["genre"].to_lists() == [[], [1]]


def test_hashing_leaves_the_share_and_spares_small_tables(tmp_path: Path) -> None:
    study = width_data.generated("generated", rows=2_000, ids=3_000)
    small = study.hashed(0.1)
    assert 0.08 < small.rows / study.rows <= 0.1
    largest = max(small.tables.values())
    assert all(small.tables[name] == min(rows, largest) for name, rows in study.tables.items())
    for name, ids, old in zip(small.columns, small.ids, study.ids):
        assert ids.min() >= 0 and ids.max() < small.tables[name]
        assert (ids == old).all() or study.tables[name] > largest
    study.save(tmp_path / "study.npz")
    loaded = width_data.Study.load(tmp_path / "study.npz")
    assert loaded.tables == study.tables and (loaded.ids == study.ids).all() and not loaded.shuffle
    assert max(loaded.train) < min(loaded.validation) and max(loaded.validation) < min(loaded.test)


@REAL
def test_histories_hold_what_was_liked_before() -> None:
    study = width_data.movielens(by_time=True)
    history, user, item = study.bags["history"], study.ids[0], study.ids[1]
    assert (history.last - history.first).max() == width_data.LONGEST
    sample = int(study.test[-1000])
    while user[sample] < 0:
        sample -= 1
    liked = [item[k] for k in range(sample) if user[k] == user[sample] and study.labels[k] and item[k] >= 0]
    found = history.ids[history.first[sample] : history.last[sample]].tolist()
    # Events of the same second do not count as before, so the end may differ by those.
    assert found and found == [x for x in liked if x in set(found)][: len(liked)][-len(found) :]


def test_absent_data_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(width_data, "DATA", tmp_path)
    with pytest.raises(BenchmarkError, match=r"real data not found: \.\./shared/data/frappe_86k"):
        width_data.prepared("frappe", tmp_path / "prepared")


def test_the_grid_is_tuned_first_and_goes_on() -> None:
    grid = width_quality.Grid(data=("frappe",), methods=("dim",), kept=(0.25, 0.02), seeds=3)
    assert list(grid.cells()) == [("frappe", "dim", 0.25)], "16 values cannot be cut to 2%"
    tuning = grid.pending([])
    count = len(width_quality.SETTINGS)
    assert len(tuning) == 2 * count and {job.seed for job in tuning} == {0, 1}
    lines = [line("dim", 0.25, 0, 0.7) | {"job": asdict(job)} for job in tuning]
    lines[2]["validation"] = lines[count + 2]["validation"] = 0.8
    lines[1]["validation"] = 0.85  # by chance: with the other seed it is worst
    lines[count + 1]["validation"] = 0.6
    rest = grid.pending(lines)
    assert [(job.setting, job.seed) for job in rest] == [(tuning[2].setting, 2)]
    assert len(grid.pending(lines[1:])) == 1, "what has no line is done"


def test_the_setting_is_chosen_on_validation_data_and_verdicts_follow() -> None:
    lines = [line("full", 1.0, seed, 0.95 + 0.001 * seed, size=6400) for seed in range(3)]
    lines += [line("water-filling", 0.25, seed, 0.94, size=1500) for seed in range(3)]
    lines += [line("water-filling", 0.25, 0, 0.93, lr=0.2)]
    lines[-1]["auc"] = 0.99  # a good test result must not choose the setting
    lines += [line("hash", 0.25, seed, 0.945, size=1600) for seed in range(3)]
    found = width_summary.summarised(lines)["data"]["frappe"]
    cell = found["methods"]["water-filling"]["0.25"]
    assert cell["auc"] == pytest.approx(0.93) and cell["setting"]["lr"] == 0.1 and cell["settings_tried"] == 2
    assert cell["net_compression"] == pytest.approx(12800 / 3000, abs=1e-3)
    verdict = found["verdicts"]["0.25"]
    assert verdict["loss"] == pytest.approx(0.011) and verdict["allowed"] == 0.002 and not verdict["reached"]
    assert verdict["best_other"] == "hash" and verdict["ahead"] == pytest.approx(-0.005) and not verdict["not_worse"]
    assert found["full_bytes"] == 6800 and set(found["equal_bytes"]) == {"water-filling", "hash"}
    assert found["equal_bytes"]["water-filling"]["0.5"]["setting"]["lr"] == 0.1
    assert "0.25" not in found["equal_bytes"]["hash"]


def test_the_default_policy_is_compared_at_equal_bytes_too() -> None:
    """With the best that others do in as many: a share of the values alone says nothing of what they take."""
    lines = [line("water-filling", 0.25, seed, 0.96, size=1500) for seed in range(3)]
    lines += [line("in_bytes", keep, seed, 0.95 + 0.001 * seed, size=700) for keep in (0.25, 0.5) for seed in range(3)]
    lines += [line("dim", 0.0625, seed, 0.94, size=800) for seed in range(3)]
    lines += [line("hash", 0.125, seed, 0.955, size=1600) for seed in range(3)]
    found = width_summary.summarised(lines)["data"]["frappe"]
    verdicts = found["byte_verdicts"]
    assert verdicts["0.25"] == {"best_other": "dim", "ahead": pytest.approx(0.011), "not_worse": True}
    assert verdicts["0.5"]["best_other"] == "hash" and not verdicts["0.5"]["not_worse"]
    assert found["verdicts"]["0.25"].get("best_other") is None, "of methods that keep as many values there is none"
    study = width_data.generated("generated", rows=2_000, ids=500)
    job = Job(data="generated", method="in_bytes", keep=0.25, setting=width_quality.SETTINGS[0], seed=0)
    width = width_training.width_of(study, job)
    assert width is not None and width.common.size == study.rows * 17 and width.policy == "water-filling"
    assert sum(width_training.tables_of(study, job).memory().values()) <= study.rows * 17


def test_results_can_be_extended(tmp_path: Path) -> None:
    """They hold the trainings that they are made of, so that more seeds can be added, or a cell be made anew."""
    lines = [line("full", 1.0, seed, 0.95) for seed in range(3)]
    lines += [line("water-filling", keep, seed, 0.94 + 0.001 * seed) for keep in (0.25, 0.02) for seed in range(2)]
    lines += [line("water-filling", 0.25, seed, 0.93, lr=0.2) for seed in range(2)]
    before = width_summary.summarised(lines)
    assert width_summary.summarised(width_summary.recalled(before)) == before
    results = tmp_path / "width.json"
    results.write_text(json.dumps({"width_quality": {"results": before}}))
    more = [line("water-filling", 0.25, 2, 0.95), *(line("water-filling", 0.02, s, 0.9, lr=0.2) for s in range(2))]
    both = width_quality.extended(more, results)
    cells = width_summary.summarised(both)["data"]["frappe"]["methods"]["water-filling"]
    assert cells["0.25"]["seeds"] == [0, 1, 2] and cells["0.25"]["settings_tried"] == 2
    assert cells["0.02"]["setting"]["lr"] == 0.2 and cells["0.02"]["validations"] == [0.9, 0.9]
    grid = width_quality.Grid(data=("frappe",), methods=("full", "water-filling"), kept=(0.25,), seeds=4)
    pending = [(job.method, job.seed, job.setting.lr) for job in grid.pending(both)]
    assert sorted(pending) == [("full", 3, 0.1), ("water-filling", 3, 0.1)]


def test_the_picture_shows_every_method() -> None:
    lines = [line(method, keep, 0, 0.9) for method in METHODS if "full" not in method for keep in KEPT]
    picture = ElementTree.fromstring(plot(width_summary.summarised([*lines, line("full", 1.0, 0, 0.91)])))
    lines_drawn = [part for part in picture.iter() if part.tag.endswith("polyline")]
    assert len(lines_drawn) == len(METHODS) - 3, (
        "all but the full models, and shares of bytes, which are no shares of values"
    )
    assert all(len(part.attrib["points"].split()) == len(KEPT) for part in lines_drawn)


def test_a_cut_training_goes_on(tmp_path: Path) -> None:
    """Cut off at once and finished later: every training is done once, and the results are made of all of them."""
    width_data.generated("generated", rows=8_000, ids=2_000).save(tmp_path / "generated.npz")
    file, output, picture = tmp_path / "lines.jsonl", tmp_path / "width.json", tmp_path / "width.svg"
    chosen = [
        "--data",
        str(tmp_path),
        "--only",
        "generated",
        "--methods",
        "water-filling",
        "full_decay",
        "--kept",
        "0.1",
    ]
    start = ["benchmarks.width_quality", "--lines", str(file)]
    trainings = ["--seeds", "3", "--workers", "2"]
    assert "18 trainings are left" in command(*start, *chosen, *trainings, "--seconds", "0")
    assert "0 trainings are left" in command(*start, *chosen, *trainings)
    trained, origin = width_quality.read(file)
    assert origin is not None and origin["machine"]["cores"] >= 1
    assert len(trained) == len({Job.of(one).key() for one in trained}) == 20
    narrow = [one for one in trained if one["job"]["method"] == "water-filling"]
    assert all(one["kept"] <= 0.1 and one["rounds"] > 0 and one["bytes"]["directory"] > 0 for one in narrow)
    command(*start, "--summarise", "--output", str(output), "--picture", str(picture))
    cells = json.loads(output.read_text())["width_quality"]["results"]["data"]["generated"]["methods"]
    assert len(cells["water-filling"]["0.1"]["scores"]) == len(cells["full_decay"]["1"]["scores"]) == 3
    assert picture.read_text().startswith("<svg")


def test_every_row_is_read_before_memory_is_measured() -> None:
    made = width_memory.Reads(rows=[500, 250, 150, 100], first=64, size=32, after=2)
    steps = list(made)
    assert len(steps) == 8 + 2 and [len(ids) for ids in steps[-1]] == [32] * 4
    for t, rows in enumerate(made.rows):
        read = np.concatenate([ids[t] for ids in steps[:-2]])
        assert len(np.unique(read)) == rows > read.max() >= 0


@pytest.mark.parametrize("name", ["width_memory", "width_speed"])
def test_quick_run(name: str, tmp_path: Path) -> None:
    output = tmp_path / "width.json"
    command("benchmarks", "--only", name, "--quick", "--output", str(output))
    part = json.loads(output.read_text())[name]
    assert part["quick"] is True and part["results"]["cases"] and part["machine"]["cores"] >= 1
    for case in part["results"]["cases"]:
        if name == "width_memory" and case["budget"] is not None:
            assert case["resident"] > 0 and case["kept"] <= case["budget"] + 1e-9
        if name == "width_speed":
            assert {"plain", "100%", "10%"} == set(case["sides"]) and case["sides"]["10%"]["round_ms"]["samples"] >= 1


def test_whole_rows_are_tuned_at_one_share() -> None:
    grid = width_quality.Grid(data=("frappe",), methods=("itep",), kept=(0.5, 0.125), seeds=2)
    tuning = grid.pending([])
    assert {job.keep for job in tuning} == {0.125} and len(tuning) == len(width_quality.SETTINGS)
    lines = [line("itep", 0.125, 0, 0.7) | {"job": asdict(job)} for job in tuning]
    lines[1]["validation"] = 0.8
    rest = grid.pending(lines)
    assert {(job.keep, job.seed) for job in rest} == {(0.5, 0), (0.5, 1), (0.125, 1)}
    assert {job.setting for job in rest} == {tuning[1].setting}
