"""The solver of tiers: against every combination of cuts, its own dual bound and an LP; and what it must never do."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unequal.optim import RowWiseAdagrad
from unequal.plan.allocate import allocate, counted, flow, repeated_ids_memory, row_wise, tiers_of
from unequal.plan.cost import Pricer, Setting
from unequal.plan.placement import UNIQUES
from unequal.plan.popularity import Popularity
from unequal.plan.tiered import Tier
from unequal.plan.tiers import Allocation, Candidates, solve
from unequal.plan.workload import Curve, FeatureLoad, TableLoad
from unequal.tables import Table

from .cases import machines

Array = np.ndarray[Any, Any]


def load_of(
    popularity: Popularity, samples: tuple[int, ...], dim: int = 16, rows: int | None = None, name: str = "t"
) -> TableLoad:
    """A table read like this. Its curve has the very points that a step asks for."""
    sizes = sorted(set(samples))
    rows = rows or int(popularity.rows.sum())
    distinct = Curve(tuple(sizes), tuple(float(popularity.rows @ popularity.chances(n)) for n in sizes), float(rows))
    return TableLoad(
        table=Table(name, rows, dim=dim), optimizer=RowWiseAdagrad(), features={"f": FeatureLoad(popularity.total, False)},
        distinct=distinct, rows=rows, popularity=popularity,
    )  # fmt: skip


def problem(rows: Array, gains: Array, memory: Array) -> Candidates:
    """Costs of rows of bins in three tiers: none, −gain of each of the others."""
    cost = np.concatenate([np.zeros((len(rows), 1)), -gains], axis=1)
    held = np.concatenate([np.zeros((len(rows), 1)), memory], axis=1)
    return Candidates(rows=rows, evaluate=lambda first, last: (cost[first:last], held[first:last]))


def concave(scale: Array, node: float, more: float) -> Array:
    """Gains that fall with the rows, and the upper tier's more than the lower one's."""
    return np.stack([scale * node, scale * node + np.maximum(scale - 1, -0.5) * more], axis=1)


@st.composite
def tables(draw: st.DrawFn, bins: int, rows: int = 1) -> list[tuple[Array, Array, Array]]:
    found = []
    for _ in range(draw(st.integers(1, 3))):
        count = draw(st.integers(1, bins))
        scale = np.sort(draw(st.lists(st.floats(-1, 4), min_size=count, max_size=count)))[::-1]
        gains = concave(scale, draw(st.floats(0.1, 2)), draw(st.floats(0.1, 2)))
        low = draw(st.floats(1, 5))
        memory = np.tile([low, low + draw(st.floats(0.5, 20))], (count, 1))
        sizes = np.array(draw(st.lists(st.integers(1, rows), min_size=count, max_size=count)), np.float64)
        found.append((sizes, gains, memory))
    return found


def best_of_all(parts: list[tuple[Array, Array, Array]], budget: float) -> float:
    """The largest gain of any two cuts of every table that fit."""
    options = []
    for rows, gains, memory in parts:
        each = np.repeat(np.arange(len(rows)), rows.astype(int))
        sums = np.concatenate([np.zeros((1, 2)), np.cumsum(gains[each], 0)])
        held = np.concatenate([np.zeros((1, 2)), np.cumsum(memory[each], 0)])
        options.append([
            (sums[r, 1] + sums[c, 0] - sums[r, 0], held[r, 1] + held[c, 0] - held[r, 0])
            for c in range(len(each) + 1)
            for r in range(c + 1)
        ])  # fmt: skip
    return max(
        sum(gain for gain, _ in chosen)
        for chosen in product(*options)
        if sum(held for _, held in chosen) <= budget * (1 + 1e-9)
    )


@settings(max_examples=60, deadline=None)
@given(tables(3, rows=2), st.floats(0, 60))
def test_as_good_as_every_combination_of_cuts(parts: list[tuple[Array, Array, Array]], budget: float) -> None:
    """The best of all for the memory that it uses; and with what is left at most one row's gain away from the best."""
    found = solve([problem(*part) for part in parts], budget)
    assert found.memory <= budget * (1 + 1e-8)
    assert found.gain == pytest.approx(best_of_all(parts, found.memory), abs=1e-9)
    assert found.gain <= best_of_all(parts, budget) + 1e-9
    assert best_of_all(parts, budget) - found.gain <= found.price * (budget - found.memory) * (1 + 1e-6) + 1e-9


