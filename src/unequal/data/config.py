"""What the reader is told: which files, which columns, how the rows are split, and which data to generate."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..errors import RecipeError

SPLITS = ("time", "column", "fraction")
TRANSFORMS = ("none", "log1p", "standardize")
BAD_ROWS = ("error", "drop")
PARTS = ("train", "validation", "test")


def _one_of(name: str, value: str, valid: Iterable[str]) -> None:
    if value not in valid:
        raise RecipeError(name, "one of " + ", ".join(valid), value)


def _between(name: str, value: float, low: float, high: float, *, open_end: bool = False) -> None:
    if not low <= value <= high or (open_end and value == high):
        raise RecipeError(name, f"a number from {low:g} to {'below ' if open_end else ''}{high:g}", value)


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitConfig:
    """How rows are divided into a training, a validation and a test part."""

    by: str = "fraction"
    """'time': the last rows by a column are the test part; 'column': a column names the part; 'fraction': at random."""
    column: str | None = None
    test: float = 0.2
    """Fraction of all rows (by time and by fraction)."""
    validation: float = 0.1
    """Fraction of all rows; by column: of the training rows, where `validation_values` names none."""
    train_values: tuple[str, ...] = ()
    """By column: values of training rows, compared as text. Empty: every value that is not named for another part."""
    validation_values: tuple[str, ...] = ()
    test_values: tuple[str, ...] = ()
    seed: int = 0
    """Of the random choice: by fraction, and of validation rows by column."""

    def __post_init__(self) -> None:
        _one_of("data.split.by", self.by, SPLITS)
        _between("data.split.test", self.test, 0, 1, open_end=True)
        _between("data.split.validation", self.validation, 0, 1, open_end=True)
        if self.by != "column" and self.test + self.validation >= 1:
            got = f"{self.test} + {self.validation}"
            raise RecipeError("data.split", "test and validation that leave rows to train on", got)
        if self.by != "fraction" and not self.column:
            raise RecipeError("data.split.column", f"a column name for a split by {self.by}", self.column)
        named = self.train_values + self.validation_values + self.test_values
        if self.by == "column" and not self.test_values and not self.validation_values and not self.train_values:
            raise RecipeError("data.split.test_values", "at least one value of the column that means 'test'", [])
        if self.by != "column" and named:
            raise RecipeError("data.split.by", "'column' where values are named", self.by)
        if len(set(named)) != len(named):
            twice = sorted({value for value in named if named.count(value) > 1})
            raise RecipeError("data.split", "every value in one part only", twice)


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateConfig:
    """Generated data with a known truth: sizes, skew, drift and noise."""

    rows: int = 200_000
    tables: int = 26
    """Number of categorical columns."""
    ids: int = 100_000
    """Distinct ids in all categorical columns together, spread as unevenly as in Criteo's."""
    dense: int = 13
    """Number of dense columns."""
    skew: float = 1.05
    """Zipf exponent of the ids' popularity; 0 is uniform."""
    sequence_length: int = 0
    """Longest history of the target item per row; 0 leaves the history out."""
    drift: float = 0.0
    """From 0 (nothing changes) to 1: how far popularity and effects have moved at the end."""
    positive_rate: float = 0.25
    noise: float = 0.05
    """Share of the rows whose label is drawn without regard to their columns."""
    signal: float = 1.9
    """Standard deviation of the logit over the rows: how much the columns tell about the label."""
    seed: int = 0
    rows_per_file: int = 1_000_000

    def __post_init__(self) -> None:
        for name, low in (("rows", 1), ("tables", 1), ("ids", 1), ("dense", 0), ("sequence_length", 0), ("seed", 0)):
            if getattr(self, name) < low:
                raise RecipeError(f"data.generate.{name}", f"{low} or more", getattr(self, name))
        if self.rows_per_file < 1:
            raise RecipeError("data.generate.rows_per_file", "1 or more", self.rows_per_file)
        if self.ids < 2 * self.tables:
            raise RecipeError("data.generate.ids", f"at least 2 for each of the {self.tables} tables", self.ids)
        _between("data.generate.skew", self.skew, 0, 5)
        _between("data.generate.drift", self.drift, 0, 1)
        _between("data.generate.noise", self.noise, 0, 1)
        _between("data.generate.signal", self.signal, 0, 20)
        if not 0.001 <= self.positive_rate <= 0.999:
            raise RecipeError("data.generate.positive_rate", "a rate from 0.001 to 0.999", self.positive_rate)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Parquet files and the meaning of their columns."""

    files: tuple[str, ...] = ()
    """Paths or patterns (`part-*.parquet`), relative to the recipe's folder. The order matters only without shuffle."""
    labels: tuple[str, ...] = ()
    """One column per task, values in [0, 1]."""
    label_threshold: float | None = None
    """Where given, the label is 1 for values at or above it, else 0."""
    dense: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    """Integers or strings, one per row; strings are hashed to 63 bits."""
    sequences: tuple[str, ...] = ()
    """List columns of integers or strings."""
    id_weights: dict[str, str] = field(default_factory=dict)
    """List column of ids → list column with one weight per id."""
    sample_weight: str | None = None
    """How much a row counts in the loss and the metrics."""
    dense_transform: str = "none"
    """'log1p' is sign(x)·log(1 + |x|); 'standardize' uses mean and deviation of the training part."""
    dense_missing: float = 0.0
    """What a missing number reads as, after the transform: 0 is the mean under 'standardize'."""
    max_length: int | None = None
    """Longer lists keep their last ids."""
    bad_rows: str = "error"
    """'error' stops at the first row that cannot be used; 'drop' leaves such rows out and counts them."""
    window: int = 2**23
    """Values held in memory at once: rows are shuffled within windows of this size."""
    split: SplitConfig = field(default_factory=SplitConfig)
    generate: GenerateConfig | None = None
    """Made on first use, into a cache folder, where no files are given."""

    def __post_init__(self) -> None:
        if not self.labels:
            raise RecipeError("data.labels", "at least one column", list(self.labels))
        if not self.categorical and not self.sequences and not self.dense:
            raise RecipeError("data", "a categorical, sequence or dense column to learn from", "none")
        _one_of("data.dense_transform", self.dense_transform, TRANSFORMS)
        _one_of("data.bad_rows", self.bad_rows, BAD_ROWS)
        if not math.isfinite(self.dense_missing):
            raise RecipeError("data.dense_missing", "a finite number", self.dense_missing)
        if self.label_threshold is not None and not math.isfinite(self.label_threshold):
            raise RecipeError("data.label_threshold", "a finite number", self.label_threshold)
        if self.max_length is not None and self.max_length < 1:
            raise RecipeError("data.max_length", "1 or more", self.max_length)
        if self.window < 1:
            raise RecipeError("data.window", "1 or more values", self.window)
        for name, columns in (("labels", self.labels), ("dense", self.dense), ("categorical", self.features)):
            twice = sorted({column for column in columns if columns.count(column) > 1})
            if twice:
                raise RecipeError(f"data.{name}", "every column once (sequences included)", twice)
        for column in self.id_weights:
            if column not in self.features:
                raise RecipeError("data.id_weights", "columns that are in sequences or categorical", column)
        learnt = set(self.features) | set(self.dense) | set(self.id_weights.values())
        for label in self.labels:
            if label in learnt:
                raise RecipeError("data.labels", "columns that are not also read as features", label)

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the id features, in the order of the batch."""
        return self.categorical + self.sequences
