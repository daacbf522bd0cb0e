"""Intervals for the figures that runs report."""

import math
from collections.abc import Sequence

import numpy as np

_Z95 = 1.959963984540054


def wilson_interval(successes: int | float, n: int) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of a proportion; (0, 1) without observations.

    Partial successes in [0, 1] may be summed: their mean varies less than a proportion, so it is wide enough.
    """
    if n == 0:
        return 0.0, 1.0
    share, z2 = successes / n, _Z95**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z95 * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_interval(values: list[float]) -> tuple[float, float, float]:
    """Return the mean with its 95 % normal interval; of paired differences, a paired interval."""
    n = len(values)
    mean = sum(values) / n
    if n < 2:
        return mean, -math.inf, math.inf
    error = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)
    return mean, mean - _Z95 * error, mean + _Z95 * error


def correlation_interval(correlation: float, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a correlation by Fisher's transformation; (-1, 1) below four observations."""
    if n < 4:
        return -1.0, 1.0
    if abs(correlation) >= 1:
        return correlation, correlation
    centre, half = math.atanh(correlation), _Z95 / math.sqrt(n - 3)
    return math.tanh(centre - half), math.tanh(centre + half)


def bootstrap_interval(values: Sequence[float], *, resamples: int = 2000, seed: int = 0) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of a mean; the mean itself without or with one observation."""
    held = np.asarray(values, dtype=np.float64)
    if held.size < 2:
        return (float(held.sum()),) * 2
    generator = np.random.default_rng(seed)
    means = [held[generator.integers(held.size, size=held.size)].mean() for _ in range(resamples)]
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)


def sign_test(wins: int, losses: int) -> float:
    """Return the two-sided p of at least so uneven a split of fair coins; on paired rows, McNemar's exact test."""
    n, fewer = wins + losses, min(wins, losses)
    tail = sum(math.comb(n, k) for k in range(fewer + 1))
    return min(1.0, 2 * tail / 2**n)
