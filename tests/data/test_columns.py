"""Types, nulls, transforms: what a column's values become in the batch."""

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from unequal.batch import Batch
from unequal.data.config import DataConfig, SplitConfig
from unequal.data.reader import Reader
from unequal.data.strings import hash_string


def read(folder: Path, columns: dict[str, Any], id_limits: dict[str, int] | None = None, **config: Any) -> Batch:
    """One batch of all rows; row groups of 2 rows, so that dictionaries differ along the way."""
    size = len(next(iter(columns.values())))
    table = pa.table({"label": [0, 1] * (size // 2) + [0] * (size % 2), **columns})
    pq.write_table(table, folder / "rows.parquet", row_group_size=2)
    config = {"labels": ("label",), "split": SplitConfig(), **config}
    reader = Reader(DataConfig(files=("rows.parquet",), **config), part="all", batch_size=size, root=folder,
                    id_limits=id_limits)  # fmt: skip
    return next(iter(reader)).check()


def hashed(*texts: str) -> list[list[int]]:
    return [[hash_string(text)] for text in texts]


TEXT = ["x", None, "", "x"]
DAYS = [datetime.date(2024, 1, 1), None, datetime.date(1969, 12, 31), datetime.date(1970, 1, 2)]
STRINGS = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string()), pa.binary()]


@pytest.mark.parametrize("kind", STRINGS, ids=str)
def test_strings_of_every_type(tmp_path: Path, kind: pa.DataType) -> None:
    array = pa.array(TEXT).dictionary_encode().cast(kind) if pa.types.is_dictionary(kind) else pa.array(TEXT, kind)
    batch = read(tmp_path, {"id": array}, categorical=("id",))
    assert batch["id"].to_lists() == hashed("x", "", "", "x")


@pytest.mark.parametrize(
    "kind", [pa.int8(), pa.uint8(), pa.int32(), pa.uint32(), pa.int64(), pa.float32(), pa.float64()]
)
def test_missing_integers_are_left_out(tmp_path: Path, kind: pa.DataType) -> None:
    batch = read(tmp_path, {"id": pa.array([7, None, 0, 100], kind)}, categorical=("id",), id_limits={"id": 101})
    assert batch["id"].to_lists() == [[7], [], [0], [100]] and batch.ids.dtype == torch.int64


def test_other_id_types(tmp_path: Path) -> None:
    columns = {
        "large": pa.array([2**63 + 5, 1, 2**64 - 1, 0], pa.uint64()),
        "flag": pa.array([True, False, None, True]),
        "coded": pa.array([50, 60, None, 50]).dictionary_encode(),
        "nan": pa.array([1.0, float("nan"), -3.0, 2.0]),
        "day": pa.array(DAYS),
        "moment": pa.array([5, None, -1, 0], pa.timestamp("ms")),
    }
    batch = read(tmp_path, columns, categorical=tuple(columns))
    assert batch["large"].to_lists() == [[5 - 2**63], [1], [-1], [0]]
    assert batch["flag"].to_lists() == [[1], [0], [], [1]]
    assert batch["coded"].to_lists() == [[50], [60], [], [50]]
    assert batch["nan"].to_lists() == [[1], [], [-3], [2]]
    assert batch["day"].to_lists() == [[19723], [], [-1], [1]]
    assert batch["moment"].to_lists() == [[5], [], [-1], [0]]


LISTS = [[1, None, 3], None, [], [4]]


@pytest.mark.parametrize("kind", [pa.list_, pa.large_list, pa.list_view], ids=["list", "large_list", "list_view"])
def test_lists_of_every_type(tmp_path: Path, kind: Any) -> None:
    batch = read(tmp_path, {"ids": pa.array(LISTS, kind(pa.int32()))}, sequences=("ids",))
    assert batch["ids"].to_lists() == [[1, 3], [], [], [4]]


def test_further_lists(tmp_path: Path) -> None:
    words = [["a", None, "b"], None, [], ["a"]]
    columns = {
        "fixed": pa.array([[1, 2], [3, 4], None, [5, 6]], pa.list_(pa.int64(), 2)),
        "words": pa.array(words),
        "coded": pa.array([["a"], ["b", "a"], [], ["c"]], pa.list_(pa.dictionary(pa.int32(), pa.string()))),
    }
    batch = read(tmp_path, columns, categorical=("fixed",), sequences=("words", "coded"))
    assert batch["fixed"].to_lists() == [[1, 2], [3, 4], [], [5, 6]]
    text = {name: [hash_string(name)] for name in "abc"}
    missing = [hash_string("")]
    assert batch["words"].to_lists() == [text["a"] + missing + text["b"], [], [], text["a"]]
    assert batch["coded"].to_lists() == [text["a"], text["b"] + text["a"], [], text["c"]]


def test_weights_follow_their_ids(tmp_path: Path) -> None:
    columns = {
        "ids": pa.array([[1, None, 3], None, [], [4, 5, 6]]),
        "weights": pa.array([[0.1, 0.2, 0.3], None, [], [0.4, 0.5, 0.6]]),
        "other": [7, 8, 9, 10],
    }
    batch = read(
        tmp_path, columns, sequences=("ids",), categorical=("other",), id_weights={"ids": "weights"}, max_length=2
    )
    assert batch["ids"].to_lists() == [[1, 3], [], [], [5, 6]]
    assert batch["ids"].weights.tolist() == torch.tensor([0.1, 0.3, 0.5, 0.6]).tolist()
    assert batch["other"].weights.tolist() == [1, 1, 1, 1]


def test_numbers_of_every_type_and_missing_ones(tmp_path: Path) -> None:
    columns = {
        "whole": pa.array([1, None, -3, 4], pa.int64()),
        "half": pa.array(np.array([1.5, 2, 3, 4], np.float16)),
        "flag": pa.array([True, False, None, True]),
        "money": pa.array([1, 2, None, 4], pa.decimal128(8, 2)),
        "coded": pa.array([0.25, None, 0.25, 1.0]).dictionary_encode(),
    }
    batch = read(tmp_path, columns, dense=tuple(columns), dense_missing=-1.0)
    expected = [[1, -1, -3, 4], [1.5, 2, 3, 4], [1, 0, -1, 1], [1, 2, -1, 4], [0.25, -1, 0.25, 1]]
    assert batch.dense.dtype == torch.float32 and batch.dense.is_contiguous()
    assert batch.dense.T.tolist() == expected


def test_log1p_keeps_the_sign(tmp_path: Path) -> None:
    batch = read(tmp_path, {"x": [0.0, 1.0, -7.0, None]}, dense=("x",), dense_transform="log1p")
    assert batch.dense[:, 0].tolist() == pytest.approx([0, np.log(2), -np.log(8), 0], rel=1e-6)


def test_standardize_uses_the_training_part(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    values = random.normal(1e6, 3.0, 500)
    table = pa.table({"x": pa.array([None if k % 10 == 3 else v for k, v in enumerate(values)]), "label": [0, 1] * 250,
                      "row": np.arange(500), "same": np.full(500, 4.0)})  # fmt: skip
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=37)
    config = DataConfig(
        files=("rows.parquet",),
        labels=("label",),
        dense=("x", "same"),
        dense_transform="standardize",
        window=200,
        split=SplitConfig(by="time", column="row"),
    )
    train = Reader(config, part="train", batch_size=500, root=tmp_path)
    present = np.array([v for k, v in enumerate(values[:350]) if k % 10 != 3])
    assert train.statistics["x"] == pytest.approx((present.mean(), present.std()), rel=1e-9)
    assert train.statistics["same"] == (4.0, 1.0)
    seen = next(iter(train)).dense[:, 0].numpy()
    assert seen[np.arange(350) % 10 != 3].std() == pytest.approx(1, abs=1e-4)
    assert (seen[3::10] == 0).all()
    test = Reader(config, part="test", batch_size=500, root=tmp_path)
    assert test.statistics == train.statistics
    told = Reader(config, part="test", batch_size=500, root=tmp_path, statistics={"x": (0.0, 1e6), "same": (0.0, 1.0)})
    assert next(iter(told)).dense[0].tolist() == pytest.approx([values[400] / 1e6, 4.0])
    assert train.state()["statistics"]["same"] == [4.0, 1.0]


def test_threshold_makes_labels(tmp_path: Path) -> None:
    batch = read(tmp_path, {"rating": [1, 4, 5, 3], "id": [1, 2, 3, 4]}, categorical=("id",), labels=("rating",),
                 label_threshold=4)  # fmt: skip
    assert batch.labels.tolist() == [[0], [1], [1], [0]]


def test_column_names_with_dots(tmp_path: Path) -> None:
    batch = read(tmp_path, {"a.b": [1, 2], "a": [3, 4]}, categorical=("a", "a.b"))
    assert batch["a"].to_lists() == [[3], [4]] and batch["a.b"].to_lists() == [[1], [2]]
