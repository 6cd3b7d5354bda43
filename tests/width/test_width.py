"""Tables whose rows are as wide as they deserve: the kernels against the reference, and what a round may and may not do."""

import os

import pytest
import torch

import unequal as uq
from unequal.storage.narrow import NarrowStorage
from unequal.width import POLICIES

OPTIMIZERS = [
    uq.SGD(lr=0.002), uq.Adagrad(lr=0.1), uq.RowWiseAdagrad(lr=0.1), uq.Adam(lr=0.01), uq.RowWiseAdam(lr=0.01), uq.LAMB(lr=0.01),
    uq.LARS(lr=0.002),
]  # fmt: skip


def batches(count, size=24, seed=0, rows=60):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        lengths = torch.randint(0, 5, (3 * size,), generator=generator)
        ids = (torch.rand(int(lengths.sum()), generator=generator) ** 3 * rows).long()
        yield uq.Batch(("a", "b", "c"), ids, lengths)


def embeddings(width, optimizer=None, dtype="fp32", seed=0, dim=8, rows=60):
    first, second = (
        uq.Table("first", rows=rows, dim=dim, dtype=dtype),
        uq.Table("second", rows=rows, dim=4, dtype=dtype),
    )
    features = {
        "a": uq.Feature(first, pooling="mean"),
        "b": uq.Feature(second, pooling=None),
        "c": uq.Feature(first, pooling="sum"),
    }
    return uq.Embeddings(
        features, optimizer=optimizer or uq.RowWiseAdagrad(lr=0.1), width=width, seed=seed, device=device()
    )


def device():
    """Where Triton kernels that are asked for run: on a GPU if there is one, otherwise interpreted."""
    return "cuda" if os.environ.get("UNEQUAL_KERNELS") == "triton" and torch.cuda.is_available() else "cpu"


def train(module, data, seed=1):
    generator = torch.Generator().manual_seed(seed)
    outputs = []
    for batch in data:
        out = module(batch.to(module.device))
        parts = [out.pooled, out["b"].values]
        targets = [torch.randn(part.shape[1], generator=generator).to(module.device) for part in parts]
        sum(((part - target) ** 2).sum() for part, target in zip(parts, targets)).backward()
        outputs.append(torch.cat([part.detach().flatten() for part in parts]).cpu())
    return outputs


def known_apart(state):
    """A state_dict without what training has shown, which a round brings up to date."""
    return {name: part for name, part in state.items() if name != "savings"}


def compare(own, expected, **tolerance):
    assert own.keys() == expected.keys()
    for name in own:
        torch.testing.assert_close(
            own[name].cpu(), expected[name].cpu(), msg=lambda text, name=name: f"{name}: {text}", **tolerance
        )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: type(optimizer).__name__)
