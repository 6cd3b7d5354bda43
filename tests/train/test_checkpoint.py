import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unequal import tensorfile
from unequal.errors import CheckpointError
from unequal.train import checkpoint, packing


def model_state(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "embeddings.item.weight": torch.randn(50, 4, generator=generator),
        "embeddings.item.half": torch.randn(5, 4, generator=generator).bfloat16(),
        "embeddings.step": torch.tensor(12),
        "head.bias": torch.randn(3, generator=generator),
    }


def other_state():
    return {
        "reader": {"epoch": 1, "row": 12345678901234567890, "seed": 7},
        "best": 0.1 + 0.2,
        "worst": float("-inf"),
        "nothing": None,
        "flags": [True, False],
        "pair": (1, "two", (3.5,)),
        "by number": {0: {"step": torch.tensor(3.0)}, 1: {}},
        "bytes": b"\x00\xff",
        "$strange": {"$tensor": "not one"},
        "moments": [torch.randn(2, 2), torch.arange(3)],
    }


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return type(b) is dict and list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_round_trip_is_exact(tmp_path):
    state, other = model_state(), other_state()
    path = checkpoint.save(tmp_path / "run" / "checkpoints", 1234, state, other)
    assert path == tmp_path / "run" / "checkpoints" / "step-00001234"
    assert names(path) == ["state.json", "tensors-00000.safetensors"] and names(path.parent) == [path.name]
    got = checkpoint.load(path)
    assert got.step == 1234 and got.path == path
    assert equal(got.model_state, state) and equal(got.other, other)
    checkpoint.verify(path)


JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.sampled_from(["$tensor", "$tuple", "$pairs"]), inner)
        | st.dictionaries(st.integers(), inner)
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(value=JSON_LIKE)
def test_packing_is_exact(value):
    packed, tensors = packing.pack(value)
    text = json.dumps(packed, allow_nan=False)
    assert not tensors and equal(packing.unpack(json.loads(text), tensors), value)


def test_tensors_whose_ways_look_alike_are_kept_apart():
    value = {"a/b": torch.tensor(1), "a": {"b": torch.tensor(2)}}
    packed, tensors = packing.pack(value)
    assert len(tensors) == 2 and equal(packing.unpack(packed, tensors), value)


def test_what_json_cannot_hold_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"'other/reader/file': .* got PosixPath"):
        checkpoint.save(tmp_path, 1, {}, {"reader": {"file": Path("x")}})
    with pytest.raises(CheckpointError, match="model state 'a': expected a tensor, got int"):
        checkpoint.save(tmp_path, 1, {"a": 3}, {})
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adam(p, lr=0.01),
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
        lambda p: torch.optim.Adam([{"params": list(p)[:1], "lr": 0.5}, {"params": list(p)[1:]}], lr=0.01),
    ],
)
def test_a_dense_optimizer_goes_on_bitwise(tmp_path, make):
    def steps(model, optimizer, count, seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(count):
            optimizer.zero_grad()
            model(torch.randn(8, 3, generator=generator)).square().sum().backward()
            optimizer.step()

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = make(list(model.parameters()))
    steps(model, optimizer, 3, 1)
    tensors, state = checkpoint.flatten_optimizer(optimizer)
    json.dumps(state, allow_nan=False)
    path = checkpoint.save(tmp_path, 3, model.state_dict(), {"optimizer": optimizer.state_dict()})
    steps(model, optimizer, 3, 2)

    saved = checkpoint.load(path)
    resumed = torch.nn.Linear(3, 2)
    resumed.load_state_dict(saved.model_state)
    other = make(list(resumed.parameters()))
    other.load_state_dict(saved.other["optimizer"])
    steps(resumed, other, 3, 2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters()))
    assert equal(optimizer.state_dict(), other.state_dict())

    third = make([torch.nn.Parameter(p.detach().clone()) for p in model.parameters()])
    checkpoint.restore_optimizer(third, tensors, json.loads(json.dumps(state)))
    assert third.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


