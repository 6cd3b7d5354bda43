import pytest
import torch

from tests.models.model_cases import categorical_batch, plain_embeddings
from unequal import Embeddings, Feature, Table
from unequal.errors import DataError, RecipeError
from unequal.models import ModelConfig, build_model

INTERACTIONS = [
    {"interaction": "dot"},
    {"keep_vectors": True},
    {"interaction": "cross"},
    {"interaction": "cross", "cross_rank": 2},
]


def weights_of(embeddings):
    return {name: value.clone() for name, value in embeddings.state_dict().items()}


@pytest.mark.parametrize("options", INTERACTIONS)
@pytest.mark.parametrize("dims", [{"a": 4}, {"a": 4, "b": 4, "c": 4}, {"a": 4, "b": 8, "c": 2}])
@pytest.mark.parametrize("dense", [0, 3])
@pytest.mark.parametrize("tasks", [1, 2])
def test_shapes_and_gradients(options, dims, dense, tasks):
    torch.manual_seed(0)
    embeddings = plain_embeddings(dims)
    model = build_model(ModelConfig(**options), embeddings, dense_features=dense, tasks=tasks)
    batch = categorical_batch(dict.fromkeys(dims, 20), 16, dense, tasks)
    before = weights_of(embeddings)
    logits = model(batch)
    assert logits.shape == (16, tasks) and logits.dtype == torch.float32
    logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and (parameter.grad != 0).any(), name
    after = weights_of(embeddings)
    for name in dims:
        assert not torch.equal(before[f"{name}.weight"], after[f"{name}.weight"]), name
    assert embeddings.step == 1


@pytest.mark.parametrize("size", [0, 1])
def test_small_batches(size):
    model = build_model(ModelConfig(), plain_embeddings({"a": 4, "b": 4}), dense_features=2, tasks=1)
    assert model(categorical_batch({"a": 20, "b": 20}, size, 2)).shape == (size, 1)


def test_samples_are_independent():
    model = build_model(ModelConfig(), plain_embeddings({"a": 4, "b": 8}), dense_features=2, tasks=2).eval()
    batch = categorical_batch({"a": 20, "b": 20}, 9, 2, 2)
    order = torch.randperm(9)
    turned = type(batch).from_jagged(
        {name: batch[name].values[order] for name in batch.features}, dense=batch.dense[order]
    )
    with torch.no_grad():
        torch.testing.assert_close(model(turned), model(batch)[order])


def test_interaction_dim_projects_every_feature():
    model = build_model(ModelConfig(interaction_dim=6), plain_embeddings({"a": 4, "b": 8}), dense_features=2, tasks=1)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if "projections" in name}
    assert sorted(shapes.values()) == [(6, 4), (6, 8)]
    assert model.head.bottom[-1].out_features == 6


def test_the_seed_decides_the_weights():
    states = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        model = build_model(ModelConfig(), plain_embeddings({"a": 4, "b": 4}), dense_features=2, tasks=1)
        states.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(states[0], states[1]) and not torch.equal(states[0], states[2])


def test_tasks_share_all_but_their_top():
    model = build_model(ModelConfig(top=(5,)), plain_embeddings({"a": 4, "b": 4}), dense_features=2, tasks=3)
    assert len(model.head.tops) == 3
    model(categorical_batch({"a": 20, "b": 20}, 8, 2))[:, 1].sum().backward()
    touched = [top[0].weight.grad is not None and bool(top[0].weight.grad.any()) for top in model.head.tops]
    assert touched == [False, True, False]
    assert model.head.bottom[0].weight.grad.any()


def test_an_unpooled_column_is_refused_with_the_remedy():
    embeddings = Embeddings({"list": Feature(Table("t", 5, dim=4), pooling=None), "b": Feature(Table("b", 5, dim=4))})
    with pytest.raises(RecipeError, match=r"pooling of 'list': expected sum or mean.*model\.kind = \"sequence\""):
        build_model(ModelConfig(), embeddings, dense_features=0, tasks=1)


def test_missing_or_wrong_dense_columns_are_refused():
    model = build_model(ModelConfig(), plain_embeddings({"a": 4}), dense_features=2, tasks=1)
    with pytest.raises(DataError, match="reads 2 dense columns per sample, the batch has none"):
        model(categorical_batch({"a": 20}, 4))
    with pytest.raises(DataError, match=r"reads 2 dense columns per sample, the batch has a tensor of shape \[4, 3\]"):
        model(categorical_batch({"a": 20}, 4, 3))


def test_dropout_acts_in_training_alone():
    torch.manual_seed(0)
    model = build_model(ModelConfig(dropout=0.5), plain_embeddings({"a": 4, "b": 4}), dense_features=2, tasks=1)
    batch = categorical_batch({"a": 20, "b": 20}, 32, 2)
    with torch.no_grad():
        assert not torch.equal(model(batch), model(batch))
        model.eval()
        assert torch.equal(model(batch), model(batch))


@pytest.mark.parametrize("options", INTERACTIONS)
def test_learns_which_pairs_go_together(options):
    """The label depends on the pair of ids and on a dense column, on neither id alone."""
    torch.manual_seed(0)
    embeddings = plain_embeddings({"a": 8, "b": 8}, rows=10)
    model = build_model(ModelConfig(**options), embeddings, dense_features=1, tasks=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    batch = categorical_batch({"a": 10, "b": 10}, 512, 1)
    same = (batch["a"].values % 2 == batch["b"].values % 2) & (batch.dense[:, 0] > -0.5)
    labels = same.float().unsqueeze(1)
    losses = []
    for _ in range(150):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(batch), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 0.6 and losses[-1] < 0.1, (losses[0], losses[-1])


def test_state_dict_holds_the_tables():
    torch.manual_seed(0)
    model = build_model(ModelConfig(), plain_embeddings({"a": 4, "b": 4}), dense_features=2, tasks=1)
    batch = categorical_batch({"a": 20, "b": 20}, 8, 2)
    model(batch).sum().backward()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(1)
    other = build_model(ModelConfig(), plain_embeddings({"a": 4, "b": 4}), dense_features=2, tasks=1)
    other.load_state_dict(state)
    assert other.embeddings.step == 1
    with torch.no_grad():
        assert torch.equal(other.eval()(batch), model.eval()(batch))
