import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unequal.errors import UserError
from unequal.stats import reads as reads_module
from unequal.stats.reads import EVERYTHING, Reads, count_ids, hashed

ids_of_any_kind = st.one_of(
    st.integers(0, 30), st.integers(-(2**63), 2**63 - 1), st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63)])
)


def counted(parts, memory):
    """One count per part, merged from the left."""
    whole = Reads(memory)
    for part in parts:
        one = Reads(memory)
        for piece in part:
            one.add(np.array(piece, np.int64))
        whole.merge(one)
    return whole


def truth(parts):
    ids, counts = np.unique(
        np.array([x for part in parts for piece in part for x in piece], np.int64), return_counts=True
    )
    return dict(zip(ids.tolist(), counts.tolist()))


def zipf(rows, draws, skew=1.05, seed=0):
    random = np.random.default_rng(seed)
    weights = np.arange(1, rows + 1) ** -skew
    ranks = np.searchsorted(np.cumsum(weights / weights.sum()), random.random(draws))
    return random.permutation(rows)[np.minimum(ranks, rows - 1)] * 1_000_003


@given(st.lists(ids_of_any_kind, max_size=60))
def test_counts_of_one_list(values):
    ids, counts = count_ids(np.array(values, np.int64))
    expected, times = np.unique(np.array(values, np.int64), return_counts=True)
    assert ids.tolist() == expected.tolist() and counts.tolist() == times.tolist()


def test_hashes_are_different_and_even():
    ids = np.arange(-50_000, 50_000)
    values = hashed(ids)
    assert len(np.unique(values)) == len(ids)
    assert ids[0] == -50_000, "the ids are left alone"
    quarters = np.bincount((values >> np.uint64(62)).astype(np.int64), minlength=4)
    assert np.abs(quarters - 25_000).max() < 600


@settings(max_examples=150)
@given(st.lists(st.lists(st.lists(ids_of_any_kind, max_size=40), max_size=4), max_size=5), st.randoms())
def test_any_split_in_any_order_counts_the_same(parts, random):
    memory = 1 << 16
    one = counted(parts, memory)
    shuffled = [[*part] for part in parts]
    random.shuffle(shuffled)
    other = counted([[[x for part in shuffled for piece in part for x in piece]]], memory)
    for reads in (one, other):
        assert reads.exact and reads.error == 0
        expected = sorted(truth(parts).items(), key=lambda pair: (-pair[1], pair[0]))
        ids, counts = reads.ranked()
        assert list(zip(ids.tolist(), counts.tolist())) == expected
        assert reads.total == sum(truth(parts).values())