def test_an_optimizer_of_another_model_is_refused():
    tensors, state = checkpoint.flatten_optimizer(torch.optim.Adam(torch.nn.Linear(2, 2).parameters()))
    with pytest.raises(CheckpointError, match=r"has \[2\] parameters by group, the model's has \[1\]"):
        checkpoint.restore_optimizer(torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))]), tensors, state)


def test_generators_go_on_as_if_nothing_had_happened(tmp_path):
    random.seed(5)
    torch.manual_seed(5)
    random.gauss(0, 1)
    path = checkpoint.save(tmp_path, 1, {}, {"random": checkpoint.random_state()})
    expected = [random.gauss(0, 1), random.random(), torch.rand(3)]
    random.seed(6)
    torch.manual_seed(6)
    checkpoint.set_random_state(checkpoint.load(path).other["random"])
    assert equal([random.gauss(0, 1), random.random(), torch.rand(3)], expected)


def test_the_newest_is_found_and_old_ones_are_pruned(tmp_path):
    folder = tmp_path / "checkpoints"
    assert checkpoint.latest(folder) is None and checkpoint.list_steps(folder) == []
    for step in (5, 100_000_000, 20, 3000):
        checkpoint.save(folder, step, {}, {})
    (folder / "notes.txt").write_text("mine")
    assert checkpoint.list_steps(folder) == [5, 20, 3000, 100_000_000]
    assert checkpoint.latest(folder) == checkpoint.path_of(folder, 100_000_000)
    removed = checkpoint.prune(folder, 2, protect=[5])
    assert removed == [checkpoint.path_of(folder, 20)]
    assert names(folder) == ["notes.txt", "step-00000005", "step-00003000", "step-100000000"]
    assert checkpoint.prune(folder, 9) == []
    with pytest.raises(CheckpointError, match="keep 1 checkpoint or more, got 0"):
        checkpoint.prune(folder, 0)


def test_saving_a_step_again_replaces_it(tmp_path):
    checkpoint.save(tmp_path, 7, {}, {"try": 1})
    path = checkpoint.save(tmp_path, 7, {}, {"try": 2})
    assert checkpoint.load(path).other == {"try": 2} and names(tmp_path) == [path.name]


def test_a_replacement_cut_off_between_its_renames_loses_nothing(tmp_path):
    path = checkpoint.save(tmp_path, 7, {}, {"try": 1})
    path.rename(tmp_path / ".replaced-step-00000007")
    assert checkpoint.load(checkpoint.latest(tmp_path)).other == {"try": 1}
    checkpoint.save(tmp_path, 8, {}, {})
    assert names(tmp_path) == ["step-00000007", "step-00000008"]
    assert checkpoint.load(path).other == {"try": 1}


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("error", [Interrupted(), KeyboardInterrupt(), RuntimeError("bug")])
@pytest.mark.parametrize("place", ["write", "fsync", "rename"])
def test_a_crash_in_the_middle_leaves_the_last_one(tmp_path, monkeypatch, error, place):
    good = checkpoint.save(tmp_path, 1, model_state(), {"n": 1})

    def crash(*arguments, **options):
        raise error

    with monkeypatch.context() as patch:
        if place == "rename":
            patch.setattr(Path, "rename", crash)
        else:
            patch.setattr(os, place, crash)
        with pytest.raises(type(error)):
            checkpoint.save(tmp_path, 2, model_state(1), {"n": 2})
    assert names(tmp_path) == [good.name]
    assert checkpoint.load(good).other == {"n": 1}
    assert checkpoint.load(checkpoint.save(tmp_path, 2, model_state(1), {"n": 2})).other == {"n": 2}


