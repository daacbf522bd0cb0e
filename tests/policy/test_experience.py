"""One scored batch turned into advantages, against a loop over its tokens."""

from dataclasses import replace

import pytest
import torch

from policy.experience import densify
from policy.ppo_config import PPOConfig
from policy.readings import Reading, Scores, Units
from policy.rollout import Rollout
from segrew.conversations import Conversations
from segrew.segmentation import Segmentation, segment_by_token

IDS = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, -1, -1]])
REWARDS = [[1.0, -2.0], [0.5, 0.0]]
LOGPROBS = torch.tensor([[-1.0, -2.0, -0.5, -1.5, -1.0], [-0.7, -0.2, -3.0, 0.0, 0.0]])
REFERENCE = torch.tensor([[-1.2, -1.0, -0.5, -2.5, -1.1], [-0.9, -0.2, -2.0, 0.0, 0.0]])
VALUES = torch.tensor([[0.3, -0.1, 0.2, 0.4, 0.0], [0.6, 0.1, -0.2, 0.0, 0.0]])


def batch(actions: torch.Tensor) -> tuple[Rollout, Units, Scores]:
    conversations = Conversations([[1], [1]], [[3] * 5, [3] * 3], torch.tensor([True, False]))
    rollout = Rollout(conversations, ["", ""], LOGPROBS, torch.zeros(2, 5), VALUES)
    units = Units(REFERENCE, cuts={}, readings=Segmentation(IDS), actions=Segmentation(actions))
    reading = Reading("rm", Segmentation(IDS), torch.tensor(REWARDS), torch.tensor(REWARDS), torch.zeros(2))
    return rollout, units, Scores((reading,), (1.0,), torch.zeros(2, dtype=torch.bool))


def loop_advantages(u: list[float], v: list[float], units: list[list[int]]) -> list[float]:
    """GAE over units with mean values, γ = 1, λ = 0.95, spread to tokens."""
    after, after_value, spread = 0.0, 0.0, [0.0] * 5
    for columns in units[::-1]:
        value = sum(v[j] for j in columns) / len(columns)
        after = sum(u[j] for j in columns) + after_value - value + 0.95 * after
        after_value = value
        for j in columns:
            spread[j] = after
    return spread


@pytest.mark.parametrize(
    "actions, units",
    [
        ([[0, 1, 2, 3, 4], [0, 1, 2, -1, -1]], ([[0], [1], [2], [3], [4]], [[0], [1], [2]])),
        ([[0, 0, 1, 1, 1], [0, 0, 0, -1, -1]], ([[0, 1], [2, 3, 4]], [[0, 1, 2]])),
        ([[0, 0, 0, 1, 1], [0, 1, 1, -1, -1]], ([[0, 1, 2], [3, 4]], [[0], [1, 2]])),
    ],
)
def test_advantages_over_any_actions_of_one_reward_vector(actions, units):
    config = PPOConfig(reward_model_path="x", kl_coef=0.1, missing_eos_penalty=2.0)
    experience = densify(config, *batch(torch.tensor(actions)), config.kl_coef)
    kl = (LOGPROBS - REFERENCE).tolist()
    dense = [[0.5, 0.5, -2 / 3, -2 / 3, -2 / 3], [0.5 / 3, 0.5 / 3, 0.5 / 3 - 2.0]]
    expected = torch.zeros(2, 5)
    for i, row in enumerate(dense):
        u = [r - 0.1 * k for r, k in zip(row, kl[i], strict=False)]
        assert experience.token_rewards[i, : len(u)].tolist() == pytest.approx(u, abs=1e-6)
        expected[i] = torch.tensor(loop_advantages(u, VALUES[i].tolist(), units[i]))
    torch.testing.assert_close(experience.advantages, expected, atol=1e-6, rtol=0)

    real = expected[IDS >= 0]
    whitened = ((expected - real.mean()) / real.std(correction=0)).masked_fill(IDS < 0, 0.0)
    torch.testing.assert_close(experience.weights, whitened, atol=1e-5, rtol=0)
    plain = PPOConfig(reward_model_path="x", kl_coef=0.1, missing_eos_penalty=2.0, whitening="none")
    unwhitened = densify(plain, *batch(torch.tensor(actions)), 0.1)
    assert torch.equal(unwhitened.weights, unwhitened.advantages)
    assert torch.equal(unwhitened.returns, experience.returns)


def test_a_terminal_reward_is_not_spread():
    config = PPOConfig(reward_model_path="x", kl_coef=0.0, reward_rule="terminal", interpolation="even")
    rollout, units, _ = batch(IDS)
    score = torch.tensor([[3.0], [-1.0]])
    reading = Reading("rm", units.whole, score, score, score[:, 0], "last")
    scores = Scores((reading,), (1.0,), torch.zeros(2, dtype=torch.bool))
    experience = densify(config, rollout, units, scores, 0.0)
    assert experience.token_rewards.tolist() == [[0, 0, 0, 0, 3.0], [0, 0, -1.0, 0, 0]]


