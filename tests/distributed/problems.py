"""Small trainings whose outcome is known from one process: tables, features, global batches and a loss, to be run on any ranks.

The loss of a sample is Σ c·exp(x) over everything that was looked up for it, with coefficients c that differ in sample and
feature; a column's coefficients have one sign. So no gradient is a difference of nearly equal numbers, and what float32 loses
stays as small in Adam's quotients as it is in the sums.
"""

import zlib
from dataclasses import dataclass, field, replace

import torch

import unequal as uq
from unequal.plan.placement import Placement, Shard, place


@dataclass
class Problem:
    features: dict
    batches: list
    """global batches"""
    optimizer: object = field(default_factory=lambda: uq.RowWiseAdagrad(lr=0.1))
    schedule: object = None
    seed: int = 3
    linear: bool = False
    """the loss is Σ c·x instead, so that gradients do not depend on the rows"""
    largest: bool = False
    """all coefficients are as large as they can be: with a linear loss, gradients bound all sums of absolute values"""

    @property
    def tables(self):
        return {feature.table.name: feature.table for feature in self.features.values()}

    def embeddings(self, device="cpu"):
        return uq.Embeddings(
            self.features, optimizer=self.optimizer, schedule=self.schedule, seed=self.seed, device=device
        )


@dataclass
class Outcome:
    """Of one rank, or of the one process that has the whole batch."""

    outputs: list
    """per step: the pooled output, and of every unpooled feature the rows"""
    losses: list
    weight_gradients: list
    shards: list
    """(Shard, its storage's state)"""
    step: int
    traffic: tuple = ()
    memory: dict = field(default_factory=dict)
    rows: dict = field(default_factory=dict)


def coefficients(problem, feature, step, count, dim):
    generator = torch.Generator().manual_seed(zlib.crc32(f"{feature} {step}".encode()))
    if problem.largest:
        return torch.full((count, dim), 1.5)
    return (torch.rand(count, dim, generator=generator) + 0.5) * (1 - 2 * (torch.arange(dim) % 2))


