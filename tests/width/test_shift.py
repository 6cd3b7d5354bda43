"""Popularity that shifts: it is noticed, soon, and nothing else is taken for it."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

import unequal as uq
from unequal.storage.tally import Tally
from unequal.train import checkpoint
from unequal.width import Shifts
from unequal.width.intervals import Intervals
from unequal.width.shift import KNOWN, Usual

from .test_width import device

ROWS = 3000


@pytest.fixture(autouse=True)
def one_thread():
    """Batches are too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def ids_of(random, count, places, law=1.2):
    """By a law of Zipf: the k-th of the places is read as often as k to a power."""
    weights = np.arange(1, len(places) + 1) ** -law
    return places[random.choice(len(places), count, p=weights / weights.sum())]


def batches(count, size=64, seed=0, places=None, law=1.2):
    random = np.random.default_rng(seed)
    places = np.arange(ROWS) if places is None else places
    for _ in range(count):
        ids = torch.from_numpy(ids_of(random, 2 * size, places, law))
        yield uq.Batch(("a", "b"), ids, torch.ones(2 * size, dtype=torch.int64))


def others(seed=5):
    return np.random.default_rng(seed).permutation(ROWS)


def embeddings(width, rows=ROWS):
    first, second = uq.Table("first", rows=rows, dim=8), uq.Table("second", rows=rows, dim=4)
    features = {"a": uq.Feature(first, pooling="mean"), "b": uq.Feature(second, pooling="sum")}
    module = uq.Embeddings(features, optimizer=uq.RowWiseAdagrad(lr=0.05), width=width, device=device())
    if width is not None:  # rounds are as far apart from the start on as they are after a long time
        module._rounds.intervals = Intervals(width.every, 1)
    return module


def train(module, data):
    outputs = []
    for batch in data:
        batch = batch.to(module.device)
        out = module(batch).pooled
        wanted = torch.stack([part % 7 - 2.5 for part in batch.ids.view(2, -1)]).prod(0)
        ((out.sum(1) - wanted) ** 2).sum().backward()
        outputs.append(out.detach())
    return outputs


def shifted(module):
    return [report.step for report in module.width_reports if report.shifted]


@pytest.mark.parametrize(("law", "budget"), [(0.9, "5%"), (1.3, "2%"), (0.5, "20%")])
@pytest.mark.parametrize(
    ("policy", "size"), [("water-filling", 8), ("water-filling", 256), ("fiited", 64), ("itep", 64)]
)
def test_steady_popularity_has_no_shift(policy, size, law, budget):
    """Small batches and large ones, and from the start, where the budget is not yet spent."""
    module = embeddings(uq.Width(budget=budget, policy=policy, every=32))
    train(module, batches(240, size, law=law))
    assert module.width_reports and not shifted(module)


@pytest.mark.parametrize("options", [{"budget": "200 KB"}, {"start": "full", "ramp": 100}, {"budget": "60%"}])
def test_steady_popularity_has_no_shift_whatever_the_budget(options):
    module = embeddings(uq.Width(**{"budget": "5%", "every": 32, **options}))
    train(module, batches(240))
    assert not shifted(module)


@pytest.mark.parametrize("policy", ["water-filling", "fiited", "adaembed", "itep"])
@pytest.mark.parametrize("law", [0.8, 1.3])
def test_a_shift_is_noticed_within_two_windows(policy, law):
    every, before = 64, 256
    module = embeddings(uq.Width(budget="5%", policy=policy, every=every))
    train(module, batches(before, law=law))
    assert not shifted(module)
    train(module, batches(2 * every, seed=1, places=others(), law=law))
    steps = shifted(module)
    assert before < steps[0] <= before + 2 * every // 16
    assert [step - steps[0] for step in steps] == [0, 2, 6, 14, 30], "as at the start of training"
    assert module.width_reports[-1].step == before + 2 * every and not module.width_reports[-1].shifted


def test_after_a_shift_ids_that_are_read_have_rows_sooner():
    def share(adapt):
        module = embeddings(uq.Width(budget="5%", every=96, adapt=adapt))
        train(module, batches(192))
        train(module, batches(48, seed=1, places=others()))
        found = sum(
            int((storage.directory.find(torch.from_numpy(others()[:60])) >= 0).sum())
            for storage in module._storages.values()
        )
        return found, shifted(module)

    (without, none), (found, steps) = share(False), share(True)
    assert not none and steps and found > 1.5 * without


