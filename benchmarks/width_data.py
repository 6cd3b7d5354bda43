"""Data for the quality of narrow rows: real clicks and ratings, and generated clicks of 5 million ids, as arrays.

Ids that the training part of real data does not have are left out: they have no row in any model. Validation data is cut from
the training part, at random or, where the data is in order of time, at its end.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .quality import DATA
from .report import BenchmarkError

if TYPE_CHECKING:
    import unequal as uq

Ints = NDArray[np.integer[Any]]
LONGEST = 50
"""rated items of a history that are read, the newest"""
IDS, ROWS, SMALL_ROWS = 5_000_000, 2_000_000, 20_000
"""of generated data; rows of a quick run"""
DRIFT = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Bag:
    """Lists of ids of one table: sample n has `ids[first[n] : last[n]]`."""

    table: str
    ids: Ints
    first: Ints
    last: Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """Samples and how a model is trained on them."""

    name: str
    tables: dict[str, int]
    """name → rows"""
    columns: list[str]
    """the table of each column with one id; the feature is called like it"""
    ids: Ints
    """[columns, samples], −1 where the id is unknown"""
    bags: dict[str, Bag]
    dense: NDArray[np.float32]
    labels: NDArray[np.int8]
    train: Ints
    validation: Ints
    test: Ints
    batch_size: int
    epochs: int
    """at the most: a training ends when validation data says so"""
    every: int = 1000
    """steps between rounds in the long run, as a recipe has it by default"""
    shuffle: bool = True
    """otherwise samples are read in order of time"""

    @property
    def rows(self) -> int:
        return sum(self.tables.values())

    @property
    def features(self) -> dict[str, str]:
        """Name → table."""
        return dict(zip(self.columns, self.columns)) | {name: bag.table for name, bag in self.bags.items()}

    def batch(self, samples: Ints) -> uq.Batch:
        import torch

        import unequal as uq

        block = self.ids[:, samples]
        known = block >= 0
        ids, lengths = [block[known]], [known.reshape(-1)]
        for bag in self.bags.values():
            count = bag.last[samples] - bag.first[samples]
            start = np.repeat(bag.first[samples] - (np.cumsum(count) - count), count)
            ids.append(bag.ids[start + np.arange(len(start))])
            lengths.append(count)
        joined, all_lengths = (np.concatenate(part).astype(np.int64) for part in (ids, lengths))
        return uq.Batch(
            tuple(self.features),
            torch.from_numpy(joined),
            torch.from_numpy(all_lengths),
            dense=torch.from_numpy(self.dense[samples]) if self.dense.shape[1] else None,
            labels=torch.from_numpy(self.labels[samples].astype(np.float32)[:, None]),
        )

    def hashed(self, share: float) -> Study:
        """Large tables are cut down to one size, into which their ids are hashed, so that this share of all rows is left."""
        from unequal.data.strings import mix64_array

        low, high = 1, max(self.tables.values())
        while low < high:
            middle = (low + high + 1) // 2
            fits = sum(min(rows, middle) for rows in self.tables.values()) <= share * self.rows
            low, high = (middle, high) if fits else (low, middle - 1)

        def mapped(ids: Ints, rows: int) -> Ints:
            places = (mix64_array(ids.astype(np.uint64)) % np.uint64(low)).astype(np.int32)
            return np.where(ids < 0, -1, places) if rows > low else ids

        return replace(
            self,
            tables={name: min(rows, low) for name, rows in self.tables.items()},
            ids=np.stack([mapped(ids, self.tables[name]) for name, ids in zip(self.columns, self.ids)]),
            bags={n: replace(bag, ids=mapped(bag.ids, self.tables[bag.table])) for n, bag in self.bags.items()},
        )

    def save(self, path: Path) -> None:
        described = {name: getattr(self, name) for name in PLAIN}
        described["bags"] = {name: bag.table for name, bag in self.bags.items()}
        arrays = {name: getattr(self, name) for name in ARRAYS}
        for name, bag in self.bags.items():
            arrays |= {f"{part} of {name}": getattr(bag, part) for part in ("ids", "first", "last")}
        fresh = path.with_suffix(".partial.npz")
        write: Callable[..., None] = np.savez_compressed if self.ids.size < 2**25 else np.savez
        write(fresh, described=np.array(json.dumps(described)), **arrays)
        fresh.replace(path)

    @classmethod
    def load(cls, path: Path) -> Study:
        with np.load(path, allow_pickle=False) as file:
            described = json.loads(str(file["described"]))
            described["bags"] = {
                name: Bag(table=table, **{part: file[f"{part} of {name}"] for part in ("ids", "first", "last")})
                for name, table in described["bags"].items()
            }
            return cls(**described, **{name: file[name] for name in ARRAYS})


PLAIN = ("name", "tables", "columns", "batch_size", "epochs", "every", "shuffle")
ARRAYS = ("ids", "dense", "labels", "train", "validation", "test")


class Builder:
    """Numbers the ids that the training part has, table by table."""

    def __init__(self, train: Ints) -> None:
        self.train = train
        self.known: dict[str, Any] = {}
        self.ids: dict[str, Ints] = {}
        self.bags: dict[str, Bag] = {}

    def numbers(self, table: str, values: Any) -> Ints:
        known = self.known[table]
        place = np.minimum(np.searchsorted(known, values), len(known) - 1)
        return np.where(known[place] == values, place, -1).astype(np.int32)

    def column(self, name: str, values: Any) -> None:
        self.known[name] = np.unique(values[self.train])
        self.ids[name] = self.numbers(name, values)

    def bag(self, name: str, table: str, values: Any, first: Ints, last: Ints) -> None:
        """Lists of a table; without a column of its own its rows are the values that the lists of the training part have."""
        if table not in self.known:
            spans = {(a, b) for a, b in zip(first[self.train].tolist(), last[self.train].tolist())}
            self.known[table] = np.unique(np.concatenate([values[a:b] for a, b in spans]))
        ids = self.numbers(table, values)
        before = np.concatenate([[0], np.cumsum(ids >= 0)]).astype(np.int32)  # unknown ids are left out of their lists
        self.bags[name] = Bag(table=table, ids=ids[ids >= 0], first=before[first], last=before[last])

    def study(self, name: str, labels: Any, validation: Ints, test: Ints, **how: Any) -> Study:
        parts = {"train": self.train, "validation": validation, "test": test}
        return Study(
            name=name,
            tables={table: len(known) for table, known in self.known.items()},
            columns=list(self.ids),
            ids=np.stack(list(self.ids.values())),
            bags=self.bags,
            dense=np.zeros((len(labels), 0), np.float32),
            labels=np.asarray(labels, np.int8),
            **{part: samples.astype(np.int32) for part, samples in parts.items()},
            **how,
        )


def columns_of(path: Path) -> dict[str, Any]:
    import pyarrow.parquet as parquet

    if not path.exists():
        raise BenchmarkError(
            f"real data not found: ../shared/data/{path.parent.name}; prepare it elsewhere (--prepare)"
        )
    table = parquet.read_table(path)
    return {name: table[name].to_numpy() for name in table.column_names}


def held_out(samples: Ints, share: float, seed: int) -> tuple[Ints, Ints]:
    """The samples without a random part of them, and that part."""
    order = np.random.default_rng(seed).permutation(samples)
    count = int(share * len(order))
    return np.sort(order[count:]), np.sort(order[:count])


def frappe() -> Study:
    """The source's validation part is trained on, its test part is the test."""
    data = columns_of(DATA / "frappe_86k/frappe.parquet")
    train, validation = held_out(np.flatnonzero(data["split"] == "validation"), 0.1, 123)
    builder = Builder(train)
    for name in (name for name in data if name not in ("label", "split")):
        builder.column(name, data[name])
    test = np.flatnonzero(data["split"] == "test")
    return builder.study("frappe", data["label"], validation, test, batch_size=256, epochs=20)


