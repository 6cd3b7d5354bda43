import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import unequal as uq
from unequal.kernels import native
from unequal.optim import OPTIMIZERS

ITEM = uq.Table("item", rows=50, dim=8, init_std=0.1)
USER = uq.Table("user", dim=5, init_std=0.1)


def make(seed=0, **options):
    features = {
        "history": uq.Feature(ITEM, pooling=None),
        "target": uq.Feature(ITEM),
        "user": uq.Feature(USER, pooling="mean"),
    }
    return uq.Embeddings(features, seed=seed, **options)


def batch(seed=0, size=4):
    generator = torch.Generator().manual_seed(seed)
    lists = lambda high: [  # noqa: E731
        torch.randint(high, (int(n),), generator=generator).tolist()
        for n in torch.randint(0, 5, (size,), generator=generator)
    ]
    return {
        "history": uq.Jagged.from_lists(lists(50)),
        "target": torch.randint(50, (size,), generator=generator),
        "user": uq.Jagged.from_lists([[id_ * 10**15 - 3 for id_ in row] for row in lists(20)]),
    }


def step(embeddings, data):
    out = embeddings(data)
    loss = (out["history"].values ** 2).sum() + (out["target"] * out["user"].sum()).sum() + out["user"].exp().sum()
    loss.backward()
    return loss.item()


def test_outputs():
    embeddings, data = make(), batch()
    out = embeddings(data)
    weights = embeddings.state_dict()["item.weight"]
    assert torch.equal(out["history"].values, weights[data["history"].values])
    assert torch.equal(out["history"].lengths, data["history"].lengths)
    assert torch.equal(out["target"], weights[data["target"]])
    assert out["user"].shape == (4, 5) and out.pooled.shape == (4, 13)
    assert list(out) == ["history", "target", "user"] and len(out) == 3


def test_is_a_plain_module_without_parameters():
    model = torch.nn.Sequential(make())
    assert list(model.parameters()) == []
    assert "item" in repr(model)


@pytest.mark.parametrize("kind", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_training_equals_autograd_with_the_reference_formulas(kind, monkeypatch):
    """Gradients from torch's own autograd on plain copies of the tables, updates from the reference kernels' formulas."""
    from unequal.kernels.reference.update import apply

    optimizer = kind(lr=0.1, weight_decay=0.01)
    item = uq.Table("item", rows=30, dim=6, init_std=0.1)
    embeddings = uq.Embeddings(
        {"a": uq.Feature(item), "b": uq.Feature(item, "mean"), "c": uq.Feature(item, None)}, optimizer=optimizer
    )
    weights = embeddings.state_dict()["item.weight"].clone()
    states = [torch.zeros((30,) if per == "row" else (30, 6)) for _, per in optimizer.state]
    for number in range(4):
        generator = torch.Generator().manual_seed(number)
        lists = [torch.randint(30, (n,), generator=generator) for n in (3, 0, 5)]
        jagged = uq.Jagged(torch.cat(lists), torch.tensor([3, 0, 5]))
        out = embeddings({"a": jagged, "b": jagged, "c": jagged})
        loss = (out["a"].sin() + out["b"] ** 2).sum() + (out["c"].values ** 3).sum() + out["c"].values.sum()
        loss.backward()

        leaf = weights.clone().requires_grad_()
        sums = torch.stack([leaf[part].sum(0) for part in lists])
        means = torch.stack([leaf[part].mean(0) if len(part) else torch.zeros(6) for part in lists])
        rows = leaf[jagged.values]
        expected = (sums.sin() + means**2).sum() + (rows**3).sum() + rows.sum()
        torch.testing.assert_close(loss, expected)
        expected.backward()
        touched = jagged.values.unique()
        part = [state[touched] for state in states]
        weights[touched] = apply(optimizer, weights[touched], part, leaf.grad[touched], optimizer.lr, number)
        for state, new in zip(states, part):
            state[touched] = new
    state = embeddings.state_dict()
    torch.testing.assert_close(state["item.weight"], weights, rtol=1e-4, atol=1e-6)
    for (name, _), wanted in zip(optimizer.state, states):
        torch.testing.assert_close(state[f"item.{name}"], wanted, rtol=1e-4, atol=1e-6)


def test_native_and_reference_modules_train_alike(monkeypatch):
    if native.library() is None:
        pytest.skip("the native kernels are not built")
    fast = make()
    monkeypatch.setenv("UNEQUAL_KERNELS", "reference")
    slow = make()
    assert slow._kernels.name == "reference" and fast._kernels.name == "cpu"
    for number in range(5):
        data = batch(number)
        assert step(fast, data) == pytest.approx(step(slow, data), rel=1e-5)
    one, other = fast.state_dict(), slow.state_dict()
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-5, atol=1e-6)


