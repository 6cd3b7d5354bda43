"""What else tables spread over ranks share with those of one process: precision, admission, refusals, evaluation, state."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

import unequal as uq
from unequal.exchange.mesh import Mesh
from unequal.plan.placement import KINDS, Placement, part_of, place

from .problems import (
    Problem,
    differences,
    many_processes,
    one_process,
    outcome,
    placement_of,
    random_batch,
    same_bits,
    share_out,
    table_images,
    train,
    with_batches,
)

DENSE = uq.Table("dense", rows=70, dim=6, init_std=0.1)
HASHED = uq.Table("hashed", dim=9, init_std=0.1)
FEATURES = {
    "bag": uq.Feature(DENSE),
    "average": uq.Feature(HASHED, "mean"),
    "list": uq.Feature(DENSE, None),
    "other": uq.Feature(HASHED, "sum"),
}


def problem_of(features=FEATURES, steps=4, size=13, **options):
    weights = options.pop("weights", False)
    return with_batches(Problem(features, [], **options), steps, size, weights=weights)


def row_wise(problem, world, ranks_per_node=None, **options):
    return placement_of(problem, world, ranks_per_node, "row_wise", list(problem.tables), **options)


DEALT = ("row_wise", "table_row_wise", "column_row_wise")
"""kinds that deal the rows of a piece out over several ranks"""
ADMISSION = [
    ("one", ["sum"], False),
    ("one, sums", ["sum"], True),
    ("two, sums", ["mean", "sum"], True),
    ("mixed", [None, "mean"], False),
]


def admission(pool, world, ranks_per_node, kinds):
    """What differs with admission: about who has a row, and about everything."""
    runs, names, about_ids, about_all = [], [], [], []
    for (name, poolings, sums), kind in product(ADMISSION, kinds):
        table = uq.Table("t", dim=8, init_std=0.1, admit_after=3)
        problem = problem_of({f"f{k}": uq.Feature(table, pooling) for k, pooling in enumerate(poolings)}, size=10)
        runs.append((problem, placement_of(problem, world, ranks_per_node, kind, ["t"] if sums else []), None))
        names.append(f"{name}, {kind}")
    results = pool.run(many_processes, runs, world=world, ranks_per_node=ranks_per_node)
    for number, (problem, _, _) in enumerate(runs):
        expected, own = one_process(problem), [outcomes[number] for outcomes in results]
        wanted, image = table_images(problem, [expected])["t"], table_images(problem, own)["t"]
        assert wanted["ids"].numel() > 5 and wanted["seen"], "some ids are admitted, some wait"
        if not torch.equal(image["ids"], wanted["ids"]) or image["seen"] != wanted["seen"]:
            about_ids.append(names[number])
        about_all += [f"{names[number]}: {line}" for line in differences(problem, expected, own)]
    return about_ids, about_all


@pytest.mark.parametrize("world, ranks_per_node", [(3, None), (4, 2)], ids=["3", "2x2"])
def test_ids_are_admitted_when_all_ranks_together_have_read_them_often_enough(pool, world, ranks_per_node):
    kinds = KINDS[:4] if ranks_per_node is None else KINDS
    about_ids, about_all = admission(pool, world, ranks_per_node, kinds)
    assert not about_ids
    others = [line for line in about_all if not any(f" {kind}: " in line for kind in DEALT)]
    assert not others, "\n".join(others)


def test_rare_ids_share_one_row_where_rows_are_dealt_out(pool):
    _, about_all = admission(pool, 4, 2, DEALT)
    assert not about_all, "\n".join(about_all)


def test_any_64_bit_id_has_its_row(pool):
    problem = problem_of()
    extremes = torch.tensor([-(2**63), 2**63 - 1, 0, -1, 1, 2**32, -(2**32), 2**62])
    batch = uq.Batch.from_jagged(
        {
            "bag": torch.arange(8),
            "average": uq.Jagged(extremes.repeat(2), torch.full((8,), 2)),
            "list": torch.arange(8),
            "other": extremes.flip(0),
        }
    )
    problem = replace(problem, batches=[batch] * 3)
    runs = [(problem, placement_of(problem, 3, None, kind), None) for kind in KINDS[:4]]
    results = pool.run(many_processes, runs, world=3)
    for number in range(4):
        assert not differences(problem, one_process(problem), [outcomes[number] for outcomes in results])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_tables_of_16_bits(pool, dtype):
    """Rows are rounded stochastically, with draws that depend on where a row lies, so the same values come only up to rounding:
    each of the steps moves a value by less than one unit in the last place on either side, and on average by nothing."""
    steps, kinds = 6, KINDS[:4]
    tables = [replace(table, dtype=dtype) for table in (DENSE, HASHED)]
    features = {name: replace(f, table=tables[f.table.name == "hashed"]) for name, f in FEATURES.items()}
    problem = problem_of(features, steps=steps, optimizer=uq.SGD(lr=0.05))
    expected = table_images(problem, [one_process(problem)])
    runs = [(problem, placement_of(problem, 3, None, kind), None) for kind in kinds]
    results = pool.run(many_processes, runs, world=3)
    for number, kind in enumerate(kinds):
        images = table_images(problem, [outcomes[number] for outcomes in results])
        for name, image in expected.items():
            ours, theirs = images[name]["weight"], image["weight"]
            assert ours.dtype == theirs.dtype == dtype and torch.equal(images[name]["ids"], image["ids"])
            gap = ours.double() - theirs.double()
            unit = torch.finfo(dtype).eps * theirs.double().abs().clamp(min=0.1)
            assert (gap.abs() <= 2 * steps * unit).all(), (kind, name)
            assert gap.mean().abs() <= 5 * unit.mean() * (2 * steps / gap.numel()) ** 0.5, (kind, name)
            assert (gap == 0).double().mean() > 0.05, (kind, name)


ROUNDOFF = {"fp32": 2.0**-23, "fp16": 2.0**-11, "bf16": 2.0**-8, "int8": 1 / 254}
SMALLEST = 2.0**-25
"""float16 has no steps smaller than 2⁻²⁴"""


@pytest.mark.parametrize("forward, backward", [("fp16", "bf16"), ("bf16", "fp16"), ("int8", "fp32"), ("fp32", "int8")])
@pytest.mark.parametrize("world, ranks_per_node", [(3, None), (4, 2)], ids=["3", "2x2"])
def test_codecs_lose_what_their_precision_says(pool, forward, backward, world, ranks_per_node):
    """One step with a linear loss, so that gradients do not depend on what was lost on the way here. Every looked up row is wrong
    by the codec's roundoff at most, of the value or, with 8 bits, of the row's largest; gradients travel once per hop."""
    features = {"bag": FEATURES["bag"], "list": FEATURES["list"]}
    features["average"] = features["summed"] = uq.Feature(uq.Table("t", rows=40, dim=11, init_std=0.3), "mean")
    problem = problem_of(features, steps=1, size=16, optimizer=uq.SGD(lr=1.0), linear=True)
    fresh = {
        name: image["weight"]
        for name, image in table_images(problem, [one_process(replace(problem, batches=[]))]).items()
    }
    expected = one_process(problem)
    moved = table_images(problem, [expected])
    most = table_images(problem, [one_process(replace(problem, largest=True))])
    batch = problem.batches[0]

    def lost(name):
        """How large the errors of a feature's output can be, in roundoffs."""
        feature, part = features[name], batch[name]
        size = fresh[feature.table.name].abs()
        rows = (size.amax(1, keepdim=True).expand_as(size) if forward == "int8" else size)[part.values]
        if feature.pooling is None:
            return rows
        owner = torch.repeat_interleave(torch.arange(batch.size), part.lengths)
        sums = torch.zeros(batch.size, size.shape[1]).index_add_(0, owner, rows)
        return sums / part.lengths.clamp(min=1)[:, None] if feature.pooling == "mean" else sums

    pooled = torch.cat([lost(name) for name, feature in features.items() if feature.pooling is not None], 1)
    allowed = {"pooled": pooled, "list": lost("list")}
    codecs = {"forward_codec": forward, "backward_codec": backward}
    runs = [(problem, placement_of(problem, world, ranks_per_node, kind, ["t"], **codecs), None) for kind in KINDS]
    results = pool.run(many_processes, runs, world=world, ranks_per_node=ranks_per_node)
    hops = 1 if ranks_per_node is None else 2
    for number, kind in enumerate(KINDS):
        outcomes = [outcomes[number] for outcomes in results]
        for name, wanted in expected.outputs[0].items():
            gap = (torch.cat([o.outputs[0][name] for o in outcomes]) - wanted).abs()
            bound = (ROUNDOFF[forward] + hops * 2**-21) * allowed[name] + 4 * SMALLEST
            assert (gap <= bound).all(), (kind, name)
            assert bool((gap > 2**-20).any()) == (forward != "fp32" and kind != "data_parallel"), (kind, name)
        for name, image in table_images(problem, outcomes).items():
            gap = (image["weight"] - moved[name]["weight"]).abs()
            bound = hops * 1.1 * (ROUNDOFF[backward] + 2**-21) * (fresh[name] - most[name]["weight"]) + 2**-21
            assert (gap <= bound).all(), (kind, name)
            assert bool((gap > 2**-19).any()) == (backward != "fp32"), (kind, name)


