"""Rows as wide as they deserve, on ranks that share a GPU and exchange through gloo: they train as one process does on it, and as
ranks on CPUs do."""

from dataclasses import replace

import pytest
import torch

import unequal as uq
from tests.distributed.pool import Pool
from tests.distributed.problems import outcome, share_out, train
from tests.distributed.test_width import differences, placement_of, problem_of, rows_of
from unequal.exchange.mesh import Mesh

POLICIES = ("water-filling", "fiited", "itep")
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
"""sums of a GPU and of a CPU, and of one process and of several, differ in their order"""


def moved(what, device):
    """All tensors in it, and batches."""
    if isinstance(what, torch.Tensor | uq.Batch):
        return what.to(device)
    if isinstance(what, dict):
        return {name: moved(part, device) for name, part in what.items()}
    if isinstance(what, list | tuple):
        return type(what)(moved(part, device) for part in what)
    return what


def trained(module, problem, device, rank=0, world=1):
    """Its outcome, on the host."""
    shares = [
        replace(part, batch=part.batch.to(device), pooled=part.pooled.to(device), lists=moved(part.lists, device))
        for part in share_out(problem, None, rank, world)
    ]
    found = outcome(module, train(module, problem, shares))
    return replace(found, outputs=moved(found.outputs, "cpu"), shards=moved(found.shards, "cpu"))


def of_rank(rank, world, runs, device):
    mesh, found = Mesh(runs[0][1].ranks_per_node), []
    for problem, placement in runs:
        module = uq.shard(problem.embeddings("meta"), placement, mesh, device=device)
        own = trained(module, problem, device, rank, world)
        module.check_copies()
        found.append((own, module.width_reports))
    return found


@pytest.fixture(scope="module")
def pool():
    pool = Pool()
    yield pool
    pool.close()


@pytest.mark.parametrize(("world", "ranks_per_node"), [(2, 2), (4, 2)])
@pytest.mark.parametrize("kind", ["row_wise", "table_wise", "tiers"])
def test_equals_one_process(pool, world, ranks_per_node, kind):
    problems = [problem_of(policy) for policy in POLICIES]
    runs = [(problem, placement_of(problem, world, ranks_per_node, kind)) for problem in problems]
    results = pool.run(of_rank, runs, "cuda", world=world, ranks_per_node=ranks_per_node, timeout=240)
    for number, problem in enumerate(problems):
        module = problem.embeddings("cuda")
        expected = trained(module, problem, "cuda")
        wrong = differences(expected, [ranks[number][0] for ranks in results], **CLOSE)
        assert not wrong, POLICIES[number] + "\n" + "\n".join(wrong[:20])
        assert all(ranks[number][1] == module.width_reports for ranks in results)
    assert len({row["weight"].numel() for row in rows_of([result[0][0] for result in results]).values()}) > 3


@pytest.mark.parametrize("kind", ["row_wise", "tiers"])
def test_narrow_gradients_as_on_cpus(pool, kind):
    problem = problem_of(gradients="norms")
    runs = [(problem, placement_of(problem, 4, 2, kind))]
    on_gpu, on_cpus = (
        pool.run(of_rank, runs, device, world=4, ranks_per_node=2, timeout=240) for device in ("cuda", "cpu")
    )
    for ours, theirs in zip(on_gpu, on_cpus):
        (own, reports), (expected, expected_reports) = ours[0], theirs[0]
        wrong = differences(expected, [own], **CLOSE)
        assert not wrong, "\n".join(wrong[:20])
        assert reports == expected_reports
        assert sum(report.pruned for report in reports) and sum(report.regained for report in reports)