@settings(max_examples=200)
@given(
    st.lists(st.lists(st.lists(st.integers(0, 200), max_size=200), max_size=3), min_size=1, max_size=5),
    st.sampled_from([1 << 10, 1 << 11, 1 << 12]),
    st.randoms(),
)
def test_sketches_keep_their_bounds(parts, memory, random):
    before = reads_module.BATCH
    reads_module.BATCH = 16
    try:
        random.shuffle(parts)
        reads = counted(parts, memory)
        reads.settle()
    finally:
        reads_module.BATCH = before
    real = truth(parts)
    assert reads.total == sum(real.values())
    room = memory // 32
    assert reads.error <= reads.total / (room + 1)
    assert len(reads.ids) <= (memory // 16 if reads.exact else room)
    slack = np.zeros(len(reads.ids), np.int64) if reads.slack is None else reads.slack
    assert np.all(np.diff(reads.ids) > 0) and np.all(slack >= 0) and np.all(slack <= reads.error)
    for name, count, more in zip(reads.ids.tolist(), reads.counts.tolist(), slack.tolist()):
        assert count <= real[name] <= count + more
    held = set(reads.ids.tolist())
    assert all(count <= reads.error for name, count in real.items() if name not in held)
    named = set(reads.ranked()[0].tolist())
    least = min((real[name] for name in named), default=np.inf)
    assert all(count <= least or name in held for name, count in real.items())
    if reads.sample is not None:
        sample = reads.sample
        inside = {int(h): real[i] for i in real if (h := hashed(np.array([i]))[0]) < sample.limit}
        assert dict(zip(sample.hashes.tolist(), sample.counts.tolist())) == inside
        assert len(sample.hashes) == min(len(real), memory // 64) or sample.limit < EVERYTHING


def test_a_sketch_of_many_ids():
    draws = zipf(500_000, 2_000_000)
    expected, counts = np.unique(draws, return_counts=True)
    reads = Reads(512 << 10)
    for part in np.array_split(draws, 40):
        reads.add(part)
    assert not reads.exact
    ids, estimates = reads.ranked()
    assert len(ids) > 2000
    real = counts[np.searchsorted(expected, ids)]
    assert np.array_equal(estimates[:200], real[:200]), "ids that are there from the start are exact"
    assert np.abs(estimates / real - 1).max() < 0.3 and np.abs(estimates / real - 1).mean() < 0.02
    best = -np.sort(-counts)
    assert real.sum() > 0.995 * best[: len(ids)].sum()
    each, others = reads.others(ids)
    assert len(ids) + each * len(others) == pytest.approx(
        len(expected), rel=0.04
    )  # 3 standard errors of 8192 sampled ids
    assert estimates.sum() + each * others.sum() == pytest.approx(len(draws), rel=0.02)
    rare = (others == 1).mean() * each * len(others)
    assert rare == pytest.approx((counts == 1).sum(), rel=0.06)


def test_merging_sketches_is_as_good():
    draws = zipf(300_000, 1_500_000, seed=3)
    whole = Reads(256 << 10)
    whole.add(draws)
    parts = [Reads(256 << 10) for _ in range(4)]
    for one, part in zip(parts, np.array_split(draws, 4)):
        one.add(part)
    merged = Reads(256 << 10)
    for one in parts:
        merged.merge(one)
    assert merged.total == whole.total and merged.error <= merged.total / (8192 + 1)
    assert np.array_equal(merged.top(500), whole.top(500))
    assert merged.sample is not None and whole.sample is not None
    assert np.array_equal(merged.sample.hashes, whole.sample.hashes)
    assert np.array_equal(merged.sample.counts, whole.sample.counts)


def test_an_exact_count_and_a_sketch_merge_both_ways():
    few, many = np.arange(50).repeat(100), zipf(50_000, 200_000)
    real = truth([[few.tolist(), many.tolist()]])
    for first, second in ((few, many), (many, few)):
        one, other = Reads(1 << 16), Reads(1 << 16)
        one.add(first)
        other.add(second)
        assert one.exact != other.exact
        before = other.ranked()[1].copy()
        one.merge(other)
        assert not one.exact and np.array_equal(other.ranked()[1], before)
        slack = one.slack
        assert slack is not None
        for name, count, more in zip(one.ids.tolist(), one.counts.tolist(), slack.tolist()):
            assert count <= real[name] <= count + more


def test_tensors_and_counts():
    reads = Reads()
    reads.add(torch.tensor([[5, 5], [2, 5]]))
    reads.add(torch.tensor([2], dtype=torch.int32))
    reads.add(np.array([2, 9]), np.array([10, 1]))
    assert reads.total == 16
    assert reads.top(2).tolist() == [2, 5] and reads.top(99).tolist() == [2, 5, 9]


def test_reads_fade():
    reads = Reads(1 << 12)
    reads.add(np.arange(40).repeat(8))
    reads.decay(0.5)
    reads.add(np.array([7, 7, 7]))
    assert reads.total == 163 and reads.ranked()[1].tolist() == [7.0] + [4.0] * 39
    for _ in range(10):
        reads.decay(0.5)
        reads.add(np.array([100, 100]))
    assert reads.top(3).tolist() == [100], "what has faded is forgotten"
    with pytest.raises(UserError, match="factor from 0 to 1, got 2"):
        reads.decay(2)


def test_what_was_popular_long_ago_makes_room():
    reads = Reads(1 << 14)
    for k in range(30):
        reads.add(zipf(5_000, 20_000, seed=k) + k * 7)
        reads.decay(0.5)
    last = Reads(1 << 20)
    last.add(zipf(5_000, 20_000, seed=29) + 29 * 7)
    assert not reads.exact and len(reads.ids) <= 512
    assert len(set(reads.top(20).tolist()) & set(last.top(40).tolist())) >= 10


def test_too_little_memory():
    with pytest.raises(UserError, match="expected 1,024 bytes or more, got 10"):
        Reads(10)