def gains_and_bytes(parts: list[tuple[Array, Array, Array]], found: Allocation) -> tuple[float, float]:
    """Counted row by row from the cuts."""
    gain = held = 0.0
    for (rows, gains, memory), cuts in zip(parts, found.tables):
        each = np.repeat(np.arange(len(rows)), rows.astype(int))
        for position, bin in enumerate(each[: cuts.copied.rows]):
            tier = int(position < cuts.replicated.rows)
            gain, held = gain + gains[bin, tier], held + memory[bin, tier]
    return float(gain), float(held)


@settings(max_examples=60, deadline=None)
@given(tables(40, rows=30), st.floats(0, 3000))
def test_no_allocation_can_be_better(parts: list[tuple[Array, Array, Array]], budget: float) -> None:
    """The dual bound at the solver's own price: no cuts, and no fractions of rows either, gain more than that. What is between is
    the memory that is left, which is less than a row."""
    found = solve([problem(*part) for part in parts], budget)
    assert gains_and_bytes(parts, found) == pytest.approx((found.gain, found.memory), abs=1e-6)
    bound = found.price * budget
    largest = 0.0
    for rows, gains, memory in parts:
        bound += float(rows @ np.maximum(0, (gains - found.price * memory).max(1)))
        largest = max(largest, float(memory.max()))
    assert found.gain <= bound + 1e-6
    assert bound - found.gain <= found.price * min(largest, budget) * (1 + 1e-6) + 1e-6
    assert not found.price or budget - found.memory <= largest


def test_equal_to_the_linear_program() -> None:
    """HiGHS on the relaxed problem, with fractions of rows."""
    optimize = pytest.importorskip("scipy.optimize")
    random = np.random.default_rng(3)
    for budget in (10.0, 300.0, 2_000.0, 1e6):
        parts = []
        for _ in range(4):
            count = int(random.integers(5, 60))
            scale = np.sort(random.uniform(-1, 4, count))[::-1]
            low = random.uniform(1, 5)
            memory = np.tile([low, low + random.uniform(0.5, 20)], (count, 1))
            parts.append(
                (random.integers(1, 30, count).astype(float), concave(scale, *random.uniform(0.1, 2, 2)), memory)
            )
        found = solve([problem(*part) for part in parts], budget)
        rows, gains, memory = (np.concatenate(each) for each in zip(*parts))
        # x[bin, tier]: rows of the bin in the tier
        limits = np.kron(np.eye(len(rows)), np.ones((1, 2)))
        solved = optimize.linprog(
            -gains.ravel(), A_ub=np.vstack([limits, memory.ravel()]), b_ub=[*rows, budget], bounds=(0, None), method="highs"
        )  # fmt: skip
        assert solved.status == 0
        assert -solved.fun >= found.gain - 1e-6
        assert -solved.fun - found.gain <= found.price * (budget - found.memory) + 1e-6
        assert found.price == pytest.approx(-solved.ineqlin.marginals[-1], rel=1e-6, abs=1e-12)


def test_only_named_rows_get_copies() -> None:
    rows, gains, memory = np.full(5, 10.0), np.tile([2.0, 3.0], (5, 1)), np.tile([1.0, 8.0], (5, 1))
    one = problem(rows, gains, memory)
    limited = Candidates(rows=rows, evaluate=one.evaluate, limit=23)
    found = solve([limited], 1e9).tables[0]
    assert (found.replicated.rows, found.copied.rows, found.limited) == (23, 23, True)
    found = solve([limited], 30.0).tables[0]
    assert (found.replicated.rows, found.copied.rows) == (1, 23), "23 node rows, and 7 bytes for one more copy of one"
    assert not solve([one], 30.0).tables[0].limited


def test_bins_are_looked_at_as_far_as_the_price_goes() -> None:
    seen = []
    scale = 1000 / np.arange(1.0, 20_001)

    def evaluate(first: int, last: int) -> tuple[Array, Array]:
        seen.append(last)
        gains = concave(scale[first:last], 1.0, 0.001)
        cost = np.concatenate([np.zeros((last - first, 1)), -gains], axis=1)
        return cost, np.tile([0.0, 1.0, 10.0], (last - first, 1))

    found = solve([Candidates(rows=np.ones(20_000), evaluate=evaluate)], 100.0)
    assert found.tables[0].copied.rows == 100 and max(seen) < 2_000


SHAPES = [(1, 4), (2, 2), (2, 4), (4, 1), (16, 8)]


