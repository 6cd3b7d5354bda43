"""What a round asks of all rows on a CPU in one pass, against torch, step by step."""

from itertools import pairwise

import pytest
import torch

from unequal.kernels import backend, cpu, reference
from unequal.kernels.request import WAYS
from unequal.storage import by_class
from unequal.width.parts import Sample, steadily
from unequal.width.policy import NOTHING, Rows, policy_of

POLICY = policy_of("water-filling")


def tables(sizes, chunks, seed=0):
    """Rows of some tables, with limits of their own, and how wide they are."""
    generator = torch.Generator().manual_seed(seed)
    parts, held = [], []
    for size in sizes:
        worth = torch.rand(size, 1, generator=generator).log2().mul(7)
        worth[::5] = worth[::5].round()  # just as much as a limit, often
        worth[::7] = NOTHING
        limits = torch.rand(chunks, generator=generator, dtype=torch.float64).mul(9).round().cumsum(0)
        parts.append(Rows(worth, chunks, 1, limits[None]))
        held.append(torch.randint(0, chunks + 1, (size,), generator=generator).to(torch.int16))
    return parts, torch.cat(held)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("hysteresis", [0.0, 0.3])
@pytest.mark.parametrize("chunks", [1, 4, 16, 63])
@pytest.mark.parametrize("sizes", [[0], [1], [300], [63, 0, 64, 65, 1], [5000, 3, 4096, 12_000]])
def test_widths_are_those_that_torch_finds(threads, sizes, chunks, hysteresis):
    parts, old = tables(sizes, chunks)
    slow, fast = Rows.joined(parts), Rows.joined(parts)
    fast.kernels = backend()
    samples = [Sample(POLICY, rows, old, torch.ones(len(old)).double(), [1.0] * len(sizes)) for rows in (slow, fast)]
    for by in (1, 8):
        for exponent in (-300, -9, -2, 0, 1, 6, 300):
            slow_one, fast_one = (sample.thin(by) for sample in samples)
            expected = steadily(POLICY, slow_one.rows, slow_one.old, 2.0**exponent, hysteresis)
            ends = [0, *fast_one.rows.ends]
            for count in (1, 2, 3):
                threads(count)
                assert torch.equal(steadily(POLICY, fast_one.rows, fast_one.old, 2.0**exponent, hysteresis), expected)
                together = cpu.chunks_between(
                    fast_one.rows.utilities, fast_one.old, ends[1:],
                    *(fast_one.rows.limits_at(2.0**exponent * factor) for factor in (1 + hysteresis, 1 / (1 + hysteresis))),
                )  # fmt: skip
                assert together == [int(expected[first:last].sum()) for first, last in pairwise(ends)]
            assert fast_one.values(2.0**exponent, hysteresis) == slow_one.values(2.0**exponent, hysteresis)


@pytest.mark.parametrize("chunks", [1, 16, 63])
@pytest.mark.parametrize("rows", [0, 1, 5, 10_000])
def test_widths_are_tallied_as_torch_does(rows, chunks):
    generator = torch.Generator().manual_seed(rows)
    old, new = (torch.randint(0, chunks + 1, (rows,), generator=generator).to(torch.int16) for _ in range(2))
    (shrinks, grows), counts = cpu.tally_widths(old, new, chunks)
    assert (int(shrinks), int(grows)) == (int((old - new).clamp(min=0).sum()), int((new - old).clamp(min=0).sum()))
    assert torch.equal(counts, by_class.counts(new, chunks, on_device=False))


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("rows", [0, 1, 50_000, by_class.PIECE + 7])
def test_worth_by_class_is_added_up_in_the_same_order(monkeypatch, rows, columns):
    generator = torch.Generator().manual_seed(rows)
    chunks = torch.randint(0, 17, (rows,), generator=generator).to(torch.int16)
    worth = torch.rand(rows, columns, generator=generator).log().mul(-9).exp()
    found = by_class.sums(chunks, worth[:, 0], 16, backend())
    monkeypatch.setenv("UNEQUAL_KERNELS", "reference")
    assert torch.equal(found, by_class.sums(chunks, worth[:, 0], 16, backend()))


@pytest.mark.parametrize("by_chunk", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 100, 5000])
def test_candidates_are_the_best_of_their_buckets(rows, by_chunk):
    """As when all are sorted by what they are worth and then by bucket; many are worth the same."""
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(0, 2**40, (2 * rows,), generator=generator).unique()[:rows]
    worth = torch.randint(0, 12, (rows, 3 if by_chunk else 1), generator=generator).float()
    places, chosen = cpu.best_of_buckets(ids, worth.sum(1), 24)
    order = worth.sum(1).argsort(descending=True, stable=True)
    expected = {}
    for row, bucket in zip(order.tolist(), reference.bucket_of(ids[order], 24).tolist()):
        way = sum(place // WAYS == bucket for place in expected)
        if way < WAYS:
            expected[bucket * WAYS + way] = row
    assert dict(zip(places.tolist(), chosen.tolist(), strict=True)) == expected


@pytest.mark.parametrize("rows", [0, 1, 1000])
def test_rows_that_move_are_told(rows):
    generator = torch.Generator().manual_seed(rows)
    old, new = (torch.randint(-1, 3, (rows,), generator=generator) for _ in range(2))
    assert torch.equal(cpu.moved(old, new), ((old != new) & (new >= 0)).nonzero()[:, 0])


@pytest.mark.parametrize("bound", [100, 10**6, 2**40, None])
@pytest.mark.parametrize("rows", [0, 1, 90])
def test_entries_come_by_id_and_before_what_follows_them(bound, rows):
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randperm(100, generator=generator)[:rows]
    ids = ids if bound == 100 else ids * (10**4 if bound else -(10**15))
    slots = torch.randint(0, 2**31, (rows,), generator=generator)
    directory = cpu.NarrowDirectory(bound, rows)
    directory.insert(ids, slots)
    own = dict(zip(*(part.tolist() for part in directory.entries()), strict=True))
    assert own == dict(zip(ids.tolist(), slots.tolist(), strict=True))
    for more in (torch.tensor([]).long(), torch.tensor([5, 3])):
        found, found_slots = directory.entries_then(more, more << 3)
        assert torch.equal(found, torch.cat([ids.sort().values, more]))
        assert torch.equal(found_slots, torch.cat([slots[ids.argsort()], more << 3]))
