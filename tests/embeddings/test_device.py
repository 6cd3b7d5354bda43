"""The module with the Triton kernels: on a GPU, or on the CPU in Triton's interpreter."""

import copy
import importlib
import pickle

import pytest
import torch

import unequal as uq
from unequal.embeddings import device as device_module
from unequal.embeddings import module as embeddings_module
from unequal.errors import DataError, UserError

layout_module = importlib.import_module("unequal.kernels.triton.layout")
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")


@pytest.fixture(autouse=True)
def triton_kernels(monkeypatch):
    monkeypatch.setenv("UNEQUAL_KERNELS", "triton")


def features(dtype=torch.float32, rows=50):
    item = uq.Table("item", rows, dim=8, dtype=dtype)
    word = uq.Table("word", None, dim=4, admit_after=2)
    user = uq.Table("user", None, dim=16)
    return {
        "item": uq.Feature(item),
        "words": uq.Feature(word, "mean"),
        "history": uq.Feature(item, None),
        "user": uq.Feature(user),
    }


def batch_of(seed, size=6, rows=50, weights=False):
    generator = torch.Generator().manual_seed(seed)
    parts = {}
    for name, most in (("unused", rows), ("item", rows), ("words", 2**60), ("history", rows), ("user", 20)):
        lengths = torch.randint(0, 5, (size,), generator=generator)
        ids = torch.randint(0, most, (int(lengths.sum()),), generator=generator) % (rows if most == rows else 12)
        own = torch.randint(1, 9, ids.shape, generator=generator) / 8 if weights else None
        parts[name] = uq.Jagged(ids, lengths, own)
    return uq.Batch.from_jagged(parts)


def train(module, batches, device):
    outputs = []
    for batch in batches:
        batch = batch.to(device)
        output = module(batch)
        history = output["history"]
        parts = [output.pooled, history.values]
        outputs.append([part.detach().cpu() for part in parts])
        gradients = [torch.arange(part.numel(), device=device).reshape(part.shape) % 7 / 16 - 0.2 for part in parts]
        torch.autograd.backward(parts, [g.to(p.dtype) for g, p in zip(gradients, parts)])
    return outputs


def make(device, **settings):
    return uq.Embeddings(features(settings.pop("dtype", torch.float32)), device=device, seed=3, **settings)


def on_cpu(monkeypatch, **settings):
    monkeypatch.setenv("UNEQUAL_KERNELS", "")
    module = make("cpu", **settings)
    monkeypatch.setenv("UNEQUAL_KERNELS", "triton")
    return module


@pytest.mark.parametrize("optimizer", [uq.RowWiseAdagrad(lr=0.1), uq.Adam(lr=0.1, weight_decay=0.1)])
@pytest.mark.parametrize("weights", [False, True])
def test_trains_as_on_the_cpu(monkeypatch, optimizer, weights):
    schedule = uq.Schedule(warmup_steps=3)
    expected = on_cpu(monkeypatch, optimizer=optimizer, schedule=schedule)
    module = make(DEVICE, optimizer=optimizer, schedule=schedule)
    batches = [batch_of(seed, weights=weights) for seed in range(4)]
    for got, wanted in zip(train(module, batches, DEVICE), train(expected, batches, "cpu")):
        for one, other in zip(got, wanted):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert module.step == expected.step == 4 and module.rows() == expected.rows()
    state = module.state_dict()
    for name, wanted in expected.state_dict().items():
        torch.testing.assert_close(state[name].cpu(), wanted, rtol=1e-4, atol=1e-5)
    module.eval(), expected.eval()
    fresh = batch_of(99)
    torch.testing.assert_close(module(fresh.to(DEVICE)).pooled.cpu(), expected(fresh).pooled, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_tables_and_outputs(monkeypatch, dtype):
    expected = on_cpu(monkeypatch, dtype=dtype, output_dtype=dtype)
    module = make(DEVICE, dtype=dtype, output_dtype=dtype)
    batches = [batch_of(seed) for seed in range(3)]
    for got, wanted in zip(train(module, batches, DEVICE), train(expected, batches, "cpu")):
        for one, other in zip(got, wanted):
            assert one.dtype == dtype
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)


