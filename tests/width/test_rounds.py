"""Rounds: how a threshold is found, who is held back, and what lays rows out anew."""

import math
from threading import Barrier, Thread

import pytest
import torch

import unequal as uq
from unequal.kernels import cpu, reference
from unequal.width.measures import alone_in_all, means, percentiles
from unequal.width.parts import Sample, _counts, steadily
from unequal.width.policy import Rows, policy_of
from unequal.width.threshold import CLOSE, LOWEST, search

CHUNKS = 4


def module_of(tables, **width):
    """Features of one id a sample, one for each table."""
    features = {f"f{t}": uq.Feature(uq.Table(f"t{t}", rows=rows, dim=4), "sum") for t, rows in enumerate(tables)}
    return uq.Embeddings(features, optimizer=uq.SGD(lr=0.1), width=uq.Width(chunk=1, **width))


def samples_of(policy, rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    policy = policy_of(policy)
    shape = (rows, CHUNKS if policy.by_chunk else 1)
    utilities = torch.rand(shape, generator=generator).log().mul(-3).exp()
    if policy.masked:
        old = torch.rand(rows, CHUNKS, generator=generator) < 0.2
    else:
        old = torch.randint(0, CHUNKS + 1, (rows,), generator=generator).to(torch.int16)
        old = old // CHUNKS * CHUNKS if policy.whole else old
    return [Sample(policy, policy.measure(utilities, CHUNKS, 1, 0.1), old, torch.ones(rows, dtype=torch.float64))]


@pytest.mark.parametrize("share", [0.02, 0.3, 0.9])
@pytest.mark.parametrize("rows", [7, 300, 20_000])
@pytest.mark.parametrize("policy", ["water-filling", "fiited", "itep"])
def test_the_threshold_spends_the_budget(policy, rows, share):
    """As the lowest that can be found by halving does, or all but a little of the budget, in fewer tries."""
    samples, budget, tries = samples_of(policy, rows), share * rows * CHUNKS, []

    def total(value):
        tries.append(value)
        return value

    low, high = -80.0, 80.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if samples[0].values(math.exp(middle), 0.1) > budget else (low, middle)
    lowest = samples[0].values(math.exp(high), 0.1)
    for guess in (None, high + 0.1, -80.0, 80.0):
        tries.clear()
        spent = samples[0].values(math.exp(search(samples, budget, 0.1, total, guess, CLOSE)), 0.1)
        assert lowest * (1 - CLOSE) <= spent <= budget
        assert len(tries) <= 45
    assert search(samples, CHUNKS * rows + 1.0, 0.1, total, None, CLOSE) == LOWEST


def test_rows_that_were_held_back_are_not_asked_again():
    """Growth is cut among rows that may still grow: it is never given up as a whole for a few values too many."""
    module = module_of([4000], budget="10%", most=0.3, every=10**6)
    generator = torch.Generator().manual_seed(0)
    for step in range(3):
        for _ in range(4):
            ids = torch.randint(0, 4000, (2000,), generator=generator)
            out = module(uq.Batch(("f0",), ids, torch.ones(2000, dtype=torch.long))).pooled
            (out * torch.rand(2000, 1, generator=generator) ** 4).sum().backward()
        assert module._rounds is not None
        report = module._rounds.round(step + 1)
        assert report.values <= 1600
        # Beyond what room there was, what goes makes room for what comes.
        assert report.regained > report.pruned * 0.8 and report.values > 1500


@pytest.mark.parametrize("seed", range(4))
def test_rows_are_laid_out_as_the_reference_does(seed):
    generator = torch.Generator().manual_seed(seed)
    bits, classes = 3, 5
    old = torch.randint(0, classes, (500,), generator=generator)
    slots = torch.empty_like(old)
    for k in range(classes):
        which = (old == k).nonzero()[:, 0]
        slots[which] = torch.randperm(which.numel(), generator=generator) << bits | k
    chunks = torch.where(
        torch.rand(500, generator=generator) < 0.7, old, torch.randint(0, classes, (500,), generator=generator)
    )
    counts = torch.bincount(chunks, minlength=classes)
    counts[0] = 0
    found = cpu.lay_out(slots, chunks.to(torch.int16), counts, bits)
    assert torch.equal(found, reference.lay_out(slots, chunks.to(torch.int16), counts, bits))
    for k in range(1, classes):
        own = found[chunks == k]
        assert torch.equal(own.sort().values, torch.arange(counts[k]) << bits | k), "without a gap"
    assert (found[chunks == 0] == -1).all()


@pytest.mark.parametrize(("low", "high"), [(0, 50), (0, 2**32), (0, 2**33), (-(2**62), 2**62)])
@pytest.mark.parametrize("count", [0, 1, 30, 5000])
def test_ids_are_sorted_whatever_they_are(count, low, high):
    generator = torch.Generator().manual_seed(count)
    ids = torch.randint(low, high, (count,), generator=generator).unique()
    ids = ids[torch.randperm(ids.numel(), generator=generator)]
    slots = torch.randint(0, 2**31, (ids.numel(),), generator=generator)
    expected, order = ids.sort()
    expected_slots = slots[order]
    found, found_slots = cpu.order_by_id(ids, slots)
    assert torch.equal(found, expected) and torch.equal(found_slots, expected_slots)


@pytest.mark.parametrize("bound", [100, 10**6, None])
@pytest.mark.parametrize("kernels", [cpu, reference])
def test_ids_without_a_slot_are_left_out_of_a_directory(kernels, bound):
    directory = kernels.NarrowDirectory(bound, 3)
    ids, slots = torch.tensor([7, 3, 99, 12]), torch.tensor([4, -1, 0, -1])
    directory.insert(ids, slots)
    assert torch.equal(directory.find(ids), slots) and directory.used == 2


@pytest.mark.parametrize("rows", [5, 48, 600, 20_000])
@pytest.mark.parametrize("bound", [2**32, None])
def test_a_directory_that_is_nearly_full_finds_the_ids_that_it_has(bound, rows):
    """Ids that meet in a line, run on into the next ones and around the end, and others of which half is the same as of these."""
    generator = torch.Generator().manual_seed(rows)
    words = torch.randint(0, 2**32, (3 * rows,), generator=generator).unique()
    ids = words if bound else torch.cat([words, words << 32, words | 1 << 40, torch.tensor([-1, -(2**63)])])
    ids = ids[torch.randperm(ids.numel(), generator=generator)]
    held = ids[:rows]
    directory = cpu.NarrowDirectory(bound, 2 * rows // 3)
    while directory.used < rows and directory.used + 1 <= directory.FULL * directory.capacity:
        part = held[directory.used : directory.used + max(1, rows // 20)]
        directory.insert(part, torch.arange(directory.used, directory.used + part.numel()))
    slots = {identity: slot for slot, identity in enumerate(held[: directory.used].tolist())}
    asked = torch.cat([ids, ids ^ 1 << 33, ids ^ 1, torch.tensor([-1, 2**32 - 1])])
    expected = torch.tensor([slots.get(identity, -1) for identity in asked.tolist()])
    assert torch.equal(directory.find(asked), expected)
    assert directory.find_into(asked, torch.empty_like(asked)) == int((expected < 0).sum())


def test_counts_fit_their_numbers():
    """A vector of 63 chunks, all of them live."""
    policy = policy_of("fiited")
    rows, old = Rows(torch.ones(3, 63), 63, 1), torch.zeros(3, 63, dtype=torch.bool)
    chosen = steadily(policy, rows, old, 0.5, 0.1)
    assert _counts(chosen).tolist() == [63] * 3


def test_the_more_is_kept_the_more_the_important_rows_get():
    """Where little is kept widths are as even as they were found to be best; where much is, a little less even."""
    policy = policy_of("water-filling")
    powers = [policy.power(share) for share in (0.0, 0.02, 0.125, 0.25, 0.5, 1.0)]
    assert powers == pytest.approx([0.8, 0.808, 0.85, 0.9, 1.0, 1.2])
    worth = torch.tensor([[1.0], [4.0], [16.0]])

    def widths(share):
        rows = policy.measure(worth, 16, 1, share)
        return policy.chosen(rows, 2 ** float(rows.utilities[-1]) / 31.5).tolist()

    assert widths(0.02) == [2, 5, 16] and widths(0.5) == [1, 4, 16] and widths(1.0) == [1, 3, 16]


@pytest.mark.parametrize("rows", [8, None])
def test_of_unbounded_ids_those_that_are_known_make_the_share(monkeypatch, rows):
    """A budget in bytes that holds about half of the values that there are."""
    module = module_of([rows], budget="30%" if rows else "2 KB", hysteresis=0.0)
    module(uq.Batch(("f0",), torch.arange(8), torch.ones(8, dtype=torch.long))).pooled.sum().backward()
    budget = module._rounds.groups[0].values(module._storages)
    expected = budget / (4 * (rows or len(module._storages["t0"].census().ids)))
    shares = []
    monkeypatch.setattr(type(module._rounds.policy), "power", lambda self, share: shares.append(share) or 1.0)
    module._rounds.round(1)
    assert shares == [expected] and 0.2 < expected < 0.8


def two_tables(policy, thresholds, budget):
    """Rows 0 to 7 of each table are live or followed, and worth what is said; the second's gradients are small."""
    module = module_of([8, 8], budget=budget, policy=policy, thresholds=thresholds, hysteresis=0.0, most=1.0)
    module(uq.Batch(("f0", "f1"), torch.arange(8).repeat(2), torch.ones(16, dtype=torch.long))).pooled.sum().backward()
    worth = torch.tensor([8.0, 7, 6, 5, 4, 3, 2, 1])
    for storage, scale in zip(module._storages.values(), (1.0, 0.01)):
        state = storage.state()
        live = set(state["ids"].tolist())
        state["candidates"] = torch.tensor([id_ for id_ in range(8) if id_ not in live], dtype=torch.int64)
        for ids, utilities in (("ids", "utilities"), ("candidates", "candidate_utilities")):
            columns = torch.tensor([1.0, 1e-3, 1e-3, 1e-3]) if policy == "fiited" else torch.ones(1)
            state[utilities] = scale * worth[state[ids]][:, None] * columns
        storage.load(state)
    module._rounds.reads.before = None  # how often rows were read is not known: what they seem to be worth is believed
    return module


@pytest.mark.parametrize(
    ("policy", "thresholds", "expected"),
    [
        # A quarter of 2 × 8 × 4 values: 4 whole rows of the 8 that are worth most, or 2 of each table.
        ("itep", "one", ({0: 4, 1: 4, 2: 4, 3: 4}, {})),
        ("itep", "table", ({0: 4, 1: 4}, {0: 4, 1: 4})),
        # 16 chunks: all first ones of the first table, then of the second; or the first ones of both; or of any column the best.
        ("fiited", "one", (dict.fromkeys(range(8), 1), dict.fromkeys(range(8), 1))),
        ("fiited", "table", (dict.fromkeys(range(8), 1), dict.fromkeys(range(8), 1))),
        ("fiited", "column", ({0: 4, 1: 4}, {0: 4, 1: 4})),
        # 15 chunks of each table, worth 8^0.99, 7^0.99, …: the power for 47% kept.
        ("water-filling", "table", ({0: 3, 1: 3, 2: 3, 3: 2, 4: 2, 5: 1, 6: 1},) * 2),
    ],
)
def test_what_is_compared_with_what(policy, thresholds, expected):
    module = two_tables(policy, thresholds, "25%" if policy != "water-filling" else 0.47)
    for step in range(6):  # not all may move at once
        assert module._rounds.round(step).values <= module.width.common.share * 64
    for storage, wanted in zip(module._storages.values(), expected):
        state = storage.state()
        assert dict(zip(state["ids"].tolist(), state["widths"].tolist())) == wanted


def spread(values):
    """As on two ranks: the first has the first table and half of the second, the other the rest."""
    first, second = values["a"], values["b"]
    return [{"a": first, "b": second[::2]}, {"b": second[1::2]}]


@pytest.mark.parametrize("rows", [1, 2, 40, 5000])
def test_units_are_those_of_all_ranks(rows):
    generator = torch.Generator().manual_seed(rows)
    values = {"a": torch.rand(rows, 1, generator=generator) ** 9, "b": torch.rand(rows + 1, 1, generator=generator)}
    values["b"][0] = 0.0
    tables = ["a", "b", "empty"]
    whole = percentiles(tables, values, 0.95, alone_in_all)
    for name, part in values.items():
        ordered = part[:, 0].sort().values
        assert whole[name] == ordered[int(0.95 * (len(ordered) - 1))].clamp(min=1e-30)

    def on_ranks(work):
        """Every rank's result, where each waits for all sums of the others."""
        barrier, given, found = Barrier(2), [None, None], [None, None]

        def of(rank, own):
            def totals(numbers):
                given[rank] = numbers
                barrier.wait(30)
                total = given[0] + given[1]
                barrier.wait(30)
                return total

            found[rank] = work(own, totals)

        threads = [Thread(target=of, args=pair, daemon=True) for pair in enumerate(spread(values))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return found

    for found in on_ranks(lambda own, totals: percentiles(tables, own, 0.95, totals)):
        assert found == whole
    columns = dict.fromkeys(tables, 1)
    expected = means(columns, values, alone_in_all)
    assert expected["a"].item() == pytest.approx(values["a"].mean().item(), rel=2**-12) and expected["empty"] == 1.0
    for found in on_ranks(lambda own, totals: means(columns, own, totals)):
        assert found == expected


def test_wrong_thresholds_say_what_is_right():
    with pytest.raises(uq.RecipeError, match="'one', 'table' or 'column', got 'rows'"):
        uq.Width(thresholds="rows")
    with pytest.raises(
        uq.RecipeError, match=r"'one' or 'table' with policy 'water-filling'.*chunks are followed by fiited"
    ):
        uq.Width(thresholds="column")
    assert uq.Width(policy="fiited", thresholds="column").thresholds == "column"


@pytest.mark.parametrize("thresholds", ["table", "column"])
def test_stays_inside_the_budget_in_every_unit(thresholds):
    policy = "fiited" if thresholds == "column" else "water-filling"
    module = module_of([300, 50], budget="20%", policy=policy, thresholds=thresholds, every=4)
    generator = torch.Generator().manual_seed(0)
    for _ in range(12):
        ids = torch.cat([torch.randint(0, rows, (40,), generator=generator) for rows in (300, 50)])
        out = module(uq.Batch(("f0", "f1"), ids, torch.ones(80, dtype=torch.long))).pooled
        (out * torch.rand(40, 1, generator=generator)).sum().backward()
        assert sum(storage.values for storage in module._storages.values()) <= 0.2 * 350 * 4