def evaluate(rank, world, problem, placement, unknown):
    module = uq.shard(problem.embeddings("meta"), placement)
    train(module, problem, share_out(problem, None, rank, world))
    before = outcome(module, ([], [], []))
    part = share_out(replace(problem, batches=[unknown]), None, rank, world)[0].batch
    module.eval()
    quiet = module(part)
    module.train()
    with torch.no_grad():
        also = module(part)
    assert not quiet.pooled.requires_grad and torch.equal(quiet.pooled, also.pooled)
    assert torch.equal(quiet["list"].values, also["list"].values)
    return before, outcome(module, ([], [], [])), quiet.pooled, quiet["list"].values


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_reads_and_changes_nothing(pool, kind):
    problem = problem_of()
    unknown = random_batch(FEATURES, 7, 11)
    unknown.ids[unknown.bounds[1] : unknown.bounds[2] : 2] += 12345
    module = problem.embeddings()
    train(module, problem, share_out(problem))
    wanted = module.eval()(unknown)
    for sums in ([], ["hashed"]):
        placement = placement_of(problem, 4, 2, kind, sums)
        results = pool.run(evaluate, problem, placement, unknown, world=4, ranks_per_node=2)
        assert all(same_bits(before, after) for before, after, _, _ in results)
        pooled, lists = (torch.cat([result[k] for result in results]) for k in (2, 3))
        torch.testing.assert_close(pooled, wanted.pooled, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lists, wanted["list"].values, rtol=1e-5, atol=1e-6)


