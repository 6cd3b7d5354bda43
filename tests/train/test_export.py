"""What `unequal export` writes and its loader reads: the model's own lookups, bit for bit, from a file of live values."""

import json
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import unequal as uq
from unequal import exported
from unequal.data.strings import hash_string
from unequal.exported import ExportError, load, string_id
from unequal.train import checkpoint, export

from .test_width_checkpoints import Held, placed
from .worlds import TRUTHS, good, run_ranks

FEATURES = ("a", "b", "c")


def embeddings(width=None, dtype="fp32", rows=80, admit_after=1):
    own = {"dtype": dtype, "admit_after": admit_after}
    first, second = uq.Table("first", rows=rows, dim=8, **own), uq.Table("second/one", rows=rows, dim=12, **own)
    features = {
        "a": uq.Feature(first, pooling="mean"),
        "b": uq.Feature(second, pooling=None),
        "c": uq.Feature(first, pooling="sum"),
    }
    return uq.Embeddings(features, optimizer=uq.RowWiseAdagrad(lr=0.1), width=width)


def batches(count, seed=0, size=24, rows=80, stretch=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        lengths = torch.randint(0, 5, (3 * size,), generator=generator)
        ids = (torch.rand(int(lengths.sum()), generator=generator) ** 3 * rows).long() * stretch
        yield uq.Batch(FEATURES, ids, lengths)


def train(module, data):
    generator = torch.Generator().manual_seed(1)
    for batch in data:
        out = module(batch)
        parts = [out.pooled, out["b"].values]
        sum(((part - torch.randn(part.shape[1], generator=generator)) ** 2).sum() for part in parts).backward()
    return module


def described(module):
    features = module.features.items()
    return {"features": {name: {"table": f.table.name, "pooling": f.pooling} for name, f in features}}


def write(module, folder, **dense):
    saved = checkpoint.open(checkpoint.save(folder, 3, dense, {}, embeddings=module))
    file = folder / "model.safetensors"
    return file, export.write(saved, file, described(module) | {"name": "clicks"})


def assert_reads_the_same(model, module, batch):
    module.eval()
    out = module(batch)
    for name, feature in model.features.items():
        ids, table = batch[name], model.tables[feature.table]
        if feature.pooling is None:
            assert torch.equal(table.lookup(ids.values), out[name].values)
        elif feature.pooling == "sum":
            assert torch.equal(table.pooled(ids.values, ids.offsets, "sum"), out[name])
        else:
            torch.testing.assert_close(table.pooled(ids.values, ids.offsets, feature.pooling), out[name])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    policy=st.sampled_from(["water-filling", "fiited", "adaembed", None]),
    dtype=st.sampled_from(["fp32", "fp16", "bf16"]),
    unbounded=st.booleans(),
    stretch=st.sampled_from([1, 2**33 + 7]),
    steps=st.integers(0, 12),
    limits=st.sampled_from([(64 << 20, 1 << 20), (0, 24)]),
)
def test_lookups_are_the_models_own(tmp_path_factory, policy, dtype, unbounded, stretch, steps, limits):
    width = None if policy is None else uq.Width(budget="40 KB" if unbounded else "30%", policy=policy, every=4)
    admit_after = 2 if unbounded and policy is None else 1
    module = embeddings(width, dtype, None if unbounded else 80, admit_after)
    known = batches(steps, stretch=stretch if unbounded else 1)
    train(module, known)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "SMALL", limits[0])
        patch.setattr(export, "AT_ONCE", limits[1])
        file, report = write(module, tmp_path_factory.mktemp("out"), bias=torch.arange(3.0))
        patch.setattr(exported, "AT_ONCE", 100)
        model = load(file)
        for batch in batches(2, seed=7, rows=400 if unbounded else 80, stretch=stretch if unbounded else 1):
            assert_reads_the_same(model, module, batch)
    assert torch.equal(model.dense["bias"], torch.arange(3.0))
    assert model.description == {"format": 1, "step": 3, "name": "clicks"}
    assert {name: table.rows for name, table in report.tables.items()} == {
        name: rows - (admit_after > 1) for name, rows in module.rows().items()
    }
    assert report.bytes == file.stat().st_size
    assert [path.name for path in file.parent.iterdir() if path.name.startswith(".")] == []


def test_rows_that_are_all_equally_wide(tmp_path):
    module = train(embeddings(uq.Width(budget="1500 b")), batches(5))
    assert module.memory()["directory"] == 0
    file, report = write(module, tmp_path)
    assert all(table.rows == 80 for table in report.tables.values())
    for batch in batches(2, seed=7, rows=80):
        assert_reads_the_same(load(file), module, batch)


