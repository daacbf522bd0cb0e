"""Advantages with a critic, against other answers, and as MA-RLHF's released code has them."""

import pytest
import torch

from policy.estimators import (
    AdvantageSettings,
    estimate_advantages,
    released_advantages,
    released_units,
    whiten_advantages,
)
from segrew.advantages import macro_advantages
from segrew.segmentation import Segmentation, segment_by_ngram, segment_by_response, segment_by_token

REWARDS = torch.tensor([[1.0, 0.0, 2.0, -9.0], [0.5, 0.5, 0.0, 0.0], [0.0, 0.0, -1.0, 4.0], [2.0, -9.0, -9.0, -9.0]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0]], dtype=torch.bool)
TOTALS = [3.0, 1.0, 3.0, 2.0]
VALUES = torch.full((4, 4), 7.0)


def spread(values: list[float]) -> torch.Tensor:
    return (torch.tensor(values)[:, None] * torch.ones(4, 4)).masked_fill(~MASK, 0.0)


@pytest.mark.parametrize(
    "estimator, expected",
    [
        # Pairs (3, 1) and (3, 2): less the other; less the mean, over the population spread; as they are.
        ("rloo", [2.0, -2.0, 1.0, -1.0]),
        ("group", [1 / 1.0001, -1 / 1.0001, 0.5 / 0.5001, -0.5 / 0.5001]),
        ("reinforce", TOTALS),
    ],
)
def test_critic_free_estimators_with_one_action(estimator, expected):
    """Invariant 26: one action, no critic and a group baseline are RLOO; values play no part."""
    settings = AdvantageSettings(estimator=estimator, group_size=2, lambda_=0.3)
    advantages, returns = estimate_advantages(REWARDS, VALUES, segment_by_response(MASK), settings)
    torch.testing.assert_close(advantages, spread(expected))
    torch.testing.assert_close(returns, spread(TOTALS))


def test_group_baselines_of_dense_actions_are_whole_answers():
    """A unit gets what follows it, less the other answer's total."""
    settings = AdvantageSettings(estimator="rloo", group_size=2)
    advantages, _ = estimate_advantages(REWARDS, VALUES, segment_by_token(MASK), settings)
    expected = [[2.0, 1.0, 1.0, 0.0], [-2.0, -2.5, -3.0, -3.0], [1.0, 1.0, 1.0, 2.0], [-1.0, 0.0, 0.0, 0.0]]
    torch.testing.assert_close(advantages, torch.tensor(expected))


def test_answers_without_actions_are_no_baseline():
    ids = segment_by_response(MASK).ids.clone()
    ids[1] = -1
    for estimator in ("rloo", "group"):
        settings = AdvantageSettings(estimator=estimator, group_size=2)
        advantages, _ = estimate_advantages(REWARDS, VALUES, Segmentation(ids), settings)
        assert not advantages[:2].any()  # alone in its group: nothing to compare with
        assert advantages[2, 0] > 0 > advantages[3, 0]


@pytest.mark.parametrize("estimator", ["rloo", "group"])
@pytest.mark.parametrize("cut", [segment_by_token, segment_by_response])
def test_an_answer_that_is_left_alone_is_not_compared_with_itself(estimator, cut):
    ids = cut(MASK).ids.clone()
    ids[1] = -1
    settings = AdvantageSettings(estimator=estimator, group_size=2)
    advantages, _ = estimate_advantages(REWARDS, VALUES, Segmentation(ids), settings)
    assert not advantages[:2].any() and advantages[2:].any()


def test_equal_answers_have_no_spread_to_blow_their_later_units_up():
    rewards, mask = (torch.stack([x[0], x[0], x[2], x[3]]) for x in (REWARDS, MASK))
    settings = AdvantageSettings(estimator="group", group_size=2)
    advantages, _ = estimate_advantages(rewards, VALUES, segment_by_token(mask), settings)
    assert not advantages[:2].any() and 0 < advantages[2:].abs().max() < 4