KILLED = """
import os, sys, signal, pathlib, torch
from unequal.train import checkpoint
real, calls = os.write, 0
def write(file, data):
    global calls
    calls += 1
    if calls == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(file, data)
folder = pathlib.Path(sys.argv[1])
checkpoint.save(folder, 1, {"a": torch.arange(9)}, {})
os.write = write
checkpoint.save(folder, 2, {"a": torch.arange(1_000_000)}, {})
"""


def test_what_a_killed_process_left_is_ignored_and_cleaned(tmp_path):
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, timeout=120)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert names(tmp_path) == [".partial-step-00000002", "step-00000001"]
    assert checkpoint.latest(tmp_path) == checkpoint.path_of(tmp_path, 1)
    assert torch.equal(checkpoint.load(checkpoint.path_of(tmp_path, 1)).model_state["a"], torch.arange(9))
    checkpoint.save(tmp_path, 3, {}, {})
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


@pytest.mark.parametrize("place", ["write", "fsync"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk(tmp_path, monkeypatch, place, code):
    good = checkpoint.save(tmp_path, 1, model_state(), {})
    real, calls = getattr(os, place), 0

    def refuse(*arguments):
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(code, os.strerror(code))
        return real(*arguments)

    monkeypatch.setattr(os, place, refuse)
    with pytest.raises(CheckpointError, match=r"needs [\d,]+ bytes, [\d,]+ are free .*untouched: make room") as caught:
        checkpoint.save(tmp_path, 2, model_state(), {})
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    assert names(tmp_path) == [good.name]
    checkpoint.load(good)


def test_too_little_room_is_noticed_before_anything_is_written(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    monkeypatch.setattr(tensorfile, "write", lambda *arguments: pytest.fail("wrote to a full disk"))
    with pytest.raises(CheckpointError, match=r"needs [\d,]+ bytes, 100 are free \(No space left"):
        checkpoint.save(tmp_path, 1, model_state(), {})
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/checkpoints: cannot write .*choose another run\.folder"):
        checkpoint.save(tmp_path / "file" / "checkpoints", 1, {}, {})

    def refuse(*arguments, **options):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(CheckpointError, match=r"new: cannot write .*Permission denied.*make the folder writable"):
        checkpoint.save(tmp_path / "new", 1, {}, {})


def damage(path, how):
    content = bytearray(path.read_bytes())
    if how == "flip":
        content[len(content) * 2 // 3] ^= 4
    elif how == "cut":
        del content[-3:]
    elif how == "empty":
        content.clear()
    path.write_bytes(content)


@pytest.mark.parametrize("file", ["tensors-00000.safetensors", "state.json"])
@pytest.mark.parametrize("how", ["flip", "cut", "empty", "gone"])
def test_damage_is_noticed_and_the_way_back_is_named(tmp_path, file, how):
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, model_state(), {"n": step, "text": "some words to damage"})
    damage(tmp_path / "step-00000002" / "tensors-00000.safetensors", "flip")
    target = tmp_path / "step-00000003" / file
    target.unlink() if how == "gone" else damage(target, how)
    assert checkpoint.latest(tmp_path) == target.parent
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(target.parent)
    message = str(caught.value)
    assert str(target) in message and "\n" not in message
    assert f"{tmp_path / 'step-00000001'}: remove {target.parent}" in message
    with pytest.raises(CheckpointError):
        checkpoint.verify(target.parent)


def test_damage_without_a_way_back(tmp_path):
    path = checkpoint.save(tmp_path, 3, model_state(), {})
    damage(path / "tensors-00000.safetensors", "flip")
    with pytest.raises(CheckpointError, match="no whole checkpoint before it"):
        checkpoint.load(path)


def test_a_newer_format_is_refused(tmp_path):
    path = checkpoint.save(tmp_path, 3, {}, {})
    index = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(index | {"format": 4}))
    with pytest.raises(CheckpointError, match="expected checkpoint format 1 to 3, got 4"):
        checkpoint.load(path)


def test_no_checkpoint_there(tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere/state\.json: cannot be read"):
        checkpoint.load(tmp_path / "nowhere")