def refuse(rank, world, problem, placement, where, wrong):
    """One rank's batch has an id too many; all ranks are to say the same, and to go on with the next batch."""
    module = uq.shard(problem.embeddings("meta"), placement)
    parts = share_out(problem, None, rank, world)
    train(module, problem, parts[:1])
    before = outcome(module, ([], [], []))
    bad = share_out(problem, None, rank, world)[1].batch
    if rank == where:
        bad.ids = bad.ids.clone()
        bad.ids[int(bad.bounds[bad.features.index("list")]) + 2] = wrong
    with pytest.raises(uq.DataError) as error:
        module(bad)
    assert same_bits(before, outcome(module, ([], [], [])))
    train(module, problem, parts[1:])
    return str(error.value), bad.lengths.view(len(bad.features), -1)[bad.features.index("list")].tolist(), module.step


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", [70, -1])
def test_a_wrong_id_is_refused_on_every_rank(pool, kind, wrong):
    problem = problem_of(steps=3)
    placement = placement_of(problem, 4, 2, kind, ["hashed"] if wrong > 0 else [])
    results = pool.run(refuse, problem, placement, 2, wrong, world=4, ranks_per_node=2)
    messages = {message for message, _, _ in results}
    lengths = results[2][1]
    sample = next(k for k in range(len(lengths)) if sum(lengths[: k + 1]) > 2)
    assert messages == {
        f"rank 2: feature 'list', sample {sample} of the batch: id {wrong} is not in [0, 70) of table 'dense'; "
        "give the table more rows, or none for unbounded ids"
    }
    assert [step for _, _, step in results] == [3] * 4


def disagree(rank, world, problem, placement):
    module = uq.shard(problem.embeddings("meta"), placement)
    batch = share_out(problem, None, rank, world)[0].batch
    if rank == 1:
        batch.weights = torch.ones(batch.ids.numel())
    with pytest.raises(uq.DataError) as error:
        module(batch)
    return str(error.value)


