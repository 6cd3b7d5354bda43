"""Mean and standard deviation of the dense columns over the training part, for `dense_transform = "standardize"`."""

import numpy as np

from .columns import to_numbers
from .config import PARTS
from .dataset import Dataset
from .split import Split
from .windows import Source, plan

Statistics = dict[str, tuple[float, float]]


def training_statistics(dataset: Dataset, split: Split) -> Statistics:
    """One pass over the dense columns. Missing and infinite values do not count; a constant column has deviation 1."""
    columns = list(dataset.config.dense)
    source = Source(dataset, columns)
    selecting = Source(dataset, [split.column] if split.column is not None else [])
    count, mean, squares = (np.zeros(len(columns)) for _ in range(3))
    chosen = np.flatnonzero(split.counts[PARTS.index("train")])
    for window in plan(dataset.row_groups, chosen, dataset.config.window, None):
        source.prepare(window.pieces)
        selecting.prepare(window.pieces if selecting.columns else [])
        in_training = []
        for piece in window.pieces:
            values = selecting.read(split.column, [piece]) if split.column is not None else None
            in_training.append(split.codes(dataset.row_groups[piece.group], piece.start, piece.stop, values)[0] == 0)
        mask = np.concatenate(in_training)
        for number, name in enumerate(columns):
            parts = [to_numbers(chunk) for chunk in source.read(name, window.pieces)]
            numbers = np.concatenate([values.astype(np.float64) for values, _ in parts])
            nulls = np.concatenate([np.zeros(len(v), bool) if n is None else n for v, n in parts])
            numbers = numbers[mask & ~nulls & np.isfinite(numbers)]
            if not len(numbers):
                continue
            # Chan's way of joining two parts' moments: sums of squares of large numbers would lose the deviation.
            here, total = numbers.mean(), count[number] + len(numbers)
            difference = here - mean[number]
            squares[number] += ((numbers - here) ** 2).sum() + difference**2 * count[number] * len(numbers) / total
            mean[number] += difference * len(numbers) / total
            count[number] = total
    deviation = np.sqrt(squares / np.maximum(count, 1))
    deviation[deviation == 0] = 1.0
    return {name: (float(mean[k]), float(deviation[k])) for k, name in enumerate(columns)}