def even_shares(size, world):
    return [size * (rank + 1) // world - size * rank // world for rank in range(world)]


def part_of_batch(batch, begin, end):
    """Samples [begin, end), and per feature which of its ids they have."""
    features, spans = {}, {}
    for name in batch.features:
        whole = batch[name]
        span = slice(int(whole.offsets[begin]), int(whole.offsets[end]))
        weights = None if whole.weights is None else whole.weights[span]
        features[name] = uq.Jagged(whole.values[span], whole.lengths[begin:end], weights)
        spans[name] = span
    return uq.Batch.from_jagged(features), spans


@dataclass
class Share:
    """A rank's contiguous share of a global batch, and what its loss needs."""

    batch: uq.Batch
    pooled: torch.Tensor
    """coefficients of the pooled output"""
    lists: dict
    """coefficients of the unpooled ones"""
    weight: float
    """Gradients are averaged over ranks, so a share's part of the global mean is scaled by the number of ranks."""


def share_out(problem, shares_of=None, rank=0, world=1, first_step=0):
    parts = []
    for number, batch in enumerate(problem.batches):
        shares = even_shares(batch.size, world) if shares_of is None else shares_of[number]
        assert len(shares) == world and sum(shares) == batch.size
        begin = sum(shares[:rank])
        samples = slice(begin, begin + shares[rank])
        part, spans = part_of_batch(batch, samples.start, samples.stop)
        pooled, lists = [torch.empty(shares[rank], 0)], {}
        for name, feature in problem.features.items():
            listed = feature.pooling is None
            count = batch[name].values.numel() if listed else batch.size
            c = coefficients(problem, name, first_step + number, count, feature.table.dim)
            if listed:
                lists[name] = c[spans[name]]
            else:
                pooled.append(c[samples])
        parts.append(Share(part, torch.cat(pooled, 1), lists, world / batch.size))
    return parts


def train(module, problem, parts):
    """One step for each of the shares: outputs, losses, gradients of the ids' weights."""
    outputs, losses, weight_gradients = [], [], []
    change = (lambda x: x) if problem.linear else torch.exp
    for part in parts:
        batch = part.batch
        if batch.weights is not None:
            batch.weights = batch.weights.detach().requires_grad_()
        out = module(batch)
        terms = [(part.pooled * change(out.pooled)).sum(dtype=torch.float64)] if part.pooled.shape[1] else []
        terms += [(c * change(out[name].values)).sum(dtype=torch.float64) for name, c in part.lists.items()]
        loss = torch.stack(terms).sum() * part.weight
        loss.backward()
        came = {"pooled": out.pooled.detach()} if part.pooled.shape[1] else {}
        came.update({name: out[name].values.detach() for name in part.lists})
        outputs.append(came)
        losses.append(loss.item() / world_of(module))
        if batch.weights is not None:
            weight_gradients.append(by_feature(batch, batch.weights.grad / world_of(module)))
    return outputs, losses, weight_gradients


def world_of(module):
    return module.placement.world if hasattr(module, "placement") else 1


def by_feature(batch, values):
    return {name: values[int(a) : int(b)] for name, a, b in zip(batch.features, batch.bounds, batch.bounds[1:])}


def outcome(module, results):
    shards = [
        (shard, {name: part.clone() for name, part in storage.state().items()})
        for shard, storage in module.shard_storages()
    ]
    mesh = getattr(module, "mesh", None)
    traffic = () if mesh is None else (mesh.traffic.inside, mesh.traffic.across, mesh.traffic.calls)
    return Outcome(*results, shards, module.step, traffic, module.memory(), module.rows())


def one_process(problem):
    module = problem.embeddings()
    return outcome(module, train(module, problem, share_out(problem)))


def many_processes(rank, world, runs):
    """What one rank does for every (problem, placement, shares) of a list."""
    from unequal.exchange.mesh import Mesh

    outcomes, meshes, parts = [], {}, {}
    for problem, placement, shares in runs:
        size = placement.ranks_per_node
        mesh = meshes[size] = meshes.get(size) or Mesh(ranks_per_node=size)
        key = id(problem), id(shares)
        if key not in parts:
            parts[key] = share_out(problem, shares, rank, world)
        module = uq.shard(problem.embeddings("meta"), placement, mesh)
        outcomes.append(outcome(module, train(module, problem, parts[key])))
    return outcomes


def placement_of(problem, world, ranks_per_node=None, kind=None, sums=None, **options):
    """All tables in one kind, or by name; `sums`: the names of the tables that are summed by their owners."""
    tables = {}
    for number, (name, table) in enumerate(problem.tables.items()):
        chosen = kind if isinstance(kind, str) else kind[name]
        pooled = all(f.pooling is not None for f in problem.features.values() if f.table.name == name)
        summed = pooled and (sums is not None and name in sums)
        tables[name] = place(chosen, table, world, ranks_per_node, first=number, sums=summed)
    return Placement(world, ranks_per_node or world, tables, **options)


def table_image(table, shards):
    """A table put together from its shards: ids in order, the rows of every part of its state, the rows that rare ids share
    (one per shard), and how often ids without a row were seen. Replicas must have the same bits."""
    columns = {}
    for shard, state in shards:
        if shard.table == table.name:
            columns.setdefault((shard.first, shard.last), {})
            known = columns[shard.first, shard.last].setdefault(shard.part, state)
            for name, part in known.items():
                assert torch.equal(part, state[name]), f"replicas of '{table.name}' differ in {name}"
    images = []
    for (first, _), parts in sorted(columns.items()):
        of = next(shard.parts for shard, _ in shards if shard.table == table.name and shard.first == first)
        assert sorted(parts) == list(range(of)), f"'{table.name}' has parts {sorted(parts)} of {of}"
        images.append(_join([_rows_of(table, state, part, of) for part, state in parts.items()]))
    assert sorted(columns)[0][0] == 0 and sorted(columns)[-1][1] == table.dim
    whole = dict(images[0])
    for image in images[1:]:
        assert torch.equal(image["ids"], whole["ids"]) and image["seen"] == whole["seen"]
        for name, part in image.items():
            if name not in ("ids", "seen") and part.dim() == 2:
                whole[name] = torch.cat([whole[name], part], 1)
            elif name not in ("ids", "seen"):
                assert torch.equal(part, whole[name]), (
                    f"'{table.name}', {name}: one number per row, the same in all columns"
                )
    return whole


def _rows_of(table, state, part, parts):
    values = {name: tensor for name, tensor in state.items() if name not in ("ids", "slots")}
    if table.rows is not None:
        count = Shard(table.name, 0, table.dim, part, parts, 0).rows(table.rows)
        assert all(tensor.shape[0] == count for tensor in values.values())
        return {"ids": torch.arange(count) * parts + part, **values, "seen": {}}
    ids, slots = state["ids"], state["slots"]
    live = slots >= 0
    image = {"ids": ids[live], **{name: tensor[slots[live]] for name, tensor in values.items()}}
    if table.admit_after > 1:
        image.update({f"rare {name}": tensor[:1] for name, tensor in values.items()})
    image["seen"] = dict(zip(ids[~live].tolist(), (-1 - slots[~live]).tolist()))
    return image


def _join(parts):
    ids = torch.cat([part["ids"] for part in parts])
    assert ids.unique().numel() == ids.numel(), "an id is in two parts"
    order = torch.argsort(ids)
    joined = {"ids": ids[order], "seen": {}}
    for name in parts[0]:
        if name not in ("ids", "seen"):
            rows = torch.cat([part[name] for part in parts])
            joined[name] = rows if name.startswith("rare ") else rows[order]
    for part in parts:
        assert not joined["seen"].keys() & part["seen"].keys()
        joined["seen"].update(part["seen"])
    return joined


def table_images(problem, outcomes):
    shards = [pair for outcome in outcomes for pair in outcome.shards]
    return {name: table_image(table, shards) for name, table in problem.tables.items()}


def differences(problem, expected, outcomes, rtol=1e-5, atol=1e-6):
    """What differs between one process and many: one line each, with the largest difference."""
    found = []

    def compare(what, ours, theirs):
        if ours.shape != theirs.shape:
            found.append(f"{what}: shape {tuple(ours.shape)}, expected {tuple(theirs.shape)}")
        elif not torch.allclose(ours, theirs, rtol=rtol, atol=atol):
            gap = (ours - theirs).abs()
            found.append(f"{what}: {gap.max():.3g} at most, {int((gap > atol + rtol * theirs.abs()).sum())} values")

    for step, outputs in enumerate(expected.outputs):
        for name, wanted in outputs.items():
            compare(f"step {step} output '{name}'", torch.cat([o.outputs[step][name] for o in outcomes]), wanted)
        loss = sum(outcome.losses[step] for outcome in outcomes)
        compare(f"step {step} loss", torch.tensor(loss), torch.tensor(expected.losses[step]))
    for step, gradients in enumerate(expected.weight_gradients):
        for name, wanted in gradients.items():
            ours = torch.cat([outcome.weight_gradients[step][name] for outcome in outcomes])
            compare(f"step {step} weight gradient '{name}'", ours, wanted)
    images = table_images(problem, outcomes)
    for name, image in table_images(problem, [expected]).items():
        ours = images[name]
        if not torch.equal(ours["ids"], image["ids"]) or ours["seen"] != image["seen"]:
            found.append(f"table '{name}': other ids have rows")
            continue
        for part, wanted in image.items():
            if part.startswith("rare "):
                wanted = wanted.expand_as(ours[part])
            if part not in ("ids", "seen"):
                compare(f"table '{name}', {part}", ours[part], wanted)
    found += [f"step {o.step}, expected {expected.step}" for o in outcomes if o.step != expected.step]
    return found


def same_bits(one, other):
    """Whether two runs' outcomes are the same to the bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, Outcome):
        return all(
            same_bits(getattr(one, name), getattr(other, name)) for name in ("outputs", "losses", "shards", "step")
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_bits(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same_bits(a, b) for a, b in zip(one, other))
    return one == other


def random_batch(features, seed, size, most=4, weights=False, silent=()):
    """Popular ids are frequent; features in `silent` have no ids at all."""
    generator = torch.Generator().manual_seed(seed)
    parts = {}
    for name, feature in features.items():
        rows = feature.table.rows or 60
        lengths = torch.randint(0, most + 1, (size,), generator=generator) * (name not in silent)
        count = int(lengths.sum())
        ids = (torch.rand(count, generator=generator) ** 2 * rows).long()
        if feature.table.rows is None:  # anything that 64 bits hold
            ids = ids * 3_141_592_653_589_793 - 2**62
        parts[name] = uq.Jagged(ids, lengths, torch.rand(count, generator=generator) + 0.5 if weights else None)
    return uq.Batch.from_jagged(parts)


def with_batches(problem, steps, size, **options):
    return replace(problem, batches=[random_batch(problem.features, 100 + k, size, **options) for k in range(steps)])