def movielens(by_time: bool) -> Study:
    """Was it rated 4 or 5? With the items that the person rated so before: all earlier ones, or those of the training part."""
    events = columns_of(DATA / "ml1m/events.parquet")
    order = np.lexsort((events["item_id"], events["user_id"], events["timestamp"]))
    user, item, time = (events[name][order].astype(np.int64) for name in ("user_id", "item_id", "timestamp"))
    labels = events["rating"][order] >= 4
    count = len(order)
    cut = int(0.8 * count)
    known = labels.copy()
    if by_time:
        train, validation, test = np.split(np.arange(count), [int(0.9 * cut), cut])
    else:
        mixed = np.random.default_rng(7).permutation(count)
        test = np.sort(mixed[cut:])
        train, validation = held_out(np.sort(mixed[:cut]), 0.1, 123)
        known &= np.isin(np.arange(count), train)
    builder = Builder(train)
    builder.column("user_id", user)
    builder.column("item_id", item)
    for table, key, ids in (("users", "user_id", user), ("items", "item_id", item)):
        facts = columns_of(DATA / f"ml1m/{table}.parquet")
        row = np.argsort(facts[key])[np.searchsorted(np.sort(facts[key]), ids)]
        for name in (name for name in facts if name not in (key, "title", "genre")):
            builder.column(name, np.unique(facts[name].astype(str), return_inverse=True)[1][row])
        if "genre" in facts:
            lists = [text.split(" ") for text in facts["genre"]]
            ends = np.cumsum([len(part) for part in lists])
            starts = ends - [len(part) for part in lists]
            builder.bag("genre", "genre", np.array([genre for part in lists for genre in part]), starts[row], ends[row])
    # By person, then by time: what someone liked before an event lies together, and ends where the event's time begins.
    liked = np.flatnonzero(known)
    liked = liked[np.lexsort((time[liked], user[liked]))]
    span = int(time.max()) + 1
    keys = user[liked] * span + time[liked]
    last = np.searchsorted(keys, user * span + time)
    first = np.maximum(np.searchsorted(keys, user * span), last - LONGEST)
    builder.bag("history", "item_id", item[liked], first, last)
    name, epochs = ("ml1m_time", 10) if by_time else ("ml1m_random", 16)
    return builder.study(name, labels, validation, test, batch_size=2048, epochs=epochs)


