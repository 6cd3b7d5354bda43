"""What values save: measured from outputs and gradients, and what rounds make of it."""

import numpy as np
import pytest
import torch

import unequal as uq
from unequal.train import checkpoint
from unequal.width.measures import alone_in_all
from unequal.width.policy import Rows, policy_of
from unequal.width.savings import FLOOR, LARGEST, STEPS, Known, Savings, assumed

ROWS = 40


def module_of(chunk=1, **width):
    """A pooled feature and a list of one table, a pooled feature of another."""
    first, second = uq.Table("first", ROWS, dim=4, init_std=0.3), uq.Table("second", ROWS, dim=2, init_std=0.3)
    features = {"a": uq.Feature(first, "sum"), "b": uq.Feature(second, "mean"), "c": uq.Feature(first, None)}
    how = uq.Width(chunk=chunk, **{"budget": "50%", "every": 4, **width})
    return uq.Embeddings(features, optimizer=uq.Adagrad(lr=0.05), width=how, seed=1)


def batches(count, size=16, seed=0):
    random = torch.Generator().manual_seed(seed)
    for _ in range(count):
        ids = torch.randint(0, ROWS, (4 * size,), generator=random)
        lengths = torch.tensor([1, 2, 1]).repeat_interleave(size)
        yield uq.Batch(("a", "b", "c"), ids, lengths), torch.rand(size, generator=random).round()


def loss_of(out, labels, reduce="mean"):
    """Of a model in which columns of the features meet."""
    a, c = out.pooled[:, :4], out["c"].values
    logits = (a * c).sum(1) + (out.pooled[:, 4:] * a[:, :2]).sum(1)
    return torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction=reduce)


def train(module, data, reduce="mean"):
    for batch, labels in data:
        loss_of(module(batch), labels, reduce).backward()


def known_of(module):
    return {name: known.saved.copy() for name, known in module._rounds.savings.known.items()}


@pytest.mark.parametrize("chunk", [1, 2])
def test_savings_are_those_of_outputs_and_gradients(chunk):
    """To second order in each value, sample by sample; a table's are those of all features that read it."""
    module = module_of(chunk, every=10**6)
    expected = {"first": np.zeros(1 + 4 // chunk), "second": np.zeros(1 + 2 // chunk)}
    for batch, labels in batches(3):
        out = module(batch)
        loss = loss_of(out, labels)
        gradients = torch.autograd.grad(loss, [out.pooled, out["c"].values], retain_graph=True)
        outputs = [out.pooled.detach(), out["c"].values.detach()]
        for table, values, gradient in [
            ("first", outputs[0][:, :4], gradients[0][:, :4]),
            ("second", outputs[0][:, 4:], gradients[0][:, 4:]),
            ("first", outputs[1], gradients[1]),
        ]:
            own = (values * gradient).double().numpy()
            parts = [own.sum(1), *np.moveaxis(own, 1, 0)]
            saved = [float((-u + len(labels) / 2 * u * u).sum()) for u in parts]
            whole, columns = saved[0], np.array(saved[1:]).reshape(-1, chunk).sum(1)
            expected[table] += [whole, *columns]
        loss.backward()
    module._rounds.round(3)
    for name, saved in known_of(module).items():
        np.testing.assert_allclose(saved, expected[name], rtol=1e-4, atol=1e-7)


def test_savings_are_what_the_loss_rises_by():
    """Of a sample: without small values the loss is higher by what they are said to save."""
    torch.manual_seed(0)
    values = 0.02 * torch.randn(4000, 3)
    weights = torch.tensor([2.0, 1.0, -1.5])
    labels = torch.rand(4000).lt(torch.sigmoid(3 * values @ weights)).float()

    def loss(part):
        return torch.nn.functional.binary_cross_entropy_with_logits(part @ weights, labels)

    own = values.clone().requires_grad_()
    loss(own).backward()
    table = uq.Table("t", 10, dim=3)
    savings = Savings({"t": 3}, {"f": uq.Feature(table, "sum")})
    savings.note(savings.sample([values], 0), [own.grad], 4000)
    savings.learn(["t"], {"t": np.ones(3)}, {"t": 3.0}, 1.0, alone_in_all)
    saved = savings.known["t"].saved
    for column in range(3):
        without = values.clone()
        without[:, column] = 0
        assert saved[1 + column] == pytest.approx(float(loss(without) - loss(values)), rel=0.05, abs=2e-6)
    assert saved[0] == pytest.approx(float(loss(torch.zeros_like(values)) - loss(values)), rel=0.05)


def test_what_is_looked_at():
    savings = Savings({"t": 2}, {"f": uq.Feature(uq.Table("t", 10, dim=2), "sum")})
    output = torch.arange(20.0).view(10, 2)
    assert torch.equal(savings.sample([output], 0).parts[0][1], output), "all of a small one"
    for first, every in STEPS.items():
        looked_at = [step for step in range(first, first + 3 * every) if savings.sample([output], step)]
        assert looked_at == [first, first + every, first + 2 * every], "one in so many, which stands for all of them"
        later = savings.sample([output], first)
        assert later.times == every
    large = torch.zeros(1_000_000, 2)
    first, part = savings.sample([large], 7).parts[0]
    assert first and 100_000 < len(part) < 200_000
    part[:] = 1.0
    assert not large.any(), "a copy: what came out may be changed by who reads it"
    savings.note(savings.sample([torch.ones(0, 2)], 0), [torch.ones(0, 2)], 0)  # a rank without samples
    savings.note(later, [torch.full((10, 2), float("nan"))], 10)
    savings.note(later, [None], 10)
    assert not savings._counted()["t"].any(), "what has diverged is left out"


def test_until_something_is_known_later_chunks_save_less():
    assert Known.nothing(4, 0.0).priorities(0.0, 0.0).tolist() == pytest.approx([1, 1 / 3, 1 / 5, 1 / 7])
    assert Known.nothing(4, 0.0).priorities(2.0, 3.0).tolist() == pytest.approx([1, 1 / 3, 1 / 5, 1 / 7])


def test_priorities_follow_what_was_saved():
    """Rows of all widths up to 4; the second chunk saves as much as the first, the third hardly anything, nobody has a fourth."""
    known = Known.nothing(4, 0.0)
    known.learn(np.array([9.0, 4.0, 2.0, 0.01, 0.0]), np.array([2.0, 1.0, 1.0, 0.0]), 10.0, 0.9)
    assert known.worth.tolist() == [4.0, 2.0, 1.0, 0.0], "of rows with at least so many"
    found = known.priorities(9 / 8, 1e-6)
    assert found[0] == pytest.approx(2.0, rel=1e-3), "twice as good as the average table"
    over_first = found / found[0]
    assert over_first[1] == pytest.approx(1 - FLOOR + FLOOR / 3, rel=1e-3)
    assert over_first[2] == pytest.approx((1 - FLOOR) * 0.01 + FLOOR / 5, rel=1e-3)
    assert (np.diff(found) <= 0).all() and found[3] > 0
    assert known.priorities(1e-9, 1e-6)[0] == pytest.approx(LARGEST)
    assert known.priorities(9 / 8, 1e9) == pytest.approx(assumed(4), rel=1e-3), "little is known"
    # What rows had been worth before counts no longer, what they have come to be worth since does.
    known.learn(np.zeros(5), np.array([2.0, 1.0, 1.0, 0.0]) * 0.9**10 + [0, 0, 1, 0], 10.0, 0.9)
    np.testing.assert_allclose(known.worth, 0.9**10 * np.array([4, 2, 1, 0]) + [1, 1, 1, 0])


def test_nothing_is_learnt_where_it_is_not_known_what_rows_were_worth():
    known = Known.nothing(2, -1.0)
    known.learn(np.ones(3), np.ones(2), 5.0, 0.9)
    assert not known.saved.any() and not known.steps and known.held.tolist() == [1, 1]
    known.learn(np.ones(3), np.ones(2), 5.0, 0.9)
    assert known.saved.any() and known.steps == 5.0


@pytest.mark.parametrize("threshold", [1e-3, 0.2, 3.0, 1e6])
def test_tables_together_have_the_widths_that_they_have_alone(threshold):
    generator = torch.Generator().manual_seed(0)
    policy, parts = policy_of("water-filling"), []
    for number in range(5):
        worth = torch.rand(200, 1, generator=generator).log().mul(-4).exp()
        worth[:9] = 0
        curve = torch.rand(8, generator=generator, dtype=torch.float64).sort(descending=True).values * 10.0**number
        parts.append(policy.measure(worth, 8, 2, 0.3, curve))
    together = policy.chosen(Rows.joined(parts), threshold)
    alone = [policy.chosen(part, threshold) for part in parts]
    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(policy.chosen(Rows.joined(parts).thin(3), threshold), torch.cat(alone)[::3])
    power, limits = policy.power(0.3), parts[1].limits[0]
    priority = 2.0 ** (parts[1].utilities.double() - limits)
    expected = (priority >= threshold * 2).sum(1)
    assert (alone[1] - expected).abs().max() <= 1 and (alone[1] == expected).float().mean() > 0.98
    assert power > 0.8


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_a_table_that_says_nothing_gets_little(reduce):
    """Both are read alike, and both have gradients; labels follow the first alone."""
    tables = [uq.Table(name, 400, dim=8, init_std=0.05) for name in ("says", "chance")]
    features = {table.name: uq.Feature(table, "sum") for table in tables}
    width = uq.Width(budget="20%", every=100)
    module = uq.Embeddings(features, optimizer=uq.Adagrad(lr=0.1), width=width)
    random = np.random.default_rng(0)
    torch.manual_seed(0)
    effect = random.normal(size=400) * 2
    top = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adam(top.parameters(), lr=1e-2)
    for _ in range(300):
        ids = random.integers(0, 400, (2, 128))
        labels = torch.from_numpy(random.random(128) < 1 / (1 + np.exp(-effect[ids[0]]))).float()
        batch = uq.Batch(("says", "chance"), torch.from_numpy(ids.ravel()), torch.ones(256, dtype=torch.int64))
        logits = top(module(batch).pooled).squeeze(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction=reduce)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    says, chance = (storage.values for storage in module._storages.values())
    assert says > 3 * chance


def test_saved_and_loaded(tmp_path):
    """In the middle of an interval, in a checkpoint and in a state_dict: training goes on bit for bit."""
    module, other, third = module_of(), module_of(), module_of()
    data = list(batches(24))
    train(module, data[:10])
    assert any(part.any() for part in module._rounds.savings._counted().values())
    path = checkpoint.save(tmp_path, 10, {}, {}, embeddings=module)
    train(other, data[5:8])  # what was there is gone
    checkpoint.load(path, embeddings=other)
    third.load_state_dict(module.state_dict())
    assert module.shown() == other.shown() == third.shown() == checkpoint.open(path).shown
    for each in (module, other, third):
        train(each, data[10:])
    assert module.shown() == other.shown()
    assert all(torch.equal(part, other.state_dict()[name]) for name, part in module.state_dict().items())
    assert [r.values for r in third.width_reports] == [
        r.values for r in module.width_reports[-len(third.width_reports) :]
    ]


def test_saved_with_other_chunks_or_not_at_all(tmp_path, monkeypatch):
    module, other = module_of(chunk=2), module_of()
    train(module, batches(10))
    path = checkpoint.save(tmp_path, 10, {}, {}, embeddings=module)
    checkpoint.load(path, embeddings=other)
    assert not any(saved.any() for saved in known_of(other).values())
    train(other, batches(12, seed=1))
    assert any(saved.any() for saved in known_of(other).values())
    assert other._rounds.savings.of_numbers(module._rounds.savings.numbers()) is None
    monkeypatch.setattr(type(checkpoint.open(path)), "shown", None)
    third = module_of()
    checkpoint.load(path, embeddings=third)
    train(third, batches(12, seed=1))
    assert third.width_reports and any(saved.any() for saved in known_of(third).values())


def test_ranks_have_parts_of_it():
    module = module_of(every=10**6)
    train(module, batches(5))
    state = module._rounds.savings.state()
    parts = [Savings.part(state, rank) for rank in range(3)]
    assert Savings.together(parts) == state
    spread = Savings(module._rounds.savings.chunks, module.features, 3)
    spread.load(parts[1])
    assert not any(part.any() for part in spread._counted().values()) and not spread.seen.any()


def test_policies_that_do_not_ask_do_not_measure():
    module = module_of(policy="fiited")
    assert module._rounds.savings is None and module._sampled([torch.ones(2, 2)]) is None
    assert module.shown()["savings"] is None and "savings" not in module.state_dict()
    train(module, batches(6))