@pytest.mark.parametrize("unique", UNIQUES)
@pytest.mark.parametrize(("nodes", "size"), SHAPES)
@pytest.mark.parametrize("objective", ["seconds", "bytes"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_copy_is_made_where_it_gains(unique: Any, nodes: int, size: int, objective: Any, device: Any) -> None:
    """The whole table's price is never more with the tiers than without, and more or fewer copies are no better."""
    topology = machines(nodes, size, device=device)
    setting = Setting(topology=topology, batch_size=128 * topology.world, unique=unique)
    load = load_of(Popularity.zipf(50_000, 1.05, 40.0), setting.samples, dim=32)
    pricer = Pricer(setting)
    tables_ = pricer.numbers([load])
    cuts = allocate(pricer, tables_, [0], 1e12, objective).tables[0]
    assert tiers_of(topology) == ((Tier.NODE, Tier.REPLICATED) if min(nodes, size) > 1 else (Tier.REPLICATED,))
    assert min(nodes, size) > 1 or cuts.node_rows == 0

    def cost(replicated: int, node: int) -> float:
        found = flow(pricer, pricer.price(load, row_wise(load, topology, counted(replicated, node))))
        if objective == "seconds":
            return found.seconds
        return found.bytes_across if nodes > 1 else found.bytes_inside

    replicated, node = cuts.replicated.rows, cuts.node_rows
    best = cost(replicated, node)
    assert best <= cost(0, 0) * (1 + 1e-9)
    for change in (1, 10, 1000, 20_000):
        for other in (
            (replicated + change, max(0, node - change)),
            (max(0, replicated - change), node + min(replicated, change) * (Tier.NODE in tiers_of(topology))),
            *([(replicated, node + change), (replicated, max(0, node - change))] if min(nodes, size) > 1 else []),
        ):
            if sum(other) <= 50_000:
                assert best <= cost(*other) * (1 + 1e-9), other


def test_deduplication_changes_the_answer() -> None:
    """Against repeated ids copies pay from about one read per node and step; with ids unique per node they save no bytes."""
    topology = machines(16, 8, 40, device="cuda")
    rows = {}
    for unique in UNIQUES:
        setting = Setting(topology=topology, batch_size=1024 * 128, unique=unique)
        load = load_of(Popularity.zipf(1_000_000, 1.05, 100.0), setting.samples, 64)
        pricer = Pricer(setting)
        rows[unique] = {
            objective: allocate(pricer, pricer.numbers([load]), [0], 1e12, objective).tables[0]
            for objective in ("bytes", "seconds")
        }
        each = pricer.numbers([load]).reads[0].each
        if unique == "none":
            last = each[
                min(
                    len(each) - 1,
                    int(np.searchsorted(np.cumsum(load.popularity.rows), rows[unique]["bytes"].copied.rows)),
                )
            ]  # type: ignore[union-attr]
            assert 0.5 < last[0] * 8 < 2, "reads per node of the last row with copies"
    assert rows["node"]["bytes"].copied.rows == 0
    assert 0 < rows["node"]["seconds"].copied.rows < rows["none"]["seconds"].copied.rows


def test_within_the_memory_of_repeated_ids() -> None:
    """Every byte that copies and messages take together is within what row-wise exchange of repeated ids takes at its peak."""
    topology = machines(4, 4, 40)
    for unique in UNIQUES:
        setting = Setting(topology=topology, batch_size=256 * 16, unique=unique)
        loads = [
            load_of(Popularity.zipf(rows, skew, 60.0), setting.samples, dim, name=f"t{dim}")
            for rows, skew, dim in ((100_000, 1.05, 64), (1_000_000, 0.9, 32), (500, 0.5, 16))
        ]
        pricer = Pricer(setting)
        numbers = pricer.numbers(loads)
        plain = [pricer.price(load, row_wise(load, topology)) for load in loads]
        budget = repeated_ids_memory(loads, setting)
        left = budget - float(pricer.memory(sum(plain)).max())
        found = allocate(pricer, numbers, range(3), left)
        after = sum(
            pricer.price(load, row_wise(load, topology, counted(cuts.replicated.rows, cuts.node_rows)))
            for load, cuts in zip(loads, found.tables)
        )
        assert float(pricer.memory(after).max()) <= max(budget, float(pricer.memory(sum(plain)).max())) * (1 + 1e-9)
        nothing = sum(pricer.price(load, row_wise(load, topology, counted(0, 0))) for load in loads)
        assert found.gain == pytest.approx(
            float((pricer.own_seconds(nothing) - pricer.own_seconds(after)).max()), rel=1e-3
        )


def test_chances_add_up_to_the_measured_number_of_rows() -> None:
    popularity = Popularity.zipf(10_000, 1.0, 50.0)
    independent = popularity.chances(100)
    for known in (0.5, 0.9, 1.05):
        chances = popularity.chances(100, known * float(popularity.rows @ independent))
        assert popularity.rows @ chances == pytest.approx(known * float(popularity.rows @ independent), rel=1e-3)
        assert (np.diff(chances) <= 1e-12).all() and chances.max() <= 1
    assert (popularity.chances(1e9, 10_000.0) > 0.999).all()