def test_gae_is_macro_gae():
    settings = AdvantageSettings(gamma=0.9, lambda_=0.8, value_scheme="last", lambda_scale="token")
    actions = segment_by_ngram(MASK, 2)
    found = estimate_advantages(REWARDS, VALUES, actions, settings)
    expected = macro_advantages(
        REWARDS, VALUES, actions, gamma=0.9, lambda_=0.8, value_scheme="last", lambda_scale="token"
    )
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_whitening_counts_tokens_or_units():
    """Units of 3 and 1 tokens with advantages 1 and 5."""
    actions = Segmentation(torch.tensor([[0, 0, 0, 1]]))
    advantages = torch.tensor([[1.0, 1.0, 1.0, 5.0]])
    assert whiten_advantages(advantages, actions, "none") is advantages
    # Mean 2, variance 3; mean 3, variance 4.
    tokens = torch.tensor([[-1.0, -1.0, -1.0, 3.0]]) / 3**0.5
    torch.testing.assert_close(whiten_advantages(advantages, actions, "token"), tokens)
    torch.testing.assert_close(whiten_advantages(advantages, actions, "unit"), torch.tensor([[-1.0, -1.0, -1.0, 1.0]]))


@pytest.mark.parametrize(
    "n, lengths, phantom",
    [
        (1, [1, 1, 1, 1, 1, 1], True),
        (2, [2, 2, 1, 1], False),
        (3, [3, 2, 1], False),
        (5, [5, 1], True),
        (6, [5, 1], False),
        (9, [5, 1], False),
    ],
)
def test_released_units_of_six_tokens(n, lengths, phantom):
    """Invariant 38. What the released code does with six tokens; a phantom is a macro action of no tokens."""
    mask = torch.ones(1, 6, dtype=torch.bool)
    units = released_units(segment_by_ngram(mask, n))
    assert units.lengths[0, : units.counts[0]].tolist() == lengths

    generator = torch.Generator().manual_seed(n)
    u, v = torch.randn(1, 6, generator=generator), torch.randn(1, 6, generator=generator)
    advantages, returns = released_advantages(u, v, segment_by_ngram(mask, n), gamma=0.9, lambda_=0.8)
    expected = released_by_loop(u[0].tolist(), v[0].tolist(), [*lengths[:-1], 0, 1] if phantom else lengths)
    assert advantages[0].tolist() == pytest.approx(expected, abs=1e-5)
    value = v[0, -1].item()
    assert returns[0, -1].item() == pytest.approx(advantages[0, -1].item() + value, abs=1e-5)


def released_by_loop(u: list[float], v: list[float], lengths: list[int]) -> list[float]:
    """Means of rewards and values over macro actions, 0 for one of no tokens; GAE over all of them."""
    spans, start = [], 0
    for length in lengths:
        spans.append((start, start + length))
        start += length

    def mean(x: list[float], a: int, b: int) -> float:
        return sum(x[a:b]) / (b - a) if b > a else 0.0

    advantage, next_value, spread_out = 0.0, 0.0, [0.0] * len(u)
    for a, b in reversed(spans):
        value = mean(v, a, b)
        advantage = mean(u, a, b) + 0.9 * next_value - value + 0.9 * 0.8 * advantage
        next_value = value
        spread_out[a:b] = [advantage] * (b - a)
    return spread_out


def test_released_advantages_of_rows_of_many_lengths_equal_row_by_row():
    """Invariant 38."""
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    u, v = torch.randn(4, 5, generator=generator), torch.randn(4, 5, generator=generator)
    whole, _ = released_advantages(u, v, segment_by_ngram(mask, 2), gamma=1.0, lambda_=0.95)
    for row in range(4):
        alone, _ = released_advantages(
            u[row : row + 1], v[row : row + 1], segment_by_ngram(mask[row : row + 1], 2), gamma=1.0, lambda_=0.95
        )
        torch.testing.assert_close(whole[row : row + 1], alone)
    assert not whole[~mask].any()


def test_compat_goes_through_the_same_door():
    settings = AdvantageSettings(compat="ma_rlhf_release")
    actions = segment_by_ngram(MASK, 2)
    found = estimate_advantages(REWARDS, VALUES, actions, settings)
    expected = released_advantages(REWARDS, VALUES, actions, gamma=1.0, lambda_=0.95)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