def test_weights_on_some_ranks_only_are_refused_on_all(pool):
    problem = problem_of(steps=1)
    messages = pool.run(disagree, problem, row_wise(problem, 3), world=3)
    assert len(set(messages)) == 1 and "some ranks' batches have weights" in messages[0]


def continue_from_one_process(rank, world, problem, placement, steps):
    """Trains alone for some steps, is spread, and trains on; then saved, loaded by a fresh one, and on again."""
    whole = problem.embeddings()
    train(whole, replace(problem, batches=problem.batches[:steps]), share_out(problem)[:steps])
    module = uq.shard(whole, placement)
    assert module.step == steps
    parts = share_out(problem, None, rank, world)
    train(module, problem, parts[steps:-1])
    loaded = uq.shard(problem.embeddings("meta"), placement)
    loaded.load_state_dict({name: tensor.clone() for name, tensor in module.state_dict().items()})
    own, theirs = (outcome(m, train(m, problem, parts[-1:])) for m in (module, loaded))
    assert same_bits(own, theirs)
    return own


@pytest.mark.parametrize("world, ranks_per_node", [(1, None), (3, None), (4, 2)], ids=["1", "3", "2x2"])
def test_state_is_taken_over(pool, world, ranks_per_node):
    schedule = uq.Schedule(kind="cosine", warmup_steps=3, total_steps=9)
    for kind in KINDS:
        tables = [DENSE, replace(HASHED, admit_after=2, optimizer=uq.Adam(lr=0.02))]
        features = {name: replace(f, table=tables[f.table.name == "hashed"]) for name, f in FEATURES.items()}
        problem = problem_of(features, steps=7, optimizer=uq.LAMB(lr=0.05), schedule=schedule)
        expected = one_process(problem)
        placement = placement_of(problem, world, ranks_per_node, kind, ["hashed"])
        results = pool.run(continue_from_one_process, problem, placement, 3, world=world, ranks_per_node=ranks_per_node)
        last = replace(expected, outputs=expected.outputs[-1:], losses=expected.losses[-1:])
        assert not differences(problem, last, results), kind


def test_a_world_of_one_needs_no_process_group():
    problem = problem_of()
    module = uq.shard(problem.embeddings("meta"))
    assert module.placement.world == 1 and list(module.parameters()) == []
    ours = outcome(module, train(module, problem, share_out(problem)))
    assert not differences(problem, one_process(problem), [ours])
    assert ours.traffic == (0, 0, 0)
    whole = problem.embeddings()
    assert (module.features, module.tables, module.optimizer) == (whole.features, whole.tables, whole.optimizer)
    train(whole, problem, share_out(problem))
    assert module.rows() == whole.rows() and module.memory()["weights"] == whole.memory()["weights"]


def default_plan(rank, world, problem):
    module = uq.shard(problem.embeddings("meta"))
    done = outcome(module, train(module, problem, share_out(problem, None, rank, world)))
    return done, {placed.kind for placed in module.placement.tables.values()}


def test_without_a_plan_rows_are_dealt_out(pool):
    problem = problem_of()
    results = pool.run(default_plan, problem, world=3)
    assert not differences(problem, one_process(problem), [done for done, _ in results])
    assert all(kinds == {"row_wise"} for _, kinds in results)


def test_memory_and_rows_are_those_of_the_rank(pool):
    problem = problem_of()
    expected = one_process(problem)
    for kind in ("table_wise", "row_wise", "column_wise"):
        results = pool.run(many_processes, [(problem, placement_of(problem, 3, None, kind), None)], world=3)
        memory = [outcomes[0].memory for outcomes in results]
        assert sum(part["weights"] for part in memory) == expected.memory["weights"]
        per_row = {"table_wise": 1, "row_wise": 1, "column_wise": 3}[
            kind
        ]  # row-wise AdaGrad: each piece has the row's sum
        assert sum(part["optimizer"] for part in memory) == per_row * expected.memory["optimizer"]
        if kind == "row_wise":
            rows = [outcomes[0].rows for outcomes in results]
            assert {name: sum(part[name] for part in rows) for name in expected.rows} == expected.rows


