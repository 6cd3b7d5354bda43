import pytest

from unequal.errors import RecipeError
from unequal.models import ModelConfig


def test_lists_from_a_recipe_become_tuples():
    config = ModelConfig(bottom=[8, 4], top=[])
    assert config.bottom == (8, 4) and config.top == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "dlmr"),
        ("interaction", "dots"),
        ("encoder", "lstm"),
        ("bottom", [0]),
        ("bottom", 64),
        ("top", [12.5]),
        ("top", [True]),
        ("interaction_dim", 0),
        ("keep_vectors", 1),
        ("cross_layers", 0),
        ("cross_rank", -1),
        ("layers", 0),
        ("heads", "2"),
        ("max_positions", 0),
        ("dropout", 1.0),
        ("dropout", float("nan")),
        ("dropout", "0.1"),
        ("history", ["history"]),
        ("history", {"history": 3}),
    ],
)
def test_a_wrong_value_names_its_field(field, value):
    with pytest.raises(RecipeError, match=rf"^model\.{field}: expected ") as caught:
        ModelConfig(**{field: value})
    assert "\n" not in str(caught.value)


def test_a_misspelt_kind_gets_a_hint():
    with pytest.raises(RecipeError, match="did you mean 'dlrm'"):
        ModelConfig(kind="dlmr")


def test_history_and_kind_must_fit():
    with pytest.raises(RecipeError, match=r'model\.history.*set model\.kind = "sequence"'):
        ModelConfig(kind="dlrm", history={"history": "item"})
    with pytest.raises(RecipeError, match=r'model\.history.*history = "item"'):
        ModelConfig(kind="sequence")
    assert ModelConfig(kind="sequence", history={"history": "item"}).encoder == "attention"
