"""Tables on a GPU are written from there and read to there, piece by piece, and the CPU can take over."""

import torch

import unequal as uq
from unequal import tensorfile
from unequal.kernels import backend
from unequal.optim import Adam
from unequal.plan.placement import Shard
from unequal.storage import make_shard
from unequal.tables import Feature, Table
from unequal.train import checkpoint, resharding

TABLES = [Table("dense", 300, dim=8), Table("hashed", dim=8, dtype="fp16"), Table("counted", dim=4, admit_after=2)]


def trained(device, steps=4):
    embeddings = uq.Embeddings({t.name: Feature(t) for t in TABLES}, optimizer=Adam(), seed=1, device=device)
    for step in range(steps):
        ids = torch.randint(0, 300, (200,), generator=torch.Generator().manual_seed(step)).to(device)
        lists = {t.name: uq.Jagged(ids, torch.full((20,), 10, device=device)) for t in TABLES}
        embeddings(lists).pooled.square().sum().backward()
    return embeddings


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(value.cpu(), two[name].cpu()) for name, value in one.items())


def test_from_the_gpu_to_the_gpu_and_to_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorfile, "LARGEST_COPY", 1000)
    monkeypatch.setattr(resharding, "CHUNK", 500)
    source = trained("cuda")
    path = checkpoint.save(tmp_path, 4, {}, {}, embeddings=source)
    for device in ("cuda", "cpu"):
        target = trained(device, 1)
        checkpoint.load_embeddings(path, target)
        assert same(source.state_dict(), target.state_dict()) and target.step == 4


class Third:
    """One rank of three, on the GPU."""

    def __init__(self, part):
        self.tables, self.optimizer, self.step = {t.name: t for t in TABLES}, Adam(), 0
        device = torch.device("cuda", 0)
        self.storages = []
        for table in TABLES:
            for first, last in ((0, 3), (3, table.dim)):
                cut = make_shard(table, first, last, part, 3, self.optimizer, 1, backend(device), device)
                self.storages.append((Shard(table.name, first, last, part, 3, part), cut))

    def shard_storages(self):
        return self.storages


def test_shards_on_the_gpu(tmp_path):
    source = trained("cuda")
    whole = checkpoint.open(checkpoint.save(tmp_path, 4, {}, {}, embeddings=source))
    for part in range(3):
        third = Third(part)
        checkpoint.load_embeddings(whole.path, third)
        assert third.step == 4
        for shard, storage in third.shard_storages():
            table = next(t for t in TABLES if t.name == shard.table)
            ids = torch.arange(part, 300, 3) if table.rows else storage.directory.entries()[0].cpu()
            ids = ids[whole.has(shard.table, ids)]
            slots = storage.locate(ids.cuda(), False).cpu()
            for name, values in whole.rows(shard.table, ids).items():
                got = storage.state()[name].cpu()[slots]
                assert torch.equal(got, values if values.dim() == 1 else values[:, shard.first : shard.last])