def several_forwards(rank, world, problem, placement):
    """A lookup whose gradients are never asked for, then two whose gradients are asked for together."""
    module = uq.shard(problem.embeddings("meta"), placement) if placement else problem.embeddings()
    first, second, third = share_out(problem, None, rank, world)
    module(first.batch)
    one, two = module(second.batch), module(third.batch)
    loss = (second.pooled * one.pooled.exp()).sum() + (third.lists["list"] * two["list"].values.exp()).sum()
    (loss * third.weight).backward()
    return outcome(module, ([], [], []))


def test_lookups_before_their_gradients(pool):
    problem = problem_of(steps=3, optimizer=uq.SGD(lr=0.1))
    expected = several_forwards(0, 1, problem, None)
    assert expected.step == 2
    for kind in ("row_wise", "column_wise", "data_parallel"):
        results = pool.run(several_forwards, problem, placement_of(problem, 3, None, kind, ["hashed"]), world=3)
        assert not differences(problem, expected, results), kind


def partly_used(rank, world, problem, placement):
    """Some outputs are not in the loss: on no rank, or on this one alone."""
    module = uq.shard(problem.embeddings("meta"), placement) if placement else problem.embeddings()
    for number, part in enumerate(share_out(problem, None, rank, world)):
        out = module(part.batch)
        loss = (part.pooled[:, :6] * out["bag"].exp()).sum()
        if number > 0 and (placement is None or rank > 0):
            loss = loss + (part.lists["list"] * out["list"].values).sum()
        (loss * part.weight).backward()
    return outcome(module, ([], [], []))


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_that_no_loss_uses(pool, kind):
    """No rank uses the lists in the first step; rank 0 never does, because it has no samples with any: its gradient is missing
    where others have one. Without momentum and decay a row without a gradient stays."""
    problem = problem_of(steps=3, optimizer=uq.Adagrad(lr=0.05))
    for batch in problem.batches:  # the samples of rank 0 have no list
        at = batch.features.index("list")
        lengths = batch.lengths.view(len(batch.features), -1)
        gone = int(lengths[at, :4].sum())
        begin = int(batch.bounds[at])
        batch.ids = torch.cat([batch.ids[:begin], batch.ids[begin + gone :]])
        lengths[at, :4] = 0
        batch._offsets = batch._bounds = None
    expected = partly_used(0, 1, problem, None)
    results = pool.run(partly_used, problem, placement_of(problem, 3, None, kind, ["hashed"]), world=3)
    assert not differences(problem, expected, results)


def other_orders(rank, world, problem, placement):
    """Every rank has its features in another order, one as a mapping, one with a feature that nobody reads."""
    module = uq.shard(problem.embeddings("meta"), placement)
    parts = share_out(problem, None, rank, world)
    for part in parts:
        batch = part.batch
        names = [*batch.features[rank:], *batch.features[:rank]]
        jagged = {name: batch[name] for name in names}
        if rank == 1:
            jagged = {"unread": batch["list"], **jagged}
        part.batch = uq.Batch.from_jagged(jagged)
    done = train(module, problem, parts)
    mapped = module({name: parts[0].batch[name] for name in parts[0].batch.features})
    assert mapped.pooled.shape == parts[0].pooled.shape and set(mapped) == set(problem.features)
    return outcome(module, done)


def test_the_order_of_features_in_a_batch_does_not_matter(pool):
    problem = problem_of()
    for kind in ("row_wise", "column_wise"):
        results = pool.run(other_orders, problem, placement_of(problem, 3, None, kind, ["hashed"]), world=3)
        assert not differences(problem, one_process(problem), results)


def refuse_plans(rank, world, problem):
    embeddings = problem.embeddings("meta")
    with pytest.raises(uq.UserError, match="the plan is for 3 ranks, 3 on a node; the job has 2, 2 on a node"):
        uq.shard(embeddings, row_wise(problem, 3))
    with pytest.raises(uq.RecipeError, match="'hashed', a table that the plan does not place"):
        uq.shard(embeddings, Placement(2, 2, {"dense": place("row_wise", DENSE, 2)}))
    with pytest.raises(uq.UserError, match="these tables are on 'meta'"):
        embeddings(problem.batches[0])


def test_plans_for_other_jobs_are_refused(pool):
    pool.run(refuse_plans, problem_of(), world=2)


