"""The controller of the KL's weight, and what an action pays."""

import pytest
import torch

from policy.kl_control import adapted_coefficient, charged_kl, scaled_kl
from segrew.segmentation import Segmentation


@pytest.mark.parametrize(
    "kl, expected",
    [
        (6.0, 0.1),  # on target
        (12.0, 0.1 * (1 + 0.2 * 256 / 10000)),  # the error is bounded at ±0.2
        (0.0, 0.1 * (1 - 0.2 * 256 / 10000)),
        (6.6, 0.1 * (1 + 0.1 * 256 / 10000)),
    ],
)
def test_the_coefficient_moves_towards_the_target(kl, expected):
    assert adapted_coefficient(0.1, kl, target=6.0, answers=256, horizon=10000) == pytest.approx(expected)


def test_the_estimates_that_can_be_charged():
    """B26 b: log p = [−1, −2], log p_ref = [−1.5, −1]."""
    logprobs, reference = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])
    expected = {"k1": [0.5, -1.0], "k2": [0.125, 0.5], "k3": [0.106531, 0.718282]}
    for name, values in expected.items():
        assert charged_kl(logprobs, reference, name)[0].tolist() == pytest.approx(values, abs=1e-6)


def test_a_unit_pays_for_its_mean():
    actions = Segmentation(torch.tensor([[0, 0, 0, 1, -1]]))
    kl = torch.tensor([[3.0, 6.0, 0.0, 2.0, float("nan")]])
    assert scaled_kl(kl, actions, "token").tolist() == [[3.0, 6.0, 0.0, 2.0, 0.0]]
    assert scaled_kl(kl, actions, "unit").tolist() == [[1.0, 2.0, 0.0, 2.0, 0.0]]
