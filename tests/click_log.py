"""A small click log, learnable in seconds, for the tests of trainer and command line."""

from pathlib import Path

import numpy as np

RECIPE = """
[data]
files = ["clicks-*.parquet"]
labels = ["click"]
dense = ["age"]
categorical = ["user", "item"]
sequences = ["history"]
[data.split]
by = "time"
column = "time"
test = 0.2
validation = 0.1
[tables]
dim = 8
[tables.items]
columns = ["item", "history"]
[model]
kind = "sequence"
bottom = [8]
top = [16]
history = { history = "item" }
dropout = 0.1
[run]
epochs = 2
batch_size = 64
checkpoint_every = 10
log_every = 5
workers = 0
threads = 1
"""


def write_click_log(folder: Path) -> Path:
    """Parquet files and the recipe beside them, which is returned: 2,000 rows, 1,400 of them train in 22 batches."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows, random = 2000, np.random.default_rng(5)
    user, item = random.integers(0, 50, rows), random.integers(0, 30, rows)
    taste, appeal = random.normal(size=50), random.normal(size=30)
    age = random.normal(size=rows)
    click = random.random(rows) < 1 / (1 + np.exp(-1.5 * (taste[user] + appeal[item]) - 0.5 * age))
    table = pa.table(
        {
            "click": click.astype(np.int8),
            "age": age.astype(np.float32),
            "user": pa.array([f"user-{number}" for number in user]),
            "item": item,
            "history": [random.integers(0, 30, random.integers(0, 5)).tolist() for _ in range(rows)],
            "time": np.arange(rows),
        }
    )
    folder.mkdir()
    pq.write_table(table.slice(0, 1200), folder / "clicks-0.parquet", row_group_size=300)
    pq.write_table(table.slice(1200), folder / "clicks-1.parquet", row_group_size=300)
    (folder / "clicks.toml").write_text(RECIPE)
    return folder / "clicks.toml"