def bytes_of_a_step(rank, world, ids_of, placement, rows):
    table = uq.Table("t", rows=rows, dim=8)
    module = uq.shard(uq.Embeddings({"f": uq.Feature(table, None)}, device="meta"), placement)
    ids = torch.tensor(ids_of[rank], dtype=torch.int64)
    batch = uq.Batch.from_jagged({"f": uq.Jagged(ids, torch.tensor([ids.numel()]))})
    before = module.mesh.traffic.copy()
    module(batch)["f"].values.sum().backward()
    spent = module.mesh.traffic.since(before)
    return spent.inside, spent.across


def traffic(pool, ids, rows=64, **options):
    table = uq.Table("t", rows=rows, dim=8)
    placement = Placement(4, 2, {"t": place("row_wise", table, 4, 2)}, **options)
    return np.array(pool.run(bytes_of_a_step, ids, placement, rows, world=4, ranks_per_node=2)).sum(0)


def test_bytes_of_unique_ids(pool):
    """Ids, rows and gradients travel once per rank that reads them, and once per node where the plan says so: exact figures,
    beyond those of a step without ids."""
    once = 1 + 4 * 8 + 4 * 8  # an id there, its row back, its gradient there
    nothing, near, far = [], [1], [2]  # rows 0 and 1 of every four are on node 0, the others on node 1
    for options in ({}, {"unique": "rank"}):
        idle = traffic(pool, [nothing] * 4, **options)
        assert (traffic(pool, [near * 5, nothing, nothing, nothing], **options) - idle).tolist() == [once, 0]
        assert (traffic(pool, [[0] * 9, nothing, nothing, nothing], **options) - idle).tolist() == [0, 0]
        assert (traffic(pool, [far * 5, nothing, nothing, nothing], **options) - idle).tolist() == [0, once]
    idle = traffic(pool, [nothing] * 4)
    assert (traffic(pool, [far, far * 2, nothing, nothing]) - idle).tolist() == [once, once]
    idle = traffic(pool, [nothing] * 4, unique="rank")
    assert (traffic(pool, [far, far * 2, nothing, nothing], unique="rank") - idle).tolist() == [0, 2 * once]
    # An id is as long as the table's largest; one that may be anything has 8 bytes.
    for rows, size in ((2**16 + 1, 3), (None, 8)):
        near = (part_of(torch.arange(99), 4, rows is None) == 1).nonzero()[:1, 0].tolist()
        more = traffic(pool, [near * 3, nothing, nothing, nothing], rows) - traffic(pool, [nothing] * 4, rows)
        assert more.tolist() == [size + 4 * 8 + 4 * 8, 0]


def bytes_of_a_bag(rank, world, count, rows):
    """Sent inside the node in a step where rank 1 has one bag of so many ids, whose owner, rank 0, pools it."""
    table = uq.Table("t", rows=rows, dim=8)
    embeddings = uq.Embeddings({"f": uq.Feature(table, "sum")}, device="meta")
    module = uq.shard(embeddings, Placement(2, 2, {"t": place("table_wise", table, 2, 2, sums=True)}))
    ids = torch.arange(count if rank else 0)
    batch = uq.Batch.from_jagged({"f": uq.Jagged(ids, torch.tensor([ids.numel()]))})
    before = module.mesh.traffic.copy()
    module(batch).pooled.sum().backward()
    return module.mesh.traffic.since(before).inside


def test_bytes_of_ids_and_lengths_of_bags(pool):
    """A bag's length has as many bytes as the number of ids in its message needs."""

    def sent(count, rows):
        return sum(pool.run(bytes_of_a_bag, count, rows, world=2))

    for rows, size in ((400, 2), (None, 8)):
        none = sent(0, rows)
        assert sent(5, rows) - none == 5 * size
        assert sent(300, rows) - none == 300 * size + 1


def with_device_mesh(rank, world, problem, placement):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "rank"))
    module = uq.shard(problem.embeddings("meta"), placement, mesh)
    assert isinstance(module.mesh, Mesh) and module.mesh.nodes == 2
    return outcome(module, train(module, problem, share_out(problem, None, rank, world)))


def test_a_device_mesh_of_torch_serves(pool):
    problem = problem_of()
    results = pool.run(with_device_mesh, problem, row_wise(problem, 4, 2), world=4)
    assert not differences(problem, one_process(problem), results)
