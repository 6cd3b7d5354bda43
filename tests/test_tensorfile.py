import json
import os
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from unequal import tensorfile
from unequal.errors import CheckpointError


def example():
    torch.manual_seed(0)
    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
    whole = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
    return {
        "bits": torch.rand(7) < 0.5,
        **{str(kind): torch.randn(3, 5).to(kind) for kind in kinds},
        **{str(kind): torch.randint(100, (4,)).to(kind) for kind in whole},
        "nothing": torch.empty(0, 3),
        "scalar": torch.tensor(-7, dtype=torch.int64),
        "turned": torch.randn(4, 6).t(),
        "strided": torch.randn(9)[::2],
        "ünïcode/名": torch.tensor([float("nan"), float("inf"), -0.0]),
    }


def same(a, b):
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and bytes(tensorfile._bytes_of(a.contiguous())) == bytes(tensorfile._bytes_of(b.contiguous()))
    )


def test_round_trip_is_exact(tmp_path):
    tensors, path = example(), tmp_path / "t.safetensors"
    checksums = tensorfile.write(path, tensors, {"who": "test"})
    assert checksums.values == (zlib.crc32(path.read_bytes()),)
    assert path.stat().st_size == checksums.bytes == tensorfile.size_of(tensors, {"who": "test"})
    got = tensorfile.read(path, checksums=checksums)
    assert list(got) == list(tensors)
    assert all(same(got[name], tensors[name]) for name in tensors)
    assert tensorfile.header(path).metadata == {"who": "test"}


def test_safetensors_reads_what_we_write(tmp_path):
    tensors, path = example(), tmp_path / "t.safetensors"
    tensorfile.write(path, tensors, {"who": "test"})
    got = load_file(path)
    assert set(got) == set(tensors) and all(same(got[name], tensors[name]) for name in tensors)


def test_we_read_what_safetensors_writes(tmp_path):
    tensors, path = {name: tensor.contiguous() for name, tensor in example().items()}, tmp_path / "t.safetensors"
    save_file(tensors, path, {"who": "test"})
    got = tensorfile.read(path)
    assert set(got) == set(tensors) and all(same(got[name], tensors[name]) for name in tensors)
    assert tensorfile.header(path).metadata == {"who": "test"}


def test_a_file_without_tensors(tmp_path):
    path = tmp_path / "t.safetensors"
    checksums = tensorfile.write(path, {})
    assert tensorfile.read(path, checksums=checksums) == {} and load_file(path) == {}


def test_some_tensors_alone(tmp_path):
    tensors, path = example(), tmp_path / "t.safetensors"
    checksums = tensorfile.write(path, tensors)
    for given_checksums in (None, checksums):
        got = tensorfile.read(path, ["turned", "scalar"], checksums=given_checksums)
        assert set(got) == {"turned", "scalar"} and same(got["turned"], tensors["turned"])
    with pytest.raises(CheckpointError, match=r"t\.safetensors: holds no tensor 'other'"):
        tensorfile.read(path, ["other"])


def test_everything_is_aligned(tmp_path):
    path = tmp_path / "t.safetensors"
    tensorfile.write(path, example())
    header = tensorfile.header(path)
    assert header.data % 8 == 0
    assert all(entry.start % entry.dtype.itemsize == 0 for entry in header.entries.values())


def test_large_tensors_go_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorfile, "PIECE", 64)
    monkeypatch.setattr(tensorfile, "BLOCK", 50)
    monkeypatch.setattr(tensorfile, "LARGEST_COPY", 256)
    tensors = {"plain": torch.randn(33, 7), "turned": torch.randn(7, 33).t(), "wide": torch.randn(300, 2).t()}
    path = tmp_path / "t.safetensors"
    checksums = tensorfile.write(path, tensors)
    content = path.read_bytes()
    assert checksums.values == tuple(zlib.crc32(content[first : first + 50]) for first in range(0, len(content), 50))
    assert tensorfile.Checksums.from_json(json.loads(json.dumps(checksums.to_json()))) == checksums
    got = tensorfile.read(path, checksums=checksums)
    assert all(torch.equal(got[name], tensors[name]) for name in tensors)


def test_parts_are_written_as_one_tensor(tmp_path):
    parts = [torch.randn(count, 3) for count in (5, 0, 2)]
    asked = []

    def give():
        for number, part in enumerate(parts):
            asked.append(number)
            yield part

    tensors = {"joined": tensorfile.Streamed(torch.float32, (7, 3), give), "ids": torch.arange(4)}
    path = tmp_path / "t.safetensors"
    size = tensorfile.size_of(tensors)
    assert not asked, "sizes are known before anything is made"
    assert tensorfile.write(path, tensors).bytes == size
    assert same(load_file(path)["joined"], torch.cat(parts)) and asked == [0, 1, 2]
    wrong = tensorfile.Streamed(torch.float32, (8, 3), lambda: parts)
    with pytest.raises(CheckpointError, match="tensor 'joined': expected 96 bytes, got 84"):
        tensorfile.write(path, {"joined": wrong})


