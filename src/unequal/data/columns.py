"""One column of a window: Arrow arrays in, numpy arrays in the order of the window out, and a note of every bad row."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from .config import DataConfig
from .dataset import Column, is_list, is_text
from .strings import MISSING_STRING, hash_strings

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Mask = NDArray[np.bool_]


@dataclass(slots=True)
class Bad:
    """Rows of a window that cannot be used for one cause."""

    column: str
    cause: str
    positions: Ints
    """Row positions in the window as read, ascending."""
    remedy: str
    describe: Callable[[int], str]
    """What is wrong with the n-th of them."""


@dataclass(slots=True)
class Values:
    """A column's values in the order of the window; with `offsets` a list per row, else one value per row."""

    values: NDArray[Any]
    offsets: Ints | None = None
    bad: list[Bad] = field(default_factory=list)

    def rows(self, first: int, last: int) -> "Values":
        if self.offsets is None:
            return Values(self.values[first:last])
        offsets = self.offsets[first : last + 1]
        return Values(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])

    def take(self, index: Ints) -> "Values":
        if self.offsets is None:
            return Values(self.values.take(index, mode="clip"), bad=self.bad)
        values, offsets = take_lists(self.values, self.offsets, index)
        return Values(values, offsets, self.bad)

    def copy(self) -> "Values":
        return Values(self.values.copy(), None if self.offsets is None else self.offsets.copy())

    @property
    def lengths(self) -> Ints:
        return np.ones(len(self.values), np.int64) if self.offsets is None else np.diff(self.offsets)


def offsets_of(lengths: NDArray[Any]) -> Ints:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def spread(starts: Ints, offsets: Ints) -> Ints:
    """Index of every value of lists that begin at `starts` in the source and lie end to end by `offsets` afterwards."""
    index = np.arange(offsets[-1], dtype=np.int64)
    index += np.repeat(starts - offsets[:-1], np.diff(offsets))
    return index


def take_lists(values: NDArray[Any], offsets: Ints, index: Ints) -> tuple[NDArray[Any], Ints]:
    taken = offsets_of(np.diff(offsets).take(index))
    return values.take(spread(offsets[:-1].take(index), taken), mode="clip"), taken


def nulls_of(array: Any) -> Mask | None:
    return array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None


def to_numbers(array: Any) -> tuple[NDArray[Any], Mask | None]:
    """Numbers of any type, and which are null."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.int8())
    elif pa.types.is_decimal(array.type):
        array = array.cast(pa.float64())
    elif pa.types.is_float16(array.type):
        array = array.cast(pa.float32())
    nulls = nulls_of(array)
    if nulls is not None:
        array = pc.fill_null(array, pa.scalar(0, array.type))
    return array.to_numpy(zero_copy_only=False), nulls


def _text_to_ids(array: Any) -> Ints:
    if pa.types.is_string_view(array.type) or pa.types.is_binary_view(array.type):
        array = array.cast(pa.large_binary())
    wide = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    kind = np.dtype(np.int64 if wide else np.int32)
    _, offsets_buffer, bytes_buffer = array.buffers()
    if not len(array):
        return np.empty(0, np.int64)
    offsets = np.frombuffer(offsets_buffer, kind, len(array) + 1, array.offset * kind.itemsize)
    bytes_ = np.frombuffer(bytes_buffer, np.uint8) if bytes_buffer is not None else np.empty(0, np.uint8)
    ids = hash_strings(bytes_, offsets)
    nulls = nulls_of(array)
    if nulls is not None:
        ids[nulls] = MISSING_STRING
    return ids


def to_ids(array: Any) -> tuple[Ints, Mask | None, Mask | None]:
    """Ids of any type that can be one, which of them are missing, and which are no whole numbers."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        return _dictionary_to_ids(array)
    if is_text(kind):
        return _text_to_ids(array), None, None
    if pa.types.is_floating(kind):
        numbers, missing = to_numbers(array)
        numbers = numbers.astype(np.float64)
        not_a_number = np.isnan(numbers)
        if missing is not None or not_a_number.any():
            missing = not_a_number if missing is None else missing | not_a_number
            numbers[missing] = 0
        broken = (numbers != np.floor(numbers)) | (np.abs(numbers) > 2**53)
        numbers[broken] = 0
        return numbers.astype(np.int64), missing, broken if broken.any() else None
    if pa.types.is_boolean(kind):
        array = array.cast(pa.int8())
    elif pa.types.is_temporal(kind):
        array = array.view(pa.int32() if kind.bit_width == 32 else pa.int64())
    missing = nulls_of(array)
    if missing is not None:
        array = pc.fill_null(array, pa.scalar(0, array.type))
    values = array.to_numpy(zero_copy_only=False)
    if values.dtype == np.uint64:
        values = values.view(np.int64)
    return values.astype(np.int64, copy=False), missing, None


