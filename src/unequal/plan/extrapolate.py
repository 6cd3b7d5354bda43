"""How many different ids there are beyond a sample: Zipf's law with an unknown exponent and an unknown number of rows, fitted to
how the sample's own parts grow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
EXPONENTS = np.linspace(0, 1.8, 37)
POPULATIONS, BINS = 40, 120
FITTED = 6
"""points of the curve that are fitted, the last ones; the last of all counts three times"""
NOISE = 0.01
"""relative error of a point"""


def expected_distinct(draws: float, population: Floats, exponents: Floats) -> Floats:
    """Different ids in so many draws from so many rows by Zipf's law. Rows of similar rank are taken together."""
    steps = np.linspace(0, 1, BINS + 1)
    edges = np.exp(steps * np.log(population[..., None] + 1))
    widths, middles = np.diff(edges), np.sqrt(edges[..., 1:] * edges[..., :-1])
    weights = middles ** -exponents[..., None]
    share = weights / (weights * widths).sum(-1, keepdims=True)
    found: Floats = (widths * -np.expm1(-draws * share)).sum(-1)
    return found


def extended(
    samples: Sequence[int], counts: Sequence[float], draws_per_sample: float, last: int
) -> list[tuple[int, float]]:
    """Points of the curve beyond its own, at doublings up to `last` samples."""
    ahead = [samples[-1] << k for k in range(1, 64) if samples[-1] << (k - 1) < last]
    if not ahead or len(samples) < 3 or counts[-1] < 2:
        return []
    most = max(2 * counts[-1], 30 * draws_per_sample * ahead[-1])
    populations, exponents = np.meshgrid(np.geomspace(counts[-1], most, POPULATIONS), EXPONENTS)
    points = list(zip(samples, counts))[-FITTED:]
    error = np.zeros(populations.shape)
    for number, (size, count) in enumerate(points):
        fitted = expected_distinct(size * draws_per_sample, populations, exponents)
        error += (3 if number == len(points) - 1 else 1) * np.log(fitted / count) ** 2
    likely = np.exp(-(error - error.min()) / (2 * NOISE**2))
    kept = likely > 1e-4
    weights, populations, exponents = likely[kept], populations[kept], exponents[kept]
    # Relative to the fit's own value at the sample's end, so that the curve has no step there.
    here = np.log(expected_distinct(samples[-1] * draws_per_sample, populations, exponents))
    found, least = [], counts[-1]
    for size in ahead:
        then = np.log(expected_distinct(size * draws_per_sample, populations, exponents))
        least = max(least, counts[-1] * float(np.exp((weights * (then - here)).sum() / weights.sum())))
        found.append((size, least))
    return found
