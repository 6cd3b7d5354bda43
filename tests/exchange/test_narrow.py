"""Rows of different width on the wire: what is picked, put back, and folded."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unequal.exchange.narrow import Run, chunks_with_values, fold, joined, keep


@st.composite
def some_rows(draw):
    chunk, chunks, count = draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(1, 12)), draw(st.integers(0, 9))
    live = draw(st.lists(st.integers(0, chunks), min_size=count, max_size=count))
    return Run(count, chunk * chunks, chunk), torch.tensor(live, dtype=torch.uint8)


@settings(max_examples=60, deadline=None)
@given(some_rows(), st.sampled_from([0, 4]))
def test_what_is_picked_is_put_back(rows, extra):
    run, live = rows
    wire = torch.arange(1, run.rows * (run.width + extra) + 1).float()
    kept = keep(live, run, False, extra)
    sizes = [k * run.chunk + extra if k else 0 for k in live.tolist()]
    assert kept.sizes.tolist() == sizes
    picked, whole = kept.pick(wire), wire.view(run.rows, run.width + extra)
    assert torch.equal(picked, torch.cat([wire[:0], *(row[:size] for row, size in zip(whole, sizes))]))
    back = kept.spread(picked, run, extra).view(whole.shape)
    for row, own, size in zip(whole, back, sizes):
        assert torch.equal(own[:size], row[:size]) and not own[size:].any()


@settings(max_examples=60, deadline=None)
@given(some_rows(), st.sampled_from([0, 4]), st.randoms(use_true_random=False))
def test_any_chunks_are_picked_and_put_back(rows, extra, random):
    run, _ = rows
    whole = torch.zeros(run.rows, run.chunks, run.chunk)
    for row in whole:
        for chunk in row:
            chunk[random.randrange(run.chunk)] = random.choice([0.0, 1.5, -2.0])
    bits = chunks_with_values(whole.view(-1), [run])
    assert torch.equal(((bits[:, None] >> torch.arange(run.chunks)) & 1) > 0, whole.any(2))
    wire = torch.cat([torch.full((run.rows, extra), 7.0), whole.view(run.rows, run.width)], 1)
    kept = keep(bits, run, True, extra)
    back = kept.spread(kept.pick(wire.view(-1)), run, extra).view(wire.shape)
    assert torch.equal(back[:, extra:], wire[:, extra:])
    assert torch.equal(back[:, :extra] == 7, whole.any(2).any(1)[:, None].expand(-1, extra))
    assert int(kept.sizes.sum()) == kept.pick(wire.view(-1)).numel()


@settings(max_examples=60, deadline=None)
@given(some_rows())
def test_norms_stand_for_what_is_folded(rows):
    run, live = rows
    gradients = torch.randn(run.rows, run.width, generator=torch.Generator().manual_seed(run.width))
    folded = gradients.clone()
    fold(folded, live, run.chunk)
    torch.testing.assert_close(folded.norm(dim=1), gradients.norm(dim=1))
    for row, own, k in zip(gradients, folded, live.tolist()):
        first = k * run.chunk
        assert torch.equal(own[:first], row[:first]) and not own[first + 1 :].any()
        if first < run.width:
            assert math.isclose(float(own[first]), float(row[first:].norm()), rel_tol=1e-5, abs_tol=1e-6)


def test_neighbours_that_are_alike_are_one_run():
    runs = [Run(0, 8, 2), Run(2, 8, 2), Run(3, 8, 2), Run(0, 4, 1), Run(1, 4, 1), Run(1, 8, 2)]
    assert joined(runs) == [Run(5, 8, 2), Run(1, 4, 1), Run(1, 8, 2)]
