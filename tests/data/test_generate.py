"""Generated data: the same bytes again, the stated sizes, skew and drift, and a truth that is one."""

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from unequal.data.config import DataConfig, GenerateConfig, SplitConfig
from unequal.data.generate import cardinalities, columns, generate, generated
from unequal.data.reader import Reader
from unequal.errors import RecipeError, UserError
from unequal.recipe import load_recipe

SMALL = {"rows": 3000, "tables": 5, "ids": 500, "dense": 3}


def read_folder(folder: Path) -> pa.Table:
    return pa.concat_tables([pq.read_table(path) for path in sorted(folder.glob("*.parquet"))])


def area_under_curve(scores: np.ndarray, labels: np.ndarray) -> float:
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - counts + (counts + 1) / 2)[inverse]
    positives = int(labels.sum())
    return (ranks[labels].sum() - positives * (positives + 1) / 2) / (positives * (len(labels) - positives))


def test_same_configuration_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        generate(tmp_path / name, GenerateConfig(**SMALL, sequence_length=4, drift=0.5, seed=seed, rows_per_file=2000))
    files = [path.name for path in sorted((tmp_path / "a").iterdir())]
    assert files == ["part-00000.parquet", "part-00001.parquet", "recipe.toml", "truth.json"]
    contents = [[(tmp_path / name / file).read_bytes() for file in files[:2]] for name in "abc"]
    assert contents[0] == contents[1] and contents[0] != contents[2]


