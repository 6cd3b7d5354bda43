"""A step's ids on their way: one call puts all messages together as the general way does."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unequal.exchange.hop import Hop, WirePiece
from unequal.kernels import backend
from unequal.plan.placement import Piece, part_of

CPU = torch.device("cpu")


class Mirror:
    """A link on which every rank sends what this one does, and this one's place can be any."""

    def __init__(self, size, place=0):
        self.size, self.place, self.mesh = size, place, SimpleNamespace()
        self.message = None

    def all_to_all_counts(self, counts):
        return counts.copy()

    def all_to_all(self, values, sent, received):
        assert values.shape[0] == sent.sum()
        self.message = values
        return values


@st.composite
def problem(draw):
    """Nodes and ranks of a node, pieces, and the ids of each."""
    nodes, size = draw(st.sampled_from([(1, 1), (1, 2), (1, 3), (1, 4), (2, 2), (2, 3), (3, 2)]))
    world, pieces, ids = nodes * size, [], []
    for _ in range(draw(st.integers(1, 5))):
        ranks = draw(
            st.one_of(
                st.just(tuple(range(world))),
                st.integers(0, world - 1).map(lambda rank: (rank,)),
                st.integers(0, nodes - 1).map(lambda n: tuple(range(n * size, n * size + size))),
                st.permutations(range(world)).map(tuple),
            )
        )
        hashed, whole = draw(st.booleans()), ranks == tuple(range(world))
        width = draw(st.sampled_from([4, 8]))
        rows = None if hashed else draw(st.sampled_from([1, 100, 256, 257, 2**24, 2**31, 2**40]))
        pieces.append(WirePiece(f"t{len(pieces)}", Piece(0, width, ranks), rows, whole and draw(st.booleans())))
        values = st.integers(-(2**63) if rows is None else 0, 2**63 - 1 if rows is None else rows - 1)
        own = draw(st.one_of(st.none(), st.lists(values, max_size=30, unique=True)))
        ids.append(None if own is None else torch.tensor(own, dtype=torch.int64))
    return nodes, size, pieces, ids


@settings(max_examples=150, deadline=None)
@given(case=problem(), near=st.booleans())
def test_messages_do_not_depend_on_who_puts_them_together(case, near):
    nodes, size, pieces, ids = case
    kernels = backend("cpu")
    assert kernels.Dealer is not None
    world = nodes * size
    # All ranks at once, or the first hop of two: to the ranks of a node by their number there.
    links, target = (Mirror(size), Mirror(size)) if near else (Mirror(world), Mirror(world)), lambda rank: rank % size
    one, other = (
        Hop(kernels, CPU, link, pieces, target if near else lambda rank: rank, counted=False) for link in links
    )
    other._dealer = None
    header = np.array([3, 4], np.int64)
    found, expected = (hop.ask(ids, [None] * len(ids), header) for hop in (one, other))
    assert torch.equal(links[0].message, links[1].message) and links[0].message.dtype == torch.uint8
    assert torch.equal(found[0].ids, expected[0].ids)
    assert found[0].ids.tolist() == in_message(one, ids, found[0].sent)
    np.testing.assert_array_equal(found[1], expected[1])
    np.testing.assert_array_equal(found[0].sent, expected[0].sent)
    np.testing.assert_array_equal(found[0].received, expected[0].received)
    np.testing.assert_array_equal(found[0].first, expected[0].first)
    for own, wanted in zip(found[0].places, expected[0].places):
        assert torch.equal(own, wanted) if own is not None else wanted is None or not wanted.numel()


def in_message(hop, ids, sent):
    """The ids in the order of a message, rank by rank."""
    found = []
    for k in range(hop.link.size):
        for p in hop.order:
            piece, own = hop.pieces[p], [] if ids[p] is None else ids[p].tolist()
            parts = part_of(torch.tensor(own, dtype=torch.int64), len(piece.piece.ranks), piece.rows is None).tolist()
            mine = [id for id, part in zip(own, parts) if piece.replicated or int(hop._targets[p][part]) == k]
            assert len(mine) == sent[k, p]
            found += mine
    return found


def test_ranks_in_any_order_need_the_general_way():
    piece = WirePiece("t", Piece(0, 4, (1, 0, 2)), 9)
    assert Hop(backend("cpu"), CPU, Mirror(3), [piece], lambda rank: rank, counted=False)._dealer is None


@pytest.mark.parametrize("counted", [False, True])
def test_counts_travel_with_ids_where_they_are_told(counted):
    piece = WirePiece("t", Piece(0, 4, (0, 1)), 9)
    hop = Hop(backend("cpu"), CPU, Mirror(2), [piece], lambda rank: rank, counted=counted)
    asked, headers = hop.ask([torch.tensor([3, 0, 2])], [torch.tensor([300, 6, 7])], np.zeros(1, np.int64))
    assert asked.ids.tolist() == [0, 2, 3] and asked.sent.tolist() == [[2], [1]]
    assert (asked.counts is None) if not counted else asked.counts.tolist() == [6, 7, 300]
    assert asked.places[0].tolist() == [2, 0, 1] and headers.tolist() == [[0], [0]]
    assert hop.link.message.numel() == (3 * (1 + 2) if counted else 3)  # a count of 300 needs two bytes


@pytest.mark.parametrize(("rows", "size"), [(9, 1), (256, 1), (257, 2), (2**24, 3), (2**31, 4), (None, 8)])
@pytest.mark.parametrize("way", ["one call", "general", "reference"])
def test_ids_have_as_many_bytes_as_the_largest_needs(rows, size, way, monkeypatch):
    """Beside those of a table that may be anything, in one message."""
    last = 2**63 - 1 if rows is None else rows - 1
    own, others = torch.tensor([last, 0]), torch.tensor([-(2**63), 2**62, 5])
    pieces = [WirePiece("t", Piece(0, 4, (0,)), rows), WirePiece("any", Piece(0, 4, (1,)), None)]
    monkeypatch.setenv("UNEQUAL_KERNELS", "reference" if way == "reference" else "")
    hop = Hop(backend("cpu"), CPU, Mirror(2), pieces, lambda rank: rank, counted=False)
    assert (hop._dealer is None) == (way == "reference")
    hop._dealer = hop._dealer if way == "one call" else None
    asked, _ = hop.ask([own, others], [None, None], np.zeros(1, np.int64))
    assert hop.link.message.numel() == 2 * size + 3 * 8
    assert asked.ids.tolist() == own.tolist() + others.tolist()


def test_nothing_is_asked_for():
    hop = Hop(backend("cpu"), CPU, Mirror(2), [WirePiece("t", Piece(0, 4, (0, 1)), 9)], lambda rank: rank, counted=True)
    asked, _ = hop.ask([None], [None], np.zeros(0, np.int64))
    assert asked.ids.dtype == torch.int64 and not asked.ids.numel() and asked.counts.tolist() == []
