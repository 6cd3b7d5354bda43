"""Raw files of the originals in, Parquet and a recipe that reads it out."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from unequal.data.importers import import_avazu, import_criteo, import_movielens
from unequal.data.reader import Reader
from unequal.data.strings import hash_string
from unequal.errors import DataError, RecipeError, UserError
from unequal.recipe import load_recipe

SHARED = Path(__file__).resolve().parents[2] / "../shared/data"


def shared(name: str) -> Path:
    folder = SHARED / name
    if not folder.exists():
        pytest.skip(f"real data not found: {folder}")
    return folder


def read(out: Path, part: str, size: int = 100_000) -> Any:
    """The first batch of a part, by the recipe that was written."""
    recipe = load_recipe(out / "recipe.toml")
    return next(iter(Reader(recipe.data, part=part, batch_size=size, root=out))).check()  # type: ignore[arg-type]


def criteo_line(number: int) -> str:
    numbers = [str(number - 2) if column != 3 else "" for column in range(13)]
    texts = [f"{number * column:08x}" if column != 5 else "" for column in range(26)]
    return "\t".join([str(number % 2), *numbers, *texts]) + "\n"


@pytest.mark.parametrize("packed", [False, True])
def test_criteo_text(tmp_path: Path, packed: bool) -> None:
    text = "".join(criteo_line(number) for number in range(200)).encode()
    source = tmp_path / ("train.txt.gz" if packed else "train.txt")
    source.write_bytes(gzip.compress(text) if packed else text)
    for number, given in enumerate((source, tmp_path)):
        out = tmp_path / f"out{number}"
        summary = import_criteo(given, out)
        assert summary == {"rows": 200, "columns": 41, "positives": 100, "files": ["criteo-00000.parquet"],
                           "split": "time"}  # fmt: skip
        batch = read(out, "test")
        assert batch.size == 30 and batch.dense.shape == (30, 13) and len(batch.features) == 26
        assert batch.labels[:4, 0].tolist() == [0, 1, 0, 1]
        assert batch.dense[0, :4].tolist() == pytest.approx([np.log1p(168)] * 3 + [0])
        assert batch["C2"].to_lists()[0] == [hash_string(f"{170:08x}")] and batch["C6"].to_lists()[0] == [
            hash_string("")
        ]


def test_criteo_broken_lines(tmp_path: Path) -> None:
    lines = [criteo_line(number) for number in range(9)]
    for number, broken, problem in (
        (1, "0\t1\n", "line 5: Expected 40 columns, got 2"),
        (2, lines[4].replace("\t2", "\ttwo", 1), "line 5: CSV conversion error to int64: invalid value 'two'"),
        (3, "7" + lines[4][1:], "line 5: expected a label of 0 or 1, got 7"),
    ):
        source = tmp_path / f"{number}.txt"
        source.write_text("".join([*lines[:4], broken, *lines[5:]]))
        with pytest.raises(DataError) as error:
            import_criteo(source, tmp_path / f"out{number}")
        assert str(error.value).startswith(f"{source}") and problem in str(error.value)
        assert list((tmp_path / f"out{number}").iterdir()) == []
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress("".join(lines * 999).encode())[:-2000])
    with pytest.raises(DataError, match=r"cut.txt.gz: .*truncated"):
        import_criteo(tmp_path / "cut.txt.gz", tmp_path / "cut")
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match=r"empty.txt: Empty CSV file"):
        import_criteo(tmp_path / "empty.txt", tmp_path / "none")
    with pytest.raises(DataError, match=r"trian.txt: no such file or folder"):
        import_criteo(tmp_path / "trian.txt", tmp_path / "none")
    (tmp_path / "bare").mkdir()
    with pytest.raises(DataError, match=r"the folder holds no Criteo data; expected one of: train.txt"):
        import_criteo(tmp_path / "bare", tmp_path / "none")


def test_criteo_sample(tmp_path: Path) -> None:
    summary = import_criteo(shared("criteo_kaggle_small"), tmp_path)
    assert summary["rows"] == 8000 and summary["positives"] == 1728 and summary["split"] == "column"
    assert [read(tmp_path, part).size for part in ("train", "validation", "test")] == [7200, 409, 391]


AVAZU = "id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,app_category,device_id,\
device_ip,device_model,device_type,device_conn_type,C14,C15,C16,C17,C18,C19,C20,C21\n"


def avazu_line(number: int, hour: str | None = None) -> str:
    moment = f"14102{1 + number // 24}{number % 24:02d}" if hour is None else hour
    return (
        ",".join([f"1000016934911786{number:04d}", str(number % 2), moment, *(f"v{number}" for _ in range(21))]) + "\n"
    )


def test_avazu_text(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text(AVAZU + "".join(avazu_line(number) for number in range(100)))
    summary = import_avazu(tmp_path, tmp_path / "out")
    assert summary == {"rows": 100, "columns": 25, "positives": 50, "files": ["avazu-00000.parquet"], "split": "time"}
    batch = read(tmp_path / "out", "test")
    assert batch.size == 10 and batch["hour_of_day"].to_lists()[0] == [90 % 24]
    assert batch["weekday"].to_lists()[0] == [4]  # 24 October 2014 was a Friday, Monday being 0
    table = pq.read_table(tmp_path / "out" / "avazu-00000.parquet")
    assert table.column("time")[0].as_py() == 1413849600
    assert batch["site_id"].to_lists()[0] == [hash_string("v90")]
    few = AVAZU + "".join(avazu_line(number, "14102100") for number in range(100))
    with gzip.open(tmp_path / "few.csv.gz", "wt") as file:
        file.write(few)
    assert import_avazu(tmp_path / "few.csv.gz", tmp_path / "few")["split"] == "fraction"


def test_avazu_broken_lines(tmp_path: Path) -> None:
    for number, text, problem in (
        (1, AVAZU + avazu_line(0) + avazu_line(1, "14132100"), "line 3: expected an hour as YYMMDDHH, got '14132100'"),
        (2, AVAZU + avazu_line(0) + avazu_line(1, ""), "line 3: expected an hour as YYMMDDHH, got nothing"),
        (3, AVAZU + avazu_line(0) + "1,2\n", "line 3: Expected 24 columns, got 2"),
        (4, AVAZU.replace("hour", "hours") + avazu_line(0), "column 'hour': no such column; did you mean 'hours'?"),
    ):
        source = tmp_path / f"{number}.csv"
        source.write_text(text)
        with pytest.raises(DataError) as error:
            import_avazu(source, tmp_path / f"out{number}")
        assert problem in str(error.value) and str(source) in str(error.value)


def test_avazu_sample(tmp_path: Path) -> None:
    summary = import_avazu(shared("avazu_small"), tmp_path)
    assert summary["rows"] == 8999 and summary["positives"] == 1563 and summary["split"] == "column"
    assert [read(tmp_path, part).size for part in ("train", "validation", "test")] == [8087, 480, 432]


def ratings(rows: int = 1500) -> list[tuple[int, int, int, int]]:
    random = np.random.default_rng(0)
    return [
        (
            int(random.integers(1, 9)),
            int(random.integers(1, 40)),
            int(random.integers(1, 6)),
            int(random.integers(0, 400)),
        )
        for _ in range(rows)
    ]


def write_movielens(folder: Path, kind: str) -> None:
    folder.mkdir()
    events = ratings()
    if kind == "1m":
        (folder / "ratings.dat").write_text("".join("::".join(map(str, event)) + "\n" for event in events))
        (folder / "users.dat").write_text("".join(f"{user}::F::25::{user}::0{user}067\n" for user in range(1, 8)))
        movies = "".join(f"{item}::Amélie {item} (2001)::Comedy|Sci-Fi\n" for item in range(1, 40))
        (folder / "movies.dat").write_text(movies, encoding="latin-1")
    elif kind == "latest":
        lines = "".join(",".join(map(str, event)) + "\n" for event in events)
        (folder / "ratings.csv").write_text("userId,movieId,rating,timestamp\n" + lines)
        movies = "".join(f'{item},"Film, the {item} (1995)",(no genres listed)\n' for item in range(1, 40))
        (folder / "movies.csv").write_text("movieId,title,genres\n" + movies)
    else:
        columns = dict(zip(("user_id", "item_id", "rating", "timestamp"), zip(*events)))
        pq.write_table(pa.table({name: list(values) for name, values in columns.items()}), folder / "events.parquet")


def expected_histories(table: pa.Table, counted: list[bool]) -> list[list[int]]:
    rows = table.to_pylist()
    result = []
    for row in rows:
        earlier = [
            other["item_id"]
            for other, counts in zip(rows, counted)
            if counts and other["user_id"] == row["user_id"] and other["timestamp"] < row["timestamp"]
        ]
        result.append(earlier[-50:])
    return result


@pytest.mark.parametrize("kind", ["1m", "latest", "parquet"])
@pytest.mark.parametrize("split", ["time", "random"])
def test_movielens(tmp_path: Path, kind: str, split: str) -> None:
    write_movielens(tmp_path / "source", kind)
    summary = import_movielens(tmp_path / "source", tmp_path / "out", split=split)
    table = pq.read_table(tmp_path / "out" / "ratings.parquet")
    rows = table.to_pylist()
    assert summary["rows"] == 1500 and summary["columns"] == table.num_columns and summary["split"] == split
    assert sorted((row["user_id"], row["item_id"], row["rating"], row["timestamp"]) for row in rows) == sorted(
        ratings()
    )
    assert [row["timestamp"] for row in rows] == sorted(row["timestamp"] for row in rows)
    assert all(row["click"] == (row["rating"] >= 4) for row in rows)
    counted = [row["click"] == 1 and row.get("split", "train") == "train" for row in rows]
    assert [row["history"] for row in rows] == expected_histories(table, counted)
    assert max(len(row["history"]) for row in rows) == 50
    batches = {part: read(tmp_path / "out", part) for part in ("train", "validation", "test")}
    sizes = {part: batch.size for part, batch in batches.items()}
    if split == "random":
        assert sizes == {"train": 1080, "validation": 120, "test": 300}
    else:
        assert sum(sizes.values()) == 1500 and abs(sizes["test"] - 300) < 10 and abs(sizes["validation"] - 120) < 10
    if kind == "1m":
        row = next(row for row in rows if row["user_id"] == 3)
        described = {name: row[name] for name in ("gender", "age", "occupation", "zip_code", "release_year", "genres")}
        assert described == {"gender": "F", "age": 25, "occupation": 3, "zip_code": "03067", "release_year": 2001,
                             "genres": ["Comedy", "Sci-Fi"]}  # fmt: skip
        assert next(row for row in rows if row["user_id"] == 8)["gender"] is None
    if kind == "latest":
        assert rows[0]["release_year"] == 1995 and rows[0]["genres"] == []


def test_movielens_broken_input(tmp_path: Path) -> None:
    write_movielens(tmp_path / "source", "1m")
    with pytest.raises(RecipeError, match="split: expected 'time' or 'random', got 'user'"):
        import_movielens(tmp_path / "source", tmp_path / "out", split="user")
    whole = (tmp_path / "source" / "ratings.dat").read_text().splitlines()
    for broken, problem in (
        ("1::2::3", "line 4: Expected 4 columns, got 3"),
        ("1::2::good::5", "line 4: CSV conversion error to double: invalid value 'good'"),
        ("1::2::::5", "line 4: expected a value, got nothing"),
    ):
        (tmp_path / "source" / "ratings.dat").write_text("\n".join([*whole[:3], broken, *whole[3:]]) + "\n")
        with pytest.raises(DataError) as error:
            import_movielens(tmp_path / "source", tmp_path / "out")
        assert problem in str(error.value) and "ratings.dat" in str(error.value)
    with pytest.raises(DataError, match=r"the folder holds no ratings; expected one of: ratings.dat, ratings.csv"):
        import_movielens(tmp_path, tmp_path / "out")


def test_movielens_sample(tmp_path: Path) -> None:
    source = shared("ml1m")
    events = pq.read_table(source / "events.parquet")
    (tmp_path / "source").mkdir()
    pq.write_table(events.slice(0, 20_000), tmp_path / "source" / "events.parquet")
    for name in ("users.parquet", "items.parquet"):
        (tmp_path / "source" / name).symlink_to((source / name).resolve())
    summary = import_movielens(tmp_path / "source", tmp_path / "out")
    assert summary["rows"] == 20_000
    batch = read(tmp_path / "out", "test")
    assert batch.features[-2:] == ("history", "genres") and batch["gender"].lengths.min() == 1
    assert batch["release_year"].lengths.min() == 1 and batch["genres"].lengths.min() == 1
    assert batch["history"].lengths.max() == 50
    with pytest.raises(UserError, match="choose an empty folder"):
        import_movielens(tmp_path / "source", tmp_path / "out")