def _dictionary_to_ids(array: Any) -> tuple[Ints, Mask | None, Mask | None]:
    ids, missing, broken = to_ids(array.dictionary)
    codes = array.indices
    nulls = nulls_of(codes)
    if nulls is not None:
        codes = pc.fill_null(codes, pa.scalar(0, codes.type))
        if not len(ids):
            ids = np.zeros(1, np.int64)
    index = codes.to_numpy()
    values = ids.take(index, mode="clip")
    missing = None if missing is None else missing[index]
    broken = None if broken is None else broken[index]
    if nulls is not None:
        if is_text(array.type):
            values[nulls] = MISSING_STRING
        else:
            missing = nulls if missing is None else missing | nulls
            broken = None if broken is None else broken & ~nulls
    return values, missing, broken


def join(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _join_masks(masks: Sequence[Mask | None], sizes: Sequence[int]) -> Mask | None:
    if all(mask is None for mask in masks):
        return None
    return join([np.zeros(size, bool) if mask is None else mask for mask, size in zip(masks, sizes)])


def _numbers(chunks: Sequence[Any]) -> tuple[NDArray[Any], Mask | None]:
    parts = [to_numbers(chunk) for chunk in chunks]
    return join([values for values, _ in parts]), _join_masks([n for _, n in parts], [len(v) for v, _ in parts])


def _ids(chunks: Sequence[Any]) -> tuple[Ints, Mask | None, Mask | None]:
    parts = [to_ids(chunk) for chunk in chunks]
    sizes = [len(values) for values, _, _ in parts]
    missing = _join_masks([missing for _, missing, _ in parts], sizes)
    return join([values for values, _, _ in parts]), missing, _join_masks([broken for _, _, broken in parts], sizes)


def _lengths(chunk: Any) -> NDArray[Any]:
    return np.asarray(pc.fill_null(pc.list_value_length(chunk), 0).to_numpy(zero_copy_only=False))


def _to_float32(values: NDArray[Any]) -> Floats:
    with np.errstate(over="ignore"):  # what does not fit becomes infinite and is reported as such
        return values.astype(np.float32, copy=False)


@dataclass(slots=True)
class Conversion:
    """How the columns of a data set become arrays."""

    config: DataConfig
    statistics: dict[str, tuple[float, float]]
    """Mean and standard deviation per dense column, for 'standardize'."""

    def convert(
        self, column: Column, chunks: Sequence[Any], order: Ints | None, weights_of: Sequence[Any] = ()
    ) -> Values:
        """The rows `order` of the column, in that order (None: all, as they come). Weights see their ids' chunks."""
        if column.role == "ids":
            result = self._convert_ids(column, chunks)
        elif column.role == "id_weights":
            result = self._convert_weights(column, chunks, weights_of)
        else:
            result = self._convert_numbers(column, chunks)
        return result if order is None else result.take(order)

    def _convert_numbers(self, column: Column, chunks: Sequence[Any]) -> Values:
        raw, nulls = _numbers(chunks)
        bad: list[Bad] = []

        def check(mask: Mask, cause: str, remedy: str) -> None:
            positions = np.flatnonzero(mask)
            if len(positions):
                bad.append(Bad(column.name, cause, positions, remedy, lambda n: f"got {raw[positions[n]]}"))

        if column.role == "dense":
            values = self._transform(column.name, _to_float32(raw))
            check(~np.isfinite(_to_float32(raw)), "not a finite number", "mend the value or set data.bad_rows = 'drop'")
            if nulls is not None:
                values = np.where(nulls, np.float32(self.config.dense_missing), values)
            return Values(values, bad=bad)
        if nulls is not None:
            positions = np.flatnonzero(nulls)
            remedy = "fill the value or set data.bad_rows = 'drop'"
            bad.append(Bad(column.name, f"no {column.role.replace('_', ' ')}", positions, remedy, lambda n: "got null"))
        if column.role == "sample_weight":
            values = _to_float32(raw)
            remedy = "mend the value or set data.bad_rows = 'drop'"
            check(~(np.isfinite(values) & (values >= 0)), "not a finite weight of 0 or more", remedy)
        elif self.config.label_threshold is not None:
            values = (raw >= self.config.label_threshold).astype(np.float32)
            check(np.isnan(raw), "label is not a number", "mend the value or set data.bad_rows = 'drop'")
        else:
            values = _to_float32(raw)
            remedy = "set data.label_threshold, mend the value or set data.bad_rows = 'drop'"
            check(~((values >= 0) & (values <= 1)), "label outside [0, 1]", remedy)
        return Values(values, bad=bad)

    def _transform(self, name: str, values: Floats) -> Floats:
        if self.config.dense_transform == "log1p":
            return np.copysign(np.log1p(np.abs(values)), values)
        if self.config.dense_transform == "standardize":
            mean, deviation = self.statistics[name]
            return ((values - mean) / deviation).astype(np.float32)
        return values

    def _convert_ids(self, column: Column, chunks: Sequence[Any]) -> Values:
        listed = is_list(chunks[0].type)
        ids, missing, broken = _ids([chunk.flatten() for chunk in chunks] if listed else chunks)
        offsets = offsets_of(join([_lengths(chunk) for chunk in chunks])) if listed else None
        bad: list[Bad] = []
        remedy = "mend the value or set data.bad_rows = 'drop'"
        if broken is not None:
            bad.append(
                _bad_ids(column.name, "id is not a whole number", broken, offsets, remedy, lambda at: "got a fraction")
            )
        if column.limit is not None:
            outside = (ids < 0) | (ids >= column.limit)
            if missing is not None:
                outside &= ~missing
            if outside.any():
                cause = f"id outside [0, {column.limit})"
                remedy = "raise `rows` of its table, leave it out for unbounded ids, or set data.bad_rows = 'drop'"
                bad.append(_bad_ids(column.name, cause, outside, offsets, remedy, lambda at: f"got {ids[at]}"))
        values, offsets = self._cut(ids, missing, offsets)
        return Values(values, offsets, bad)

    def _cut(
        self, values: NDArray[Any], missing: Mask | None, offsets: Ints | None
    ) -> tuple[NDArray[Any], Ints | None]:
        """Leaves missing values out, then keeps the last `max_length` of every list."""
        if missing is not None:
            present = ~missing
            counts = offsets_of(present)
            values, offsets = values[present], counts if offsets is None else counts[offsets]
        longest = self.config.max_length
        if offsets is not None and longest is not None and len(offsets) > 1:
            lengths = np.diff(offsets)
            if lengths.max() > longest:
                kept = offsets_of(np.minimum(lengths, longest))
                values = values.take(spread(offsets[1:] - np.diff(kept), kept), mode="clip")
                offsets = kept
        return values, offsets

    def _convert_weights(self, column: Column, chunks: Sequence[Any], weights_of: Sequence[Any]) -> Values:
        listed = is_list(chunks[0].type)
        raw, nulls = _numbers([chunk.flatten() for chunk in chunks] if listed else chunks)
        weights = _to_float32(raw)
        offsets = offsets_of(join([_lengths(chunk) for chunk in chunks])) if listed else None
        ids_offsets = offsets_of(join([_lengths(chunk) for chunk in weights_of])) if listed else None
        broken = ~np.isfinite(weights)
        if nulls is not None:
            broken |= nulls
        bad: list[Bad] = []
        if broken.any():
            remedy = "mend the value or set data.bad_rows = 'drop'"
            cause = "weight is not a finite number"
            bad.append(_bad_ids(column.name, cause, broken, offsets, remedy, lambda at: f"got {raw[at]}"))
        missing = _ids([chunk.flatten() for chunk in weights_of] if listed else weights_of)[1]
        if offsets is not None and ids_offsets is not None:
            lengths, ids_lengths = np.diff(offsets), np.diff(ids_offsets)
            positions = np.flatnonzero(lengths != ids_lengths)
            if len(positions):
                remedy = f"give every id of '{column.owner}' one weight, or set data.bad_rows = 'drop'"

                def describe(n: int) -> str:
                    at = positions[n]
                    return f"got {lengths[at]} weights for {ids_lengths[at]} ids"

                bad.append(Bad(column.name, "not one weight per id", positions, remedy, describe))
                # Rows that will be reported or dropped still have to line up with their ids until then.
                fitting = np.repeat(lengths == ids_lengths, ids_lengths)
                padded = np.zeros(len(fitting), np.float32)
                padded[fitting] = weights[np.repeat(lengths == ids_lengths, lengths)]
                weights, offsets = padded, ids_offsets
        weights, offsets = self._cut(weights, missing, offsets)
        return Values(weights, offsets, bad)


def _bad_ids(
    column: str, cause: str, mask: Mask, offsets: Ints | None, remedy: str, describe: Callable[[int], str]
) -> Bad:
    """Bad values of a column as bad rows; of a list the first bad value speaks for the row."""
    at = np.flatnonzero(mask)
    if offsets is None:
        return Bad(column, cause, at, remedy, lambda n: describe(at[n]))
    rows, first = np.unique(np.searchsorted(offsets, at, side="right") - 1, return_index=True)
    return Bad(column, cause, rows, remedy, lambda n: describe(at[first[n]]))
