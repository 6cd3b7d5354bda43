"""Which rows belong to which part. One column is read once to find the boundaries; nothing is kept per row."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ..errors import DataError, nearest
from .columns import Ints, Mask, join, nulls_of, to_numbers
from .config import PARTS, SplitConfig
from .dataset import Dataset, RowGroup, check_present, is_list, is_text, reading
from .strings import mix64, mix64_array

NOWHERE = len(PARTS)
_CACHED_ROWS = 2**24
_BINS = 2**16
_VALUES_SEEN = 1000
"""A split column with this many values is not checked for values that never occur."""

Codes = NDArray[np.int8]


def uniform(seed: int, first: int, count: int) -> NDArray[np.float64]:
    """A number in [0, 1) for each of the rows `first`, `first + 1`, …, from seed and row number alone."""
    rows = np.arange(first, first + count, dtype=np.uint64)
    rows *= np.uint64(0x9E3779B97F4A7C15)
    rows += np.uint64(mix64(seed + 1 & 0xFFFFFFFFFFFFFFFF))
    return (mix64_array(rows) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def ordered_keys(array: Any) -> tuple[Ints, Mask | None]:
    """Times as integers that sort in the same way, and which of them are missing."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if is_text(array.type):
        array = _parse_times(array)
    if pa.types.is_temporal(array.type):
        missing = nulls_of(array)
        array = array.view(pa.int32() if array.type.bit_width == 32 else pa.int64())
        if missing is not None:
            array = pc.fill_null(array, pa.scalar(0, array.type))
        return array.to_numpy(zero_copy_only=False).astype(np.int64), missing
    numbers, missing = to_numbers(array)
    if numbers.dtype.kind != "f":
        return numbers.astype(np.int64), missing
    numbers = numbers.astype(np.float64) + 0.0  # −0 and 0 are the same time
    not_a_number = np.isnan(numbers)
    if not_a_number.any():
        missing = not_a_number if missing is None else missing | not_a_number
    bits = numbers.view(np.int64)
    return bits ^ ((bits >> 63) & np.int64(0x7FFFFFFFFFFFFFFF)), missing


def _parse_times(array: Any) -> Any:
    """Text as microseconds: ISO 8601 (2024-05-01 or 2024-05-01 12:30:00), or else whole numbers."""
    text = array.cast(pa.large_string())
    if pc.all(pc.match_substring_regex(text, r"^-?\d+$")).as_py():
        return text.cast(pa.int64())
    return text.cast(pa.timestamp("us"))