def test_repeats_bitwise_over_threads():
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        embeddings = make()
        losses = [step(embeddings, batch(number, size=300)) for number in range(5)]
        results.append((losses, embeddings.state_dict()))
    for losses, state in results[1:]:
        assert losses == results[0][0]
        assert all(torch.equal(state[name], results[0][1][name]) for name in state)


def test_evaluation_changes_nothing():
    embeddings = make()
    step(embeddings, batch(0))
    before = {name: tensor.clone() for name, tensor in embeddings.state_dict().items()}
    embeddings.eval()
    out = embeddings(batch(1))
    assert not out.pooled.requires_grad
    with torch.no_grad():
        embeddings.train()(batch(2))
    after = embeddings.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    unknown = embeddings.eval()({**batch(1), "user": torch.tensor([1, 2, 3, 4])})
    assert (unknown["user"] == 0).all()


def test_rare_ids_share_a_row():
    embeddings = uq.Embeddings({"user": uq.Feature(uq.Table("user", dim=4, admit_after=3, init_std=0.1))})
    first = embeddings({"user": torch.tensor([10, 11, 10])})["user"]
    assert torch.equal(first[0], first[1]) and embeddings.rows() == {"user": 1}
    second = embeddings({"user": torch.tensor([10, 11, 12])})["user"]
    assert not torch.equal(second[0], second[1]) and torch.equal(second[1], second[2])
    embeddings.eval()
    out = embeddings({"user": torch.tensor([999, 11, 10])})["user"]
    assert torch.equal(out[0], out[1]) and torch.equal(out[2], second[0])


def test_a_fresh_row_depends_on_the_id_alone():
    one, other = make(), make()
    one(batch(0))
    for number in (3, 2, 1, 0):
        other(batch(number))
    ids = batch(0)["user"]
    one.eval(), other.eval()
    both = [module({**batch(0), "user": ids})["user"] for module in (one, other)]
    assert torch.equal(*both)
    assert not torch.equal(make(seed=1).eval()(batch(0))["target"], both[0][:, :1])


def test_state_round_trip_continues_bitwise():
    embeddings = make(optimizer=uq.Adam(lr=0.1))
    for number in range(3):
        step(embeddings, batch(number))
    saved = {name: tensor.clone() for name, tensor in embeddings.state_dict().items()}
    restored = make(seed=5, optimizer=uq.Adam(lr=0.1))
    step(restored, batch(9))
    restored.load_state_dict(saved)
    restored.seed = embeddings.seed
    assert restored.step == 3
    known = {**batch(2)}
    assert step(embeddings, known) == step(restored, known)
    one, other = embeddings.state_dict(), restored.state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_loading_other_tables_is_refused():
    state = make().state_dict()
    wide = uq.Embeddings({"target": uq.Feature(uq.Table("item", rows=50, dim=16))})
    with pytest.raises(RuntimeError, match=r"expected \(50, 16\).*got \(50, 8\)"):
        wide.load_state_dict(state, strict=False)
    with pytest.raises(RuntimeError, match=r"user\.weight"):
        uq.Embeddings({"target": uq.Feature(ITEM)}).load_state_dict(state)


def test_table_names_may_hold_dots():
    def named(*names):
        return uq.Embeddings({name: uq.Feature(uq.Table(name, rows=3, dim=2)) for name in names}, seed=len(names))

    saved = named("a", "a.b").state_dict()
    restored = uq.Embeddings({n: uq.Feature(uq.Table(n, rows=3, dim=2)) for n in ("a", "a.b")}, seed=9)
    restored.load_state_dict(saved)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in restored.state_dict().items())
    with pytest.raises(RuntimeError, match=r"Unexpected.*a\.b\.weight"):
        named("a").load_state_dict(saved)