def test_truth_is_the_ceiling(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    config = GenerateConfig(rows=80_000, tables=6, ids=2000, dense=4, positive_rate=0.3)
    told = generate(tmp_path, config, lambda done, total: seen.append((done, total)))
    table = read_folder(tmp_path)
    truth, labels = table.column("truth").to_numpy(), table.column("click").to_numpy() == 1
    assert seen[-1] == (80_000, 80_000)
    assert json.loads((tmp_path / "truth.json").read_text()) == json.loads(json.dumps(told))
    for part, rows in (("all", slice(None)), ("test", slice(64_000, None))):
        score, label = truth[rows], labels[rows]
        assert told[part]["rows"] == len(label) and told[part]["positives"] == label.sum()
        assert told[part]["auc"] == pytest.approx(area_under_curve(score, label), abs=1e-5)
        loss = -np.log(np.where(label, score, 1 - score)).mean()
        rate = label.mean()
        entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
        assert told[part]["log_loss"] == pytest.approx(loss, rel=1e-9)
        assert told[part]["normalized_entropy"] == pytest.approx(loss / entropy, rel=1e-9)
    assert 0.80 < told["all"]["auc"] < 0.86
    assert labels.mean() == pytest.approx(0.3, abs=0.02)
    for low in np.arange(0, 1, 0.1):
        inside = (truth >= low) & (truth < low + 0.1)
        if inside.sum() > 500:
            deviation = np.sqrt(0.25 / inside.sum())
            assert abs(labels[inside].mean() - truth[inside].mean()) < 5 * deviation


@pytest.mark.parametrize(
    "options", [{}, {"sequence_length": 5}, {"tables": 26, "ids": 100_000}, {"tables": 1, "ids": 2}]
)
def test_ids_in_all_as_asked(options: dict[str, int]) -> None:
    config = GenerateConfig(**{**SMALL, **options})
    sizes = cardinalities(config)
    assert sum(sizes) == config.ids and min(sizes) >= 2
    assert len(sizes) == len(columns(config)["categorical"])


def test_columns_and_ranges(tmp_path: Path) -> None:
    config = GenerateConfig(**SMALL, sequence_length=6)
    told = generate(tmp_path, config)
    table = read_folder(tmp_path)
    assert table.num_rows == 3000 and table.column("time").to_numpy().tolist() == sorted(
        table.column("time").to_pylist()
    )
    assert len(set(table.column("time").to_pylist())) == 3000
    for name, size in told["cardinalities"].items():
        ids = table.column(name).to_numpy()
        assert ids.min() >= 0 and ids.max() < size
    histories = table.column("history").combine_chunks()
    lengths = np.diff(histories.offsets.to_numpy())
    assert set(lengths.tolist()) == set(range(7))
    assert histories.values.to_numpy().max() < told["cardinalities"]["item"]
    for name in columns(config)["dense"]:
        values = table.column(name).to_numpy()
        assert np.isfinite(values).all() and values.min() >= 0


def shares(table: pa.Table, rows: slice) -> np.ndarray:
    return np.bincount(table.column("C1").to_numpy()[rows], minlength=1000) / len(range(*rows.indices(table.num_rows)))


def test_skew_and_drift(tmp_path: Path) -> None:
    top = {}
    for skew in (0.0, 1.2):
        generate(tmp_path / str(skew), GenerateConfig(rows=20_000, tables=1, ids=1000, dense=0, skew=skew))
        top[skew] = np.sort(shares(read_folder(tmp_path / str(skew)), slice(None)))[::-1][:10].sum()
    assert top[0.0] < 0.03 and 0.4 < top[1.2] < 0.9
    moved = {}
    for drift in (0.0, 1.0):
        folder = tmp_path / f"drift {drift}"
        generate(folder, GenerateConfig(rows=20_000, tables=1, ids=1000, dense=0, skew=1.2, drift=drift))
        table = read_folder(folder)
        moved[drift] = np.abs(shares(table, slice(0, 4000)) - shares(table, slice(16_000, None))).sum() / 2
    assert moved[0.0] < 0.15 and moved[1.0] > 0.8


def test_the_recipe_reads_the_data(tmp_path: Path) -> None:
    generate(tmp_path, GenerateConfig(**SMALL, sequence_length=4))
    recipe = load_recipe(tmp_path / "recipe.toml")
    reader = Reader(recipe.data, part="test", batch_size=100, root=tmp_path)
    assert reader.rows == 600
    batch = next(iter(reader)).check()
    assert batch.features == ("C1", "C2", "C3", "C4", "C5", "item", "history") and batch.dense.shape == (100, 3)


def test_made_once_into_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNEQUAL_CACHE", str(tmp_path / "cache"))
    made = GenerateConfig(**SMALL)
    names = columns(made)
    config = DataConfig(**names, generate=made, split=SplitConfig(by="time", column="time"))
    assert Reader(config, part="train", batch_size=100).rows == 2100
    (folder,) = (tmp_path / "cache").iterdir()
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert generated(made) == folder and {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    generated(GenerateConfig(**SMALL, seed=1))
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_folder_with_data_is_left_alone(tmp_path: Path) -> None:
    generate(tmp_path, GenerateConfig(**SMALL))
    before = (tmp_path / "part-00000.parquet").read_bytes()
    with pytest.raises(UserError, match="choose an empty folder"):
        generate(tmp_path, GenerateConfig(**SMALL, seed=5))
    assert (tmp_path / "part-00000.parquet").read_bytes() == before


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written: "):
        generate(tmp_path / "file" / "out", GenerateConfig(**SMALL))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_a_full_disk_leaves_no_half_file(tmp_path: Path) -> None:
    (tmp_path / "part-00000.parquet.part").symlink_to("/dev/full")
    with pytest.raises(
        UserError, match=r"part-00000.parquet.part: cannot be written: No space left on device; free some"
    ):
        generate(tmp_path, GenerateConfig(**SMALL))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [("rows", 0), ("ids", 9), ("drift", 1.5), ("noise", -0.1), ("positive_rate", 0.0), ("skew", 9.0)],
)
def test_wrong_fields(field: str, value: float) -> None:
    with pytest.raises(RecipeError, match=rf"data.generate.{field}: expected .*, got {value}"):
        GenerateConfig(**{**SMALL, field: value})
