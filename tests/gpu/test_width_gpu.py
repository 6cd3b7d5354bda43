"""Tables whose rows differ in width on a GPU: the reference's results over steps and rounds, the same on every run."""

import copy

import pytest
import torch

import unequal as uq
from tests.width.test_width import OPTIMIZERS, batches, compare, embeddings, train
from unequal.width import POLICIES


def on_gpu(module: uq.Embeddings) -> uq.Embeddings:
    return copy.deepcopy(module).to("cuda")


def state(module: uq.Embeddings) -> dict[str, torch.Tensor]:
    return {name: part.cpu() for name, part in module.state_dict().items()}


@pytest.mark.parametrize(
    ("policy", "optimizer"),
    [
        *((policy, uq.RowWiseAdagrad(lr=0.1)) for policy in POLICIES),
        *(("fiited", optimizer) for optimizer in OPTIMIZERS),
    ],
    ids=lambda part: part if isinstance(part, str) else type(part).__name__,
)
def test_agrees_with_reference(monkeypatch: pytest.MonkeyPatch, policy: str, optimizer: uq.Optimizer) -> None:
    width = uq.Width(budget="30%", policy=policy, every=4)
    monkeypatch.setenv("UNEQUAL_KERNELS", "reference")
    expected = embeddings(width, optimizer)
    monkeypatch.delenv("UNEQUAL_KERNELS")
    own = on_gpu(expected)
    for found, wanted in zip(train(own, batches(8)), train(expected, batches(8)), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    compare(state(own), expected.state_dict(), rtol=1e-4, atol=1e-5)
    assert own._kernels.name == "triton"
    if policy != "none":
        assert any(report.pruned and report.regained for report in own.width_reports)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("policy", ["water-filling", "fiited"])
def test_agrees_with_reference_in_16_bits(monkeypatch: pytest.MonkeyPatch, policy: str, dtype: str) -> None:
    monkeypatch.setenv("UNEQUAL_KERNELS", "reference")
    expected = embeddings(uq.Width(budget="30%", policy=policy, every=4, chunk=1), dtype=dtype)
    monkeypatch.delenv("UNEQUAL_KERNELS")
    own = on_gpu(expected)
    train(own, batches(6))
    train(expected, batches(6))
    compare(state(own), expected.state_dict(), rtol=2e-2, atol=2e-3)


def large(width: uq.Width | None, rows: int | None = 200_000) -> uq.Embeddings:
    tables = [uq.Table(f"t{k}", rows=rows, dim=dim) for k, dim in enumerate((64, 16, 64))]
    return uq.Embeddings(
        {f"f{k}": uq.Feature(table, None if k == 2 else "sum") for k, table in enumerate(tables)},
        width=width, device="cuda",
    )  # fmt: skip


def large_batches(count: int, size: int = 2000, rows: int = 200_000) -> list[uq.Batch]:
    generator = torch.Generator().manual_seed(3)
    lengths = [torch.randint(0, 6, (3 * size,), generator=generator) for _ in range(count)]
    ids = [(torch.rand(int(part.sum()), generator=generator) ** 4 * rows).long() for part in lengths]
    return [uq.Batch(("f0", "f1", "f2"), i, n).to("cuda") for i, n in zip(ids, lengths)]


def steps(module: uq.Embeddings, data: list[uq.Batch]) -> None:
    """Samples count differently: otherwise thousands of rows that were read once would be worth the same but for rounding, and
    where the threshold lies among them rounding decides."""
    for batch in data:
        out = module(batch)
        counts = torch.linspace(0.1, 1.0, batch.size, device=batch.ids.device)
        lists = torch.repeat_interleave(counts, out["f2"].lengths)
        loss = (((out.pooled - 1) ** 2).sum(1) * counts).sum()
        loss.add((((out["f2"].values - 1) ** 2).sum(1) * lists).sum()).backward()


@pytest.mark.parametrize("rows", [200_000, None])
def test_the_same_bits_on_every_run(rows: int | None) -> None:
    """Programs run in any order, and newcomers meet in the same buckets; nothing of it shows."""
    data, states = large_batches(27), []
    for _ in range(2):
        module = large(uq.Width(budget="1%" if rows else "6 MB", every=8), rows)
        steps(module, data)
        states.append(state(module))
    compare(states[0], states[1], rtol=0, atol=0)
    assert states[0]["t0.candidates"].numel() and len(states[0]["t0.widths"].unique()) > 3


def test_all_of_it_is_the_plain_table() -> None:
    data = large_batches(8)
    plain, wide = large(None), large(uq.Width(budget="100%", policy="none"))
    steps(plain, data)
    steps(wide, data)
    own, whole = state(wide), state(plain)
    ids = own["t0.ids"]
    torch.testing.assert_close(own["t0.weight"].view(-1, 64), whole["t0.weight"][ids], rtol=1e-6, atol=1e-7)


def test_moves_to_the_cpu_and_back() -> None:
    module = large(uq.Width(budget="3%", every=4))
    data = large_batches(12)
    steps(module, data[:6])
    there = copy.deepcopy(module).to("cpu")
    compare(state(module), there.state_dict(), rtol=0, atol=0)
    back = there.to("cuda")
    steps(back, data[6:])
    steps(module, data[6:])
    compare(state(module), state(back), rtol=1e-4, atol=1e-5)


def test_memory_goes_away() -> None:
    """Measured at the device's allocator."""

    def held(width: uq.Width | None) -> int:
        before = torch.cuda.memory_allocated()
        module = large(width)
        for batch in large_batches(24):
            steps(module, [batch])
        torch.cuda.synchronize()
        del batch
        return torch.cuda.memory_allocated() - before

    assert held(uq.Width(budget="2%", every=4)) < 0.25 * held(None)


def test_a_graph_is_refused() -> None:
    module = large(uq.Width(budget="3%"))
    batch = large_batches(1)[0]
    steps(module, [batch])
    with (
        pytest.raises(uq.UserError, match="cannot be captured in a CUDA graph"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        module(batch)
    torch.cuda.synchronize()
    steps(module, [batch])
