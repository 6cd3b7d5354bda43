"""Tables whose rows are as wide as they deserve, spread over ranks: they train as in one process, and messages are as narrow."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import unequal as uq
from unequal.errors import UserError
from unequal.plan.placement import Piece, Placement, TablePlacement, Tiers, place

from .problems import Problem, outcome, same_bits, share_out, train, with_batches

MESHES = {"2": (2, None, "node"), "3": (3, None, "node"), "2x2": (4, 2, "node"), "2x2_rank": (4, 2, "rank")}
STEPS = 20


@dataclass
class WidthProblem(Problem):
    width: object = None

    def embeddings(self, device="cpu"):
        return uq.Embeddings(
            self.features,
            optimizer=self.optimizer,
            schedule=self.schedule,
            seed=self.seed,
            device=device,
            width=self.width,
        )


def problem_of(policy="water-filling", optimizer=None, steps=STEPS, dtype="fp32", **options):
    """Two tables, read as pooled features and as lists. All ids are read at first, when there is room for all of them."""
    first = uq.Table("first", rows=60, dim=8, init_std=0.1, dtype=dtype)
    second = uq.Table("second", rows=41, dim=4, init_std=0.1, dtype=dtype)
    features = {"a": uq.Feature(first, "mean"), "b": uq.Feature(second, None), "c": uq.Feature(first, "sum")}
    settings = {"budget": "40%", "policy": policy, "every": 4, "start": "full", "ramp": 6, "gradients": "whole"}
    width = uq.Width(**{**settings, **options})
    problem = WidthProblem(features, [], optimizer=optimizer or uq.RowWiseAdagrad(lr=0.1), width=width)
    problem = with_batches(problem, steps, 24)
    everything = {"a": torch.arange(60), "b": torch.arange(41), "c": torch.arange(24)}
    lengths = {name: torch.tensor(even(ids.numel())) for name, ids in everything.items()}
    problem.batches[0] = uq.Batch.from_jagged({n: uq.Jagged(ids, lengths[n]) for n, ids in everything.items()})
    return problem


def even(count, size=24):
    return [count * (k + 1) // size - count * k // size for k in range(size)]


def placement_of(problem, world, ranks_per_node, kind, unique="node", sums=(), seed=0, **options):
    tables, generator = {}, np.random.default_rng(seed)
    for number, (name, table) in enumerate(problem.tables.items()):
        whole = "row_wise" if kind == "tiers" else kind
        tables[name] = place(whole, table, world, ranks_per_node, first=number, sums=name in sums)
        if kind == "tiers":
            ids = generator.permutation(table.rows)
            cut = len(ids) // 4
            tables[name] = replace(tables[name], tiers=Tiers(ids[:cut].copy(), ids[cut : 3 * cut].copy()))
    return Placement(world, ranks_per_node or world, tables, unique=unique, **options)


def many(rank, world, runs):
    from unequal.exchange.mesh import Mesh

    meshes, found = {}, []
    for problem, placement, *shares in runs:
        size = placement.ranks_per_node
        mesh = meshes[size] = meshes.get(size) or Mesh(ranks_per_node=size)
        mesh.traffic.inside = mesh.traffic.across = 0
        module = uq.shard(problem.embeddings("meta"), placement, mesh)
        results = train(module, problem, share_out(problem, shares[0] if shares else None, rank, world))
        module.check_copies()
        copies = {name: int(part.chunks.count_nonzero()) for name, part in module.copies.items()}
        found.append((outcome(module, results), module.width_reports, copies))
    return found


def rows_of(outcomes):
    """Every row of every table: what its values and its state are, how much it is worth."""
    found = {}
    for shard, state in [pair for result in outcomes for pair in result.shards]:
        starts = (state["widths"].cumsum(0) - state["widths"]).tolist()
        for number, (id_, width, start) in enumerate(zip(state["ids"].tolist(), state["widths"].tolist(), starts)):
            row = {"weight": state["weight"][start : start + width].float(), "utilities": state["utilities"][number]}
            for name, part in state.items():
                if name not in ("weight", "ids", "widths", "utilities", "candidates", "candidate_utilities"):
                    flat = part.shape[0] == state["weight"].shape[0]
                    row[name] = part[start : start + width] if flat else part[number : number + 1]
            assert (shard.table, id_) not in found
            found[shard.table, id_] = row
        for id_, utilities in zip(state["candidates"].tolist(), state["candidate_utilities"]):
            assert (shard.table, id_) not in found
            found[shard.table, id_] = {"weight": torch.empty(0), "utilities": utilities}
    return found


def differences(expected, outcomes, rtol=2e-5, atol=1e-6):
    wrong = []
    for step, outputs in enumerate(expected.outputs):
        for name, wanted in outputs.items():
            ours = torch.cat([result.outputs[step][name] for result in outcomes])
            if not torch.allclose(ours, wanted, rtol=rtol, atol=atol):
                wrong.append(f"step {step} output '{name}': {(ours - wanted).abs().max():.3g}")
        loss = sum(result.losses[step] for result in outcomes)
        if abs(loss - expected.losses[step]) > atol + rtol * abs(expected.losses[step]):
            wrong.append(f"step {step} loss {loss}, expected {expected.losses[step]}")
    ours, wanted = rows_of(outcomes), rows_of([expected])
    if ours.keys() != wanted.keys():
        wrong.append(f"other rows: {sorted(ours.keys() ^ wanted.keys())}")
        return wrong
    for key, row in wanted.items():
        if ours[key].keys() != row.keys():
            wrong.append(f"{key}: other parts")
            continue
        for name, part in row.items():
            own = ours[key][name]
            if own.shape != part.shape or not torch.allclose(own, part, rtol=rtol, atol=atol):
                wrong.append(f"{key} {name}: {own}, expected {part}")
    return wrong


def alone(problem):
    module = problem.embeddings()
    return outcome(module, train(module, problem, share_out(problem))), module.width_reports


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("kind", ["row_wise", "table_wise", "tiers"])
def test_equals_one_process(pool, mesh, kind):
    """Losses, outputs, rows, widths, utilities and candidates over many steps and rounds; and again, bit for bit."""
    world, size, unique = MESHES[mesh]
    policies = ["water-filling", "fiited", "itep", "none"]
    problems = [problem_of(policy) for policy in policies]
    runs = [(problem, placement_of(problem, world, size, kind, unique)) for problem in problems]
    results = pool.run(many, [*runs, runs[0]], world=world, ranks_per_node=size, timeout=120)
    for number, (policy, problem) in enumerate(zip(policies, problems)):
        expected, reports = alone(problem)
        own = [of_rank[number] for of_rank in results]
        wrong = differences(expected, [result for result, _, _ in own])
        assert not wrong, policy + "\n" + "\n".join(wrong[:20])
        assert all(report == reports for _, report, _ in own)
        if policy == "water-filling":
            assert sum(report.pruned for report in reports) and sum(report.regained for report in reports)
            widths = {row["weight"].numel() for row in rows_of([expected]).values()}
            assert len(widths) > 3
        if kind == "tiers":
            assert all(copies["first"] > 4 for _, _, copies in own)
    assert all(same_bits(of_rank[0][0], of_rank[-1][0]) for of_rank in results)


def rates_of(rank, world, problem, placement):
    module, found = uq.shard(problem.embeddings("meta"), placement), []
    for part in share_out(problem, None, rank, world):
        train(module, problem, [part])
        found.append(module.width_rates)
    return found


@pytest.mark.parametrize("kind", ["row_wise", "table_wise"])
def test_rates_follow_what_all_ranks_have_read(pool, kind):
    """Ids are read little by little: the fewer of them, the less has to be narrow."""
    problem = problem_of(budget="20%", start="small", steps=12)
    del problem.batches[0]
    module, expected = problem.embeddings(), []
    for part in share_out(problem):
        train(module, problem, [part])
        expected.append(module.width_rates)
    for own in pool.run(rates_of, problem, placement_of(problem, 3, None, kind), world=3, timeout=120):
        assert own == expected
    rates = [step["first"] for step in expected]
    assert rates[0] == 1.0 and len(set(rates)) > 2 and 1.5 < rates[-1] <= 5**0.5


def test_rows_that_are_all_equally_wide_equal_one_process(pool):
    """Small tables in few bytes: all ranks decide alike, and hold no more than these."""
    problem = problem_of(budget="1050 b", start="small", steps=8)
    placements = [placement_of(problem, 3, None, kind) for kind in ("row_wise", "table_wise", "tiers")]
    results = pool.run(many, [(problem, placement) for placement in placements], world=3, timeout=120)
    expected, _ = alone(problem)
    assert {row["weight"].numel() for row in rows_of([expected]).values()} == {1, 2}
    for number in range(3):
        wrong = differences(expected, [of_rank[number][0] for of_rank in results])
        assert not wrong, "\n".join(wrong[:20])


@pytest.mark.parametrize("optimizer", ["Adagrad", "Adam", "LAMB", "LARS"])
def test_optimizers_equal_one_process(pool, optimizer):
    problem = problem_of(optimizer=getattr(uq, optimizer)(lr=0.02), steps=10)
    placements = [placement_of(problem, 2, None, "row_wise"), placement_of(problem, 2, None, "tiers")]
    results = pool.run(many, [(problem, placement) for placement in placements], world=2, timeout=120)
    expected, _ = alone(problem)
    for number in range(2):
        wrong = differences(expected, [of_rank[number][0] for of_rank in results], rtol=1e-4, atol=1e-5)
        assert not wrong, "\n".join(wrong[:20])


def test_mixtures_equal_one_process(pool):
    """Owners that pool, hierarchical rows, weights, shares that are uneven or empty, budgets of single tables, and units of all
    ranks' rows: percentiles, means of tables and of columns."""
    runs, expected = [], []
    uneven = [[24, 0, 0, 0] if k % 2 else [0, 5, 19, 0] for k in range(12)]
    for kind, sums, shares, unique, options in [
        ("row_wise", ("first",), None, "node", {}),
        ("row_wise", ("first",), uneven, "rank", {"policy": "fiited"}),
        ("table_row_wise", (), uneven, "node", {"policy": "adaembed", "tables": {"second": "60%"}}),
        ("tiers", (), uneven, "node", {"policy": "frequency"}),
        ("tiers", (), uneven, "none", {"policy": "fiited"}),
        ("table_wise", (), None, "node", {"policy": "adaembed"}),
        ("row_wise", (), uneven, "node", {"thresholds": "table"}),
        ("table_wise", (), None, "node", {"policy": "fiited", "thresholds": "column"}),
        ("tiers", (), None, "node", {"policy": "fiited", "thresholds": "column"}),
    ]:
        problem = problem_of(steps=12, **options)
        if sums and unique == "rank":
            problem.batches[3:6] = with_batches(problem, 3, 24, weights=True).batches
        runs.append((problem, placement_of(problem, 4, 2, kind, unique, sums), shares))
        expected.append(alone(problem))
    results = pool.run(many, runs, world=4, ranks_per_node=2, timeout=120)
    for number, (wanted, reports) in enumerate(expected):
        assert all(of_rank[number][1] == reports for of_rank in results)
        wrong = differences(wanted, [of_rank[number][0] for of_rank in results])
        assert not wrong, f"run {number}\n" + "\n".join(wrong[:20])


