"""Generated clicks with a known truth, so that the best possible AUC is known.

The logit of a click is a sum of what the ids contribute one by one, of products of latent vectors of some pairs of
columns, of the dense columns, and of how well the target item fits the history. See docs/formats.md.
"""

import hashlib
import json
import math
import os
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from .config import GenerateConfig
from .strings import mix64, mix64_array
from .writing import Progress, TableWriter, fresh_folder, model_sections, recipe_text, write_text, writing

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

FORMAT = 1
"""Raised whenever the same configuration gives other data, so that cached data is made anew."""
_CHUNK = 2**16
_START, _SPAN = 1_704_067_200_000, 30 * 24 * 3600 * 1000
_LATENT = 4
_CLUSTERS = 16
_BINS = 2**20
_TEST = 0.2
# Distinct values of the 26 categorical columns of the Criteo Kaggle data, whose spread is imitated.
_CRITEO = (1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10,
           5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572)  # fmt: skip


def columns(config: GenerateConfig) -> dict[str, tuple[str, ...]]:
    """The names of the columns, by what they are in a recipe."""
    target = ("item",) if config.sequence_length else ()
    return {
        "labels": ("click",),
        "dense": tuple(f"I{number + 1}" for number in range(config.dense)),
        "categorical": (*(f"C{number + 1}" for number in range(config.tables)), *target),
        "sequences": ("history",) if config.sequence_length else (),
    }


def cardinalities(config: GenerateConfig) -> list[int]:
    """Distinct ids per categorical column (the last is the item's, where there is a history): `ids` in all."""
    count = config.tables + (1 if config.sequence_length else 0)
    spread = np.log(np.sort(_CRITEO)) if count != len(_CRITEO) else np.log(_CRITEO)
    sizes = np.interp(np.linspace(0, len(_CRITEO) - 1, count), np.arange(len(_CRITEO)), spread)
    low, high = 0.0, 4.0
    for _ in range(60):
        power = (low + high) / 2
        total = np.maximum(2, np.exp(sizes * power)).sum()
        low, high = (power, high) if total < config.ids else (low, power)
    result = np.maximum(2, np.exp(sizes * low)).astype(np.int64)
    result[np.argmax(result)] += config.ids - result.sum()
    if config.sequence_length:
        # The items are of a middling table, so that each is seen often enough for a model to learn its taste.
        result = np.sort(result)
        item = int(0.8 * (count - 1))
        result = np.append(np.delete(result, item), result[item])
    return [int(size) for size in result]


def _normal(seed: int, column: int, number: int, ids: Ints) -> Array:
    """A number per id, about normal with deviation 1, from (seed, column, number, id) alone."""
    start = mix64(mix64(seed + 1) + column * 1009 + number + 1)
    words = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    words += np.uint64(start)
    parts = mix64_array(words).view(np.uint16).reshape(-1, 4).sum(1, dtype=np.int64)
    return np.asarray((parts - 2 * 65535) * (math.sqrt(3) / 65536))


