"""Input that cannot be used: each fault is one line that names file, column and row, or is dropped and counted."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from unequal.data.config import DataConfig
from unequal.data.reader import Reader
from unequal.errors import DataError

ROWS = 60
CONFIG: dict[str, Any] = {
    "files": ("rows.parquet",),
    "labels": ("label",),
    "dense": ("x",),
    "categorical": ("id", "number"),
    "sequences": ("list",),
    "id_weights": {"list": "weights"},
    "sample_weight": "weight",
    "window": 100,
}


def columns() -> dict[str, list[Any]]:
    return {
        "label": [k % 2 for k in range(ROWS)],
        "x": [float(k) for k in range(ROWS)],
        "id": [k % 10 for k in range(ROWS)],
        "number": [float(k) for k in range(ROWS)],
        "list": [[k % 5] * (k % 3) for k in range(ROWS)],
        "weights": [[0.5] * (k % 3) for k in range(ROWS)],
        "weight": [1.0] * ROWS,
    }


def make(folder: Path, table: pa.Table | None = None, **config: Any) -> Reader:
    if table is not None:
        pq.write_table(table, folder / "rows.parquet", row_group_size=16)
    limits = {"id": 10, "list": 5} if "categorical" not in config else None
    told = DataConfig(**{**CONFIG, **config})
    return Reader(told, part="all", batch_size=7, root=folder, id_limits=limits, shuffle=True, workers=1)


def one_line(error: pytest.ExceptionInfo[DataError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


FAULTS = [
    ("label", 2, "label outside [0, 1], got 2.0", "label outside [0, 1]"),
    ("label", -0.5, "label outside [0, 1], got -0.5", "label outside [0, 1]"),
    ("label", float("nan"), "label outside [0, 1], got nan", "label outside [0, 1]"),
    ("label", None, "no label, got null", "no label"),
    ("x", float("nan"), "not a finite number, got nan", "not a finite number"),
    ("x", float("-inf"), "not a finite number, got -inf", "not a finite number"),
    ("x", 1e39, "not a finite number, got 1e+39", "not a finite number"),
    ("weight", -1.0, "not a finite weight of 0 or more, got -1.0", "not a finite weight of 0 or more"),
    ("weight", float("inf"), "not a finite weight of 0 or more, got inf", "not a finite weight of 0 or more"),
    ("weight", None, "no sample weight, got null", "no sample weight"),
    ("id", 10, "id outside [0, 10), got 10", "id outside [0, 10)"),
    ("id", -1, "id outside [0, 10), got -1", "id outside [0, 10)"),
    ("number", 2.5, "id is not a whole number, got a fraction", "id is not a whole number"),
    ("list", [0, 5, 6], "id outside [0, 5), got 5", "id outside [0, 5)"),
    ("weights", [0.5], "not one weight per id, got 1 weights for 2 ids", "not one weight per id"),
    ("weights", None, "not one weight per id, got 0 weights for 2 ids", "not one weight per id"),
    ("weights", [0.5, float("nan")], "weight is not a finite number, got nan", "weight is not a finite number"),
]


@pytest.mark.parametrize(("column", "value", "problem", "cause"), FAULTS, ids=[f"{f[0]} {f[1]}" for f in FAULTS])
def test_a_bad_row_is_named_or_dropped(tmp_path: Path, column: str, value: Any, problem: str, cause: str) -> None:
    faulty = columns()
    if column == "label":
        faulty["label"] = [float(label) for label in faulty["label"]]
    faulty[column][41] = value
    if column == "list":
        faulty["weights"][41] = [0.5] * len(value)
    table = pa.table(faulty)
    with pytest.raises(DataError) as error:
        list(make(tmp_path, table))
    assert one_line(error).startswith(f"{tmp_path / 'rows.parquet'}, column '{column}', row 41: {problem}")
    assert "drop" in one_line(error)
    reader = make(tmp_path, bad_rows="drop")
    for _ in range(2):
        batches = list(reader)
        for batch in batches:
            batch.check()
        assert sorted(x for batch in batches for x in batch.dense[:, 0].tolist()) == [x for x in range(ROWS) if x != 41]
        assert reader.dropped == {f"{column}: {cause}": 1}
    assert reader.rows == ROWS


def test_many_bad_rows_are_counted_once_each_and_resume_keeps_the_count(tmp_path: Path) -> None:
    faulty = columns()
    for row in (0, 1, 2, 30, 59):
        faulty["x"][row] = float("nan")
    for row in (2, 31):
        faulty["id"][row] = 99
    reader = make(tmp_path, pa.table(faulty), bad_rows="drop")
    list(reader)
    whole = {"x: not a finite number": 5, "id: id outside [0, 10)": 1}
    assert reader.dropped == whole
    for stop in range(1, 9):
        first = make(tmp_path, bad_rows="drop")
        for number, _ in enumerate(first, 1):
            if number == stop:
                break
        state, rest = first.state(), [batch.dense.tolist() for batch in first]
        second = make(tmp_path, bad_rows="drop")
        second.restore(state)
        assert [batch.dense.tolist() for batch in second] == rest
        assert first.dropped == second.dropped == whole


def test_all_rows_bad(tmp_path: Path) -> None:
    faulty = columns()
    faulty["x"] = [float("nan")] * ROWS
    reader = make(tmp_path, pa.table(faulty), bad_rows="drop")
    assert list(reader) == [] and reader.dropped == {"x: not a finite number": ROWS} and reader.epoch == 1


def test_bad_rows_of_another_part_do_not_matter(tmp_path: Path) -> None:
    from unequal.data.config import SplitConfig

    faulty = columns()
    faulty["x"][59] = float("nan")
    pq.write_table(pa.table({**faulty, "time": np.arange(ROWS)}), tmp_path / "rows.parquet", row_group_size=60)
    config = DataConfig(**CONFIG, split=SplitConfig(by="time", column="time"))
    assert sum(batch.size for batch in Reader(config, part="train", batch_size=9, root=tmp_path)) == 42
    with pytest.raises(DataError, match="row 59"):
        list(Reader(config, part="test", batch_size=9, root=tmp_path))


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such file: .*rows.parquet"):
        make(tmp_path)
    with pytest.raises(DataError, match=r"no file matches '.*part-\*.parquet'"):
        make(tmp_path, files=("part-*.parquet",))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no"):
        make(tmp_path, files=("empty",))
    with pytest.raises(DataError, match=r"data.files names no file; .*data.generate"):
        make(tmp_path, files=())


@pytest.mark.parametrize("keep", [0, 3, 200, 0.5, 0.99])
def test_truncated_file(tmp_path: Path, keep: float) -> None:
    make(tmp_path, pa.table(columns()))
    whole = (tmp_path / "rows.parquet").read_bytes()
    (tmp_path / "rows.parquet").write_bytes(whole[: keep if isinstance(keep, int) else int(keep * len(whole))])
    with pytest.raises(
        DataError, match=r"rows.parquet: expected a readable Parquet file, got: Parquet .*; the file"
    ) as e:
        make(tmp_path)
    one_line(e)


def test_broken_page(tmp_path: Path) -> None:
    make(tmp_path, pa.table(columns()))
    whole = bytearray((tmp_path / "rows.parquet").read_bytes())
    whole[4:400] = bytes(396)
    (tmp_path / "rows.parquet").write_bytes(whole)
    with pytest.raises(DataError, match=r"rows.parquet(, column '.*')?: expected a readable Parquet file"):
        list(make(tmp_path))


def test_no_rows(tmp_path: Path) -> None:
    table = pa.table(columns()).slice(0, 0)
    with pytest.raises(DataError, match=r"rows.parquet: the files hold no rows"):
        make(tmp_path, table)


def test_columns_that_are_not_there_or_of_another_type(tmp_path: Path) -> None:
    make(tmp_path, pa.table({**columns(), "city": ["Bern"] * ROWS, "lists": [[1.5]] * ROWS}))
    where = str(tmp_path / "rows.parquet")
    with pytest.raises(DataError) as error:
        make(tmp_path, dense=("weigth",))
    assert one_line(error) == f"{where}, column 'weigth': no such column; did you mean 'weight'?"
    wrong = {
        "dense": (("city",), "expected numbers, got string; convert it, or name it under data.categorical"),
        "labels": (("list",), "expected numbers, got list<element: int64>; convert the column"),
        "sequences": (("list", "city"), "expected a list per row, got string; name the column under data.categorical"),
        "id_weights": ({"list": "weight"}, "expected a list of numbers per row, as weights of 'list', got double"),
    }
    for field, (value, problem) in wrong.items():
        with pytest.raises(DataError) as error:
            make(tmp_path, **{field: value, "categorical": (), **({"id_weights": {}} if field == "labels" else {}),
                              **({"sequences": ()} if field == "labels" else {})})  # fmt: skip
        assert problem in one_line(error)
    with pytest.raises(
        DataError, match="expected integers, because its table has 10 rows, got string; leave `rows` out"
    ):
        Reader(
            DataConfig(files=("rows.parquet",), labels=("label",), categorical=("city",)),
            part="all",
            batch_size=1,
            root=tmp_path,
            id_limits={"city": 10},
        )


def test_files_that_differ(tmp_path: Path) -> None:
    table = pa.table(columns())
    pq.write_table(table, tmp_path / "a.parquet")
    text = table.set_column(table.schema.get_field_index("id"), "id", pa.array(["x"] * ROWS))
    pq.write_table(text, tmp_path / "b.parquet")
    config = DataConfig(files=("*.parquet",), labels=("label",), categorical=("id",))
    with pytest.raises(DataError, match=r"b.parquet, column 'id': expected the same kind of values as in .*a.parquet"):
        Reader(config, part="all", batch_size=1, root=tmp_path)


def test_errors_of_threads_reach_the_consumer(tmp_path: Path) -> None:
    import threading

    before = set(threading.enumerate())
    faulty = columns()
    faulty["x"][50] = float("nan")
    make(tmp_path, pa.table(faulty))
    reader = Reader(DataConfig(**CONFIG), part="all", batch_size=7, root=tmp_path, workers=3)
    seen = 0
    with pytest.raises(DataError, match="row 50"):
        for batch in reader:
            seen += batch.size
    assert seen > 0
    assert set(threading.enumerate()) == before
