"""Models on a GPU give the CPU's outputs and gradients, the same on every run."""

import pytest
import torch
from torch import Tensor, nn

from unequal import Jagged
from unequal.models.encoder import TargetAttention, TransformerEncoder, spread, sums
from unequal.models.interaction import CrossInteraction, DotInteraction


def results(module: nn.Module, *inputs: Tensor, lengths: Tensor | None = None) -> list[Tensor]:
    """Output and every gradient, on the CPU."""
    module.zero_grad()
    parts = [part.detach().requires_grad_() for part in inputs]
    out = module(*parts) if lengths is None else module(Jagged(parts[0], lengths), *parts[1:])
    weight = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
    (out * weight).sum().backward()
    gradients = [part.grad for part in (*parts, *module.parameters())]
    return [part.detach().cpu() for part in (out, *gradients) if part is not None]


@pytest.mark.parametrize("longest", [0, 3, 40])
@pytest.mark.parametrize("kind", ["attention", "transformer"])
def test_encoders(kind: str, longest: int) -> None:
    torch.manual_seed(0)
    encoder = TargetAttention(16, 12)
    if kind == "transformer":
        encoder = TransformerEncoder(16, 12, layers=2, heads=2, max_positions=10)
    lengths = torch.randint(0, longest + 1, (200,))
    values, target = torch.randn(int(lengths.sum()), 16), torch.randn(200, 12)
    expected = results(encoder, values, target, lengths=lengths)
    encoder.cuda()
    runs = [results(encoder, values.cuda(), target.cuda(), lengths=lengths.cuda()) for _ in range(3)]
    assert len(runs[0]) == len(expected)
    for ours, theirs in zip(runs[0], expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    for again in runs[1:]:
        assert all(torch.equal(one, other) for one, other in zip(runs[0], again))


@pytest.mark.parametrize("module", [DotInteraction([16, 16, 8], 16), CrossInteraction([16, 16, 8], 2)])
def test_interactions(module: nn.Module) -> None:
    vectors = torch.randn(300, 40, generator=torch.Generator().manual_seed(0))
    expected = results(module, vectors)
    module.cuda()
    first, second = (results(module, vectors.cuda()) for _ in range(2))
    for ours, theirs in zip(first, expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(one, other) for one, other in zip(first, second))


def test_sums_over_lists_wait_for_nothing() -> None:
    lengths = torch.tensor([0, 5, 1, 0, 20, 11, 0], device="cuda")
    lists = Jagged(torch.randn(37, 6, device="cuda", requires_grad=True), lengths)
    owner, offsets = torch.repeat_interleave(lengths, output_size=37), lists.offsets
    torch.cuda.set_sync_debug_mode("error")
    try:
        total = sums(lists.values, owner, offsets)
        spread(total, owner, offsets).square().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = [part.sum(0) for part in lists.values.detach().cpu().split(lengths.tolist())]
    torch.testing.assert_close(total.detach().cpu(), torch.stack(expected))
