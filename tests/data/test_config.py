"""Wrong values in [data] are answered with the field, what was expected and what came."""

from typing import Any

import pytest

from unequal.data.config import DataConfig
from unequal.errors import RecipeError

GOOD: dict[str, Any] = {"files": ("a.parquet",), "labels": ("click",), "categorical": ("user",), "sequences": ("seen",)}


def test_features_in_order() -> None:
    assert DataConfig(**GOOD).features == ("user", "seen")


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("labels", (), "data.labels: expected at least one column, got []"),
        ("labels", ("user",), "data.labels: expected columns that are not also read as features, got 'user'"),
        ("categorical", ("user", "user"), "data.categorical: expected every column once (sequences included), got"),
        ("sequences", ("user",), "data.categorical: expected every column once (sequences included), got ['user']"),
        ("dense_transform", "log", "data.dense_transform: expected one of none, log1p, standardize, got 'log'"),
        ("dense_missing", float("nan"), "data.dense_missing: expected a finite number, got nan"),
        ("label_threshold", float("inf"), "data.label_threshold: expected a finite number, got inf"),
        ("max_length", 0, "data.max_length: expected 1 or more, got 0"),
        ("window", 0, "data.window: expected 1 or more values, got 0"),
        ("bad_rows", "skip", "data.bad_rows: expected one of error, drop, got 'skip'"),
        (
            "id_weights",
            {"item": "w"},
            "data.id_weights: expected columns that are in sequences or categorical, got 'item'",
        ),
    ],
)
def test_wrong_fields(field: str, value: Any, problem: str) -> None:
    with pytest.raises(RecipeError) as error:
        DataConfig(**{**GOOD, field: value})
    assert str(error.value).startswith(problem)


def test_nothing_to_learn_from() -> None:
    with pytest.raises(RecipeError, match="data: expected a categorical, sequence or dense column to learn from"):
        DataConfig(labels=("click",))