def test_state_can_be_saved_and_loaded():
    module = make(DEVICE)
    train(module, [batch_of(0), batch_of(1)], DEVICE)
    other = make(DEVICE)
    other.load_state_dict(copy.deepcopy(module.state_dict()))
    assert other.step == 2
    train(module, [batch_of(2)], DEVICE), train(other, [batch_of(2)], DEVICE)
    wanted = module.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in other.state_dict().items())


def test_repeats_bitwise():
    states = []
    for _ in range(2):
        module = make(DEVICE, optimizer=uq.LAMB(lr=0.1))
        train(module, [batch_of(seed, weights=True) for seed in range(3)], DEVICE)
        states.append(module.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_a_wrong_id_is_noticed_and_changes_nothing():
    module = make(DEVICE)
    before = module.state_dict()["item.weight"].clone()
    wrong = uq.Batch.from_jagged(
        {name: uq.Jagged(torch.tensor([7**9 if name == "item" else 1]), torch.tensor([1])) for name in features()}
    )
    output = module(wrong.to(DEVICE))
    assert not output["item"].any()
    output["item"].sum().backward()
    assert torch.equal(module.state_dict()["item.weight"], before)
    with pytest.raises(DataError, match=r"'item'.*id 40353607 is not in \[0, 50\) of table 'item'"):
        module.check()
    module.check()
    module(wrong.to(DEVICE))
    with pytest.raises(DataError, match="40353607"):
        for _ in range(3 * device_module.CHECK_EVERY):
            module(batch_of(0).to(DEVICE))
            if ON_GPU:
                torch.cuda.synchronize()


def test_out_of_memory_says_what_to_do(monkeypatch):
    def too_much(*arguments):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(embeddings_module, "make_storage", too_much)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * 10**9, 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    tables = {"a": uq.Table("small", 1000, dim=8), "b": uq.Table("big", 10**9, dim=64)}
    with pytest.raises(UserError, match="out of memory") as caught:
        uq.Embeddings({name: uq.Feature(table) for name, table in tables.items()}, device=DEVICE)
    message = str(caught.value)
    assert (
        "260.00 GB" in message
        and "3.00 GB of 80.00 GB" in message
        and message.index("'big'") < message.index("'small'")
    )
    assert "float16" in message and "shard them over 5 or more" in message and "CPU" in message


def test_a_step_without_a_single_id_counts():
    module = make(DEVICE)
    empty = {
        name: uq.Jagged(torch.zeros(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)) for name in features()
    }
    module(uq.Batch.from_jagged(empty).to(DEVICE)).pooled.sum().backward()
    assert module.step == 1 and float(module._side.clock[0]) == 1


def test_row_numbers_beyond_32_bits(monkeypatch):
    """Sorted as int64: what a module of more than 2^31 rows does."""
    states = []
    for small_keys in (2**31, 5):
        monkeypatch.setattr(layout_module, "SMALL_KEYS", small_keys)
        module = make(DEVICE)
        train(module, [batch_of(seed) for seed in range(2)], DEVICE)
        states.append(module.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_a_copy_goes_its_own_way():
    module = make(DEVICE)
    train(module, [batch_of(0)], DEVICE)
    copied, restored = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
    train(module, [batch_of(1)], DEVICE)
    for other in (copied, restored):
        assert other.step == 1
        assert not torch.equal(other.state_dict()["item.weight"], module.state_dict()["item.weight"])
        train(other, [batch_of(1)], DEVICE)
        assert all(torch.equal(value, other.state_dict()[name]) for name, value in module.state_dict().items())


def test_features_that_get_no_gradient_are_not_updated():
    module = make(DEVICE)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    module(batch_of(0).to(DEVICE))["history"].values.sum().backward()
    after = module.state_dict()
    assert not torch.equal(after["item.weight"], before["item.weight"])
    assert torch.equal(after["word.weight"][:1], before["word.weight"][:1]) and module.step == 1


@needs_gpu
def test_module_and_batch_must_be_on_one_device():
    module = make("cuda")
    with pytest.raises(DataError, match=r"the batch is on 'cpu'.*batch.to\('cuda:0'\)"):
        module(batch_of(0))


@needs_gpu
def test_moves_between_devices(monkeypatch):
    monkeypatch.setenv("UNEQUAL_KERNELS", "")
    module, still = make("cpu"), make("cpu")
    train(module, [batch_of(0)], "cpu"), train(still, [batch_of(0)], "cpu")
    module.cuda()
    train(module, [batch_of(1)], "cuda"), train(still, [batch_of(1)], "cpu")
    module.to("cpu")
    train(module, [batch_of(2)], "cpu"), train(still, [batch_of(2)], "cpu")
    assert module.device.type == "cpu" and module.step == 3
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, still.state_dict()[name], rtol=1e-4, atol=1e-5)


@needs_gpu
@pytest.mark.parametrize("pooling", ["sum", None])
def test_no_step_waits_for_the_device(pooling):
    table = uq.Table("t", 1000, dim=32)
    module = uq.Embeddings({"f": uq.Feature(table, pooling), "g": uq.Feature(table)}, device="cuda")
    ids = {"f": uq.Jagged(torch.arange(600) % 7, torch.full((200,), 3)), "g": torch.arange(200)}
    batch = uq.Batch.from_jagged(ids).to("cuda")

    def step():
        output = module(batch)
        parts = [output.pooled] if pooling else [output.pooled, output["f"].values]
        torch.autograd.backward(parts, [torch.ones_like(part) for part in parts])

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
@pytest.mark.parametrize("optimizer", [uq.RowWiseAdagrad(lr=0.1), uq.Adam(lr=0.1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_captured_step_is_the_same_step(optimizer, dtype):
    """Also that it counts: Adam's corrections and stochastic rounding depend on the step."""
    table = uq.Table("t", 500, dim=64, dtype=dtype)
    schedule = uq.Schedule(warmup_steps=6)
    batch = uq.Batch.from_jagged({"f": uq.Jagged(torch.arange(3000) % 401, torch.full((1000,), 3))}).to("cuda")
    gradient = torch.linspace(-1, 1, 64, device="cuda").expand(1000, 64).contiguous()
    modules = [
        uq.Embeddings({"f": uq.Feature(table)}, optimizer=optimizer, schedule=schedule, device="cuda") for _ in "ab"
    ]
    for module in modules:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                module(batch).pooled.backward(gradient)
        torch.cuda.current_stream().wait_stream(stream)
    eager, captured = modules
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured(batch).pooled.backward(gradient)
    for _ in range(5):
        eager(batch).pooled.backward(gradient)
        captured.before_replay()
        graph.replay()
    assert captured.step == eager.step == 7
    for one, other in zip(captured.state_dict().values(), eager.state_dict().values()):
        assert torch.equal(one, other)


@needs_gpu
def test_rows_beyond_2_to_the_31_values():
    rows = 2**31 // 64 + 1000
    module = uq.Embeddings(
        {"f": uq.Feature(uq.Table("t", rows, dim=64, dtype=torch.float16))}, optimizer=uq.SGD(lr=1.0), device="cuda"
    )
    weight = module.state_dict()["t.weight"]
    ids = torch.tensor([rows - 1, 0, rows - 1000], device="cuda")
    before = weight[ids].float()
    output = module({"f": ids})["f"]
    assert torch.equal(output, before)
    output.backward(torch.full_like(output, 0.5))
    torch.testing.assert_close(weight[ids].float(), before - 0.5, rtol=2e-3, atol=2e-3)
