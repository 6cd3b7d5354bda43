import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unequal import Jagged
from unequal.batch import offsets_of
from unequal.models.encoder import (
    TargetAttention,
    TransformerEncoder,
    padded_at_the_front,
    spread,
    sum_by_segment,
    sums,
    without_the_rest,
)

LISTS = st.lists(st.integers(0, 6), min_size=1, max_size=6)


def jagged(lengths, dim, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(sum(lengths), dim, generator=generator, dtype=torch.float64)
    return Jagged(values.requires_grad_(), torch.tensor(lengths))


def encoders(dim, target_dim):
    torch.manual_seed(1)
    options = {"layers": 2, "heads": 2, "max_positions": 4}
    return [TargetAttention(dim, target_dim).double(), TransformerEncoder(dim, target_dim, **options).double()]


@settings(max_examples=30, deadline=None)
@given(lengths=LISTS, target_dim=st.sampled_from([4, 6]))
def test_attention_agrees_with_one_list_at_a_time(lengths, target_dim):
    encoder, target = encoders(4, target_dim)[0], torch.randn(len(lengths), target_dim, dtype=torch.float64)
    history = jagged(lengths, 4)
    rows = []
    for past, query in zip(history.values.split(lengths), encoder.project(target)):
        query = query.expand_as(past)
        inner = encoder.activation(encoder.inner(torch.cat([past, query * past, query - past], 1)))
        weights = torch.softmax(encoder.outer(inner), 0)
        rows.append((weights * past).sum(0))
    torch.testing.assert_close(encoder(history, target), torch.stack(rows))


@settings(max_examples=30, deadline=None)
@given(lengths=LISTS)
def test_a_sample_does_not_depend_on_the_others(lengths):
    target, history = torch.randn(len(lengths), 4, dtype=torch.float64), jagged(lengths, 4)
    for encoder in encoders(4, 4):
        together = encoder(history, target)
        parts = zip(history.values.split(lengths), target)
        alone = [encoder(Jagged(past, torch.tensor([len(past)])), query[None]) for past, query in parts]
        torch.testing.assert_close(together, torch.cat(alone))


@pytest.mark.parametrize("number", [0, 1])
def test_empty_histories_give_zeros_and_finite_gradients(number):
    encoder, target = encoders(4, 4)[number], torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    for lengths in ([0, 2, 0], [0, 0, 0]):
        history = jagged(lengths, 4)
        out = encoder(history, target)
        out.square().sum().backward()
        assert (out[0] == 0).all() and (out[2] == 0).all()
        assert (out[1] != 0).any() == (lengths[1] > 0)
        assert history.values.grad is None or history.values.grad.isfinite().all()
        assert target.grad is None or target.grad.isfinite().all()
        assert all(p.grad is None or p.grad.isfinite().all() for p in encoder.parameters())


@pytest.mark.parametrize("number", [0, 1])
def test_a_batch_without_samples(number):
    out = encoders(4, 4)[number](jagged([], 4), torch.zeros(0, 4, dtype=torch.float64))
    assert out.shape == (0, 4)


def test_attention_does_not_overflow():
    encoder = encoders(4, 4)[0]
    history = jagged([3], 4)
    out = encoder(Jagged(history.values * 1e6, history.lengths), torch.full((1, 4), 1e6, dtype=torch.float64))
    assert out.isfinite().all()


def test_transformer_reads_the_newest():
    encoder, target = encoders(4, 4)[1], torch.randn(2, 4, dtype=torch.float64)
    history = jagged([7, 2], 4)
    newest = Jagged(history.values[3:], torch.tensor([4, 2]))
    torch.testing.assert_close(encoder(history, target), encoder(newest, target))
    changed = history.values.detach().clone()
    changed[3, 0] += 1
    assert not torch.allclose(encoder(Jagged(changed, history.lengths), target)[0], encoder(history, target)[0])


def test_transformer_sees_the_order_and_attention_does_not():
    attention, transformer = encoders(4, 4)
    history, target = jagged([3], 4), torch.randn(1, 4, dtype=torch.float64)
    turned = Jagged(history.values.flip(0), history.lengths)
    torch.testing.assert_close(attention(history, target), attention(turned, target))
    assert not torch.allclose(transformer(history, target), transformer(turned, target))


def test_padding_puts_the_newest_last():
    lists = Jagged(torch.arange(1.0, 7.0).unsqueeze(1), torch.tensor([3, 0, 1, 2]))
    padded, present = padded_at_the_front(lists, 2)
    assert padded.squeeze(2).tolist() == [[2, 3], [0, 0], [0, 4], [5, 6]]
    assert present.tolist() == [[True, True], [False, False], [False, True], [True, True]]


def test_gradients_of_encoders_against_differences():
    for encoder in encoders(4, 4):
        lengths = torch.tensor([2, 0, 3])

        def run(values, target, encoder=encoder, lengths=lengths):
            return encoder(Jagged(values, lengths), target)

        inputs = (torch.randn(5, 4).double().requires_grad_(), torch.randn(3, 4).double().requires_grad_())
        assert torch.autograd.gradcheck(run, inputs)


def test_what_gpus_use_instead_gives_the_same():
    torch.manual_seed(0)
    lists = Jagged(torch.randn(37, 6, requires_grad=True), torch.tensor([0, 5, 1, 0, 20, 11, 0]))
    owner = torch.repeat_interleave(lists.lengths)
    expected = torch.zeros(7, 6).index_add(0, owner, lists.values)
    assert torch.equal(sum_by_segment(lists.values, lists.offsets), expected)

    padded, _ = padded_at_the_front(lists, 4)
    (gradient,) = torch.autograd.grad(padded.square().sum(), lists.values)
    place = lists.offsets[1:].index_select(0, owner) - 1 - torch.arange(37)
    other = without_the_rest(lists.values, owner * 4 + 3 - place, place < 4, 28)
    assert torch.equal(other.view(7, 4, 6), padded)
    assert torch.equal(torch.autograd.grad(other.square().sum(), lists.values)[0], gradient)


def test_lists_of_their_own_gradients():
    lengths = torch.tensor([2, 0, 3])
    owner, offsets = torch.repeat_interleave(lengths), offsets_of(lengths)
    of_samples, of_places = (torch.randn(n, 2, dtype=torch.float64, requires_grad=True) for n in (3, 5))
    assert torch.autograd.gradcheck(lambda x: spread(x, owner, offsets), of_samples)
    assert torch.autograd.gradcheck(lambda x: sums(x, owner, offsets), of_places)
