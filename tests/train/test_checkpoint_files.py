"""What is in a checkpoint's files: the first format, looking in without the run, plain safetensors and JSON."""

import json
import shutil
import zlib

import pytest
import torch

import unequal as uq
from unequal import tensorfile
from unequal.errors import CheckpointError
from unequal.optim import SGD
from unequal.plan.placement import KINDS
from unequal.tables import Feature, Table
from unequal.train import checkpoint

from .worlds import (
    TRUTHS,
    assert_world,
    good,
    inspected,
    load_world,
    make_placement,
    run_ranks,
    save_world,
)


def save_in_format_1(folder, step, model_state, other):
    """What the first version wrote: one file with one checksum, tables among the model's state, and no list of them."""
    state, tensors = checkpoint.pack(other)
    tensors |= {f"model/{name}": tensor for name, tensor in model_state.items()}
    path = checkpoint.path_of(folder, step)
    path.mkdir(parents=True)
    tensorfile.write(path / "tensors.safetensors", tensors, {"format": "pt", "step": str(step)})
    content = (path / "tensors.safetensors").read_bytes()
    files = {"tensors.safetensors": {"bytes": len(content), "checksum": f"crc32:{zlib.crc32(content):08x}"}}
    index = {"format": 1, "step": step, "files": files, "state": state}
    compact = json.dumps(index, separators=(",", ":"), allow_nan=False)
    sealed = {"checksum": f"crc32:{zlib.crc32(compact.encode()):08x}"} | index
    (path / "state.json").write_text(json.dumps(sealed, indent=1) + "\n")
    return path


@pytest.fixture(scope="module")
def format_1(tmp_path_factory):
    embeddings = uq.Embeddings({name: Feature(truth.table) for name, truth in TRUTHS.items()}, optimizer=SGD())
    for shard, storage in embeddings.shard_storages():
        TRUTHS[shard.table].pour_into(shard, storage)
    embeddings.step = 77
    state = {f"embeddings.{name}": tensor for name, tensor in embeddings.state_dict().items()}
    other = {"random": {"torch": torch.arange(4)}, "reader": {"epoch": 1}}
    return save_in_format_1(tmp_path_factory.mktemp("old"), 12, state | {"head.bias": torch.ones(2)}, other)


def test_format_1_still_loads(format_1):
    saved = checkpoint.load(format_1)
    embeddings = uq.Embeddings({name: Feature(truth.table) for name, truth in TRUTHS.items()}, optimizer=SGD())
    model = torch.nn.Module()
    model.embeddings, model.head = embeddings, torch.nn.Linear(1, 2)
    with torch.no_grad():
        state = saved.model_state | {"head.weight": model.head.weight.clone()}
    model.load_state_dict(state)
    for shard, storage in embeddings.shard_storages():
        TRUTHS[shard.table].assert_in(shard, storage)
    assert saved.step == 12 and saved.other["reader"] == {"epoch": 1}
    assert torch.equal(saved.own["random"]["torch"], torch.arange(4))
    checkpoint.verify(format_1)


@pytest.mark.parametrize("piece", [1 << 20, 512])
def test_format_1_loads_on_many_ranks(format_1, piece, monkeypatch):
    monkeypatch.setattr(tensorfile, "PIECE", piece)
    assert_world(format_1, TRUTHS, make_placement(TRUTHS, KINDS, 3))
    inspected(format_1, TRUTHS)
    embeddings = uq.Embeddings({name: Feature(truth.table) for name, truth in TRUTHS.items()}, optimizer=SGD())
    saved = checkpoint.load(format_1, embeddings=embeddings)
    assert list(saved.model_state) == ["head.bias"] and saved.world == 1


def test_format_1_with_a_damaged_byte(format_1, tmp_path):
    copy = tmp_path / format_1.name
    shutil.copytree(format_1, copy)
    content = bytearray((copy / "tensors.safetensors").read_bytes())
    content[-5] ^= 1
    (copy / "tensors.safetensors").write_bytes(content)
    for result in load_world(copy, TRUTHS, make_placement(TRUTHS, "row_wise", 2)):
        assert "tensors.safetensors" in str(result) and "is damaged" in str(result)


def test_format_1_of_other_tables(format_1):
    truths = {name: truth for name, truth in TRUTHS.items() if name != "one.row"}
    embeddings = uq.Embeddings({name: Feature(truth.table) for name, truth in truths.items()}, optimizer=SGD())
    with pytest.raises(CheckpointError, match=r"expected the tables .*, the saved ones are .*'one\.row'"):
        checkpoint.load_embeddings(format_1, embeddings)