@pytest.mark.parametrize("kernels", ["cpu", "reference", "triton"])
@pytest.mark.parametrize("policy", ["water-filling", "fiited"])
def test_what_is_forgotten(monkeypatch, policy, kernels):
    """Of rows and of candidates; what comes after counts in full."""
    if kernels == "triton":
        pytest.importorskip("unequal.kernels.triton")
    monkeypatch.setenv("UNEQUAL_KERNELS", kernels)
    width = uq.Width(budget="0.2%", policy=policy, every=1000, decay=0.999999)
    own, other = embeddings(width), embeddings(width)
    for module in (own, other):
        train(module, batches(6, 20))
    before = {name: storage.census() for name, storage in own._storages.items()}
    for storage in own._storages.values():
        storage.forget(0.25)
    forgotten = {name: storage.census() for name, storage in own._storages.items()}
    for module in (own, other):
        train(module, batches(3, 20, seed=1))
    for name, storage in own._storages.items():
        was = before[name].utilities
        assert was.shape[0] > before[name].live > 0 and was.sum() > 0
        torch.testing.assert_close(forgotten[name].utilities, 0.25 * was)
        now, others_now = (
            dict(zip(c.ids.tolist(), c.utilities)) for c in (storage.census(), other._storages[name].census())
        )
        for id_, worth in zip(before[name].ids.tolist(), was):
            if id_ in now and id_ in others_now:
                torch.testing.assert_close(now[id_], others_now[id_] - 0.75 * worth, rtol=1e-4, atol=1e-4)


def test_what_never_fades_is_not_forgotten():
    module = embeddings(uq.Width(budget="5%", policy="frequency", every=1000))
    train(module, batches(3, 20))
    storage = module._storages["first"]
    before = storage.census().utilities
    storage.forget(0.25)
    assert torch.equal(storage.census().utilities, before)


def test_where_nothing_fades_nothing_is_forgotten_at_a_shift():
    """What values save neither: it is for what rows are worth."""
    module = embeddings(uq.Width(budget="5%", every=96, decay=1.0))
    train(module, batches(384))
    rounds = module._rounds
    known = {name: (known.steps, known.held.copy()) for name, known in rounds.savings.known.items()}
    worth = {name: storage.census().utilities for name, storage in module._storages.items()}
    rounds._forget()
    for name, (steps, held) in known.items():
        assert rounds.savings.known[name].steps == steps and (rounds.savings.known[name].held == held).all()
        assert torch.equal(module._storages[name].census().utilities, worth[name])


def test_after_a_shift_rows_are_soon_as_wide_as_they_are_popular_now(monkeypatch):
    """As what they were worth before counts for little. What rows save is forgotten alike."""

    def narrower(share):
        monkeypatch.setattr("unequal.width.rounds.FORGET", share)
        module = embeddings(uq.Width(budget="5%", every=96))
        train(module, batches(384))
        known = module._rounds.savings.known["first"].steps
        train(module, batches(48, seed=1, places=others()))
        assert shifted(module) and known < 384
        steps.append(module._rounds.savings.known["first"].steps)
        places = torch.from_numpy(others()[:60])
        rows = [storage.directory.find(places) for storage in module._storages.values()]
        return sum(int((slots & 31)[slots >= 0].sum()) for slots in rows)

    steps = []
    whole, some = narrower(1.0), narrower(0.3)
    assert some > 1.1 * whole and steps[1] < 0.5 * steps[0]


def test_a_round_that_may_not_move_everything_moves_something():
    """Whichever rows it holds back, the others grow into what has become free."""
    module = embeddings(uq.Width(budget="5%", every=1000, most=0.2, hysteresis=0.0))
    train(module, batches(40))
    train(module, batches(40, seed=1, places=others()))
    for step in range(20):
        report = copy.deepcopy(module)._rounds.round(step)
        assert report.regained > 0.05 * report.values and report.values <= 0.05 * report.full


@pytest.mark.parametrize("options", [{"adapt": False}, {"every": 15}, {"policy": "none"}])
def test_where_nobody_looks(options):
    """Where it is not wanted, where the next round is near anyway, and where there are none."""
    module = embeddings(uq.Width(**{"budget": "5%", "every": 64, **options}))
    train(module, batches(200, 16))
    train(module, batches(70, 16, seed=1, places=others()))
    assert not shifted(module)


def test_it_must_be_yes_or_no():
    with pytest.raises(uq.RecipeError, match="width adapt: expected true or false, got 'yes'"):
        uq.Width(adapt="yes")


def learnt(shares):
    usual = Usual()
    for share in shares:
        usual.learn(share)
    return usual