@pytest.mark.parametrize("kind", ["row_wise", "column_wise", "data_parallel", "column_row_wise"])
def test_tables_of_many_ranks(saved_in_every_kind, kind, tmp_path):
    """However rows and columns were spread: whole tables, with the row that rare ids share."""
    saved = checkpoint.open(saved_in_every_kind[kind])
    export.write(saved, tmp_path / "m.safetensors", {"features": {}})
    model = load(tmp_path / "m.safetensors")
    assert torch.equal(model.dense["head.bias"], torch.arange(3.0))
    for name, truth in TRUTHS.items():
        table, weight = model.tables[name], truth.values["weight"].float()
        assert (table.rows, table.dim, table.dtype) == (truth.ids.numel(), truth.table.dim, truth.table.dtype)
        assert torch.equal(table.lookup(truth.ids), weight[: truth.ids.numel()])
        assert table.has(truth.ids).all() and not table.has(torch.tensor([2**62 + 5])).any()
        rare = weight[-1] if truth.shares_rare else torch.zeros(truth.table.dim)
        assert torch.equal(table.lookup(torch.tensor([2**62 + 5]))[0], rare)


def test_a_narrow_table_of_many_ranks(tmp_path):
    """Rows dealt out over ranks come together by their ids."""
    module = train(embeddings(uq.Width(budget="30%", every=4)), batches(12))
    path = checkpoint.save(tmp_path, 1, {}, {}, embeddings=module)

    def go_on(mesh):
        held = Held(module.tables, module.optimizer, module.width, placed(module.tables, ("row_wise",), 3), mesh)
        checkpoint.load_embeddings(path, held)
        return checkpoint.save(tmp_path, 2, {}, {}, embeddings=held)

    (spread, *_) = good(run_ranks(3, go_on, 3))
    for name, source in (("one", path), ("three", spread)):
        export.write(checkpoint.open(source), tmp_path / f"{name}.safetensors", described(module))
    one, three = load(tmp_path / "one.safetensors"), load(tmp_path / "three.safetensors")
    ids = torch.arange(-5, 90)
    for name, table in one.tables.items():
        assert torch.equal(table.lookup(ids), three.tables[name].lookup(ids))
        assert torch.equal(table.widths(ids), three.tables[name].widths(ids))


def test_shapes_widths_and_weights(tmp_path):
    module = train(embeddings(uq.Width(budget="20%", every=4)), batches(12))
    file, _ = write(module, tmp_path)
    table = load(file).tables["first"]
    state = module._storages["first"].state()
    assert torch.equal(table.widths(state["ids"]), state["widths"]) and table.values == int(state["widths"].sum())
    assert not table.widths(torch.tensor([1000, -1])).any() and not table.lookup(torch.tensor([1000, -1])).any()
    ids = torch.arange(6).view(2, 3)
    assert table.lookup(ids).shape == (2, 3, 8) and table.has(ids).shape == (2, 3)
    assert torch.equal(table.lookup(ids.int()), table.lookup(ids))
    rows, weights = table.lookup(ids.view(-1)), torch.rand(6)
    offsets = torch.tensor([0, 2, 2, 6])
    bags = [rows[:2], rows[2:2], rows[2:]]
    torch.testing.assert_close(table.pooled(ids.view(-1), offsets), torch.stack([bag.sum(0) for bag in bags]))
    scaled = [rows[:2] * weights[:2, None], rows[2:2], rows[2:] * weights[2:, None]]
    expected = torch.stack([part.sum(0) / max(1, len(part)) for part in scaled])
    torch.testing.assert_close(table.pooled(ids.view(-1), offsets, "mean", weights), expected)
    assert table.pooled(ids[:0].view(-1), torch.tensor([0])).shape == (0, 8)
    assert table.pooled(ids[:0].view(-1), torch.tensor([0, 0])).tolist() == [[0.0] * 8]
    for wrong in ([0, 7], [1, 6], [0, 4, 2, 6], []):
        with pytest.raises(ExportError, match="offsets that rise from 0 to the number of ids, 6"):
            table.pooled(ids.view(-1), torch.tensor(wrong, dtype=torch.int64))
    with pytest.raises(ExportError, match="'sum' or 'mean', got 'max'"):
        table.pooled(ids.view(-1), offsets, "max")
    with pytest.raises(ExportError, match=r"integer type, got torch.float32"):
        table.lookup(torch.rand(3))


