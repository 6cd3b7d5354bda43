import numpy as np
import pytest

from unequal.stats import growth as growth_module
from unequal.stats.curve import Stretches
from unequal.stats.growth import Doubling, Growth


def test_doubling_agrees_with_looking_at_all_stretches():
    random = np.random.default_rng(0)
    ids = random.zipf(1.3, 8192) % 3000
    growth = Growth()
    doubling = Doubling(growth, 512)
    for part in np.array_split(ids, 16):
        doubling.add(np.unique(part))
    stretches = Stretches([(ids, np.arange(len(ids) + 1))])
    for size in (512, 1024, 2048, 4096, 8192):
        count, total = growth.seen[size]
        assert count == 8192 // size
        assert total / count == pytest.approx(stretches.reaching(1, size, 8192))


def test_large_sets_are_estimated(monkeypatch):
    monkeypatch.setattr(growth_module, "KEPT_HASHES", 4096)
    growth = Growth()
    doubling = Doubling(growth, 1)
    for part in np.array_split(np.arange(80_000), 8):
        doubling.add(part)
    assert growth.seen[1] == (8, 80_000)
    for size in (2, 4, 8):
        _, total = growth.seen[size]
        assert total == pytest.approx(80_000, rel=0.05) and total != 80_000


def test_merging_adds_stretches_and_thins_odd_sizes():
    one, other = Growth(), Growth()
    one.note(4, 10, 3)
    other.note(4, 14)
    other.note(100, 50)
    one.note(101, 52)
    one.note(103, 54)
    one.merge(other)
    assert one.seen[4] == (4, 44)
    assert set(one.seen) == {4, 101}
    assert one.seen[101][1] / one.seen[101][0] == pytest.approx(52, rel=0.001)


def test_a_curve_rises_to_what_all_samples_have():
    growth = Growth()
    for size, different in ((1, 3.0), (2, 5.0), (4, 4.9), (8, 11.0), (64, 90.0)):
        growth.note(size, different)
    curve = growth.curve(20, 10, limit=200)
    assert curve.samples == (1, 2, 4, 8, 20) and curve.counts == (3, 5, 5, 10, 10)
    assert curve(20) == 10 and curve(2) == 5 and 5 < curve(6) < 10
    assert growth.curve(64, 90)(64) == 90