def test_agrees_with_reference(monkeypatch, policy, optimizer):
    """Over steps and rounds: outputs, rows, optimizer state, utilities and candidates."""
    width = uq.Width(budget="30%", policy=policy, every=4)
    own = embeddings(width, optimizer)
    monkeypatch.setenv("UNEQUAL_KERNELS", "reference")
    expected = embeddings(width, optimizer)
    assert own._kernels.name == "cpu" and expected._kernels.name == "reference"
    for found, wanted in zip(train(own, batches(10)), train(expected, batches(10)), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    compare(own.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-5)
    if policy != "none":
        assert any(report.pruned and report.regained for report in own.width_reports)


@pytest.mark.parametrize("policy", ["water-filling", "fiited"])
def test_followed_by_hashing_agrees_with_reference(monkeypatch, policy):
    """Of many ids only some are followed: then they are found by their keys."""
    width = uq.Width(budget="0.1%", policy=policy, every=4)
    own = embeddings(width, rows=60_000)
    monkeypatch.setenv("UNEQUAL_KERNELS", "reference")
    expected = embeddings(width, rows=60_000)
    storage = own._storages["first"]
    assert isinstance(storage, NarrowStorage) and not storage.how.by_id and storage.followed.numel() == 8192
    data = list(batches(6, rows=60_000))
    for found, wanted in zip(train(own, data), train(expected, data), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    compare(own.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-5)
    assert own.state_dict()["first.candidates"].numel() > 100


@pytest.mark.parametrize("policy", ["water-filling", "fiited"])
def test_small_tables_follow_every_id_at_4_bytes(policy):
    """By number: without keys, and all of them from the first step on."""
    module = embeddings(uq.Width(budget="5%", policy=policy, every=10**6))
    data = list(batches(3))
    train(module, data)
    storage = module._storages["first"]
    assert isinstance(storage, NarrowStorage) and storage.how.by_id
    assert storage.records.slabs[0][0].nbytes == 60 * 4 * storage.records.utilities
    if policy == "water-filling":  # the same 4 bytes say where rows are
        assert storage.how.in_directory and storage.directory.bytes == 0
    assert not storage.followed.numel() and not storage._stamps.numel()
    read = {int(id_) for batch in data for name in "ac" for id_ in batch[name].values}
    state = module.state_dict()
    assert read == set(state["first.ids"].tolist()) | set(state["first.candidates"].tolist())
    assert (state["first.candidate_utilities"].sum(1) > 0).all()


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("dim", [16, 24, 64])
@pytest.mark.parametrize("policy", ["water-filling", "fiited"])
def test_wider_rows_agree_with_reference(monkeypatch, policy, dim, dtype):
    """Rows that are read in whole vectors of the machine, and rows that are not."""
    width = uq.Width(budget="30%", policy=policy, every=4)
    own = embeddings(width, dtype=dtype, dim=dim)
    monkeypatch.setenv("UNEQUAL_KERNELS", "reference")
    expected = embeddings(width, dtype=dtype, dim=dim)
    for found, wanted in zip(train(own, batches(6)), train(expected, batches(6)), strict=True):
        torch.testing.assert_close(
            found, wanted, rtol=1e-4 if dtype == "fp32" else 2e-2, atol=1e-5 if dtype == "fp32" else 2e-2
        )


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("policy", ["water-filling", "fiited"])
def test_agrees_with_reference_in_16_bits(monkeypatch, policy, dtype):
    width = uq.Width(budget="30%", policy=policy, every=4, chunk=1)
    own = embeddings(width, dtype=dtype)
    monkeypatch.setenv("UNEQUAL_KERNELS", "reference")
    expected = embeddings(width, dtype=dtype)
    train(own, batches(6))
    train(expected, batches(6))
    compare(own.state_dict(), expected.state_dict(), rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("budget", ["100%", "50%", "12%", "4 KB"])
@pytest.mark.parametrize("policy", POLICIES)
def test_stays_inside_the_budget(budget, policy):
    module = embeddings(uq.Width(budget=budget if "%" in budget else "16 KB", policy=policy, every=8))
    full = 60 * 8 + 60 * 4
    for batch in batches(40):
        train(module, [batch])
        values = sum(storage.values for storage in module._storages.values())
        if "%" in budget:
            assert values <= float(budget[:-1]) / 100 * full + 1e-6


def test_all_of_it_is_the_plain_table():
    """With the whole budget every row gets full width when it is new, and training is that of whole tables, bit for bit."""
    plain, wide = embeddings(None), embeddings(uq.Width(budget="100%", policy="none"))
    for found, wanted in zip(train(wide, batches(12)), train(plain, batches(12)), strict=True):
        assert torch.equal(found, wanted)
    state, whole = wide.state_dict(), plain.state_dict()
    ids = state["first.ids"]
    assert torch.equal(state["first.weight"].view(-1, 8), whole["first.weight"][ids])
    assert torch.equal(state["first.sum"], whole["first.sum"][ids])


def test_missing_chunks_read_as_zeros_and_missing_rows_too():
    module = embeddings(uq.Width(budget="20%", every=4))
    train(module, batches(12))
    module.eval()
    state = module.state_dict()
    widths = dict(zip(state["second.ids"].tolist(), state["second.widths"].tolist()))
    ids = torch.arange(60)
    lengths = torch.cat([torch.zeros(60), torch.ones(60), torch.zeros(60)]).long()
    rows = module(uq.Batch(("a", "b", "c"), ids, lengths))["b"].values
    for id_, row in zip(ids.tolist(), rows):
        width = widths.get(id_, 0)
        assert not row[width:].any() and (width == 0 or row[:width].any())
    assert 0 < len(widths) < 60 and len(set(widths.values())) > 1


def test_important_rows_are_wide():
    module = embeddings(uq.Width(budget="30%", every=8))
    train(module, batches(64))
    state = module.state_dict()
    widths = torch.zeros(60).index_put_((state["first.ids"],), state["first.widths"].float())
    assert widths[:4].mean() > 2 * widths[30:].mean()


@pytest.mark.parametrize("policy", ["water-filling", "fiited"])
def test_saved_and_loaded_it_goes_on_alike(policy):
    """Layouts differ after loading; what is computed does not."""
    data = list(batches(30))
    module = embeddings(uq.Width(budget="30%", policy=policy, every=8))
    train(module, data[:15])
    other = embeddings(uq.Width(budget="30%", policy=policy, every=8), seed=5)
    other.load_state_dict(module.state_dict())
    other._storages["first"].rows.key = module._storages["first"].rows.key
    other._storages["second"].rows.key = module._storages["second"].rows.key
    compare(module.state_dict(), other.state_dict(), rtol=0, atol=0)
    for found, wanted in zip(train(module, data[15:]), train(other, data[15:]), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_round_between_forward_and_backward():
    """Slots that were looked up before it mean nothing after it."""
    data = list(batches(3))
    module = embeddings(uq.Width(budget="30%", every=10**6))
    train(module, data[:1])
    out = module(data[1])
    before = module.state_dict()
    assert module._rounds is not None
    module._rounds.round(5)
    module._generation += 1
    (out.pooled.sum() * 0).backward()
    after = module.state_dict()
    common = {id_: k for k, id_ in enumerate(after["first.ids"].tolist())}
    starts = dict(
        zip(before["first.ids"].tolist(), (before["first.widths"].cumsum(0) - before["first.widths"]).tolist())
    )
    new_starts = after["first.widths"].cumsum(0) - after["first.widths"]
    for id_, start in starts.items():
        if id_ in common:
            first = int(new_starts[common[id_]])
            assert before["first.weight"][start] == after["first.weight"][first], "gradients of 0 change nothing"


def test_a_round_without_memory_changes_nothing(monkeypatch):
    module = embeddings(uq.Width(budget="30%", every=10**6))
    train(module, batches(7))
    before = {name: part.clone() for name, part in module.state_dict().items()}
    real = NarrowStorage._slab
    calls = []

    def short(self, k, rows):
        calls.append(k)
        if len(calls) > 1:
            raise MemoryError("no memory for a slab")
        return real(self, k, rows)

    monkeypatch.setattr(NarrowStorage, "_slab", short)
    assert module._rounds is not None
    with pytest.warns(UserWarning, match="found no memory"):
        report = module._rounds.round(8)
    assert report.failed and len(calls) > 1
    monkeypatch.undo()
    after = known_apart(module.state_dict())
    compare(
        {k: v for k, v in after.items() if "utilit" not in k},
        {k: v for k, v in known_apart(before).items() if "utilit" not in k},
    )
    train(module, batches(4, seed=3))


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_slabs_have_nothing_to_spare_after_a_round(monkeypatch, kernels):
    """And room again for new rows before the next."""
    monkeypatch.setenv("UNEQUAL_KERNELS", kernels)
    module = embeddings(uq.Width(budget="60%", every=4), rows=2000)
    held = []
    for batch in batches(12, size=128, rows=2000):
        train(module, [batch])
        storage = module._storages["first"]
        assert isinstance(storage, NarrowStorage)
        records = storage.records
        held.append([sum(slab.shape[0] for slab in slabs) for slabs in records.slabs[1:]])
        assert all(room >= count for room, count in zip(held[-1], storage.counts[1:]))
        assert all(slab.shape[0] == 1 << records.slab_log2 for slabs in records.slabs[1:] for slab in slabs[:-1])
        if len(held) % 4 == 0:
            assert held[-1] == storage.counts[1:] and sum(held[-1]) > 100
    assert (
        sum(storage.memory().values())
        == sum(count * 4 * int(words) for count, words in zip(storage.counts[1:], records.layout[1:, 5]))
        + storage.directory.bytes
        + 4 * 2000
    )


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("wrong", [-1, 60])
def test_an_id_outside_the_table_is_refused(wrong, training):
    module = embeddings(uq.Width(budget="30%")).train(training)
    lengths = torch.cat([torch.zeros(2), torch.tensor([1.0, 2.0]), torch.zeros(2)]).long()
    with pytest.raises(uq.DataError, match=rf"feature 'b', sample 1 of the batch: id {wrong} is not in \[0, 60\)"):
        module(uq.Batch(("a", "b", "c"), torch.tensor([3, 4, wrong]), lengths))


def test_a_wrong_id_of_any_reader_changes_nothing():
    """Two features read one table, and both are looked at before anything is added."""
    module = embeddings(uq.Width(budget="30%", every=4))
    train(module, batches(3))
    before = {name: part.clone() for name, part in module.state_dict().items()}
    lengths = torch.tensor([1, 1, 0, 1, 2, 0])
    with pytest.raises(uq.DataError, match=r"feature 'c', sample 0 of the batch: id 77 is not in \[0, 60\)"):
        module(uq.Batch(("a", "b", "c"), torch.tensor([50, 51, 52, 53, 77]), lengths))
    compare(module.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("policy", ["water-filling", "fiited"])
def test_utilities_are_read_and_fade_alike_in_both_ways(policy):
    """In C++, and by torch as on devices that have no kernel for it."""
    module = embeddings(uq.Width(budget="40%", policy=policy, every=4))
    train(module, batches(6))
    for storage in module._storages.values():
        census = storage.census()
        slots = census.slots[: census.live]
        assert census.live and storage.records.gain > 1
        utilities, masks = storage.kernels.worth(storage.rows, slots)
        expected, expected_masks = storage._worth(slots)
        assert torch.equal(utilities, expected)
        assert (masks is None) == (expected_masks is None) and (masks is None or torch.equal(masks, expected_masks))
        gain, followed = storage.records.gain, storage.candidates()
        worth = storage.records.slabs[0][0][followed[0]].clone()
        storage._fade()
        assert all(torch.equal(*both) for both in zip(storage.candidates(), followed))
        torch.testing.assert_close(storage.records.slabs[0][0][followed[0]], worth / gain, rtol=1e-6, atol=0)
        torch.testing.assert_close(storage._worth(slots)[0], expected / gain, rtol=1e-6, atol=0)
        assert storage.records.gain == 1.0


@pytest.mark.parametrize("policy", ["water-filling", "fiited"])
def test_utilities_outlast_any_number_of_steps(policy):
    """What is added grows with every step, so that what was there fades; long before it is too large, all is made smaller."""
    module = embeddings(uq.Width(budget="10%", policy=policy, every=10_000, decay=0.5))
    storages = list(module._storages.values())
    train(module, batches(3))
    for storage in storages:
        storage.how.purse.left = 0.0
        before = storage.census()
        for _ in range(39):
            storage.tick()
        torch.testing.assert_close(storage.census().utilities, before.utilities * 0.5**39, rtol=1e-6, atol=0)
        for _ in range(200):
            storage.tick()
            assert storage.records.gain <= 2.0**40
        after = storage.census()
        assert torch.equal(before.ids[: before.live], after.ids[: after.live])
        assert before.utilities.max() > 0.1 and after.utilities.max() < 1e-30
    train(module, batches(3))
    for storage in storages:
        utilities = storage.census().utilities
        assert utilities.isfinite().all() and utilities.max() > 0.1


@pytest.mark.parametrize("policy", ["water-filling", "fiited"])
def test_a_round_that_changes_nothing_does_nothing(policy):
    module = embeddings(uq.Width(budget="40%", policy=policy, every=10**6))
    train(module, batches(6))
    rounds = module._rounds
    rounds.width = uq.Width(budget="40%", policy=policy, every=10**6, hysteresis=9.0)
    rounds.round(6)
    rounds.round(7)
    directories = [storage.directory for storage in module._storages.values()]
    before = {name: part.clone() for name, part in module.state_dict().items()}
    report = rounds.round(8)
    assert not report.pruned and not report.regained
    assert all(storage.directory is kept for storage, kept in zip(module._storages.values(), directories))
    compare(known_apart(module.state_dict()), known_apart(before), rtol=0, atol=0)
    train(module, batches(2, seed=5))


def test_a_share_of_about_as_many_unbounded_ids():
    """As of a table that has so many rows."""

    def made(count, **width):
        table = uq.Table("t", rows=count, dim=4)
        return uq.Embeddings({"f": uq.Feature(table, "sum")}, width=uq.Width(budget="25%", every=4, **width))

    with pytest.raises(uq.RecipeError, match=r"a size like '2 GB', or width.rows: table 't' has unbounded ids"):
        made(None)
    modules = [made(60), made(None, rows={"t": 60})]
    generator = torch.Generator().manual_seed(0)
    for _ in range(12):
        ids = torch.randint(0, 60, (32,), generator=generator)
        for module in modules:
            out = module(uq.Batch(("f",), ids, torch.ones(32, dtype=torch.int64))).pooled
            (out * (ids % 7)[:, None]).sum().backward()
            assert module._storages["t"].values <= 60
    kept = [module.width_reports[-1].kept for module in modules]
    assert kept[0] == pytest.approx(kept[1], abs=0.02) and kept[1] > 0.2
    with pytest.raises(uq.RecipeError, match="tables of the model: t, got 'items'"):
        made(60, rows={"items": 3})


@pytest.mark.parametrize(
    ("optimizer", "budget", "whole"),
    [(uq.RowWiseAdagrad(lr=0.1), "50%", True), (uq.RowWiseAdam(lr=0.01), "20%", True), (uq.RowWiseAdagrad(lr=0.1), "15%", False),
     (uq.Adagrad(lr=0.1), "50%", True), (uq.Adam(lr=0.01), "50%", False)],
)  # fmt: skip
def test_rows_begin_whole_until_the_first_round(optimizer, budget, whole):
    """Where all values of a row have one number by which they learn, or each has one that only grows. After the first round new
    rows are as they always were, also in what goes on from a saved state."""
    width = uq.Width(budget=budget, every=320)
    module = embeddings(width, optimizer, rows=400)
    data = list(batches(24, rows=400))

    def widths(module):
        return module.state_dict()["first.widths"]

    train(module, data[:1])
    assert bool((widths(module) == 8).all()) is whole
    fresh, now = embeddings(width, optimizer, rows=400), module.state_dict()
    fresh.load_state_dict(now)
    train(fresh, data[1:3])
    train(module, data[1:3])
    assert torch.equal(widths(fresh), widths(module))
    train(module, data[3:])
    how = module._rounds.how["first"]
    assert module.width_reports and how.begins == how.start < how.early if whole else how.early == 0


def test_chunks():
    table = uq.Table("t", rows=5, dim=64)
    assert uq.Width().chunk_of(table) == 4
    assert uq.Width().chunk_of(uq.Table("t", rows=5, dim=16)) == 1
    assert uq.Width().chunk_of(uq.Table("t", rows=5, dim=10)) == 1
    assert uq.Width().chunk_of(uq.Table("t", rows=5, dim=96)) == 6
    with pytest.raises(uq.RecipeError, match=r"a divisor of its dim 64 that makes at most 63 chunks: one of \[2, 4, 8"):
        uq.Width(chunk=5).chunk_of(table)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": "ten"}, "a share like '10%' or a size like '2 GB', got 'ten'"),
        ({"budget": "0%"}, "more than 0% and at most 100%"),
        ({"budget": "120%"}, "more than 0% and at most 100%"),
        ({"policy": "waterfilling"}, "did you mean 'water-filling'"),
        ({"every": 0}, "1 or more steps"),
        ({"state": "old"}, "'fresh' or 'row', got 'old'"),
        ({"tables": {"x": "-1 GB"}}, "width budget of table 'x'"),
    ],
)
def test_wrong_options_say_what_is_right(options, message):
    with pytest.raises(uq.RecipeError, match=message):
        uq.Width(**options)


def test_a_budget_below_the_minimum_says_what_it_is():
    with pytest.raises(uq.RecipeError, match=r"at least 0\.28% of all values, one chunk for a row in each of 2 tables"):
        embeddings(uq.Width(budget="0.1%"))
    with pytest.raises(uq.RecipeError, match=r"at least 960 bytes: 2 tables with a chunk of every row, got '959'"):
        embeddings(uq.Width(budget="959 b"))
    with pytest.raises(uq.RecipeError, match=r"at least .* bytes: 2 tables with a row, its place"):
        embeddings(uq.Width(budget="1 KB", policy="itep"))


def test_a_share_may_be_a_number():
    assert uq.Width(budget=0.25).common == uq.Width(budget="25%").common


@pytest.mark.parametrize("kernels", ["cpu", "reference", "triton"])
@pytest.mark.parametrize(
    ("optimizer", "name"), [(uq.RowWiseAdagrad(lr=0.1), "sum"), (uq.RowWiseAdam(lr=0.01), "second")]
)
def test_an_average_over_the_row_counts_new_values_with_a_fifth(monkeypatch, kernels, optimizer, name):
    """Or rows that are widened late would learn as slowly as what they know already."""
    if kernels == "triton":
        pytest.importorskip("unequal.kernels.triton")
    monkeypatch.setenv("UNEQUAL_KERNELS", kernels)

    def rows(module):
        state = {
            key.removeprefix("first."): part for key, part in module.state_dict().items() if key.startswith("first.")
        }
        return {
            id_: (int(width), float(own))
            for id_, width, own in zip(state["ids"].tolist(), state["widths"], state[name])
        }

    for how, share in (("row", 0.2), ("fresh", 1.0)):
        module = embeddings(uq.Width(budget="15%", every=10**6, state=how, most=1.0), optimizer)
        train(module, batches(6, size=8))
        before, report, after = rows(module), module._rounds.round(6), rows(module)
        assert report.pruned and report.regained
        grown = {id_ for id_ in before.keys() & after.keys() if after[id_][0] > before[id_][0]}
        assert grown and before.keys() & after.keys() - grown
        for id_ in before.keys() & after.keys():
            (was, held), (now, own) = before[id_], after[id_]
            wanted = held * (was + share * (now - was)) / now if id_ in grown else held
            assert own == pytest.approx(wanted, rel=1e-6)
