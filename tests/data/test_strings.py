"""The string hash: fixed values, and the C++ function against the numpy reference."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unequal.data.strings import MISSING_STRING, hash_string, hash_strings, hash_strings_reference


def packed(texts: list[str], kind: type) -> tuple[np.ndarray, np.ndarray]:
    parts = [text.encode() for text in texts]
    offsets = np.cumsum([0, *(len(part) for part in parts)]).astype(kind)
    return np.frombuffer(b"".join(parts), np.uint8), offsets


def test_values_that_files_and_checkpoints_rely_on() -> None:
    fixed = [8442584544778250395, 198367012849983736, 1469794369386453849, 5070652140786563677]
    assert [hash_string(text) for text in ("", "a", "68fd1e64", "Zürich")] == fixed
    assert fixed[0] == MISSING_STRING


@pytest.mark.parametrize("kind", [np.int32, np.int64])
@given(texts=st.lists(st.text(max_size=12)))
def test_native_reference_and_single_agree(kind: type, texts: list[str]) -> None:
    bytes_, offsets = packed(texts, kind)
    native = hash_strings(bytes_, offsets)
    assert native.tolist() == hash_strings_reference(bytes_, offsets).tolist() == [hash_string(text) for text in texts]
    assert (native >= 0).all()


def test_strings_of_one_length_take_the_fast_way() -> None:
    texts = [f"{number:08x}" for number in range(1003)]
    assert hash_strings(*packed(texts, np.int32)).tolist() == [hash_string(text) for text in texts]


def test_offsets_need_not_begin_at_zero() -> None:
    bytes_, offsets = packed(["one", "two", "three", "", "five", "six"], np.int64)
    assert hash_strings(bytes_, offsets[2:]).tolist() == [hash_string(text) for text in ("three", "", "five", "six")]