def test_sources_add_up_on_tokens_with_their_weights():
    """A dense source split evenly, a terminal one, one number a token: 2·½ + 0.5·(…) + … by hand."""
    config = PPOConfig(reward_model_path="x", kl_coef=0.0, reward_clip=4.0)
    rollout, units, _ = batch(IDS)
    dense = torch.tensor(REWARDS)
    total = torch.tensor([[8.0], [2.0]])  # the first is clamped to 4
    tokens = torch.tensor([[0.0, 1.0, 0.0, 0.0, -1.0], [0.5, 0.0, 0.0, 0.0, 0.0]])
    readings = [
        Reading("rm", units.readings, dense, dense, torch.zeros(2)),
        Reading("f", units.whole, total, total, total[:, 0], "last"),
        Reading("g", segment_by_token(IDS >= 0), tokens, tokens, tokens.sum(1), "last"),
    ]
    scores = Scores(tuple(readings), (2.0, 0.5, 1.0), torch.zeros(2, dtype=torch.bool))
    experience = densify(config, rollout, units, scores, 0.0)
    expected = torch.tensor([[1.0, 2.0, -4 / 3, -4 / 3, -4 / 3 + 2 - 1], [1 / 3 + 0.5, 1 / 3, 1 / 3 + 1, 0, 0]])
    torch.testing.assert_close(experience.token_rewards, expected)
    assert scores.scores.tolist() == [0.5 * 8, 0.5 * 2 + 0.5]


def test_b23_bad_rows_take_no_part():
    """Four rewards 1.0, None, NaN and +inf: the last three are as if they were not there."""
    config = PPOConfig(reward_model_path="x", kl_coef=0.0, skip_bad_rows=True)
    ids = IDS[:1].expand(4, -1)
    conversations = Conversations([[1]] * 4, [[3] * 5] * 4, torch.ones(4, dtype=torch.bool))
    rollout = Rollout(conversations, [""] * 4, *(x[:1].expand(4, -1) for x in (LOGPROBS, LOGPROBS, VALUES)))
    units = Units(REFERENCE[:1].expand(4, -1), {}, Segmentation(ids), Segmentation(ids))
    raw = torch.tensor([[1.0, 2.0], [torch.nan, 1.0], [0.0, torch.nan], [torch.inf, 0.0]])
    reading = Reading("rm", units.readings, raw, raw, raw.sum(1))
    assert reading.bad.tolist() == [False, True, True, True]
    scores = Scores((reading.without(reading.bad),), (1.0,), reading.bad)
    batch_of_four = densify(config, rollout, units, scores, 0.0)
    assert batch_of_four.units.actions.mask.any(1).tolist() == [True, False, False, False]

    alone = Rollout(conversations.select([0]), [""], *(x[:1] for x in (LOGPROBS, LOGPROBS, VALUES)))
    one = Units(REFERENCE[:1], {}, Segmentation(IDS[:1]), Segmentation(IDS[:1]))
    reading = Reading("rm", one.readings, raw[:1], raw[:1], raw[:1].sum(1))
    batch_of_one = densify(config, alone, one, Scores((reading,), (1.0,), torch.tensor([False])), 0.0)
    for name in ("token_rewards", "advantages", "weights", "returns"):
        torch.testing.assert_close(getattr(batch_of_four, name)[:1], getattr(batch_of_one, name))
        assert not getattr(batch_of_four, name)[1:].any()


def test_cut_off_answers_can_be_masked_or_continued_by_their_value():
    masked = PPOConfig(reward_model_path="x", kl_coef=0.0, truncated_answers="mask")
    experience = densify(masked, *batch(IDS), 0.0)
    assert experience.units.actions.mask.any(1).tolist() == [True, False]
    config = PPOConfig(
        reward_model_path="x", kl_coef=0.0, truncated_answers="bootstrap", action_rule="response", whitening="none"
    )
    rollout, units, scores = batch(torch.where(IDS >= 0, 0, -1))
    rollout = replace(rollout, values_after=torch.tensor([0.0, 2.5]))
    experience = densify(config, rollout, units, scores, 0.0)
    # One action a row: R + V_after − mean V.
    assert experience.advantages[0, 0].item() == pytest.approx(-1.0 - 0.16, abs=1e-6)
    assert experience.advantages[1, 0].item() == pytest.approx(0.5 + 2.5 - 0.5 / 3, abs=1e-6)
