"""Reader: samples per second on one core, from Parquet to shuffled batches. Run: python -m benchmarks.reader"""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from unequal.data.config import DataConfig
from unequal.data.dataset import Dataset
from unequal.data.reader import Reader

ROWS = 1_000_000
BATCH = 4096
DENSE = tuple(f"I{number}" for number in range(1, 14))
CATEGORICAL = tuple(f"C{number}" for number in range(1, 27))


def write(path: Path, kind: str) -> None:
    """13 dense columns, 26 categorical ones of 10 to 1,000,000 values by Zipf's law, by the default writer."""
    random = np.random.default_rng(0)
    columns: dict[str, Any] = {"label": (random.random(ROWS) < 0.25).astype(np.int8)}
    columns |= {name: random.lognormal(size=ROWS).astype(np.float32) for name in DENSE}
    for name, size in zip(CATEGORICAL, np.geomspace(10, 1_000_000, len(CATEGORICAL)).astype(np.int64)):
        codes = random.zipf(1.2, ROWS) % size
        if kind == "integers":
            columns[name] = codes * 2654435761 % 2**32
        else:
            words = pa.array([f"{number * 2654435761 % 2**32:08x}" for number in range(size)])
            columns[name] = words.take(pa.array(codes))
    pq.write_table(pa.table(columns), path)


def measure(path: Path, epochs: int = 4) -> dict[str, int]:
    """The best of some epochs, by the clock and by the processor time used, which other work on the machine spares."""
    config = DataConfig(files=(path.name,), labels=("label",), dense=DENSE, categorical=CATEGORICAL)
    reader = Reader(Dataset(config, path.parent), part="all", batch_size=BATCH, shuffle=True)
    wall, processor = float("inf"), float("inf")
    for _ in range(epochs):
        start, start_processor = time.perf_counter(), time.process_time()
        samples = sum(batch.size for batch in reader)
        wall = min(wall, time.perf_counter() - start)
        processor = min(processor, time.process_time() - start_processor)
        if samples != ROWS:
            raise RuntimeError(f"the reader gave {samples} of {ROWS} rows")
    return {"samples_per_second": round(ROWS / wall), "samples_per_processor_second": round(ROWS / processor)}


def run() -> dict[str, Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"rows": ROWS, "dense": len(DENSE), "categorical": len(CATEGORICAL), "batch_size": BATCH}
    result |= {"shuffle": True, "workers": 0, "compression": "snappy"}
    try:
        with tempfile.TemporaryDirectory() as folder:
            for kind in ("integers", "strings"):
                path = Path(folder) / f"{kind}.parquet"
                write(path, kind)
                result[kind] = {**measure(path), "file_bytes": path.stat().st_size}
                path.unlink()
    finally:
        torch.set_num_threads(threads)
    result["samples_per_second"] = result["integers"]["samples_per_second"]
    return result


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
