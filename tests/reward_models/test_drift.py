"""Moments of normalized rewards by third of the response, on numbers small enough to add up by hand."""

import math

import pytest
import torch

from reward_models.drift import drift_metrics, drift_moments, drift_warning

THIRDS = torch.tensor([[1 / 3, 2 / 3, 1.0], [1.0, 0.0, 0.0]])


def test_moments_and_metrics_by_hand():
    z = torch.tensor([[1.0, -5.0, 2.0], [4.0, math.nan, 9.0]])
    moments = drift_moments(z, THIRDS)
    # early: 1; middle: -5; late: 2 and 4; all: 1 - 5 + 2 + 4
    assert moments.tolist() == [[1, 1, 1, 0], [1, -5, 25, 1], [2, 6, 20, 0], [4, 2, 46, 1]]
    metrics = drift_metrics(moments)
    assert metrics == pytest.approx(
        {
            "drift/mean_late": 3.0,
            "drift/spread_late": 1.0,
            "drift/mean": 0.5,
            "drift/spread": math.sqrt(46 / 4 - 0.25),
            "drift/far": 0.25,
        }
    )
    assert drift_warning(moments) is None  # four units say nothing


def test_batches_add_up():
    z, p = torch.randn(6, 3), torch.rand(6, 3)
    torch.testing.assert_close(drift_moments(z[:2], p[:2]) + drift_moments(z[2:], p[2:]), drift_moments(z, p))


def standardized(n=300):
    z = torch.randn(n, 3, generator=torch.Generator().manual_seed(0))
    return (z - z.mean(0)) / z.std(0, correction=0), torch.tensor([[0.2, 0.5, 1.0]]).expand(n, 3)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda z: z, None),
        (lambda z: z + torch.tensor([0.0, 0.0, 1.5]), "drift/mean_late 1.50"),
        (lambda z: z * torch.tensor([0.2, 1.0, 1.0]), "drift/spread_early 0.20"),
        (lambda z: z * 4.0, "drift/far"),
    ],
)
def test_only_what_is_far_off_is_warned_of(change, named):
    z, p = standardized()
    said = drift_warning(drift_moments(change(z), p))
    assert (said is None) == (named is None)
    if named:
        assert named in said and "segrew calibrate" in said and "drift/mean_middle" not in said


def test_padding_alone_has_no_metrics():
    assert drift_metrics(drift_moments(torch.zeros(2, 3), torch.zeros(2, 3))) == {}