@pytest.mark.parametrize("unbounded", [False, True])
def test_the_file_is_as_large_as_what_lives(tmp_path, unbounded):
    """Values, and of every row its id and a byte; nothing else grows with the table."""
    table = uq.Table("t", rows=None if unbounded else 5000, dim=16)
    width = uq.Width(budget="90 KB" if unbounded else "10%", every=4)
    module = uq.Embeddings({"a": uq.Feature(table)}, width=width)
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        ids = (torch.rand(800, generator=generator) ** 2 * 5000).long() * (2**35 if unbounded else 1)
        module(uq.Batch(("a",), ids, torch.full((400,), 2))).pooled.square().sum().backward()
    file, report = write(module, tmp_path)
    rows, values = module.rows()["t"], module._storages["t"].values
    assert rows > 300 and report.tables["t"].values == values
    beside = file.stat().st_size - values * 4
    assert beside <= rows * (9 if unbounded else 5) + 1600


def test_needs_torch_alone(tmp_path):
    """The loader as a file of its own, where numpy and this package cannot be imported."""
    module = train(embeddings(uq.Width(budget="30%", policy="fiited", every=4)), batches(8))
    file, _ = write(module, tmp_path)
    (tmp_path / "load.py").write_bytes(Path(exported.__file__).read_bytes())
    program = """
import sys
sys.modules["numpy"] = sys.modules["unequal"] = None
import torch
from load import load
table = load("model.safetensors").tables["first"]
rows = table.lookup(torch.arange(80))
print([value.hex() for value in rows.double().flatten().tolist()])
print(table.pooled(torch.arange(4), torch.tensor([0, 3, 4]), "mean").shape)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    rows, shape = done.stdout.strip().splitlines()
    expected = load(file).tables["first"].lookup(torch.arange(80))
    assert rows == str([value.hex() for value in expected.double().flatten().tolist()])
    assert shape == "torch.Size([2, 8])"


def test_every_flipped_byte_and_every_cut_is_noticed(tmp_path):
    module = train(embeddings(uq.Width(budget="5%", every=4, chunk=4)), batches(3))
    file, _ = write(module, tmp_path, bias=torch.ones(2))
    content, expected = file.read_bytes(), load(file)
    broken = tmp_path / "broken.safetensors"
    generator = torch.Generator().manual_seed(0)
    for place in torch.randint(len(content), (400,), generator=generator).tolist() + list(range(40)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 7
        broken.write_bytes(flipped)
        try:
            found = load(broken)
        except ExportError as error:
            assert str(broken) in str(error) and "\n" not in str(error)
            continue
        # A byte of the header that says nothing: the format is padded, and other readers have a field of their own.
        assert found.description == expected.description
        for name, table in found.tables.items():
            assert torch.equal(table.lookup(torch.arange(80)), expected.tables[name].lookup(torch.arange(80)))
    for length in (0, 5, 8, 100, len(content) // 2, len(content) - 1):
        broken.write_bytes(content[:length])
        with pytest.raises(ExportError, match=r"bytes|header"):
            load(broken)


def test_other_files_say_what_they_are(tmp_path):
    with pytest.raises(ExportError, match=r"cannot be read \(No such file.*name what `unequal export` wrote"):
        load(tmp_path / "missing.safetensors")
    module = embeddings()
    path = checkpoint.save(tmp_path, 1, {}, {}, embeddings=module)
    with pytest.raises(ExportError, match="expected a file of the kind 'unequal export', got None"):
        load(path / "tensors-00000.safetensors")
    (tmp_path / "text.safetensors").write_text("{} " * 100)
    with pytest.raises(ExportError, match=r"no whole header|cannot be understood|no header"):
        load(tmp_path / "text.safetensors")


def test_another_version_is_refused(tmp_path):
    file, _ = write(embeddings(), tmp_path)
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    text = header["__metadata__"]["description"].replace('"format": 1', '"format": 2')
    header["__metadata__"] |= {"description": text, "checksum": f"{zlib.crc32(text.encode()):08x}"}
    changed = json.dumps(header).encode()
    file.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + length :])
    with pytest.raises(ExportError, match="expected format 1, got 2; load it with the loader"):
        load(file)


@pytest.mark.parametrize("text", ["", "a", "Zürich", "a longer one, with spaces"])
def test_strings_have_the_ids_that_the_reader_gives_them(text):
    assert string_id(text) == hash_string(text)
