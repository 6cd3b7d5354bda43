"""Which rows go to which part."""

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unequal.data import split as split_module
from unequal.data.config import DataConfig, SplitConfig
from unequal.data.dataset import Dataset
from unequal.data.reader import Reader
from unequal.data.split import uniform
from unequal.errors import DataError, RecipeError

PARTS = ("train", "validation", "test")


def dataset(folder: Path, key: Any, split: SplitConfig, **config: Any) -> Dataset:
    rows = len(key)
    table = pa.table({"key": key, "row": np.arange(rows), "label": np.zeros(rows)})
    pq.write_table(table, folder / "rows.parquet", row_group_size=max(1, rows // 7))
    told = DataConfig(files=("rows.parquet",), labels=("label",), dense=("row",), split=split, window=50, **config)
    return Dataset(told, folder)


def parts_of(data: Dataset) -> list[list[int]]:
    readers = [Reader(data, part=part, batch_size=13) for part in PARTS]  # type: ignore[arg-type]
    seen = [[int(row) for batch in reader for row in batch.dense[:, 0]] for reader in readers]
    assert [reader.rows for reader in readers] == [len(rows) for rows in seen]
    return seen


def times(values: list[int], kind: str) -> Any:
    if kind == "float":
        return pa.array([value / 8 for value in values])
    if kind == "timestamp":
        return pa.array(values, pa.timestamp("us"))
    if kind == "date":
        return pa.array([datetime.date(2020, 1, 1) + datetime.timedelta(value) for value in values])
    if kind == "text":
        return pa.array([str(datetime.date(2020, 1, 1) + datetime.timedelta(value)) for value in values])
    if kind == "digits":
        return pa.array([str(value) for value in values])
    return pa.array(values)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(-300, 300), min_size=20, max_size=90),
    st.sampled_from(["int", "float", "timestamp", "date", "text", "digits"]),
    st.booleans(),
)
def test_time_keeps_equal_times_together(
    tmp_path_factory: pytest.TempPathFactory, values: list[int], kind: str, cached: bool
) -> None:
    folder = tmp_path_factory.mktemp("time")
    values[:3] = [-301, 301, 302]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split_module, "_CACHED_ROWS", 10**6 if cached else 0)
        patch.setattr(split_module, "_BINS", 8)
        data = dataset(folder, times(values, kind), SplitConfig(by="time", column="key", test=0.25, validation=0))
        train, validation, test = parts_of(data)
    assert sorted(train + validation + test) == list(range(len(values)))
    assert not validation
    assert max(values[row] for row in train) < min(values[row] for row in test)
    ordered = sorted(values)
    share = round(0.25 * len(values))
    possible = [len(values) - k for k in range(1, len(values)) if ordered[k] != ordered[k - 1]]
    assert abs(len(test) - share) == min(abs(size - share) for size in possible)


def test_time_without_ties_is_exact(tmp_path: Path) -> None:
    order = np.random.default_rng(0).permutation(1000)
    train, validation, test = parts_of(dataset(tmp_path, order * 10**15, SplitConfig(by="time", column="key")))
    assert sorted(order[test]) == list(range(800, 1000)) and sorted(order[validation]) == list(range(700, 800))
    assert len(train) == 700


def test_times_of_the_whole_range(tmp_path: Path) -> None:
    key = np.array([-(2**63), 2**63 - 1, 0, 5, -5, 17, 18, 19, 20, 21])
    train, validation, test = parts_of(dataset(tmp_path, key, SplitConfig(by="time", column="key")))
    assert sorted(key[test]) == [21, 2**63 - 1] and key[validation].tolist() == [20] and len(train) == 7


def test_one_time_cannot_be_split(tmp_path: Path) -> None:
    data = dataset(tmp_path, [7] * 50, SplitConfig(by="time", column="key"))
    with pytest.raises(DataError, match=r"equal times cannot be split.*data.split.by = 'fraction'"):
        Reader(data, part="train", batch_size=5).rows  # noqa: B018


def test_missing_times(tmp_path: Path) -> None:
    key = pa.array([None if k == 5 else k for k in range(50)])
    data = dataset(tmp_path, key, SplitConfig(by="time", column="key"))
    with pytest.raises(DataError, match=r"column 'key', row 5: no time to split by, got null"):
        list(Reader(data, part="test", batch_size=5))
    data = dataset(tmp_path, key, SplitConfig(by="time", column="key"), bad_rows="drop")
    reader = Reader(data, part="train", batch_size=5, shuffle=True)
    rows = sorted(int(row) for batch in reader for row in batch.dense[:, 0])
    assert rows == [k for k in range(35) if k != 5] and reader.dropped == {"key: no time to split by": 1}
    assert reader.rows == 35


