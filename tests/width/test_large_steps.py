"""Steps of so many ids that kernels go about them in other ways: by bucket, by class, and rows that all threads sum together."""

import pytest
import torch

import unequal as uq
from unequal.width.savings import Savings

ROWS = 40_000
OPTIMIZERS = [
    uq.RowWiseAdagrad(lr=0.05), uq.RowWiseAdagrad(lr=0.05, weight_decay=0.01), uq.SGD(lr=0.05), uq.Adagrad(lr=0.05)
]  # fmt: skip


def embeddings(optimizer, dim, chunk, rows=ROWS):
    tables = [uq.Table("large", rows=rows, dim=dim), uq.Table("small", rows=300, dim=dim)]
    features = {
        "list": uq.Feature(tables[0], None),
        "bag": uq.Feature(tables[0], "sum"),
        "other": uq.Feature(tables[1], "mean"),
    }
    return uq.Embeddings(features, optimizer=optimizer, width=uq.Width(budget="20%", every=3, chunk=chunk))


def steps(module, count, seed):
    """One id is read 20,000 times, which is more than one thread sums."""
    generator = torch.Generator().manual_seed(seed)
    outputs = []
    for _ in range(count):
        lengths = torch.randint(0, 60, (3, 1000), generator=generator)
        parts = [
            (torch.rand(int(n), generator=generator) ** 4 * rows).long()
            for n, rows in zip(lengths.sum(1), (ROWS, ROWS, 300))
        ]
        parts[0][torch.randperm(len(parts[0]), generator=generator)[:20_000]] = 7
        out = module(uq.Batch(("list", "bag", "other"), torch.cat(parts), lengths.flatten()))
        outputs += [out["list"].values.detach().clone(), out.pooled.detach().clone()]
        gradients = [1e-2 * torch.randn(part.shape, generator=generator) for part in outputs[-2:]]
        torch.autograd.backward([out["list"].values, out.pooled], gradients)
    return outputs


def compare(own, expected, **tolerance):
    assert own.keys() == expected.keys()
    for name in own:
        torch.testing.assert_close(
            own[name], expected[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance
        )


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize(("dim", "chunk"), [(16, 1), (24, 2), (64, 4), (64, 16)])
def test_agrees_with_reference(monkeypatch, optimizer, dim, chunk):
    own = embeddings(optimizer, dim, chunk)
    steps(own, 6, seed=0)
    counts = own._storages["large"].counts
    assert sum(count > 0 for count in counts) > 2, "rows of several widths"
    monkeypatch.setenv("UNEQUAL_KERNELS", "reference")
    expected = embeddings(optimizer, dim, chunk)
    assert expected._kernels.name == "reference"
    expected.load_state_dict(own.state_dict())
    for found, wanted in zip(steps(own, 2, seed=1), steps(expected, 2, seed=1), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    compare(own.state_dict(), expected.state_dict(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("optimizer", OPTIMIZERS[::2], ids=str)
@pytest.mark.parametrize("rows", [ROWS, 200_000])
def test_same_bits_for_any_number_of_threads(optimizer, rows):
    states = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        module = embeddings(optimizer, 64, 4, rows)
        steps(module, 7, seed=3)
        states.append(module.state_dict())
    for state in states[1:]:
        compare(state, states[0], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("dims", [(8,), (64, 16, 3), (20, 128, 128, 5)])
@pytest.mark.parametrize("kernels", ["cpu", "triton"])
def test_savings_are_counted_alike_in_one_pass(kernels, dims, dtype):
    own = pytest.importorskip(f"unequal.kernels.{kernels}")
    device = "cuda" if kernels == "triton" and torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    features = {f"f{k}": uq.Feature(uq.Table(f"t{k}", rows=10, dim=dim), "sum") for k, dim in enumerate(dims)}
    found = []
    for count in (None, own.count_savings):
        savings = Savings({f"t{k}": dim for k, dim in enumerate(dims)}, features, ranks=2)
        generator.manual_seed(1)
        for step in range(3):
            values, gradient = (torch.randn(300, sum(dims), generator=generator).to(device, dtype) for _ in range(2))
            gradient[step, 1] = float("inf")
            savings.note(savings.sample([values], step), [gradient], 300, count)
        found.append(savings._counted())
    for name in found[0]:
        torch.testing.assert_close(
            torch.from_numpy(found[1][name]), torch.from_numpy(found[0][name]), rtol=1e-4, atol=1e-3
        )