class Split:
    """The parts of a data set. `counts[p, g]`: rows of part p in row group g."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset, self.config = dataset, dataset.config.split
        self.counts = np.zeros((len(PARTS) + 1, len(dataset.row_groups)), np.int64)
        self._absent = np.zeros(len(dataset.row_groups), np.int64)
        self._bounds: tuple[int, int] = (0, 0)
        self._handle: tuple[int, Any] = (-1, None)
        seen: set[str] = set()
        self._values_seen: set[str] | None = seen
        if self.config.by == "time":
            self._find_times()
        else:
            for number, group in enumerate(dataset.row_groups):
                codes, _ = self.codes(group, 0, group.rows, self._read(group))
                self.counts[:, number] = np.bincount(codes, minlength=NOWHERE + 1)
        if self.config.by == "column":
            self._check_values(seen)
        self._values_seen = None

    def rows(self, part: str) -> int:
        if part == "all":
            return self.dataset.rows
        rows = int(self.counts[PARTS.index(part)].sum())
        if not rows and self._expected(part):
            problem = f"the split leaves no rows for the part '{part}' of {self.dataset.rows} rows"
            raise DataError(problem, file=self.dataset.files[0], column=self.config.column, remedy="change data.split")
        return rows

    def _expected(self, part: str) -> bool:
        config: SplitConfig = self.config
        if part == "train":
            return True
        if config.by == "column" and part == "test":
            return bool(config.test_values)
        return bool((config.test if part == "test" else config.validation) or getattr(config, f"{part}_values"))

    @property
    def column(self) -> str | None:
        return None if self.config.by == "fraction" else self.config.column

    def whole(self, group: int, part: str) -> bool:
        """Whether every row of the row group is known to belong to the part and to have a time."""
        rows = self.dataset.row_groups[group].rows
        return part == "all" or bool(self.counts[PARTS.index(part), group] == rows and not self._absent[group])

    def _read(self, group: RowGroup) -> list[Any] | None:
        """The split column of a row group, or None where none is needed."""
        if self.column is None:
            return None
        path = self.dataset.files[group.file]
        with reading(path, self.column):
            if self._handle[0] != group.file:
                self._handle = (group.file, self.dataset.open(group.file))
                check_present(self.column, self._handle[1].schema_arrow.names, path)
            table = self._handle[1].read_row_group(group.index, columns=[self.column], use_threads=False)
        return list(table.column(self.column).chunks)

    def codes(self, group: RowGroup, start: int, stop: int, column: list[Any] | None) -> tuple[Codes, Mask]:
        """The part's number of each of the rows [start, stop) of the row group, and which have no time to split by.

        `column`: the split column's arrays of these rows.
        """
        config = self.config
        absent = np.zeros(stop - start, bool)
        if config.by == "time":
            assert column is not None
            keys, missing = self._keys(column, group, start)
            codes = (keys >= self._bounds[0]).astype(np.int8) + (keys >= self._bounds[1]).astype(np.int8)
            if missing is not None:
                codes[missing] = 0  # training meets them, and drops them
                absent = missing
            return codes, absent
        draw = uniform(config.seed, group.first_of_all + start, stop - start)
        if config.by == "fraction":
            codes = np.zeros(stop - start, np.int8)
            codes[draw < config.test + config.validation] = 1
            codes[draw < config.test] = 2
            return codes, absent
        assert column is not None
        codes = join([self._named(chunk) for chunk in column])
        if config.validation and not config.validation_values:
            codes[(codes == 0) & (draw < config.validation)] = 1
        return codes, absent

    def _named(self, chunk: Any) -> Codes:
        if is_list(chunk.type):
            raise self._wrong_type(chunk.type)
        if not pa.types.is_dictionary(chunk.type):
            chunk = chunk.cast(pa.string()).dictionary_encode()
        names = chunk.dictionary.cast(pa.string()).to_pylist()
        if self._values_seen is not None and len(self._values_seen) < _VALUES_SEEN:
            self._values_seen.update(name for name in names if name is not None)
        config = self.config
        parts = dict.fromkeys(config.train_values, 0)
        parts |= dict.fromkeys(config.validation_values, 1) | dict.fromkeys(config.test_values, 2)
        other = NOWHERE if config.train_values else 0
        lookup = np.array([*(NOWHERE if n is None else parts.get(n, other) for n in names), NOWHERE], np.int8)
        codes = pc.fill_null(chunk.indices.cast(pa.int64()), len(names)).to_numpy(zero_copy_only=False)
        return np.asarray(lookup[codes])

    def _wrong_type(self, kind: Any) -> DataError:
        remedy = "choose another data.split.column"
        expected = "numbers, times or ISO 8601 text" if self.config.by == "time" else "plain values"
        problem = f"expected {expected} to split by, got {kind}"
        return DataError(problem, file=self.dataset.files[0], column=self.config.column, remedy=remedy)

    def _check_values(self, seen: set[str]) -> None:
        config = self.config
        for value in config.train_values + config.validation_values + config.test_values:
            if value not in seen and len(seen) < _VALUES_SEEN:
                problem = f"no row has the value '{value}' that data.split names"
                remedy = nearest(value, sorted(seen))
                raise DataError(problem, file=self.dataset.files[0], column=config.column, remedy=remedy)

    def _keys(self, column: list[Any], group: RowGroup, start: int) -> tuple[Ints, Mask | None]:
        file = self.dataset.files[group.file]
        kind = column[0].type.value_type if pa.types.is_dictionary(column[0].type) else column[0].type
        if is_list(kind) or not (is_text(kind) or pa.types.is_temporal(kind) or pa.types.is_primitive(kind)):
            raise self._wrong_type(kind)
        try:
            parts = [ordered_keys(chunk) for chunk in column]
        except pa.ArrowInvalid as error:
            said = str(error).splitlines()[0]
            remedy = "write times as numbers, timestamps or ISO 8601 text"
            raise DataError(f"not a time: {said}", file=file, column=self.config.column, remedy=remedy) from error
        keys = join([keys for keys, _ in parts])
        if all(missing is None for _, missing in parts):
            return keys, None
        missing = join([np.zeros(len(k), bool) if m is None else m for k, m in parts])
        if self.dataset.config.bad_rows == "error":
            row = group.first + start + int(np.argmax(missing))
            remedy = "fill it, or set data.bad_rows = 'drop'"
            raise DataError("no time to split by, got null (rows count from 0)", file=file, column=self.config.column,
                            row=row, remedy=remedy)  # fmt: skip
        return keys, missing

    def _find_times(self) -> None:
        """Boundaries that come nearest to the fractions with equal times on one side."""
        groups = self.dataset.row_groups
        cached: list[Ints] | None = [] if self.dataset.rows <= _CACHED_ROWS else None
        low, high = np.zeros(len(groups), np.int64), np.full(len(groups), -1, np.int64)
        absent = self._absent

        def load(number: int) -> Ints:
            group = groups[number]
            column = self._read(group)
            assert column is not None
            keys, missing = self._keys(column, group, 0)
            return keys if missing is None else keys[~missing]

        for number, group in enumerate(groups):
            keys = load(number)
            absent[number] = group.rows - len(keys)
            if len(keys):
                low[number], high[number] = keys.min(), keys.max()
            else:
                low[number], high[number] = 1, 0
            if cached is not None:
                cached.append(keys)

        def keys_between(first: int, last: int) -> Iterator[Ints]:
            for number in range(len(groups)):
                if low[number] <= high[number] and high[number] >= first and low[number] <= last:
                    yield cached[number] if cached is not None else load(number)

        rows = self.dataset.rows - int(absent.sum())
        if not rows:
            raise DataError("no row has a time", file=self.dataset.files[0], column=self.config.column)
        present = low <= high
        span = int(low[present].min()), int(high[present].max())
        after = span[1] + 1
        bounds = []
        for fraction in (self.config.test + self.config.validation, self.config.test):
            share = round(fraction * rows)
            bounds.append(_boundary(keys_between, span, rows, share) if share else after)
        self._bounds = (min(bounds), bounds[1])
        if self._bounds[0] <= span[0]:
            problem = f"equal times cannot be split: {rows} rows, most of them at one time"
            remedy = "choose a finer column or data.split.by = 'fraction'"
            raise DataError(problem, file=self.dataset.files[0], column=self.config.column, remedy=remedy)
        for number, group in enumerate(groups):
            if low[number] > high[number]:
                codes = np.zeros(0, np.int64)
            elif high[number] < self._bounds[0] or low[number] >= self._bounds[1]:
                codes = np.full(group.rows - absent[number], 0 if high[number] < self._bounds[0] else 2)
            else:
                keys = cached[number] if cached is not None else load(number)
                codes = (keys >= self._bounds[0]).astype(np.int64) + (keys >= self._bounds[1])
            self.counts[:, number] = np.bincount(codes, minlength=NOWHERE + 1)
            self.counts[0, number] += absent[number]


def _boundary(keys_between: Callable[[int, int], Iterator[Ints]], span: tuple[int, int], rows: int, share: int) -> int:
    """The smallest key of the last `share` of all rows; of rows with equal keys all or none, whichever comes nearer."""
    key, below, equal = _key_at(keys_between, span, rows - share)
    with_ties, without = rows - below, rows - below - equal
    return key + 1 if (without and abs(without - share) < abs(with_ties - share)) or (not below and without) else key


def _key_at(
    keys_between: Callable[[int, int], Iterator[Ints]], span: tuple[int, int], rank: int
) -> tuple[int, int, int]:
    """The key at `rank` of the sorted keys, how many are smaller and how many equal: counted in ever finer bins."""
    (first, last), below = span, 0
    while True:
        width = max(1, -(-(last - first + 1) // _BINS))
        counts = np.zeros(_BINS, np.int64)
        for keys in keys_between(first, last):
            inside = keys[(keys >= first) & (keys <= last)]
            distance = inside.view(np.uint64) - np.uint64(first & 0xFFFFFFFFFFFFFFFF)
            counts += np.bincount((distance // np.uint64(width)).astype(np.int64), minlength=_BINS)
        ends = below + np.cumsum(counts)
        chosen = int(np.searchsorted(ends, rank, side="right"))
        below = int(ends[chosen] - counts[chosen])
        first, last = first + chosen * width, min(last, first + (chosen + 1) * width - 1)
        if width == 1:
            return first, below, int(counts[chosen])
