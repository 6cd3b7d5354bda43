import pytest
import torch

from tests.models.model_cases import sequence_batch, sequence_embeddings
from unequal import Batch, Embeddings, Feature, Jagged, Table
from unequal.errors import RecipeError
from unequal.models import ModelConfig, build_model

ENCODERS = ["attention", "transformer"]


def config(encoder="attention", **options):
    return ModelConfig(kind="sequence", history={"history": "target"}, encoder=encoder, **options)


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("interaction", ["dot", "cross"])
@pytest.mark.parametrize("dims", [(8, None, 8), (8, 4, 2)])
def test_shapes_and_gradients(encoder, interaction, dims):
    torch.manual_seed(0)
    embeddings = sequence_embeddings(*dims)
    model = build_model(config(encoder, interaction=interaction, layers=2), embeddings, dense_features=0, tasks=2)
    before = {name: value.clone() for name, value in embeddings.state_dict().items()}
    logits = model(sequence_batch([[1, 2, 3], [], [4], [5, 6]], [9, 10, 11, 12], [1, 2, 3, 4]))
    assert logits.shape == (4, 2)
    logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        # A softmax does not see what is added to all scores: that bias has no gradient but rounding errors.
        unseen = encoder == "attention" and name.endswith("outer.bias")
        assert parameter.grad is not None and (unseen or (parameter.grad != 0).any()), name
    after = embeddings.state_dict()
    moved = (before["item.weight"] != after["item.weight"]).any(1).nonzero().flatten().tolist()
    assert moved == [1, 2, 3, 4, 5, 6] + ([9, 10, 11, 12] if dims[1] is None else [])


@pytest.mark.parametrize("encoder", ENCODERS)
def test_other_histories_do_not_change_my_logits(encoder):
    model = build_model(config(encoder), sequence_embeddings(), dense_features=0, tasks=1).eval()
    with torch.no_grad():
        short = model(sequence_batch([[1, 2], [3]], [7, 8], [1, 2]))
        long = model(sequence_batch([[1, 2], list(range(29)), []], [7, 9, 3], [1, 3, 4]))
        alone = model(sequence_batch([[1, 2]], [7], [1]))
    torch.testing.assert_close(short[0], long[0])
    torch.testing.assert_close(short[0], alone[0])


@pytest.mark.parametrize("encoder", ENCODERS)
def test_all_histories_empty(encoder):
    model = build_model(config(encoder), sequence_embeddings(), dense_features=0, tasks=1)
    logits = model(sequence_batch([[], []], [7, 8]))
    logits.sum().backward()
    assert logits.isfinite().all()
    assert all(value.isfinite().all() for value in model.state_dict().values())


def test_weights_of_ids_scale_their_vectors():
    model = build_model(config(), sequence_embeddings(), dense_features=0, tasks=1).eval()

    def logits(weights):
        history = Jagged.from_lists([[1, 2], [3]], weights)
        return model(
            Batch.from_jagged({"user": torch.tensor([0, 1]), "history": history, "target": torch.tensor([5, 6])})
        )

    with torch.no_grad():
        plain, ones, halves = logits(None), logits([[1, 1], [1]]), logits([[1, 0.5], [1]])
    assert torch.equal(plain, ones)
    assert not torch.equal(plain[0], halves[0])
    torch.testing.assert_close(plain[1], halves[1])


def test_two_histories():
    item = Table("item", 20, dim=8, init_std=0.5)
    embeddings = Embeddings(
        {
            "liked": Feature(item, pooling=None),
            "target": Feature(item),
            "bought": Feature(item, pooling=None),
            "tags": Feature(Table("tag", 9, dim=4), pooling="mean"),
        }
    )
    pairs = {"bought": "target", "liked": "target"}
    model = build_model(ModelConfig(kind="sequence", history=pairs), embeddings, dense_features=1, tasks=1).eval()
    lists = {"liked": Jagged.from_lists([[1, 2], []]), "bought": Jagged.from_lists([[3], [4]])}
    rest = {"target": torch.tensor([5, 6]), "tags": Jagged.from_lists([[1], [2, 3]])}
    with torch.no_grad():
        first = model(Batch.from_jagged(lists | rest, dense=torch.ones(2, 1)))
        swapped = {"liked": lists["bought"], "bought": lists["liked"]}
        second = model(Batch.from_jagged(swapped | rest, dense=torch.ones(2, 1)))
    assert first.shape == (2, 1) and not torch.allclose(first, second)


def feature(pooling):
    return Feature(Table("item", 20, dim=8), pooling=pooling)


@pytest.mark.parametrize(
    ("features", "history", "message"),
    [
        ({"past": None, "item": "sum"}, {"pats": "item"}, r"model\.history: .*'pats'; did you mean 'past'"),
        ({"past": None, "item": "sum"}, {"past": "itme"}, r"model\.history: .*'itme'; did you mean 'item'"),
        ({"past": "mean", "item": "sum"}, {"past": "item"}, r"pooling of 'past': expected none"),
        ({"past": None, "item": None}, {"past": "item"}, r"model\.history: expected a pooled target for 'past'"),
        ({"past": None, "tags": None, "item": "sum"}, {"past": "item"}, r"pooling of 'tags': expected sum or mean"),
    ],
)
def test_columns_that_do_not_fit(features, history, message):
    embeddings = Embeddings({name: feature(pooling) for name, pooling in features.items()})
    with pytest.raises(RecipeError, match=message):
        build_model(ModelConfig(kind="sequence", history=history), embeddings, dense_features=0, tasks=1)


def test_heads_must_divide_the_dim():
    with pytest.raises(RecipeError, match=r"model\.heads: expected a divisor of the dim of 'history' \(8\), got 3"):
        build_model(config("transformer", heads=3), sequence_embeddings(), dense_features=0, tasks=1)


@pytest.mark.parametrize("encoder", ENCODERS)
def test_learns_whether_the_target_was_seen(encoder):
    """The label says whether an id of the target's class is in the history: nothing but the encoder can see that."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(0, 6, (600,), generator=generator).tolist()
    histories = [torch.randint(30, (length,), generator=generator).tolist() for length in lengths]
    targets = torch.randint(30, (600,), generator=generator).tolist()
    labels = torch.tensor([[float(any(i % 3 == t % 3 for i in past))] for past, t in zip(histories, targets)])
    model = build_model(config(encoder), sequence_embeddings(16, user_dim=16), dense_features=0, tasks=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    batch = sequence_batch(histories, targets)
    losses = []
    for _ in range(150):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(batch), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 0.6 and losses[-1] < 0.2, (losses[0], losses[-1])