class _World:
    """The hidden truth: who is popular when, and what every id contributes."""

    def __init__(self, config: GenerateConfig) -> None:
        self.config, self.sizes = config, cardinalities(config)
        plain = config.tables
        # Pairs of columns that are not large: a model has to see both ids of a pair often enough.
        middling = np.argsort(self.sizes[:plain], kind="stable")[plain // 4 :][:8]
        half = len(middling) // 2
        self.pairs = [(int(one), int(other)) for one, other in zip(middling[:half], middling[half:])]
        self.scale = {"single": 0.5, "pairs": 0.25 if self.pairs else 0.0, "dense": 0.25 if config.dense else 0.0}
        self.scale["history"] = 0.4 if config.sequence_length else 0.0
        self.middle = dict.fromkeys(self.scale, 0.0)
        self.intercept = 0.0
        self._calibrate()

    def _calibrate(self) -> None:
        """Gives each part of the logit its share of the variance, and finds the intercept for the positive rate."""
        random = np.random.default_rng([self.config.seed, 2])
        parts = self.parts(*self.draw(random, random.random(40_000)))
        whole = sum(self.scale.values())
        for name, values in parts.items():
            share = self.config.signal**2 * self.scale[name] / whole
            self.middle[name] = float(values.mean())
            self.scale[name] = math.sqrt(share) / (float(values.std()) or 1.0)
        logits = self._sum(parts)
        low, high = -60.0, 60.0
        for _ in range(60):
            self.intercept = (low + high) / 2
            rate = float((1 / (1 + np.exp(-(logits + self.intercept)))).mean())
            low, high = (self.intercept, high) if rate < self.config.positive_rate else (low, self.intercept)

    def draw(self, random: np.random.Generator, time: Array) -> tuple[Array, Array, list[Ints], Ints, Ints]:
        """Rows at the given times in [0, 1]: times, dense values, ids per column, history and its lengths."""
        rows, config = len(time), self.config
        dense = np.expm1(np.abs(random.standard_normal((config.dense, rows)) + 1.0) * 1.5)
        ids = [self._popular(random.random(rows), time, size) for size in self.sizes[: config.tables]]
        lengths, history = np.zeros(rows, np.int64), np.zeros(0, np.int64)
        if config.sequence_length:
            size = self.sizes[-1]
            taste = random.integers(0, _CLUSTERS, rows)
            lengths = random.integers(0, config.sequence_length + 1, rows)
            several = np.repeat(np.arange(rows), lengths)
            history = self._popular(random.random(len(several)), time[several], size)
            history = self._towards(history, taste[several], random.random(len(several)) < 0.7, size)
            item = self._popular(random.random(rows), time, size)
            ids.append(self._towards(item, taste, random.random(rows) < 0.3, size))
        return time, dense, ids, history, lengths

    def _popular(self, uniform: Array, time: Array, size: int) -> Ints:
        """Ids by Zipf's law. With drift the ranks move on with time, so that other ids become popular."""
        skew = self.config.skew
        if abs(skew - 1) < 1e-9:
            rank = 0.5 * ((size + 0.5) / 0.5) ** uniform
        else:
            first, last = 0.5 ** (1 - skew), (size + 0.5) ** (1 - skew)
            rank = (first + uniform * (last - first)) ** (1 / (1 - skew))
        ranks = np.clip(np.rint(rank).astype(np.int64) - 1, 0, size - 1)
        ranks += (self.config.drift * 0.5 * size * time).astype(np.int64)
        step = max(1, int(size * 0.618)) | 1
        while math.gcd(step, size) != 1:
            step += 2
        return np.asarray(ranks % size * step % size)

    @staticmethod
    def _towards(ids: Ints, taste: Ints, moved: NDArray[np.bool_], size: int) -> Ints:
        """Some ids replaced by a neighbour of the taste's cluster; an id's cluster is its remainder."""
        near = ids - ids % _CLUSTERS + taste
        return np.where(moved & (near < size), near, ids)

    def _effect(self, column: int, number: int, ids: Ints, time: Array) -> Array:
        """What an id contributes; with drift it turns into another, independent value."""
        start = _normal(self.config.seed, column, number, ids)
        if not self.config.drift:
            return start
        angle = self.config.drift * math.pi / 2 * time
        return np.cos(angle) * start + np.sin(angle) * _normal(self.config.seed, column, number + 500, ids)

    def parts(self, time: Array, dense: Array, ids: list[Ints], history: Ints, lengths: Ints) -> dict[str, Array]:
        """The parts of the logit before scaling."""
        zero = np.zeros(len(time))
        single, pairs, numbers = zero.copy(), zero.copy(), zero.copy()
        for column, values in enumerate(ids):
            # Large tables weigh less: most of their ids are too rare for any model to learn.
            single += self._effect(column, 0, values, time) / (1 + math.log10(self.sizes[column]))
        for one, other in self.pairs:
            for k in range(_LATENT):
                pairs += self._effect(one, 1 + k, ids[one], time) * self._effect(other, 1 + k, ids[other], time)
        for column, values in enumerate(dense):
            weight = _normal(self.config.seed, 2000, column, np.arange(2))
            level = np.log1p(values) / 1.5 - 1.0
            numbers += weight[0] * level + 0.5 * weight[1] * np.tanh(2 * level)
        fit = zero.copy()
        if self.config.sequence_length:
            rows = np.repeat(np.arange(len(time)), lengths)
            for k in range(_LATENT):
                liked = np.bincount(rows, self._latent(k, history), minlength=len(time))
                fit += self._latent(k, ids[-1]) * liked / np.sqrt(np.maximum(lengths, 1))
        return {"single": single, "pairs": pairs, "dense": numbers, "history": fit}

    def _latent(self, number: int, items: Ints) -> Array:
        seed = self.config.seed
        centre = _normal(seed, 3000, number, np.arange(_CLUSTERS))
        return np.asarray(0.8 * centre[items % _CLUSTERS] + 0.6 * _normal(seed, 3001, number, items))

    def _sum(self, parts: dict[str, Array]) -> Array:
        total = np.zeros(len(parts["single"]))
        for name, values in parts.items():
            total += self.scale[name] * (values - self.middle[name])
        return total

    def probability(self, parts: dict[str, Array]) -> Array:
        clear = 1 / (1 + np.exp(-(self._sum(parts) + self.intercept)))
        return np.asarray((1 - self.config.noise) * clear + self.config.noise * self.config.positive_rate)


class _Ceiling:
    """What the true probabilities reach on some rows; probabilities are counted in fine bins, so memory is bounded."""

    def __init__(self) -> None:
        self.counts = np.zeros((2, _BINS), np.int64)
        self.loss = 0.0

    def add(self, truth: Array, labels: NDArray[np.bool_]) -> None:
        bins = np.minimum((truth * _BINS).astype(np.int64), _BINS - 1)
        self.counts[1] += np.bincount(bins[labels], minlength=_BINS)
        self.counts[0] += np.bincount(bins[~labels], minlength=_BINS)
        self.loss -= float(np.log(np.where(labels, truth, 1 - truth)).sum())

    def result(self) -> dict[str, float | int | None]:
        negatives, positives = self.counts
        rows, clicks = int(self.counts.sum()), int(positives.sum())
        if not 0 < clicks < rows:
            return {"rows": rows, "positives": clicks, "auc": None, "log_loss": None, "normalized_entropy": None}
        below = np.cumsum(negatives) - negatives
        area = float((positives * (below + negatives / 2)).sum()) / (clicks * (rows - clicks))
        rate, loss = clicks / rows, self.loss / rows
        entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
        return {
            "rows": rows,
            "positives": clicks,
            "auc": area,
            "log_loss": loss,
            "normalized_entropy": loss / entropy,
        }


def generate(out: Path, config: GenerateConfig, progress: Progress | None = None) -> dict[str, Any]:
    """Writes part-*.parquet, truth.json and recipe.toml into the folder `out`; gives back what truth.json holds."""
    out = Path(out)
    fresh_folder(out, "part-*.parquet")
    world, names = _World(config), columns(config)
    overall, last = _Ceiling(), _Ceiling()
    boundary = config.rows - round(_TEST * config.rows)
    for number, first in enumerate(range(0, config.rows, config.rows_per_file)):
        stop = min(config.rows, first + config.rows_per_file)
        with TableWriter(out / f"part-{number:05d}.parquet", _schema(names)) as writer:
            for start in range(first, stop, _CHUNK):
                rows = np.arange(start, min(stop, start + _CHUNK))
                truth, labels, table = _rows(world, rows, names)
                overall.add(truth, labels)
                last.add(truth[rows >= boundary], labels[rows >= boundary])
                writer.write(table)
                if progress is not None:
                    progress(int(rows[-1]) + 1, config.rows)
    result = {
        "format": FORMAT,
        "config": asdict(config),
        "cardinalities": dict(zip(names["categorical"], world.sizes)),
        "all": overall.result(),
        "test": last.result(),
    }
    write_text(out / "recipe.toml", _recipe(names, config.rows))
    write_text(out / "truth.json", json.dumps(result, indent=1) + "\n")
    return result


def _schema(names: dict[str, tuple[str, ...]]) -> Any:
    fields = [("time", pa.int64()), ("click", pa.int8()), *((name, pa.float32()) for name in names["dense"])]
    fields += [(name, pa.int64()) for name in names["categorical"]]
    fields += [(name, pa.list_(pa.int64())) for name in names["sequences"]]
    return pa.schema([*fields, ("truth", pa.float64())])


def _rows(world: _World, rows: Ints, names: dict[str, tuple[str, ...]]) -> tuple[Array, NDArray[np.bool_], Any]:
    config = world.config
    random = np.random.default_rng([config.seed, 1, int(rows[0])])
    drawn = world.draw(random, rows / config.rows)
    _, dense, ids, history, lengths = drawn
    truth = world.probability(world.parts(*drawn))
    labels = random.random(len(rows)) < truth
    arrays = [pa.array(_START + rows * _SPAN // config.rows), pa.array(labels.astype(np.int8))]
    arrays += [pa.array(values.astype(np.float32)) for values in dense]
    arrays += [pa.array(values) for values in ids]
    if names["sequences"]:
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        arrays.append(pa.ListArray.from_arrays(pa.array(offsets), pa.array(history)))
    return truth, labels, pa.Table.from_arrays([*arrays, pa.array(truth)], schema=_schema(names))


def _recipe(names: dict[str, tuple[str, ...]], rows: int) -> str:
    sequence = bool(names["sequences"])
    sections: dict[str, dict[str, Any]] = {
        "data": {"files": ["part-*.parquet"], **names, "dense_transform": "log1p" if names["dense"] else "none"},
        "data.split": {"by": "time", "column": "time", "test": _TEST, "validation": 0.1},
        "tables": {"dim": 16, "init_std": 0.05},
    }
    if sequence:
        sections["tables.item"] = {"columns": ["item", "history"]}
        sections["pooling"] = {"history": "none"}
    sections |= model_sections(rows, sequence={"history": "item"} if sequence else None)
    return recipe_text(sections, "Generated data; truth.json holds the best AUC and log loss there can be.")


def generated(config: GenerateConfig, progress: Progress | None = None) -> Path:
    """The folder in the cache that holds the data of this configuration; made on first use."""
    text = json.dumps([FORMAT, asdict(config)], sort_keys=True)
    base = Path(os.environ.get("UNEQUAL_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "unequal"))
    folder = base.expanduser() / f"generated-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if (folder / "truth.json").exists():
        return folder
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=folder.name + "-", dir=folder.parent))
    try:
        generate(part, config, progress)
        with writing(folder):
            try:
                os.rename(part, folder)
            except OSError:
                if not (folder / "truth.json").exists():  # else another process was first, with the same data
                    raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder
