from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from unequal.data.config import DataConfig, SplitConfig
from unequal.data.dataset import Dataset
from unequal.data.reader import Reader
from unequal.errors import DataError, UserError
from unequal.stats.collect import deal, profile_dataset
from unequal.stats.source import source_of
from unequal.tables import Feature, Table

ITEMS = Table("items", dim=4)
FEATURES = {"user": Feature(Table("users", dim=4)), "item": Feature(ITEMS), "history": Feature(ITEMS, pooling=None)}
CONFIG = DataConfig(
    files=("part-*.parquet",),
    labels=("click",),
    dense=("age",),
    categorical=("user", "item"),
    sequences=("history",),
    max_length=6,
    split=SplitConfig(by="fraction", test=0.2, validation=0.1),
)
ROWS = 6000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three files of some row groups each: strings, numbers with gaps, lists that are longer than `max_length`."""
    path = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(1)
    item = (3000 ** random.random(ROWS)).astype(np.int64)
    table = pa.table(
        {
            "click": random.integers(0, 2, ROWS),
            "age": random.random(ROWS),
            "user": [f"user {number}" for number in random.integers(0, 800, ROWS)],
            "item": pa.array(item, mask=random.random(ROWS) < 0.05),
            "history": [
                (3000 ** random.random(length)).astype(np.int64).tolist() for length in random.integers(0, 9, ROWS)
            ],
            "time": np.arange(ROWS),
        }
    )
    for number in range(3):
        pq.write_table(
            table.slice(2000 * number, 2000), path / f"part-{number}.parquet", row_group_size=300 + 100 * number
        )
    return path


def exact(folder, config, name):
    """Every id of a table that training reads, and how often."""
    reader = Reader(config, part="train", batch_size=512, root=folder)
    columns = [column for column, feature in FEATURES.items() if feature.table.name == name]
    ids = np.concatenate([batch[column].values.numpy() for batch in reader for column in columns])
    found, counts = np.unique(ids, return_counts=True)
    order = np.lexsort((found, -counts))
    return found[order], counts[order], reader.rows


@pytest.mark.parametrize("split", [CONFIG.split, SplitConfig(by="time", column="time", test=0.3, validation=0.1)])
@pytest.mark.parametrize("window", [2**23, 900])
def test_the_training_part_is_counted_once(folder, split, window):
    config = replace(CONFIG, split=split, window=window)
    profile = profile_dataset(Dataset(config, folder), FEATURES)
    for name, table in profile.tables.items():
        ids, counts, rows = exact(folder, config, name)
        assert profile.samples == profile.total_samples == rows and not profile.sampled
        assert table.exact and table.top(table.kept).tolist() == ids.tolist()
        assert table.top_reads(table.kept) * rows == pytest.approx(counts)
        assert table.distinct(rows) == len(ids)


@pytest.mark.parametrize("world", [2, 3, 40])
def test_ranks_read_row_groups_of_their_own(folder, world):
    data = Dataset(CONFIG, folder)
    parts = [profile_dataset(data, FEATURES, rank=rank, world=world) for rank in range(world)]
    assert max(part.samples for part in parts) < 1.4 * max(4200 / world, 300)
    merged = parts[0]
    for part in parts[1:]:
        merged = merged.merge(part)
    whole = profile_dataset(data, FEATURES)
    assert merged.samples == whole.samples == merged.total_samples and not merged.sampled
    merged.check(whole.source)
    for name, table in whole.tables.items():
        other = merged.tables[name]
        assert other.top(other.kept).tolist() == table.top(table.kept).tolist()
        assert np.array_equal(other.top_reads(other.kept), table.top_reads(table.kept))
        for size in (1, 16, 256, 2048):
            assert other.distinct(size) == pytest.approx(table.distinct(size), rel=0.1)


def test_row_groups_are_dealt_out_evenly(folder):
    groups = Dataset(CONFIG, folder).row_groups
    dealt = deal(groups, np.arange(len(groups)), 4)
    assert sorted(np.concatenate(dealt).tolist()) == list(range(len(groups)))
    loads = [sum(groups[number].values for number in numbers) for numbers in dealt]
    assert max(loads) < 1.3 * min(loads)


@pytest.mark.parametrize(("window", "world"), [(2**23, 1), (900, 1), (900, 3), (2**23, 2)])
def test_a_sample_is_of_the_size_that_was_asked_for(folder, window, world):
    data = Dataset(replace(CONFIG, window=window), folder)
    whole = profile_dataset(data, FEATURES)
    parts = [profile_dataset(data, FEATURES, samples=1500, rank=rank, world=world) for rank in range(world)]
    profile = parts[0]
    for part in parts[1:]:
        profile = profile.merge(part)
    assert profile.samples == pytest.approx(1500, abs=5)
    assert profile.sampled and profile.total_samples == whole.samples
    for name, table in whole.tables.items():
        other = profile.tables[name]
        assert other.reads_per_sample == pytest.approx(table.reads_per_sample, rel=0.05)
        assert other.rows_seen < table.rows_seen
        assert other.distinct(1024) == pytest.approx(table.distinct(1024), rel=0.1)


def test_the_curve_is_that_of_training(folder):
    """Measured on the very batches that training reads."""
    config = replace(CONFIG, window=2**23)
    table = profile_dataset(Dataset(config, folder), FEATURES).tables["items"]
    reader = Reader(config, part="train", batch_size=256, root=folder, shuffle=True, drop_last=True)
    found = [len(np.unique(np.concatenate([b["item"].values.numpy(), b["history"].values.numpy()]))) for b in reader]
    assert table.distinct(256) == pytest.approx(np.mean(found), rel=0.05)


def test_bad_rows_are_left_out_as_in_training(folder, tmp_path):
    table = pq.read_table(folder / "part-0.parquet")
    age = table["age"].to_numpy().copy()
    age[::7] = np.nan
    pq.write_table(table.set_column(1, "age", pa.array(age)), tmp_path / "part-0.parquet", row_group_size=300)
    config = replace(CONFIG, bad_rows="drop")
    profile = profile_dataset(Dataset(config, tmp_path), FEATURES)
    (dropped,) = profile.dropped.values()
    reader = Reader(config, part="train", batch_size=512, root=tmp_path)
    assert profile.samples == sum(batch.size for batch in reader) == profile.total_samples - dropped
    assert not profile.sampled
    with pytest.raises(DataError, match=r"column 'item'.*id outside"):
        profile_dataset(Dataset(CONFIG, tmp_path, id_limits={"item": 10}), FEATURES)


def test_what_is_said_of_other_data(folder, tmp_path):
    data = Dataset(CONFIG, folder)
    profile = profile_dataset(data, FEATURES)
    profile.check(source_of(CONFIG, FEATURES, data))
    profile.check(source_of(replace(CONFIG, window=100, dense=()), FEATURES))

    def refused(source, what):
        with pytest.raises(UserError, match=what) as caught:
            profile.check(source)
        assert "make it again with `unequal profile`" in str(caught.value)

    refused(source_of(replace(CONFIG, max_length=9), FEATURES), "data.max_length was 6 and is 9")
    refused(source_of(replace(CONFIG, split=SplitConfig(test=0.3)), FEATURES), "data.split, 'test' was 0.2 and is 0.3")
    apart = {**FEATURES, "history": Feature(Table("history", dim=4), pooling=None)}
    refused(source_of(CONFIG, apart), r"columns of tables, 'items' was \['item', 'history'\] and is \['item'\]")
    for number in range(2):
        (tmp_path / f"part-{number}.parquet").write_bytes((folder / f"part-{number}.parquet").read_bytes())
    refused(source_of(CONFIG, FEATURES, Dataset(CONFIG, tmp_path)), "'part-2.parquet' is not among the 2 of now")
    pq.write_table(pq.read_table(folder / "part-2.parquet").slice(5), tmp_path / "part-2.parquet")
    refused(
        source_of(CONFIG, FEATURES, Dataset(CONFIG, tmp_path)), "'part-2.parquet' had 2,000 rows in .* has 1,995 in"
    )
    (tmp_path / "part-2.parquet").write_bytes((folder / "part-2.parquet").read_bytes())
    profile.check(source_of(CONFIG, FEATURES, Dataset(CONFIG, tmp_path)))
    (tmp_path / "part-3.parquet").write_bytes((folder / "part-2.parquet").read_bytes())
    refused(source_of(CONFIG, FEATURES, Dataset(CONFIG, tmp_path)), "'part-3.parquet' is new among the files")


def test_parts_of_a_data_set_merge(folder):
    split = SplitConfig(by="column", column="click", test_values=("0",), validation=0)
    config = replace(CONFIG, split=split)
    parts = [
        profile_dataset(Dataset(replace(config, files=(f"part-{n}.parquet",)), folder), FEATURES) for n in range(3)
    ]
    merged = parts[2].merge(parts[0]).merge(parts[1])
    whole = profile_dataset(Dataset(config, folder), FEATURES)
    assert merged.samples == merged.total_samples == whole.samples
    assert merged.tables["items"].top(50).tolist() == whole.tables["items"].top(50).tolist()
    with pytest.raises(UserError, match="expected parts that have none in common"):
        whole.merge(whole)
    other = profile_dataset(Dataset(replace(config, max_length=2), folder), FEATURES)
    with pytest.raises(UserError, match=r"cannot be merged: data\.max_length was 6 and is 2"):
        whole.merge(other)
