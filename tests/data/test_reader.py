"""The reader against the rows that were written: content, order, resuming, ranks, threads."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unequal.batch import Batch
from unequal.data.config import DataConfig, SplitConfig
from unequal.data.dataset import Dataset
from unequal.data.reader import Reader
from unequal.data.strings import hash_string
from unequal.errors import DataError, RecipeError

ROWS = 1000
CONFIG = DataConfig(
    files=("*.parquet",),
    labels=("click", "buy"),
    dense=("price", "row"),
    categorical=("user", "city"),
    sequences=("history", "words"),
    id_weights={"history": "strength"},
    sample_weight="weight",
    window=3000,
)


def make_rows(rows: int = ROWS, seed: int = 0) -> pa.Table:
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 6, rows)
    history = [random.integers(0, 100, n).tolist() for n in lengths]
    words = [random.choice(["a", "bee", "", "Ωmega"], n).tolist() for n in random.integers(0, 3, rows)]
    return pa.table(
        {
            "row": np.arange(rows, dtype=np.int32),
            "click": random.integers(0, 2, rows).astype(np.int8),
            "buy": random.random(rows),
            "price": random.standard_normal(rows).astype(np.float32),
            "user": random.integers(-(2**62), 2**62, rows),
            "city": random.choice(["Bern", "Zürich", "Genève"], rows),
            "history": pa.array([None if k % 17 == 0 else h for k, h in enumerate(history)], pa.list_(pa.int32())),
            "strength": pa.array([None if k % 17 == 0 else [i / 7 for i in h] for k, h in enumerate(history)]),
            "words": pa.array(words, pa.large_list(pa.string())),
            "weight": random.random(rows).astype(np.float32),
            "time": random.integers(0, 300, rows),
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows")
    table = make_rows()
    pq.write_table(table.slice(0, 400), path / "a.parquet", row_group_size=64)
    pq.write_table(table.slice(400, 600), path / "b.parquet", row_group_size=500)
    return path


def rows_of(batches: list[Batch]) -> list[dict[str, Any]]:
    """Every sample as plain values."""
    result = []
    for batch in batches:
        batch.check()
        lists = {name: batch[name] for name in batch.features}
        parts = {name: part.to_lists() for name, part in lists.items()}
        for k in range(batch.size):
            row: dict[str, Any] = {name: values[k] for name, values in parts.items()}
            row["labels"], row["dense"] = batch.labels[k].tolist(), batch.dense[k].tolist()
            row["weight"] = None if batch.sample_weights is None else batch.sample_weights[k].item()
            if batch.weights is not None:
                row["strength"] = lists["history"].weights.split(lists["history"].lengths.tolist())[k].tolist()
            result.append(row)
    return result


def expected_rows(table: pa.Table) -> list[dict[str, Any]]:
    single = np.float32
    return [
        {
            "user": [row["user"]],
            "city": [hash_string(row["city"])],
            "history": row["history"] or [],
            "words": [hash_string(word) for word in row["words"]],
            "labels": [row["click"], single(row["buy"]).item()],
            "dense": [row["price"], row["row"]],
            "weight": row["weight"],
            "strength": [single(value).item() for value in row["strength"] or []],
        }
        for row in table.to_pylist()
    ]


def equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return other is None if one is None else other is not None and torch.equal(one, other)


def same(one: list[Batch], other: list[Batch]) -> bool:
    names = ("ids", "lengths", "weights", "dense", "labels", "sample_weights")
    return len(one) == len(other) and all(
        a.features == b.features
        and all(
            (getattr(a, n) is None and getattr(b, n) is None) or torch.equal(getattr(a, n), getattr(b, n))
            for n in names
        )
        for a, b in zip(one, other)
    )


def numbers(batches: list[Batch]) -> list[int]:
    return [int(number) for batch in batches for number in batch.dense[:, 1]]


@pytest.mark.parametrize("window", [100, 700, 3000, 10**6])
def test_every_row_comes_as_written(folder: Path, window: int) -> None:
    reader = Reader(replace(CONFIG, window=window), part="all", batch_size=64, root=folder)
    batches = list(reader)
    assert rows_of(batches) == expected_rows(make_rows())
    assert reader.rows == ROWS and reader.batches_per_epoch == len(batches) == 16
    assert reader.features == ("user", "city", "history", "words")
    assert [batch.size for batch in batches] == [64] * 15 + [40]


@pytest.mark.parametrize("window", [100, 700, 3000, 10**6])
def test_shuffle_gives_every_row_once_in_another_order_each_epoch(folder: Path, window: int) -> None:
    reader = Reader(replace(CONFIG, window=window), part="all", batch_size=64, root=folder, shuffle=True, seed=3)
    first, second = list(reader), list(reader)
    written = expected_rows(make_rows())
    assert numbers(first) != numbers(second)
    for epoch in (first, second):
        assert numbers(epoch) != list(range(ROWS))
        assert rows_of(epoch) == [written[number] for number in numbers(epoch)]
        assert sorted(numbers(epoch)) == list(range(ROWS))
    again = Reader(replace(CONFIG, window=window), part="all", batch_size=64, root=folder, shuffle=True, seed=3)
    assert same(list(again), first) and same(list(again), second)
    other = Reader(replace(CONFIG, window=window), part="all", batch_size=64, root=folder, shuffle=True, seed=4)
    assert numbers(list(other)) != numbers(first)


def test_large_row_groups_are_mixed(tmp_path: Path) -> None:
    for number in range(4):
        table = make_rows(seed=number).drop_columns("row")
        table = table.append_column("row", pa.array(np.arange(ROWS) + number * ROWS))
        pq.write_table(table, tmp_path / f"{number}.parquet")
    reader = Reader(replace(CONFIG, window=20000), part="all", batch_size=500, root=tmp_path, shuffle=True)
    first = next(iter(reader))
    assert len(np.unique(numbers([first]) // np.int64(ROWS))) == 4


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_workers_change_nothing_and_leave_no_threads(folder: Path, workers: int) -> None:
    before = set(threading.enumerate())
    plain = Reader(CONFIG, part="train", batch_size=50, root=folder, shuffle=True)
    threaded = Reader(CONFIG, part="train", batch_size=50, root=folder, shuffle=True, workers=workers)
    for _ in range(2):
        assert same(list(plain), list(threaded))
    for _ in threaded:
        break
    assert set(threading.enumerate()) == before


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 22), st.sampled_from([40, 64, 93]), st.sampled_from([300, 900, 10**6]), st.integers(0, 2))
def test_resume_in_the_middle_of_an_epoch(folder: Path, stop: int, size: int, window: int, workers: int) -> None:
    def make() -> Reader:
        config = replace(CONFIG, window=window, split=SplitConfig(by="time", column="time"))
        return Reader(config, part="train", batch_size=size, root=folder, shuffle=True, seed=1, workers=workers)

    reader, taken = make(), 0
    while taken < stop:
        for _ in reader:
            taken += 1
            if taken == stop:
                break
    state = json.loads(json.dumps(reader.state()))
    rest = list(reader) + list(reader)
    resumed = make()
    resumed.restore(state)
    assert same(list(resumed) + list(resumed), rest)


def test_state_of_other_data_or_order_is_refused(folder: Path, tmp_path: Path) -> None:
    state = Reader(CONFIG, part="train", batch_size=50, root=folder).state()
    pq.write_table(make_rows(), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="other files or data settings"):
        Reader(CONFIG, part="train", batch_size=50, root=tmp_path).restore(state)
    with pytest.raises(DataError, match="other files or data settings"):
        Reader(replace(CONFIG, max_length=2), part="train", batch_size=50, root=folder).restore(state)
    with pytest.raises(DataError, match="other seed: expected 1, got 0"):
        Reader(CONFIG, part="train", batch_size=50, root=folder, seed=1).restore(state)
    with pytest.raises(DataError, match="other global batch"):
        Reader(CONFIG, part="train", batch_size=51, root=folder).restore(state)
    with pytest.raises(DataError, match="version 1, got None"):
        Reader(CONFIG, part="train", batch_size=50, root=folder).restore({})


@pytest.mark.parametrize(("world", "size"), [(2, 60), (3, 60), (7, 60), (3, 999), (4, 333), (5, 3)])
def test_ranks_share_every_batch(folder: Path, world: int, size: int) -> None:
    def make(rank: int, world: int) -> Reader:
        return Reader(CONFIG, part="all", batch_size=size, root=folder, shuffle=True, rank=rank, world=world)

    whole = list(make(0, 1))
    readers = [make(rank, world) for rank in range(world)]
    assert {reader.batches_per_epoch for reader in readers} == {len(whole)}
    shares = [list(reader) for reader in readers]
    assert {len(share) for share in shares} == {len(whole)}
    for number, batch in enumerate(whole):
        assert rows_of([share[number] for share in shares]) == rows_of([batch])
    empty = [batch for share in shares for batch in share if not batch.size]
    assert bool(empty) == (min(batch.size for batch in whole) < world)
    for batch in empty:
        assert (batch.dense.shape, batch.labels.shape) == ((0, 2), (0, 2))


def test_a_position_holds_for_any_number_of_ranks(folder: Path) -> None:
    def make(rank: int, world: int) -> Reader:
        return Reader(CONFIG, part="all", batch_size=64, root=folder, shuffle=True, rank=rank, world=world)

    alone, second = make(0, 1), make(1, 3)
    for _ in range(5):
        next(iter(alone))
    second.restore(json.loads(json.dumps(alone.state())))
    whole = rows_of(list(alone))
    shared = make(0, 3), second, make(2, 3)
    for reader in (shared[0], shared[2]):
        reader.restore(second.state())
    parts = [list(reader) for reader in shared]
    assert [row for turn in zip(*parts) for row in rows_of(list(turn))] == whole


def test_a_bookmark_is_where_it_was_put(folder: Path) -> None:
    reader = Reader(CONFIG, part="all", batch_size=64, root=folder, shuffle=True)
    batches = iter(reader)
    for _ in range(3):
        next(batches)
    mark, state = reader.bookmark(), reader.state()
    next(batches)
    assert reader.state(mark) == state != reader.state()


def test_drop_last(folder: Path) -> None:
    reader = Reader(CONFIG, part="all", batch_size=64, root=folder, drop_last=True)
    assert [batch.size for batch in reader] == [64] * reader.batches_per_epoch == [64] * 15
    assert reader.epoch == 1


def test_lists_keep_their_last_ids(folder: Path) -> None:
    batches = list(Reader(replace(CONFIG, max_length=2), part="all", batch_size=64, root=folder, shuffle=True))
    written = expected_rows(make_rows())
    for row, number in zip(rows_of(batches), numbers(batches)):
        assert row["history"] == written[number]["history"][-2:]
        assert row["strength"] == written[number]["strength"][-2:]
        assert row["words"] == written[number]["words"][-2:]


def test_readers_share_a_data_set(folder: Path) -> None:
    dataset = Dataset(CONFIG, folder)
    parts = [Reader(dataset, part=part, batch_size=64) for part in ("train", "validation", "test")]  # type: ignore[arg-type]
    seen = [numbers(list(reader)) for reader in parts]
    assert sorted(number for part in seen for number in part) == list(range(ROWS))
    assert [reader.rows for reader in parts] == [len(part) for part in seen]


def test_only_dense_columns(folder: Path) -> None:
    config = DataConfig(files=("a.parquet",), labels=("click",), dense=("price", "row"))
    batches = list(Reader(config, part="all", batch_size=64, root=folder))
    assert [batch.size for batch in batches] == [64] * 6 + [16] and numbers(batches) == list(range(400))


def test_wrong_arguments(folder: Path) -> None:
    with pytest.raises(RecipeError, match="part: expected one of train"):
        Reader(CONFIG, part="dev", batch_size=1, root=folder)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="batch_size: expected 1 or more, got 0"):
        Reader(CONFIG, part="all", batch_size=0, root=folder)
    with pytest.raises(RecipeError, match="rank"):
        Reader(CONFIG, part="all", batch_size=1, root=folder, rank=1)
    with pytest.raises(DataError, match="id_limits names 'citty', which is no id column; did you mean 'city'"):
        Reader(CONFIG, part="all", batch_size=1, root=folder, id_limits={"citty": 4})