def test_times_that_are_none(tmp_path: Path) -> None:
    split = SplitConfig(by="time", column="key")
    with pytest.raises(DataError, match=r"column 'key': not a time"):
        parts_of(dataset(tmp_path, ["yesterday"] * 9, split))
    with pytest.raises(
        DataError, match=r"column 'key': expected numbers, times or ISO 8601 text to split by, got list"
    ):
        parts_of(dataset(tmp_path, pa.array([[1]] * 9), split))
    with pytest.raises(DataError, match=r"column 'kee': no such column; did you mean 'key'"):
        parts_of(dataset(tmp_path, range(9), SplitConfig(by="time", column="kee")))


@pytest.mark.parametrize("kind", [str, int, "dictionary"])
def test_column_values_name_the_parts(tmp_path: Path, kind: Any) -> None:
    key = [k % 4 for k in range(200)]
    array = pa.array([str(k) for k in key]).dictionary_encode() if kind == "dictionary" else pa.array(map(kind, key))
    split = SplitConfig(
        by="column", column="key", train_values=("0", "3"), validation_values=("1",), test_values=("2",)
    )
    assert parts_of(dataset(tmp_path, array, split)) == [
        [k for k in range(200) if k % 4 in chosen] for chosen in ((0, 3), (1,), (2,))
    ]
    split = SplitConfig(by="column", column="key", test_values=("2",), validation=0)
    train, validation, test = parts_of(dataset(tmp_path, array, split))
    assert (len(train), len(validation), len(test)) == (150, 0, 50)
    split = SplitConfig(by="column", column="key", train_values=("0",), test_values=("2",), validation=0.2)
    train, validation, test = parts_of(dataset(tmp_path, array, split))
    assert sorted(train + validation) == list(range(0, 200, 4)) and len(test) == 50
    assert 3 <= len(validation) <= 20


def test_column_values_that_never_occur(tmp_path: Path) -> None:
    split = SplitConfig(by="column", column="key", test_values=("tset",))
    with pytest.raises(DataError, match=r"no row has the value 'tset' that data.split names; did you mean 'test'"):
        parts_of(dataset(tmp_path, ["train", "test"] * 10, split))


def test_rows_without_a_value_belong_nowhere(tmp_path: Path) -> None:
    split = SplitConfig(by="column", column="key", test_values=("a",), validation=0)
    train, _, test = parts_of(dataset(tmp_path, ["a", None, "b", None], split))
    assert (train, test) == ([2], [0])


def test_fraction_depends_on_seed_and_row_alone(tmp_path: Path) -> None:
    first = parts_of(dataset(tmp_path, range(3000), SplitConfig()))
    assert sorted(row for part in first for row in part) == list(range(3000))
    sizes = [len(part) / 3000 for part in first]
    assert sizes == pytest.approx([0.7, 0.1, 0.2], abs=0.03)
    pq.write_table(pq.read_table(tmp_path / "rows.parquet"), tmp_path / "rows.parquet", row_group_size=11)
    again = Dataset(DataConfig(files=("rows.parquet",), labels=("label",), dense=("row",), window=999), tmp_path)
    assert parts_of(again) == first
    assert parts_of(dataset(tmp_path, range(3000), SplitConfig(seed=1))) != first


def test_uniform_is_uniform_and_independent_of_pieces() -> None:
    draws = uniform(0, 0, 100_000)
    assert (draws >= 0).all() and (draws < 1).all()
    assert np.abs(np.histogram(draws, 20)[0] / 5000 - 1).max() < 0.06
    assert (uniform(0, 1234, 10) == draws[1234:1244]).all()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"by": "date"}, "data.split.by: expected one of time, column, fraction, got 'date'"),
        ({"by": "time"}, "data.split.column: expected a column name for a split by time, got None"),
        ({"test": 1.5}, "data.split.test: expected a number from 0 to below 1, got 1.5"),
        ({"test": 0.6, "validation": 0.4}, "data.split: expected test and validation that leave rows to train on"),
        ({"by": "column", "column": "c"}, "data.split.test_values: expected at least one value"),
        ({"test_values": ("a",)}, "data.split.by: expected 'column' where values are named, got 'fraction'"),
        (
            {"by": "column", "column": "c", "test_values": ("a",), "train_values": ("a",)},
            "data.split: expected every value in one part only",
        ),
    ],
)
def test_wrong_fields(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(RecipeError) as error:
        SplitConfig(**fields)
    assert problem in str(error.value)


def test_parts_that_get_no_rows(tmp_path: Path) -> None:
    data = dataset(tmp_path, range(3), SplitConfig(test=0.0001, validation=0))
    assert Reader(data, part="validation", batch_size=1).rows == 0
    assert list(Reader(data, part="validation", batch_size=1)) == []
    with pytest.raises(DataError, match="the split leaves no rows for the part 'test' of 3 rows"):
        Reader(data, part="test", batch_size=1).rows  # noqa: B018
