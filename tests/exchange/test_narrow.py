"""Rows of different width on the wire. What a message is made of: tests/kernels/test_pack.py."""

from unequal.exchange.narrow import Run, joined


def test_neighbours_that_are_alike_are_one_run():
    runs = [Run(0, 8, 2), Run(2, 8, 2), Run(3, 8, 2), Run(0, 4, 1), Run(1, 4, 1), Run(1, 8, 2)]
    assert joined(runs) == [Run(5, 8, 2), Run(1, 4, 1), Run(1, 8, 2)]
