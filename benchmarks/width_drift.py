"""Drift: other ids become popular at once. How soon is a model inside a budget as good as one that knew them from the start?

Generated clicks by two laws over the same ids and with the same truth. By the second law a share of the ids, half or all, have
changed places with others, so most of what was popular is rare and the other way round. A model is trained by the first law, then
by the second, and scored on the second at the shift and at shares of the interval between rounds after it. The shift comes right
after a round: the next one is as far away as it can be. Beside it at each point is a model of the same budget and seed that was
trained by the second law alone, for as many steps in all. What other ids cost any model is seen from plain tables treated alike,
what rounds do from a model that has none after the shift, and what they could do at best from one that is told at the shift how
wide rows of the one that knew are: what that one is behind, rows have yet to learn.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .width_data import Ints, Study
from .width_training import Job, Setting, area, tables_of

if TYPE_CHECKING:
    import torch
    from rich.table import Table

BUDGETS = (0.1, 0.02)
POINTS = (0.0, 0.25, 0.5, 1.0, 2.0)
"""round intervals after the shift"""
BAR, AT = 0.003, 1.0
"""how far below the one that knew at most, in AUC, after so many intervals"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift:
    """How much of what."""

    ids: int = 200_000
    tables: int = 8
    batch_size: int = 512
    every: int = 400
    """steps between rounds"""
    before: int = 3
    """intervals by the first law"""
    test: int = 50_000
    """samples"""
    seeds: int = 3
    moved: tuple[float, ...] = (0.5, 1.0)
    """shares of the ids that change places"""


QUICK = Drift(ids=2_000, tables=4, batch_size=64, every=8, before=1, test=2_000, seeds=1, moved=(1.0,))


def made(drift: Drift, seed: int, moved: float) -> Study:
    """`validation` holds what is trained by the first law, `train` what is by the second, `test` is of the second."""
    from unequal.data.config import GenerateConfig
    from unequal.data.generate import _World

    world = _World(GenerateConfig(ids=drift.ids, tables=drift.tables, seed=seed))
    random = np.random.default_rng([seed, 17])
    places = [changed(random, size, moved) for size in world.sizes]
    first = drift.before * drift.every * drift.batch_size
    second = first + int(POINTS[-1] * drift.every) * drift.batch_size
    rows = first + second + drift.test
    ids, dense, labels = [], [], []
    for start in range(0, rows, 1 << 16):
        time, numbers, columns, history, lengths = world.draw(random, np.zeros(min(1 << 16, rows - start)))
        later = start + np.arange(len(time)) >= first
        columns = [np.where(later, place[column], column) for place, column in zip(places, columns)]
        truth = world.probability(world.parts(time, numbers, columns, history, lengths))
        ids.append(np.stack(columns).astype(np.int32))
        dense.append(np.log1p(numbers).astype(np.float32).T)
        labels.append(random.random(len(truth)) < truth)
    names = [f"C{column + 1}" for column in range(drift.tables)]
    parts = np.split(np.arange(rows, dtype=np.int32), [first, first + second])
    return Study(
        name="drift", tables=dict(zip(names, world.sizes)), columns=names, ids=np.concatenate(ids, 1), bags={},
        dense=np.concatenate(dense), labels=np.concatenate(labels).astype(np.int8), validation=parts[0], train=parts[1],
        test=parts[2], batch_size=drift.batch_size, epochs=1, every=drift.every, shuffle=False,
    )  # fmt: skip


def changed(random: np.random.Generator, size: int, moved: float) -> Ints:
    """By id the one that is as popular as it was; so many of them are others."""
    chosen = random.permutation(size)[: round(moved * size)]
    places = np.arange(size)
    places[chosen] = np.roll(chosen, 1)
    return places


class Training:
    """A model, and how far it is."""

    def __init__(self, data: Study, budget: float | None, seed: int) -> None:
        import torch

        from unequal.models import ModelConfig, build_model

        torch.manual_seed(seed)
        method = "full" if budget is None else "water-filling"
        job = Job(data="drift", method=method, keep=budget or 1.0, setting=Setting(), seed=seed)
        self.data, self.embeddings = data, tables_of(data, job)
        self.model: torch.nn.Module = build_model(
            ModelConfig(), self.embeddings, dense_features=data.dense.shape[1], tasks=1
        )
        self.dense = torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def steps(self, samples: Ints) -> None:
        import torch

        for first in range(0, len(samples), self.data.batch_size):
            batch = self.data.batch(samples[first : first + self.data.batch_size])
            self.dense.zero_grad(set_to_none=True)
            torch.nn.functional.binary_cross_entropy_with_logits(self.model(batch), batch.labels).backward()
            self.dense.step()

    def scores(self, samples: Ints) -> list[float]:
        """On the test part, at each point of these samples."""
        points = [round(point * self.data.every) * self.data.batch_size for point in POINTS]
        found = []
        for start, end in zip([0, *points], points):
            self.steps(samples[start:end])
            found.append(area(self.data, self.model, self.data.test))
        return found

    def state(self) -> Any:
        return copy.deepcopy((self.model.state_dict(), self.dense.state_dict()))

    def back(self, state: Any) -> None:
        self.model.load_state_dict(state[0])
        self.dense.load_state_dict(state[1])

    def widths(self) -> dict[str, torch.Tensor]:
        """Chunks of every id of every table."""
        import torch

        found = {}
        for storage in self.storages():
            census = storage.census()
            chunks = found[storage.table.name] = torch.zeros(storage.table.rows, dtype=torch.int16)
            chunks[census.ids] = census.chunks(storage.records)
        return found

    def give(self, widths: dict[str, torch.Tensor]) -> None:
        """Rows are as wide as this from now on."""
        from unequal.storage import by_class

        for storage in self.storages():
            wanted, purse = widths[storage.table.name], storage.how.purse
            purse.left = float(wanted.numel() * storage.table.dim)
            storage.locate(wanted.nonzero()[:, 0], insert=True)
            census = storage.census()
            chunks = wanted[census.ids]
            counts = by_class.counts(chunks, storage.records.chunks, on_device=False)
            storage.prepare(census, chunks, None, counts.tolist())()
            purse.left = 0.0

    def storages(self) -> list[Any]:
        return [storage for _, storage in self.embeddings.shard_storages()]

    def stop_rounds(self) -> None:
        """Rows stay as wide as they are, and there are no new ones."""
        from unequal.width.intervals import NEVER

        rounds = self.embeddings._rounds
        assert rounds is not None
        rounds.width, rounds.intervals = replace(rounds.width, adapt=False), NEVER
        for group in rounds.groups:
            group.purse.left = 0.0


