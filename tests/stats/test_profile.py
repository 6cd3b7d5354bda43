import json
import shutil
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import unequal as uq
from unequal import tensorfile
from unequal.errors import UserError
from unequal.stats.collect import profile_batches
from unequal.stats.profilefile import pack, unpack

ITEMS = uq.Table("items", dim=4)
FEATURES = {
    "item": uq.Feature(ITEMS),
    "history": uq.Feature(ITEMS, pooling=None),
    "user": uq.Feature(uq.Table("users", 1000, dim=4)),
}


def batch(items, histories, users):
    jagged = {
        "item": uq.Jagged(torch.tensor(items), torch.ones(len(items), dtype=torch.int64)),
        "history": uq.Jagged(
            torch.tensor([x for one in histories for x in one], dtype=torch.int64),
            torch.tensor([len(one) for one in histories], dtype=torch.int64),
        ),
        "user": uq.Jagged(torch.tensor(users), torch.ones(len(users), dtype=torch.int64)),
    }
    return uq.Batch.from_jagged(jagged)


def batches(count=6, size=50, seed=0, spread=40):
    """Ids by Zipf's law with the exponent 1."""
    random = np.random.default_rng(seed)

    def draw(number):
        return (spread ** random.random(number)).astype(np.int64).tolist()

    for _ in range(count):
        yield batch(
            draw(size),
            [draw(random.integers(0, 6)) for _ in range(size)],
            random.integers(0, 1000, size).tolist(),
        )


def exact_counts(parts, names):
    ids = torch.cat([part[name].values for part in parts for name in names]).numpy()
    return np.unique(ids, return_counts=True)


def test_counts_of_all_features_of_a_table():
    parts = list(batches())
    profile = uq.Profile.of(FEATURES, parts)
    assert profile.samples == 300 and not profile.sampled
    items, users = profile.tables["items"], profile.tables["users"]
    ids, counts = exact_counts(parts, ("item", "history"))
    order = np.lexsort((ids, -counts))
    assert items.exact and items.kept == items.rows_seen == len(ids) and items.rows_seen_error == 0
    assert items.top(7).tolist() == ids[order][:7].tolist()
    assert items.top_reads(len(ids)) * 300 == pytest.approx(counts[order])
    assert items.reads_per_sample == pytest.approx(counts.sum() / 300)
    assert items.feature_ids == pytest.approx({"item": 1.0, "history": counts.sum() / 300 - 1})
    assert items.features["item"].pooled and not items.features["history"].pooled
    assert users.reads_per_sample == 1 and users.rows == 1000
    rows, reads = items.histogram()
    assert rows.sum() == len(ids) and (rows * reads).sum() == counts.sum()
    assert rows[reads == counts.min()] == (counts == counts.min()).sum()


def test_no_more_ids_than_were_counted():
    items = uq.Profile.of(FEATURES, batches()).tables["items"]
    with pytest.raises(UserError, match=rf"'items': expected 0 to {items.kept} of its most-read rows.* got 1,000"):
        items.top(1000)
    sketch = profile_batches(FEATURES, batches(40, spread=10**6), memory=1 << 12).tables["items"]
    assert not sketch.exact
    with pytest.raises(UserError, match="with more --sketch-bytes"):
        sketch.top(10**6)


def test_the_curve_is_of_stretches_in_order():
    """Ids of a session come together: shuffled, short stretches would have more of them."""
    sessions = np.repeat(np.arange(64), 16) % 50
    parts = [batch(sessions[k : k + 32].tolist(), [[]] * 32, [0] * 32) for k in range(0, 1024, 32)]
    curve = uq.Profile.of(FEATURES, parts).tables["items"].distinct
    for size, different in ((1, 1), (16, 1), (32, 2), (512, 32), (1024, 50)):
        assert curve(size) == pytest.approx(different)
    assert uq.Profile.of(FEATURES, parts).tables["users"].distinct(700) == pytest.approx(1)


def test_stretches_do_not_depend_on_how_batches_are_cut(monkeypatch):
    from unequal.stats import counter

    monkeypatch.setattr(counter, "STRETCH_IDS", 256)
    monkeypatch.setattr(counter, "SPARSER", 1)
    parts = list(batches(8, 64))
    joined = [_joined(parts[:3]), _joined(parts[3:4]), _joined(parts[4:])]
    one, other = (uq.Profile.of(FEATURES, some).tables["items"] for some in (parts, joined))
    for size, (count, total) in one.growth.seen.items():
        if size in other.growth.seen:
            assert other.growth.seen[size] == (count, pytest.approx(total))
    assert len(set(one.growth.seen) & set(other.growth.seen)) > 4


def _joined(parts):
    lists = {
        name: uq.Jagged(
            torch.cat([part[name].values for part in parts]), torch.cat([part[name].lengths for part in parts])
        )
        for name in FEATURES
    }
    return uq.Batch.from_jagged(lists)


@pytest.mark.parametrize("memory", [1 << 24, 1 << 18])
def test_popularity_adds_up(memory):
    items = uq.Profile.of(FEATURES, batches(30, 1000, spread=10**6), memory=memory).tables["items"]
    assert items.exact == (memory == 1 << 24)
    rows, reads = items.popularity()
    assert len(rows) < 4096 + 16 * 20
    assert np.all(np.diff(reads) <= 1e-12) and np.all(rows > 0)
    assert rows.sum() == pytest.approx(items.rows_seen)
    assert (rows * reads).sum() == pytest.approx(items.reads_per_sample)
    assert np.all(rows[: min(items.kept, 4096)] == pytest.approx(1))


def test_bins_of_a_sketch_are_those_of_all_ids():
    parts = list(batches(30, 1000, spread=10**6))
    whole, sketch = (uq.Profile.of(FEATURES, parts, memory=size).tables["items"] for size in (1 << 24, 1 << 19))
    assert whole.exact and not sketch.exact
    assert sketch.rows_seen == pytest.approx(whole.rows_seen, rel=4 * sketch.rows_seen_error)
    ends = [np.cumsum(rows) for rows, _ in (whole.popularity(), sketch.popularity())]
    sums = [np.cumsum(rows * reads) for rows, reads in (whole.popularity(), sketch.popularity())]
    for rank in (10, 100, 1000, 4000, 20_000):
        there, here = (np.interp(rank, end, total) for end, total in zip(ends, sums))
        assert here == pytest.approx(there, rel=0.03)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=6, max_size=6), st.permutations(range(6)))
def test_profiles_merge_in_any_split_and_order(owner, order):
    parts = list(batches(6))
    whole = uq.Profile.of(FEATURES, parts)
    made = None
    for rank in range(6):
        mine = [parts[k] for k in order if owner[k] == rank]
        if mine:
            one = uq.Profile.of(FEATURES, mine)
            made = one if made is None else made.merge(one)
    assert made.samples == whole.samples == made.total_samples
    for name, table in whole.tables.items():
        other = made.tables[name]
        assert other.exact and other.kept == table.kept
        assert other.top(other.kept).tolist() == table.top(table.kept).tolist()
        assert np.array_equal(other.top_reads(other.kept), table.top_reads(table.kept))
        assert other.feature_ids == table.feature_ids and other.reads_per_sample == table.reads_per_sample
        assert other.distinct(300) == table.distinct(300) == table.rows_seen
        counts = other.distinct.counts
        assert all(a <= b for a, b in pairwise(counts))


def test_sketches_merge_into_estimates():
    parts = list(batches(40, 500, spread=10**6))
    whole = uq.Profile.of(FEATURES, parts)
    halves = [uq.Profile.of(FEATURES, parts[k::2], memory=1 << 18) for k in range(2)]
    for merged in (halves[0].merge(halves[1]), halves[0].merge(uq.Profile.of(FEATURES, parts[1::2]))):
        one, other = merged.tables["items"], whole.tables["items"]
        assert one.rows_seen == pytest.approx(other.rows_seen, rel=4 * max(0.01, one.rows_seen_error))
        assert one.top(20).tolist() == other.top(20).tolist()
        assert one.reads_per_sample == other.reads_per_sample


@pytest.mark.parametrize("memory", [1 << 24, 1 << 12])
def test_a_file_holds_all_of_it(tmp_path, memory):
    profile = uq.Profile.of(FEATURES, batches(spread=10**6), memory=memory, total_samples=1000)
    profile.recipe, profile.dropped, profile.source = "clicks", {"age: nan": 3}, {"max_length": 5}
    path = tmp_path / "new" / "p.profile"
    profile.save(path)
    assert [file.name for file in path.parent.iterdir()] == ["p.profile"]
    read = uq.Profile.load(path)
    assert (read.samples, read.total_samples, read.sampled) == (300, 1000, True)
    assert (read.recipe, read.dropped, read.source) == (profile.recipe, profile.dropped, profile.source)
    for name, table in profile.tables.items():
        other = read.tables[name]
        assert other.exact == table.exact and other.rows_seen == table.rows_seen and other.rows == table.rows
        assert other.top(other.kept).tolist() == table.top(table.kept).tolist()
        for mine, theirs in zip(table.popularity(), other.popularity()):
            assert np.array_equal(mine, theirs)
        assert other.distinct == table.distinct and other.feature_ids == table.feature_ids
    again, tensors = pack(read)
    before, expected = pack(profile)
    assert again == before and all(torch.equal(tensors[name], expected[name]) for name in expected)
    merged = read.merge(unpack(before, expected))
    assert merged.samples == 600


