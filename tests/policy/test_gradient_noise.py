"""The variance between micro-batch gradients, against numbers by hand."""

import pytest
import torch

from policy.gradient_noise import GradientNoise, relative_variance


def test_relative_variance_is_weighted_by_shares():
    # Mean ¼·(4, 0) + ¾·(0, 4) = (1, 3); variance ¼·(9 + 9) + ¾·(1 + 1) = 6; |mean|² = 10.
    gradients, shares = torch.tensor([[4.0, 0.0], [0.0, 4.0]]), torch.tensor([0.25, 0.75])
    assert relative_variance(gradients, shares).item() == pytest.approx(0.6)
    assert relative_variance(gradients[:1].expand(3, -1), torch.ones(3)).item() == 0.0


def test_an_accumulating_gradient_is_watched_micro_batch_by_micro_batch():
    module = torch.nn.Linear(2, 1, bias=False)
    noise = GradientNoise(module)
    for batch in ([(1.0, 0.5), (3.0, 0.5)], [(2.0, 1.0)]):  # (gradient of the micro-batch alone, its share)
        module.zero_grad()
        noise.begin()
        for gradient, share in batch:
            (share * gradient * module.weight.sum()).backward()
            noise.observe(torch.tensor(share))
    # Means 2, deviations ±1 in every coordinate: 1 / 4. A single micro-batch says nothing.
    assert noise.metrics()["gradient/relative_variance"].item() == pytest.approx(0.25)


def test_neither_a_frozen_policy_nor_a_single_micro_batch_has_a_variance():
    module = torch.nn.Linear(2, 1)
    noise = GradientNoise(module)
    noise.observe(torch.tensor(1.0))
    assert noise.metrics() == {}
    noise.begin()
    module.weight.sum().backward()
    noise.observe(torch.tensor(1.0))
    assert noise.metrics() == {}