def generated(name: str, rows: int = ROWS, ids: int = IDS, drift: float = 0.0) -> Study:
    """One pass in order of time; 10% before the end are validation data, the last 20% the test."""
    from unequal.data.config import GenerateConfig
    from unequal.data.generate import columns, generate

    config = GenerateConfig(rows=rows, ids=ids, drift=drift)
    names = columns(config)
    with tempfile.TemporaryDirectory() as temporary:
        truth = generate(Path(temporary) / "data", config)
        parts = [columns_of(path) for path in sorted((Path(temporary) / "data").glob("part-*.parquet"))]
    whole = {column: np.concatenate([part[column] for part in parts]) for column in parts[0]}
    train, validation, test = np.split(np.arange(rows, dtype=np.int32), [int(0.7 * rows), int(0.8 * rows)])
    return Study(
        name=name,
        tables=truth["cardinalities"],
        columns=list(names["categorical"]),
        ids=np.stack([whole[column].astype(np.int32) for column in names["categorical"]]),
        bags={},
        dense=np.stack([np.log1p(whole[column]) for column in names["dense"]], 1).astype(np.float32),
        labels=whole["click"].astype(np.int8),
        train=train,
        validation=validation,
        test=test,
        batch_size=4096 if rows > SMALL_ROWS else 256,
        epochs=1,
        shuffle=False,
    )


STUDIES: dict[str, Callable[[], Study]] = {
    "frappe": frappe,
    "ml1m_random": lambda: movielens(by_time=False),
    "ml1m_time": lambda: movielens(by_time=True),
    "generated": lambda: generated("generated"),
    "generated_drift": lambda: generated("generated_drift", drift=DRIFT),
}


def prepared(name: str, folder: Path) -> Study:
    """As it lies in the folder; made and put there on first use."""
    path = folder / f"{name}.npz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        STUDIES[name]().save(path)
    return Study.load(path)
