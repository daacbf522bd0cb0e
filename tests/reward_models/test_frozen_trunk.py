"""The head fit against the same objective solved by scikit-learn, and against plain arithmetic."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from reward_models.frozen_trunk import fit_head, scores_of


def pairs_of_units(seed=0, pairs=60, width=5, shift=0.7):
    """States of chosen and rejected answers of 1 to 4 units, row after row, and their unit mask."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, 5, (2 * pairs,), generator=generator)
    unit_mask = torch.arange(4) < counts[:, None]
    states = torch.randn(int(counts.sum()), width, generator=generator)
    better = torch.repeat_interleave(torch.arange(2 * pairs) % 2 == 0, counts)
    states[better, 0] += shift
    return states, unit_mask


def mean_states(states, unit_mask):
    rows, at = [], 0
    for count in unit_mask.sum(1).tolist():
        rows.append(states[at : at + count].mean(0))
        at += count
    return torch.stack(rows)


def test_scores_are_means_of_dot_products():
    states, unit_mask = pairs_of_units()
    weight = torch.arange(5.0)
    expected = mean_states(states, unit_mask) @ weight
    torch.testing.assert_close(scores_of(weight, states, unit_mask, aggregator="mean"), expected)


@pytest.mark.parametrize("penalty", [0.01, 0.1, 1.0])
def test_mean_head_equals_logistic_regression_on_differences(penalty):
    states, unit_mask = pairs_of_units()
    spread = states.std(0)
    means = mean_states(states / spread, unit_mask).numpy()
    differences = means[0::2] - means[1::2]
    # The mirrored copy gives scikit-learn two classes and leaves the objective as it is.
    features, labels = np.concatenate([differences, -differences]), np.repeat([1, 0], len(differences))
    solver = LogisticRegression(C=1 / (penalty * len(labels)), fit_intercept=False, tol=1e-10, max_iter=10_000)
    expected = solver.fit(features, labels).coef_[0] / spread.numpy()
    found = fit_head(states, unit_mask, aggregator="mean", penalty=penalty)
    np.testing.assert_allclose(found.numpy(), expected, atol=2e-3)


@pytest.mark.parametrize("aggregator", ["softmax", "sum", "softmin"])
def test_the_fit_separates_what_is_separable(aggregator):
    states, unit_mask = pairs_of_units(shift=4.0)
    weight = fit_head(states, unit_mask, aggregator=aggregator, penalty=0.1)
    scores = scores_of(weight, states, unit_mask, aggregator=aggregator)
    assert (scores[0::2] > scores[1::2]).float().mean() > 0.9
