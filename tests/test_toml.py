"""Dataclasses from TOML and back: what is written is read again, whatever the strings and numbers."""

import tomllib
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unequal.errors import RecipeError
from unequal.toml import Section, parse, to_mapping, write


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    size: int = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    name: str
    kind: Literal["dot", "cross"] = "dot"
    rate: float = 0.5
    deep: bool = False
    layers: tuple[int, ...] = ()
    words: tuple[str, ...] = ()
    pairs: dict[str, str] = field(default_factory=dict)
    limit: int | None = None
    inner: Inner = field(default_factory=Inner)


text = st.text(st.characters(exclude_categories=["Cs"]))
outers = st.builds(
    Outer,
    name=text,
    kind=st.sampled_from(["dot", "cross"]),
    rate=st.floats(allow_nan=False, allow_infinity=False),
    deep=st.booleans(),
    layers=st.lists(st.integers(-(2**63), 2**63 - 1)).map(tuple),
    words=st.lists(text).map(tuple),
    pairs=st.dictionaries(text, text),
    limit=st.none() | st.integers(0, 9),
    inner=st.builds(Inner, size=st.integers(0, 9)),
)


@given(outers)
def test_what_is_written_is_read_again(outer: Outer) -> None:
    assert parse(Outer, tomllib.loads(write(to_mapping(outer))), "outer") == outer


@given(st.dictionaries(text, st.dictionaries(text, st.integers(0, 9)).map(Section)))
def test_sections_of_any_name_survive(sections: dict[str, Section]) -> None:
    assert tomllib.loads(write(sections)) == sections


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "outer.name: expected a string, got nothing; add it to [outer]"),
        ({"name": 3}, "outer.name: expected a string, got 3"),
        ({"name": "a", "kynd": "dot"}, "outer.kynd: expected a field of [outer], got 'kynd'; did you mean 'kind'?"),
        ({"name": "a", "kind": "dott"}, "outer.kind: expected one of dot, cross, got 'dott'; did you mean 'dot'?"),
        ({"name": "a", "rate": "fast"}, "outer.rate: expected a number, got 'fast'"),
        ({"name": "a", "rate": True}, "outer.rate: expected a number, got True"),
        ({"name": "a", "rate": float("nan")}, "outer.rate: expected a finite number, got nan"),
        ({"name": "a", "deep": 1}, "outer.deep: expected true or false, got 1"),
        ({"name": "a", "words": "b"}, "outer.words: expected a list of strings, got 'b'; write [\"b\"]"),
        ({"name": "a", "layers": [1, "2"]}, "outer.layers[1]: expected an integer, got '2'"),
        ({"name": "a", "layers": [1, True]}, "outer.layers[1]: expected an integer, got True"),
        ({"name": "a", "pairs": {"x": 1}}, "outer.pairs.x: expected a string, got 1"),
        ({"name": "a", "limit": 1.5}, "outer.limit: expected an integer, got 1.5"),
        ({"name": "a", "inner": 3}, "outer.inner: expected a table [outer.inner], got 3"),
        (
            {"name": "a", "inner": {"sise": 1}},
            "outer.inner.sise: expected a field of [outer.inner], got 'sise'; did you mean 'size'?",
        ),
    ],
)
def test_a_mistake_is_named_in_one_line(given: dict[str, object], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse(Outer, given, "outer")
    assert str(caught.value) == message


def test_an_integer_is_a_number_and_none_unsets() -> None:
    outer = parse(Outer, {"name": "a", "rate": 2, "limit": "none"}, "outer")
    assert outer.rate == 2.0 and isinstance(outer.rate, float) and outer.limit is None