def test_other_tools_read_the_file(tmp_path):
    from safetensors import safe_open

    path = tmp_path / "p.profile"
    profile = uq.Profile.of(FEATURES, batches())
    profile.save(path)
    with safe_open(path, "pt") as file:
        content = json.loads(file.metadata()["profile"])
        ids = file.get_tensor("tables/items/ids")
    assert content["tables"]["items"]["exact"] and ids.tolist()[:3] == profile.tables["items"].top(3).tolist()


def test_damaged_truncated_and_foreign_files(tmp_path):
    path, broken = tmp_path / "p.profile", tmp_path / "b.profile"
    uq.Profile.of(FEATURES, batches()).save(path)
    content = path.read_bytes()

    def refused(what):
        with pytest.raises(UserError, match=what) as caught:
            uq.Profile.load(broken)
        assert str(broken) in str(caught.value) and "\n" not in str(caught.value)
        assert str(caught.value).endswith("make it again with `unequal profile`")

    refused("expected a profile, got no such file")
    for length in (0, 5, 100, len(content) // 2, len(content) - 1):
        broken.write_bytes(content[:length])
        refused("damaged or incomplete")
    for at in range(8, len(content), 211):
        changed = bytearray(content)
        changed[at] ^= 1
        broken.write_bytes(changed)
        refused("damaged|incomplete|another safetensors file")
    broken.write_text("id,count\n1,2\n")
    refused("not a safetensors file")
    save_file({"a": torch.zeros(3)}, broken)
    refused("got another safetensors file")
    with tensorfile.TensorFile(path) as file:
        metadata = dict(file.header.metadata)
    metadata["profile"] = metadata["profile"].replace('"samples": 300', '"samples": 301')
    tensorfile.write(broken, tensorfile.read(path), metadata)
    refused("description of the profile is damaged")
    broken.unlink()
    broken.mkdir()
    refused("got a folder")


def test_a_newer_format_is_refused(tmp_path, monkeypatch):
    from unequal.stats import profilefile

    path = tmp_path / "p.profile"
    monkeypatch.setattr(profilefile, "FORMAT", 9)
    uq.Profile.of(FEATURES, batches(1)).save(path)
    monkeypatch.undo()
    with pytest.raises(UserError, match="expected a profile of format 1, got 9; make it again"):
        uq.Profile.load(path)


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "p.profile"
    profile = uq.Profile.of(FEATURES, batches(1))
    profile.save(path)
    before = path.read_bytes()

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensorfile.os, "fsync", full)
    with pytest.raises(UserError, match="cannot write the profile: No space left on device; choose another file"):
        profile.save(path)
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1
    shutil.rmtree(tmp_path)


def test_no_samples():
    with pytest.raises(UserError, match="expected samples to count, got none"):
        uq.Profile.of(FEATURES, [])


def test_a_table_that_is_never_read():
    parts = [batch([1, 2], [[], []], [3, 4])]
    features = {"history": FEATURES["history"], "user": FEATURES["user"]}
    profile = uq.Profile.of(features, parts).merge(uq.Profile.of(features, parts))
    items = profile.tables["items"]
    assert (items.rows_seen, items.kept, items.reads_per_sample, items.distinct(100)) == (0, 0, 0, 0)
    assert items.top(0).tolist() == [] and [len(part) for part in items.popularity()] == [0, 0]
    assert profile.tables["users"].rows_seen == 2 and profile.tables["users"].distinct(4) == 2


def test_other_tables_do_not_merge():
    one = uq.Profile.of(FEATURES, batches(1))
    other = uq.Profile.of({"item": FEATURES["item"]}, batches(1))
    for left, right in ((one, other), (other, uq.Profile.of({"history": FEATURES["history"]}, batches(1)))):
        with pytest.raises(UserError, match=r"profiles of different tables.* merge those of one recipe"):
            left.merge(right)