@settings(max_examples=80, deadline=None)
@given(data=st.data(), block=st.sampled_from([16, 64, 1000]), verified=st.booleans())
def test_rows_are_read_alone(tmp_path_factory, data, block, verified):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensorfile, "BLOCK", block)
        patch.setattr(tensorfile, "LARGEST_COPY", 100)
        tensors = {"a": torch.randn(40, 3), "flat": torch.arange(90), "half": torch.randn(50, 2).half()}
        path = tmp_path_factory.mktemp("rows") / "t.safetensors"
        checksums = tensorfile.write(path, tensors)
        with tensorfile.TensorFile(path, checksums if verified else None) as file:
            for name, tensor in tensors.items():
                first, last = sorted(data.draw(st.tuples(*[st.integers(0, len(tensor))] * 2)))
                assert same(file.read(name, first, last), tensor[first:last])
                chosen = torch.tensor(sorted(data.draw(st.sets(st.integers(0, len(tensor) - 1)))), dtype=torch.int64)
                assert same(file.gather(name, chosen), tensor[chosen])


def test_damage_is_noticed_where_it_is_read_and_nowhere_else(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorfile, "BLOCK", 256)
    tensors, path = {"a": torch.randn(1000, 4)}, tmp_path / "t.safetensors"
    checksums = tensorfile.write(path, tensors)
    content = bytearray(path.read_bytes())
    content[8000] ^= 1
    path.write_bytes(content)
    with tensorfile.TensorFile(path, checksums) as file:
        data = file.header.data
        damaged = (8000 - data) // 16
        assert torch.equal(file.read("a", 0, 100), tensors["a"][:100])
        assert torch.equal(file.gather("a", torch.tensor([3, 700, 999])), tensors["a"][[3, 700, 999]])
        for read in (lambda: file.read("a", damaged, damaged + 1), lambda: file.read("a"), file.verify):
            with pytest.raises(CheckpointError, match=r"t\.safetensors: the file has .* in bytes 7936 to 8192"):
                read()


def test_one_checksum_for_a_whole_file_still_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorfile, "PIECE", 256)
    tensors, path = {"a": torch.randn(1000, 4)}, tmp_path / "t.safetensors"
    tensorfile.write(path, tensors)
    content = bytearray(path.read_bytes())
    entry = {"bytes": len(content), "checksum": f"crc32:{zlib.crc32(content):08x}"}
    checksums = tensorfile.Checksums.from_json(entry)
    with tensorfile.TensorFile(path, checksums) as file:
        assert torch.equal(file.read("a", 5, 9), tensors["a"][5:9])
        file.verify()
    content[8000] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"t\.safetensors: the file has the checksum"):
        tensorfile.read(path, ["a"], checksums=checksums)


def test_short_writes_are_continued(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:13]))
    path = tmp_path / "t.safetensors"
    checksums = tensorfile.write(path, {"a": torch.arange(100)})
    assert torch.equal(tensorfile.read(path, checksums=checksums)["a"], torch.arange(100))


@settings(max_examples=60, deadline=None)
@given(share=st.floats(0, 0.999))
def test_every_truncation_is_noticed(tmp_path_factory, share):
    path = tmp_path_factory.mktemp("cut") / "t.safetensors"
    tensorfile.write(path, {"a": torch.randn(20), "b": torch.tensor(3)})
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(CheckpointError, match=r"t\.safetensors"):
        tensorfile.read(path)


@settings(max_examples=150, deadline=None)
@given(place=st.floats(0, 0.999), bit=st.integers(0, 7))
def test_every_flipped_bit_is_noticed(tmp_path_factory, place, bit):
    path = tmp_path_factory.mktemp("flip") / "t.safetensors"
    checksums = tensorfile.write(path, {"a": torch.randn(20), "b": torch.tensor(3)}, {"x": "y"})
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= 1 << bit
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"t\.safetensors"):
        tensorfile.read(path, checksums=checksums)


@pytest.mark.parametrize(
    "header",
    [
        "[]",
        "{",
        '{"a": {"dtype": "F32", "shape": [1]}}',
        '{"a": {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        '{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}',
        '{"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}, "a": {"dtype": "U8", "shape": [2], '
        '"data_offsets": [2, 4]}}',
    ],
)
def test_headers_that_make_no_sense(tmp_path, header):
    path = tmp_path / "t.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(4))
    with pytest.raises(CheckpointError, match=r"t\.safetensors: the file .*; it is damaged or incomplete"):
        tensorfile.read(path)


def test_a_missing_file(tmp_path):
    with pytest.raises(CheckpointError, match=r"t\.safetensors: cannot be read \(No such file"):
        tensorfile.read(tmp_path / "t.safetensors")


@pytest.mark.parametrize("tensor", [torch.zeros(2, dtype=torch.complex128), torch.eye(2).to_sparse()])
def test_what_the_format_cannot_hold_is_refused(tmp_path, tensor):
    with pytest.raises(CheckpointError, match="tensor 'x': expected a dense tensor"):
        tensorfile.write(tmp_path / "t", {"x": tensor})
    assert not (tmp_path / "t").exists()


def test_the_header_is_plain_json(tmp_path):
    path = tmp_path / "t.safetensors"
    tensorfile.write(path, {"a": torch.zeros(2, 3)})
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert json.loads(content[8 : 8 + length]) == {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
