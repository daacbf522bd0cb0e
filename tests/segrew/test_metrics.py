"""Intervals, against published values and plain arithmetic."""

import math

import numpy as np
import pytest

from segrew.metrics import correlation_interval, mean_interval, wilson_interval


@pytest.mark.parametrize(
    "successes, n, low, high",
    [
        (8, 10, 0.490162, 0.943318),
        (0, 10, 0.0, 0.277533),
        (10, 10, 0.722467, 1.0),
        (1, 2, 0.094531, 0.905469),
        (0, 0, 0, 1),
    ],
)
def test_wilson_intervals_as_tabulated(successes, n, low, high):
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=1e-6)


def test_wilson_bounds_solve_the_score_equation():
    for bound in wilson_interval(37, 120):
        assert abs(37 / 120 - bound) / math.sqrt(bound * (1 - bound) / 120) == pytest.approx(1.959963984540054)


def test_mean_interval_is_the_normal_one():
    values = [0.5, -1.0, 2.5, 0.0, 1.25]
    mean, low, high = mean_interval(values)
    error = np.std(values, ddof=1) / np.sqrt(5)
    assert mean == pytest.approx(np.mean(values))
    assert (mean - low, high - mean) == pytest.approx((1.959964 * error,) * 2)


def test_one_value_has_a_mean_and_no_bounds():
    assert mean_interval([3.0]) == (3.0, -math.inf, math.inf)
    assert mean_interval([2.0, 2.0]) == (2.0, 2.0, 2.0)


def test_correlation_interval_as_tabulated():
    assert correlation_interval(0.5, 28) == pytest.approx((0.156028, 0.735818), abs=1e-5)  # atanh(.5) -+ 1.96 / 5
    assert correlation_interval(0.5, 3) == (-1.0, 1.0) and correlation_interval(1.0, 9) == (1.0, 1.0)