def test_what_is_unusual():
    usual = learnt([0.1] * 10)
    assert usual.share == pytest.approx(0.1) and usual.variance == pytest.approx(0)
    assert not usual.exceeded(0.14, 1e6) and usual.exceeded(0.16, 1e6)
    assert not usual.exceeded(0.16, 100), "by chance"
    assert not usual.exceeded(0.0, 1e6)
    assert learnt([0.7] * 10).exceeded(0.82, 1e6) and learnt([0.0] * 10).exceeded(0.02, 1e6)
    assert not learnt([1.0] * 10).exceeded(1.0, 1e6)
    assert not learnt([0.1] * (KNOWN - 1)).exceeded(0.9, 1e6), "nothing is known yet"
    assert not learnt([0.05, 0.15] * 10).exceeded(0.25, 1e6), "it goes up and down"
    assert learnt([0.05, 0.15] * 10).exceeded(0.6, 1e6)


def test_while_there_is_room_for_new_rows_nothing_is_compared():
    tally = Tally()
    shifts = Shifts(16, 16, {"all": [tally]})

    def window(step, unfound, spent):
        tally.note(1000, unfound)
        return shifts.look(step, lambda own: own, lambda number: spent)

    assert not any(window(step, 100, True) for step in range(10, 30))
    assert not window(30, 900, False) and shifts.usual["all"].share == pytest.approx(0.1)
    assert window(31, 900, True) and shifts.since == 30
    assert not any(window(step, 900, True) for step in range(32, 50)), "a new state of things, one interval later"


@pytest.mark.parametrize("kernels", ["cpu", "triton"])
def test_all_kernels_count_alike(monkeypatch, kernels):
    if kernels == "triton":
        pytest.importorskip("unequal.kernels.triton")
    counts = []
    for name in (kernels, "reference"):
        monkeypatch.setenv("UNEQUAL_KERNELS", name)
        module = embeddings(uq.Width(budget="2%", every=1000))
        own = []
        for batch in batches(3, 20):
            train(module, [batch])
            module.eval()
            module(batch.to(module.device))  # is not counted
            module.train()
            own.append([Tally.sums([storage.how.tally]) for storage in module._storages.values()])
        counts.append(own)
    assert counts[0] == counts[1]
    assert counts[0][-1][0][0] == 60 and 0 < counts[0][-1][0][1] < 60


@pytest.mark.parametrize("done", [257, 262, 270, 291])
def test_goes_on_bitwise(tmp_path, done):
    """In a window, right after a shift, and between the rounds that follow it."""
    width = uq.Width(budget="5%", every=64)
    data = [*batches(256), *batches(100, seed=1, places=others())]
    own, other = embeddings(width), embeddings(width)
    train(own, data[:done])
    path = checkpoint.save(tmp_path, done, {}, {}, embeddings=own)
    train(other, batches(3, seed=9))  # what was there is gone
    checkpoint.load(path, embeddings=other)
    reports = len(other.width_reports)
    for found, wanted in zip(train(other, data[done:]), train(own, data[done:]), strict=True):
        assert torch.equal(found, wanted)
    assert shifted(own) and own.width_reports[-(len(other.width_reports) - reports) :] == other.width_reports[reports:]
    assert own.watched() == other.watched()


def test_checkpoints_that_do_not_say_what_is_usual(tmp_path, monkeypatch):
    """Older ones: it is learnt anew. And of another budget nothing is known."""
    width = uq.Width(budget="5%", every=64)
    module, other = embeddings(width), embeddings(width)
    train(module, batches(130))
    path = checkpoint.save(tmp_path, 1, {}, {}, embeddings=module)
    smaller = embeddings(replace(width, budget="3%"))
    checkpoint.load(path, embeddings=smaller)
    assert all(usual.windows == 0 for usual in smaller._rounds.shifts.usual.values())
    monkeypatch.setattr(type(checkpoint.open(path)), "watched", None)
    checkpoint.load(path, embeddings=other)
    assert other._rounds.shifts.since is None
    assert all(usual.windows == 0 for usual in other._rounds.shifts.usual.values())
    train(other, batches(100, seed=1))
    assert not shifted(other)


def test_what_rounds_change_is_no_shift():
    """By as much as the share has risen after a round before it may rise again, for some windows; not by more, nor later."""
    usual = Usual()
    for _ in range(12):
        usual.learn(0.2)
        usual.note(0.2, False)
    assert usual.exceeded(0.33, 100_000)
    usual.is_after_round = True
    usual.note(0.34, False)  # before anything was to be noticed
    usual.note(0.2, False)
    assert usual.jump == pytest.approx(0.14)
    usual.allowed, usual.is_after_round = usual.jump, True
    assert not usual.exceeded(0.33, 100_000) and usual.exceeded(0.36, 100_000)
    usual.note(0.9, True)
    assert usual.jump == pytest.approx(0.14), "a shift says nothing of what rounds do"
    for _ in range(12):
        usual.learn(0.2)
    assert usual.exceeded(0.33, 100_000)
    usual.is_after_round = True
    usual.note(0.2, False)
    assert usual.jump == pytest.approx(0.07), "of late"