def test_a_checkpoint_without_tables_says_so(tmp_path):
    path = checkpoint.save(tmp_path, 1, {"head.bias": torch.ones(2)}, {})
    embeddings = uq.Embeddings({"f": Feature(Table("t", 10, dim=4))})
    with pytest.raises(CheckpointError, match=r"expected the tables \['t'\], the saved ones are \[\]"):
        checkpoint.load_embeddings(path, embeddings)
    assert checkpoint.open(path).tables == {}


def test_looking_into_a_checkpoint(saved_in_every_kind):
    for path in saved_in_every_kind.values():
        inspected(path, TRUTHS)
        saved = checkpoint.open(str(path))
        assert (saved.step, saved.world, saved.tables_step, saved.other) == (1, 4, 77, {"n": 1})
        assert saved.tables["counted"].admit_after == 3 and saved.tables["dense"].optimizer == "RowWiseAdagrad"
        assert "SavedCheckpoint" in repr(saved) and "hashed" in repr(saved)
        with pytest.raises(CheckpointError, match=r"table 'hashed' has no row for id 3; ask with has\(\)"):
            saved.rows("hashed", [int(TRUTHS["hashed"].ids[5]), 3])
        with pytest.raises(CheckpointError, match="table 'dense' has no row for id 23"):
            saved.rows("dense", [0, 23])
        with pytest.raises(CheckpointError, match="has no table 'dens'; did you mean 'dense'"):
            saved.rows("dens", [0])
        assert saved.has("dense", [-1, 0, 22, 23]).tolist() == [False, True, True, False]
        assert saved.rows("dense", [])["weight"].shape == (0, 9)


def test_a_few_rows_do_not_read_the_whole_file(tmp_path, monkeypatch):
    embeddings = uq.Embeddings({"f": Feature(Table("t", 50_000, dim=16))}, optimizer=SGD())
    path = checkpoint.save(tmp_path, 1, {}, {}, embeddings=embeddings)
    read = 0
    whole = tensorfile.TensorFile._read_into

    def counted(self, start, out):
        nonlocal read
        read += len(out)
        whole(self, start, out)

    monkeypatch.setattr(tensorfile.TensorFile, "_read_into", counted)
    got = checkpoint.open(path).rows("t", [40_000, 3, 40_001])
    assert torch.equal(got["weight"], embeddings.state_dict()["t.weight"][[40_000, 3, 40_001]])
    assert read <= 3 * tensorfile.BLOCK


def test_ranks_agree_on_the_newest_and_one_prunes(tmp_path):
    placement = make_placement(TRUTHS, "row_wise", 3)
    for step in (1, 2, 3):
        good(save_world(tmp_path, step, TRUTHS, placement))
    assert good(run_ranks(3, lambda mesh: checkpoint.latest(tmp_path, mesh=mesh))) == [tmp_path / "step-00000003"] * 3
    removed = good(run_ranks(3, lambda mesh: checkpoint.prune(tmp_path, 1, mesh=mesh)))
    assert removed == [[tmp_path / "step-00000001", tmp_path / "step-00000002"]] * 3
    assert checkpoint.list_steps(tmp_path) == [3]


def test_the_files_are_plain_safetensors_and_json(small):
    from safetensors.torch import load_file

    path, truths, _ = small
    index = json.loads((path / "state.json").read_text())
    assert (index["format"], index["step"], index["world"], index["tables_step"]) == (2, 3, 3, 77)
    tensors = {}
    for name, entry in index["files"].items():
        content = (path / name).read_bytes()
        assert len(content) == entry["bytes"] and entry["checksums"] == f"{zlib.crc32(content):08x}"
        tensors |= load_file(path / name)
    dense = torch.empty(5, 4)
    for shard in index["tables"]["dense"]["shards"]:
        first, last = shard["columns"]
        dense[shard["part"] :: shard["parts"], first:last] = tensors[shard["tensors"]["weight"]]
    assert torch.equal(dense, truths["dense"].values["weight"])


def test_the_dense_state_is_the_models_without_its_tables():
    model = torch.nn.Module()
    model.embeddings = uq.Embeddings({"f": Feature(Table("t", dim=4))})
    model.head = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    model.head.register_buffer("scratch", torch.zeros(1), persistent=False)
    state = checkpoint.dense_state(model, model.embeddings)
    whole = model.state_dict()
    assert list(state) == [name for name in whole if not name.startswith("embeddings.")]
    assert all(torch.equal(value, whole[name]) for name, value in state.items())
    saved = {name: value.clone() + 1 for name, value in state.items()}
    checkpoint.load_dense_state(model, model.embeddings, saved)
    assert all(
        torch.equal(value, saved[name]) for name, value in checkpoint.dense_state(model, model.embeddings).items()
    )
    del saved["head.0.bias"]
    with pytest.raises(CheckpointError, match=r"another model .*'head\.0\.bias' \(nothing saved, \[2\] expected\)"):
        checkpoint.load_dense_state(model, model.embeddings, saved)