def test_the_purse_is_one(pool):
    """Where it is too small for all ids, those get rows that would in one process."""
    runs, expected = [], []
    for budget in ("13%", "7%"):
        problem = problem_of("none", steps=6, budget=budget, start="small")
        problem.batches = problem.batches[1:]
        expected.append(alone(problem)[0])
        runs += [(problem, placement_of(problem, 3, None, kind)) for kind in ("row_wise", "table_wise", "tiers")]
    results = pool.run(many, runs, world=3, timeout=120)
    for number in range(len(runs)):
        wanted = expected[number // 3]
        wrong = differences(wanted, [of_rank[number][0] for of_rank in results])
        assert not wrong, f"run {number}\n" + "\n".join(wrong[:20])
        values = sum(row["weight"].numel() for row in rows_of([wanted]).values())
        assert values <= float(runs[number][0].width.common.share) * (60 * 8 + 41 * 4) < values + 8


def test_norms_are_exact_where_one_rank_reads(pool):
    """Of the gradients of missing chunks only norms travel: with one reader of a row that is all there is to know."""
    one = [[24, 0, 0, 0] if k % 3 else [0, 0, 0, 24] for k in range(14)]
    problem = problem_of(steps=14, gradients="norms")
    kinds = [
        ("row_wise", "node"),
        ("row_wise", "rank"),
        ("tiers", "node"),
        ("tiers", "rank"),
        ("table_row_wise", "node"),
    ]
    runs = [(problem, placement_of(problem, 4, 2, kind, unique), one) for kind, unique in kinds]
    without = problem_of("none", steps=8, budget="30%", start="small", gradients="norms")
    runs += [(without, placement_of(without, 4, 2, kind, unique)) for kind, unique in kinds]
    results = pool.run(many, runs, world=4, ranks_per_node=2, timeout=120)
    expected = [alone(problem)[0]] * len(kinds) + [alone(without)[0]] * len(kinds)
    for number, wanted in enumerate(expected):
        wrong = differences(wanted, [of_rank[number][0] for of_rank in results])
        assert not wrong, f"run {number}\n" + "\n".join(wrong[:20])


@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8"])
def test_every_precision(pool, codec):
    """Copies agree with their owners, and what is learned is about the same."""
    runs = []
    for policy, gradients in (("water-filling", "norms"), ("fiited", "whole"), ("none", "norms")):
        problem = problem_of(policy, steps=6, gradients=gradients, dtype="fp16" if codec == "fp16" else "fp32")
        placement = placement_of(problem, 4, 2, "tiers", forward_codec=codec, backward_codec=codec)
        runs.append((problem, placement))
    results = pool.run(many, runs, world=4, ranks_per_node=2, timeout=120)
    for number, (problem, _) in enumerate(runs):
        wanted = alone(problem)[0]
        for step in range(6):
            loss = sum(of_rank[number][0].losses[step] for of_rank in results)
            assert loss == pytest.approx(wanted.losses[step], rel=0.02)


def count_bytes(rank, world, problem, placement):
    """Bytes of rows that are sent forward, of gradients that are sent back, and what they must be."""
    from unequal.exchange.mesh import Mesh

    mesh = Mesh()
    module = uq.shard(problem.embeddings("meta"), placement, mesh)
    parts = share_out(problem, None, rank, world)
    train(module, problem, parts)
    before = module._storages["first[0:8]"].state()
    sent, batch = [], parts[1].batch
    step = module._request(batch, True)
    for work in (
        lambda: module._look_up(step),
        lambda: module._send_back(step, torch.ones(batch.size, 16), [torch.ones(batch["b"].values.numel(), 4)]),
    ):
        was = mesh.traffic.inside
        work()
        sent.append(mesh.traffic.inside - was)
    read = {"first": torch.cat([batch["a"].values, batch["c"].values]).unique(), "second": batch["b"].values.unique()}
    asked = mesh.gather({name: ids.tolist() for name, ids in read.items()})
    widths = {name: {} for name in read}
    for shard, storage in module.shard_storages():
        state = storage.state()
        widths[shard.table] = dict(zip(state["ids"].tolist(), state["widths"].tolist()))
    assert before["ids"].numel()
    answers = sum(
        1 + 4 * widths[name].get(id_, 0) for name, ids in asked[1 - rank].items() for id_ in ids if id_ % world == rank
    )
    theirs = mesh.gather({name: {str(id_): width for id_, width in of.items()} for name, of in widths.items()})[
        1 - rank
    ]
    dims = {"first": 8, "second": 4}
    whole = narrow = 0
    for name, ids in asked[rank].items():
        for id_ in ids:
            if id_ % world != rank:
                width = theirs[name].get(str(id_), 0)
                whole += 4 * dims[name]
                narrow += 4 * min(dims[name], width + 1)
    return sent, answers, whole, narrow


@pytest.mark.parametrize("gradients", ["whole", "norms"])
def test_live_chunks_alone_travel(pool, gradients):
    problem = problem_of(steps=9, budget="15%", gradients=gradients)
    placement = placement_of(problem, 2, None, "row_wise")
    for sent, answers, whole, narrow in pool.run(count_bytes, problem, placement, world=2):
        assert sent == [answers, whole if gradients == "whole" else narrow]
        assert answers < 0.8 * whole and narrow < whole


def shard_again(rank, world, problem, state, done):
    """A module that was trained in one process, spread, goes on; and one more time, from what it was saved as."""
    source = problem.embeddings()
    source.load_state_dict(state)
    placement = placement_of(problem, world, None, "tiers")
    module = uq.shard(source, placement)
    rest = replace(problem, batches=problem.batches[done:])
    parts = share_out(rest, None, rank, world, first_step=done)
    first = train(module, rest, parts[:3])
    other = uq.shard(problem.embeddings("meta"), placement)
    other.load_state_dict(module.state_dict())
    second = train(other, rest, parts[3:])
    other.check_copies()
    return outcome(other, [a + b for a, b in zip(first, second)])


@pytest.mark.parametrize("policy", ["water-filling", "fiited"])
def test_a_trained_module_is_spread(pool, policy):
    problem = problem_of(policy, steps=14, ramp=2)
    whole = problem.embeddings()
    parts = share_out(problem)
    train(whole, problem, parts[:6])
    state = {name: part.clone() for name, part in whole.state_dict().items()}
    expected = outcome(whole, train(whole, problem, parts[6:]))
    wrong = differences(expected, pool.run(shard_again, problem, state, 6, world=2, timeout=120))
    assert not wrong, "\n".join(wrong[:20])


def round_between(rank, world, problem, placement):
    module = uq.shard(problem.embeddings("meta"), placement)
    parts = share_out(problem, None, rank, world)
    train(module, problem, parts[:5])
    out = module(parts[5].batch)
    before = {shard.table: storage.state() for shard, storage in module.shard_storages()}
    module._rounds.round(8)
    module._generation += 1
    module._follow_widths(everything=False)
    (out.pooled.sum() * 0 + out["b"].values.sum() * 0).backward()
    module.check_copies()
    changed = 0
    for shard, storage in module.shard_storages():
        old, new = before[shard.table], storage.state()
        starts = dict(zip(old["ids"].tolist(), (old["widths"].cumsum(0) - old["widths"]).tolist()))
        widths = dict(zip(old["ids"].tolist(), old["widths"].tolist()))
        new_starts = (new["widths"].cumsum(0) - new["widths"]).tolist()
        for id_, start, width in zip(new["ids"].tolist(), new_starts, new["widths"].tolist()):
            if id_ in starts:
                both = min(width, widths[id_])
                kept = old["weight"][starts[id_] : starts[id_] + both]
                assert torch.equal(kept, new["weight"][start : start + both]), "gradients of 0 change nothing"
                changed += width != widths[id_]
    return changed


@pytest.mark.parametrize("gradients", ["whole", "norms"])
def test_a_round_between_forward_and_backward(pool, gradients):
    problem = problem_of(steps=6, gradients=gradients, every=10**6, budget="30%", start="small", hysteresis=0.0)
    changed = pool.run(round_between, problem, placement_of(problem, 2, None, "tiers"), world=2)
    assert all(changed)


def round_without_memory(rank, world, problem, placement):
    from unequal.storage.narrow import NarrowStorage

    module = uq.shard(problem.embeddings("meta"), placement)
    parts = share_out(problem, None, rank, world)
    train(module, problem, parts[:5])

    def tables():
        """Without what rows are worth and save, which a round brings up to date."""
        return {k: v.clone() for k, v in module.state_dict().items() if "utilit" not in k and k != "savings"}

    before = tables()
    real = NarrowStorage._slab
    if rank == 1:
        NarrowStorage._slab = lambda self, k, rows: (_ for _ in ()).throw(MemoryError("no memory for a slab"))
    try:
        with pytest.warns(UserWarning, match="found no memory"):
            report = module._rounds.round(8)
    finally:
        NarrowStorage._slab = real
    same = same_bits(before, tables())
    train(module, problem, parts[5:])
    return report.failed, same


def test_where_one_rank_has_no_memory_no_rank_changes(pool):
    problem = problem_of(steps=8, every=10**6, budget="30%", start="small", hysteresis=0.0)
    (first, same), (second, alike) = pool.run(
        round_without_memory, problem, placement_of(problem, 2, None, "row_wise"), world=2
    )
    assert same and alike
    assert first == "all tables: no memory on another rank" and second == "all tables: no memory for a slab"


@pytest.mark.parametrize("kind", ["column_wise", "data_parallel"])
def test_kinds_that_cut_or_repeat_rows_are_refused(kind):
    problem = problem_of()
    placement = placement_of(problem, 1, None, kind)
    if kind == "column_wise":
        halves = TablePlacement(kind, (Piece(0, 4, (0,)), Piece(4, 8, (0,))))
        placement = replace(placement, tables={**placement.tables, "first": halves})
    with pytest.raises(
        UserError, match=f"table 'first' is placed {kind}, but with a width budget .* row_wise, table_row_wise"
    ):
        uq.shard(problem.embeddings("meta"), placement)


def unbounded_problem(steps=16):
    first, second = uq.Table("first", None, dim=8, init_std=0.1), uq.Table("second", None, dim=4, init_std=0.1)
    features = {"a": uq.Feature(first, "mean"), "b": uq.Feature(second, None), "c": uq.Feature(first, "sum")}
    width = uq.Width(budget="80 KB", every=4)
    return with_batches(WidthProblem(features, [], width=width), steps, 24)


def test_unbounded_ids_in_bytes(pool):
    """The budget is that of all ranks together, and ids that nobody has seen yet may have a place in a tier."""
    problem = unbounded_problem()
    placements = [placement_of(problem, 4, 2, "row_wise"), placement_of(problem, 4, 2, "table_wise")]
    read = {
        table: torch.cat(
            [b[n].values for b in problem.batches for n, f in problem.features.items() if f.table.name == table]
        )
        for table in problem.tables
    }
    tiers = {
        name: Tiers(ids.unique().numpy()[:12].copy(), ids.unique().numpy()[20:40].copy()) for name, ids in read.items()
    }
    rows = placements[0].tables
    placements.append(replace(placements[0], tables={n: replace(rows[n], tiers=tiers[n]) for n in rows}))
    results = pool.run(many, [(problem, placed) for placed in placements], world=4, ranks_per_node=2, timeout=120)
    expected, _ = alone(problem)
    for number in range(len(placements)):
        own = [of_rank[number][0] for of_rank in results]
        held = sum(sum(result.memory.values()) for result in own)
        assert held <= 80_000, "all that all ranks hold, candidates included"
        assert len(rows_of(own)) > 30 and all(
            sum(row["weight"].numel() for row in rows_of([one]).values()) for one in own[:2]
        )
        # What a size in bytes is in values depends on how rows lie, so that only what comes before the first round is the same.
        loss = sum(result.losses[0] for result in own)
        assert loss == pytest.approx(expected.losses[0], rel=1e-5)
