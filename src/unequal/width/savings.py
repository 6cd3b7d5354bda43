"""What values save: by how much the loss would be higher without the k-th chunk of rows, per unit of what these rows are worth.

Gradients say where there is something to learn. What has come of it is another matter: of a table that says nothing about the
label, rows have gradients like others, and learn chance; in some models the second value of a row saves as much as the first, in
others next to nothing. So it is measured, of all rows that have a k-th chunk together. Without a value w the loss of a sample is
higher by −w·g + ½(w·g)², to second order, with the gradient g of that sample and the square of it for the curvature, as it is for
a loss that is a logarithm of a probability. A sample that has not been trained on since speaks for others, so that chance counts
against a value. All of it can be read off a lookup's outputs and their gradients, in a part of some steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..tables import Feature
from .measures import Floats, Totals

STEPS = {0: 1, 256: 4, 4096: 16}
"""from which step on one in how many is looked at"""
VALUES, LEAST_VALUES = 1 << 18, 1 << 14
"""that are looked at in a step, about: of all outputs, and of each at least"""
STRIDE = 7919
"""by which the part of a batch that is looked at moves on"""
PRIOR = 30.0
"""steps' worth of what is assumed as long as little is known: of a row's k-th chunk 1 / (2k − 1) of what the first one saves"""
FLOOR = 0.3
"""share of that which is assumed whatever is known: a chunk that no row has yet cannot have saved anything"""
LEAST, LARGEST = 1 / 64, 64.0
"""of what a table's rows save, over the average"""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The part of a lookup's outputs that is looked at."""

    parts: list[tuple[int, Tensor]]
    """of each output, the first line, and lines from there on"""
    times: int
    """steps for which it stands"""


def assumed(chunks: int) -> Floats:
    """What the first, second … chunk saves, over the first one."""
    shape: Floats = 1.0 / np.arange(1, 2 * chunks, 2, dtype=np.float64)
    return shape


def _of_all(own: Sequence[Floats], totals: Totals) -> list[Floats]:
    """The sums over all ranks, asked for at once."""
    return np.split(totals(np.concatenate(own)), np.cumsum([part.size for part in own])[:-1])


@dataclass(slots=True)
class Known:
    """Of a table, on all ranks; what is long ago counts less."""

    saved: Floats
    """[1 + chunks]: by all that its rows have, and by the first, second … chunk of those that have it, each removed alone"""
    worth: Floats
    """[chunks]: what rows with a first, second … chunk have come to be worth meanwhile"""
    held: Floats
    """[chunks]: what rows of exactly so many chunks were worth after the last round; negative where that is not known"""
    steps: float = 0.0
    """that it is known from, faded"""

    @classmethod
    def nothing(cls, chunks: int, held: float) -> Known:
        return cls(np.zeros(1 + chunks), np.zeros(chunks), np.full(chunks, held))

    def learn(self, saved: Floats, now: Floats, steps: float, decay: float) -> None:
        """What was saved in so many steps since the last round, and what rows of exactly so many chunks are worth now."""
        if self.held.min() >= 0:
            faded = float(decay**steps)
            gained = np.maximum(now - faded * self.held, 0.0)
            self.saved = faded * self.saved + saved
            self.worth = faded * self.worth + np.cumsum(gained[::-1])[::-1]
            self.steps = faded * self.steps + steps
        self.held = now

    def forget(self, share: float) -> None:
        """All of it counts for so much; so does what rows are worth."""
        self.saved, self.worth, self.steps = share * self.saved, share * self.worth, share * self.steps
        self.held = np.where(self.held < 0, self.held, share * self.held)

    def priorities(self, average: float, prior: float) -> Floats:
        """Of chunks of equally important rows of all tables; none is above one before it. `average`: what rows of all tables save
        for what they are worth; `prior`: the worth of rows for which it is assumed that they do as well, and their chunks."""
        whole, first, shape = float(self.saved[0]), float(self.saved[1]), assumed(len(self.held))
        if average <= 0 or not self.worth[0] + prior > 0:
            return shape
        rows = (max(whole, 0.0) / average + prior) / (float(self.worth[0]) + prior)
        rows = min(max(rows, LEAST), LARGEST)
        if first > 0 and self.worth[0] > 0:
            over_first = np.maximum(self.saved[1:], 0.0) * (self.worth[0] / first)
            found = (over_first + prior * shape) / np.maximum(self.worth + prior, np.finfo(float).tiny)
            shape = np.minimum.accumulate((1 - FLOOR) * found / found[0] + FLOOR * shape)
        priorities: Floats = rows * shape
        return priorities


PARTS = ("saved", "worth", "held")
"""of what is known of a table: those of which there are several numbers"""


@dataclass(slots=True)
class Savings:
    """Of all tables of a module. `chunks`: by table, how many a whole row has; `features`: in the order of the module; `ranks`:
    over whose samples gradients are averages."""

    chunks: Mapping[str, int]
    features: Mapping[str, Feature]
    ranks: int = 1
    known: dict[str, Known] = field(init=False)
    before: dict[str, Floats] = field(init=False)
    """what was counted since the last round and before they were loaded: [2, 1 + chunks] by table, products and their squares"""
    seen: Floats = field(init=False)
    """samples and steps since the last round"""
    _outputs: list[list[Feature]] = field(init=False)
    """features of each output, in the order of its columns"""
    _sums: list[Tensor] = field(init=False)
    """[2, features + columns] of each output, where the outputs are"""

    def __post_init__(self) -> None:
        pooled = [feature for feature in self.features.values() if feature.pooling is not None]
        lists = [[feature] for feature in self.features.values() if feature.pooling is None]
        self._outputs = [pooled, *lists] if pooled else lists
        self.load(None, held=0.0)

    # In a step

    def sample(self, outputs: Sequence[Tensor], step: int) -> Sampled | None:
        """Of these outputs, where any of this step's are looked at."""
        times = next(every for first, every in reversed(STEPS.items()) if step >= first)
        if step % times:
            return None
        parts, most = [], max(VALUES // max(1, len(outputs)), LEAST_VALUES)
        for output in outputs:
            lines, columns = output.shape
            count = min(lines, max(1, most // columns))
            first = step * STRIDE % (lines - count + 1)
            # What came out may be changed by who reads it.
            parts.append((first, torch.narrow_copy(output.detach(), 0, first, count)))
        return Sampled(parts, times)

    def note(
        self, sampled: Sampled, gradients: Sequence[Tensor | None], samples: int,
        count: Callable[..., None] | None = None,
    ) -> None:  # fmt: skip
        """The gradients of these outputs, and how many samples they are of. `count`: the backend's `count_savings`."""
        if not self._sums:
            self._sums = [torch.zeros(0)] * len(self._outputs)
        self.seen += sampled.times * np.array([samples, 1 / self.ranks])
        for number, ((first, values), gradient) in enumerate(zip(sampled.parts, gradients)):
            lines = values.shape[0]
            if gradient is None or not lines:
                continue
            dims = [feature.table.dim for feature in self._outputs[number]]
            factor = sampled.times * gradient.shape[0] / lines
            upstream, sums = gradient[first : first + lines], self._sums[number]
            if count is not None:
                if not sums.numel():
                    sums = torch.zeros(2, len(dims) + sum(dims), dtype=torch.float64)
                sums = self._sums[number] = sums.to(values.device)
                count(values, upstream, dims, factor / self.ranks, factor / self.ranks**2, sums)
                continue
            more = self._added_up(values.float() * upstream.float(), dims) * factor
            more = torch.where(more.isfinite(), more, 0.0)  # a step that has diverged must not be all there is
            self._sums[number] = sums.to(more.device).add_(more) if sums.numel() else more

    def _added_up(self, products: Tensor, dims: Sequence[int]) -> Tensor:
        """Over lines: the sums of products by feature and by column, and those of their squares."""
        alike = [(dim, len(list(run))) for dim, run in groupby(dims)]
        runs = torch.split(products, [dim * count for dim, count in alike], 1)
        wholes = [run.reshape(-1, count, dim).sum(2) for run, (dim, count) in zip(runs, alike)]
        terms = torch.cat([*wholes, products], 1).div_(self.ranks)
        return torch.stack([terms.sum(0), terms.square_().sum(0)]).double()

    def _counted(self) -> dict[str, Floats]:
        """Since the last round, as this rank has seen it."""
        found = {name: part.copy() for name, part in self.before.items()}
        for sums, features in zip(self._sums, self._outputs):
            if not sums.numel():
                continue
            numbers, at = sums.cpu().numpy(), len(features)
            for number, feature in enumerate(features):
                table = feature.table
                columns = numbers[:, at : at + table.dim].reshape(2, self.chunks[table.name], -1).sum(2)
                found[table.name] += np.concatenate([numbers[:, number : number + 1], columns], 1)
                at += table.dim
        return found

    # In a round

    def learn(
        self, tables: Sequence[str], held: Mapping[str, Floats], all_of_it: Mapping[str, float], decay: float, totals: Totals
    ) -> dict[str, Floats]:  # fmt: skip
        """The priorities of chunks in these tables, which share a budget. `held`: what this rank's rows of exactly 1, 2, … chunks
        are worth, of tables that it has a part of; `all_of_it`: the same with ids that have no row."""
        counted, own = self._counted(), [self.seen]
        for name in tables:
            own += [
                counted[name].ravel(),
                held.get(name, np.zeros(self.chunks[name])),
                np.array([all_of_it.get(name, 0.0)]),
            ]
            counted[name] = np.zeros((2, 1 + self.chunks[name]))
        together = iter(_of_all(own, totals))
        samples, steps = next(together).tolist()
        self.before, self._sums = counted, []
        known, priors = [self.known[name] for name in tables], []
        for table in known:
            products, squares = next(together).reshape(2, -1)
            # Gradients are those of a mean over the samples: the curvature of one is the square of its own.
            saved = squares * (samples / max(steps, 1.0) / 2) - products
            table.learn(saved, next(together), steps, decay)
            priors.append(PRIOR * float(next(together)[0]) / max(table.steps, 1.0))
        worth = sum(float(table.worth[0]) for table in known)
        average = sum(float(table.saved[0]) for table in known) / worth if worth else 0.0
        return {name: table.priorities(average, prior) for name, table, prior in zip(tables, known, priors)}

    def settle(self, tables: Sequence[str], held: Mapping[str, Floats], totals: Totals) -> None:
        """After the round, rows of exactly 1, 2, … chunks are worth this."""
        own = [held.get(name, np.zeros(self.chunks[name])) for name in tables]
        for name, part in zip(tables, _of_all(own, totals)):
            self.known[name].held = part

    def forget(self, share: float) -> None:
        """What is known of all tables counts for so much of itself; see NarrowStorage.forget."""
        for known in self.known.values():
            known.forget(share)

    def end(self) -> None:
        """Of the round of all tables."""
        self.seen = np.zeros(2)

    # Saved and loaded

    def state(self) -> dict[str, Any]:
        """What is to be saved, as far as this rank knows it: `together` makes one of all ranks'."""
        tables = {
            name: {**{part: getattr(known, part).tolist() for part in PARTS}, "steps": known.steps}
            for name, known in self.known.items()
        }
        counted = {name: part.ravel().tolist() for name, part in self._counted().items()}
        return {"tables": tables, "counted": counted, "seen": self.seen.tolist()}

    def numbers(self) -> Tensor:
        """The same in one row."""
        state = self.state()
        found = list(state["seen"])
        for name, saved in state["tables"].items():
            for part in (*(saved[part] for part in PARTS), state["counted"][name], [saved["steps"]]):
                found += part
        return torch.tensor(found, dtype=torch.float64)

    def of_numbers(self, numbers: Tensor) -> dict[str, Any] | None:
        """What `state` gave, or nothing where these are other tables' or chunks'."""
        if numbers.numel() != 2 + sum(5 * chunks + 4 for chunks in self.chunks.values()):
            return None
        left = iter(numbers.tolist())
        state: dict[str, Any] = {"tables": {}, "counted": {}, "seen": list(islice(left, 2))}
        for name, chunks in self.chunks.items():
            *parts, counted = (list(islice(left, count)) for count in (1 + chunks, chunks, chunks, 2 + 2 * chunks))
            state["tables"][name] = {**dict(zip(PARTS, parts)), "steps": next(left)}
            state["counted"][name] = counted
        return state

    @staticmethod
    def together(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What all ranks know alike, and the counts of all of them."""
        first = states[0]["counted"]
        counted = {name: np.sum([state["counted"][name] for state in states], 0).tolist() for name in first}
        seen = np.sum([state["seen"] for state in states], 0).tolist()
        return {"tables": states[0]["tables"], "counted": counted, "seen": seen}

    @staticmethod
    def part(state: Mapping[str, Any], rank: int) -> dict[str, Any]:
        """What a rank goes on from: the first one has all that was counted."""
        if rank == 0:
            return dict(state)
        counted = {name: [0.0] * len(part) for name, part in state["counted"].items()}
        return {"tables": state["tables"], "counted": counted, "seen": [0.0, 0.0]}

    def load(self, state: Mapping[str, Any] | None, held: float = -1.0) -> None:
        """`state`: of this rank, see `part`; None: nothing is known. `held`: what rows are worth then. Tables whose rows have
        other chunks now are learnt anew."""
        self._sums, self.known, self.before = [], {}, {}
        self.seen = np.zeros(2) if state is None else np.array(state["seen"])
        for name, chunks in self.chunks.items():
            saved = None if state is None else state["tables"].get(name)
            if state is None or saved is None or len(saved["held"]) != chunks:
                self.known[name], self.before[name] = Known.nothing(chunks, held), np.zeros((2, 1 + chunks))
                continue
            sums, worth, was = (np.array(saved[part]) for part in PARTS)
            self.known[name] = Known(sums, worth, was, saved["steps"])
            self.before[name] = np.array(state["counted"][name]).reshape(2, -1)