def compared(data: Study, budget: float | None, seed: int) -> dict[str, Any]:
    """Test AUC at each point: of the one that knew, of the one that did not, and of it without rounds, and told."""
    knew = Training(data, budget, seed)
    early = len(data.validation)
    knew.steps(data.train[:early])
    widths = knew.widths() if budget is not None else {}
    found: dict[str, Any] = {"knew": knew.scores(data.train[early:])}
    shifted = Training(data, budget, seed)
    shifted.steps(data.validation)
    state = shifted.state() if budget is not None else None
    later = data.train[: len(data.train) - early]
    found["shifted"] = shifted.scores(later)
    if budget is not None:
        reports = shifted.embeddings.width_reports
        found["kept"] = reports[-1].kept
        found["regained"] = [round(report.regained / report.full / budget, 4) for report in reports]
        shifted.back(state)
        shifted.stop_rounds()
        found["frozen"] = shifted.scores(later)
        shifted.back(state)
        shifted.stop_rounds()
        shifted.give(widths)
        found["told"] = shifted.scores(later)
    return found


def run(quick: bool = False) -> dict[str, Any]:
    import torch

    drift = QUICK if quick else Drift()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        lines = list(trained(drift))
    finally:
        torch.set_num_threads(threads)
    return {"unit": "AUC", "points": POINTS, "setting": asdict(drift), "cases": list(summarised(drift, lines))}


def trained(drift: Drift) -> Iterator[dict[str, Any]]:
    for seed in range(drift.seeds):
        for moved in drift.moved:
            data = made(drift, seed, moved)
            for budget in (None, *BUDGETS):
                yield {"moved": moved, "budget": budget, "seed": seed} | compared(data, budget, seed)


def summarised(drift: Drift, lines: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    lines = list(lines)
    for moved in drift.moved:
        for budget in (None, *BUDGETS):
            mine = [line for line in lines if line["moved"] == moved and line["budget"] == budget]
            case: dict[str, Any] = {"moved": moved, "budget": budget}
            for name in ("knew", "shifted", "frozen", "told"):
                if name in mine[0]:
                    case[name] = [mean(line[name][p] for line in mine) for p in range(len(POINTS))]
            behind = [[line["knew"][p] - line["shifted"][p] for line in mine] for p in range(len(POINTS))]
            case["behind"] = [mean(part) for part in behind]
            case["deviation"] = [round(statistics.pstdev(part), 6) for part in behind]
            if budget is not None:
                at = case["behind"][POINTS.index(AT)]
                case |= {"bar": BAR, "reached": at <= BAR}
            yield case | {"lines": mine}


def mean(numbers: Iterable[float]) -> float:
    return round(statistics.fmean(numbers), 6)


def table(result: dict[str, Any]) -> Table:
    from rich.table import Table

    view = Table(
        title="drift: AUC below that of a model that knew the new law from the start, by round intervals after the shift"
    )
    for name in ("moved", "kept", "", *(f"{point:g}" for point in POINTS), "bar"):
        view.add_column(name, justify="right")
    for case in result["cases"]:
        kept = "plain" if case["budget"] is None else f"{100 * case['budget']:g}%"
        bar = f"{case['bar']:g} " + ("kept" if case["reached"] else "MISSED") if "bar" in case else ""
        cells = [f"{b:.4f} ± {d:.4f}" for b, d in zip(case["behind"], case["deviation"])]
        view.add_row(f"{100 * case['moved']:g}%", kept, "with rounds" if "bar" in case else "", *cells, bar)
        for name, what in (("frozen", "without"), ("told", "told")):
            if name in case:
                cells = [f"{k - f:.4f}" for k, f in zip(case["knew"], case[name])]
                view.add_row("", "", what, *cells, "")
    return view