def test_weights_and_their_gradient():
    table = uq.Table("item", rows=20, dim=8, init_std=0.5)
    embeddings = uq.Embeddings({"a": uq.Feature(table), "b": uq.Feature(table, "mean")}, optimizer=uq.SGD(lr=0.0))
    full = embeddings.state_dict()["item.weight"]
    weights = torch.rand(6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    ids = torch.tensor([1, 2, 3, 4, 5, 1])
    data = uq.Batch(("a", "b"), ids, torch.tensor([2, 1, 0, 3]), weights=weights)
    out = embeddings(data)
    rows = full[ids] * weights[:, None]
    torch.testing.assert_close(out["a"], torch.stack([rows[0] + rows[1], rows[2]]))
    torch.testing.assert_close(out["b"], torch.stack([torch.zeros(8), rows[3:].sum(0) / 3]))
    (out.pooled * torch.arange(16.0)).sum().backward()
    expected = torch.autograd.functional.vjp(
        lambda w: torch.cat(
            [
                torch.stack([(full[ids] * w[:, None])[:2].sum(0), (full[ids] * w[:, None])[2]]),
                torch.stack([torch.zeros(8), (full[ids] * w[:, None])[3:].sum(0) / 3]),
            ],
            dim=1,
        ),
        weights.detach(),
        torch.arange(16.0).expand(2, 16),
    )[1]
    torch.testing.assert_close(weights.grad, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_tables_learn_in_small_steps(dtype):
    """Steps far below half a unit in the last place move the mean only because rounding is stochastic."""
    table = uq.Table("t", rows=1000, dim=8, dtype=dtype, init_std=0.0)
    embeddings = uq.Embeddings({"x": uq.Feature(table)}, optimizer=uq.SGD(lr=1.0))
    storage = embeddings._storages["t"].rows.weights[0]
    storage.fill_(1.0)
    ids = torch.arange(1000)
    for _ in range(100):
        (embeddings({"x": ids}).pooled * 1e-5).sum().backward()
    assert float(storage.double().mean()) == pytest.approx(1 - 100 * 1e-5, abs=1e-4)


def test_schedule_is_followed():
    schedule = uq.Schedule(kind="linear", total_steps=2)
    embeddings = uq.Embeddings(
        {"x": uq.Feature(uq.Table("t", rows=2, dim=4))}, optimizer=uq.SGD(lr=1.0), schedule=schedule
    )
    start = embeddings.state_dict()["t.weight"][0].clone()
    changes = []
    for _ in range(3):
        embeddings({"x": torch.tensor([0])}).pooled.sum().backward()
        now = embeddings.state_dict()["t.weight"][0].clone()
        changes.append(float((start - now).mean()))
        start = now
    assert changes == pytest.approx([1.0, 0.5, 0.0], abs=1e-6)


def test_errors_say_what_to_do():
    embeddings = make()
    with pytest.raises(
        uq.DataError, match=r"feature 'target', sample 2 of the batch: id 50 is not in \[0, 50\) of table 'item'"
    ):
        embeddings({**batch(), "target": torch.tensor([0, 1, 50, 2])})
    with pytest.raises(uq.DataError, match=r"sample 1 of the batch: id -1"):
        embeddings({**batch(), "target": torch.tensor([0, -1, 5, 2])})
    with pytest.raises(uq.DataError, match="lacks feature 'target'; did you mean 'targets'"):
        data = batch()
        embeddings(uq.Batch.from_jagged({"history": data["history"], "targets": data["target"], "user": data["user"]}))
    with pytest.raises(uq.DataError, match="lengths add up to 5, but there are 4 ids"):
        names = ("history", "target", "user")
        embeddings(uq.Batch(names, torch.tensor([1, 2, 3, 4]), torch.tensor([1, 1, 1, 1, 0, 1])))
    with pytest.raises(uq.RecipeError, match="one definition"):
        uq.Embeddings({"a": uq.Feature(ITEM), "b": uq.Feature(uq.Table("item", rows=51, dim=8))})
    with pytest.raises(uq.UserError, match="did you mean 'user'"):
        embeddings(batch())["usr"]


def test_a_wrong_id_leaves_the_tables_as_they_were():
    embeddings = make()
    before = embeddings.state_dict()["item.weight"].clone()
    with pytest.raises(uq.DataError):
        embeddings({**batch(), "target": torch.tensor([0, 1, 2**40, 2])})
    assert torch.equal(before, embeddings.state_dict()["item.weight"]) and embeddings.step == 0


def test_empty_batches():
    embeddings = make()
    out = embeddings(
        uq.Batch(("history", "target", "user"), torch.empty(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    )
    assert out.pooled.shape == (0, 13) and out["history"].values.shape == (0, 8)
    out.pooled.sum().backward()
    none = uq.Batch(("history", "target", "user"), torch.zeros(0, dtype=torch.int64), torch.zeros(9, dtype=torch.int64))
    out = embeddings(none)
    assert (out.pooled == 0).all()
    (out.pooled.sum() + out["history"].values.sum()).backward()


@settings(max_examples=30, deadline=None)
@given(order=st.permutations(["history", "target", "user", "extra"]))
def test_the_order_of_features_in_the_batch_does_not_matter(order):
    data = {**batch(), "extra": torch.zeros(4, dtype=torch.int64)}
    shuffled = uq.Batch.from_jagged({name: data[name] for name in order})
    one, other = make()(batch()), make()(shuffled)
    assert torch.equal(one.pooled, other.pooled) and torch.equal(one["history"].values, other["history"].values)


def test_memory_is_counted():
    embeddings = make()
    step(embeddings, batch())
    users = embeddings.rows()["user"]
    memory = embeddings.memory()
    assert memory["weights"] == 4 * (50 * 8 + users * 5) and memory["optimizer"] == 4 * (50 + users)
    assert memory["directory"] > 0


def test_copies_are_independent():
    embeddings = make()
    step(embeddings, batch())
    twin = copy.deepcopy(embeddings)
    step(twin, batch(1))
    assert twin.step == 2 and embeddings.step == 1
    assert not torch.equal(twin.state_dict()["item.weight"], embeddings.state_dict()["item.weight"])
