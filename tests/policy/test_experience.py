"""One scored batch turned into advantages, against a loop over its tokens."""

import pytest
import torch
from accelerate import Accelerator

from policy.experience import densify
from policy.ppo_config import PPOConfig
from policy.rollout import Rollout
from policy.scoring import Scores, Units
from segrew.language_models import Conversations
from segrew.segmentation import Segmentation

IDS = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, -1, -1]])
REWARDS = [[1.0, -2.0], [0.5, 0.0]]
LOGPROBS = torch.tensor([[-1.0, -2.0, -0.5, -1.5, -1.0], [-0.7, -0.2, -3.0, 0.0, 0.0]])
REFERENCE = torch.tensor([[-1.2, -1.0, -0.5, -2.5, -1.1], [-0.9, -0.2, -2.0, 0.0, 0.0]])
VALUES = torch.tensor([[0.3, -0.1, 0.2, 0.4, 0.0], [0.6, 0.1, -0.2, 0.0, 0.0]])


def batch(actions: torch.Tensor) -> tuple[Rollout, Units, Scores]:
    conversations = Conversations([[1], [1]], [[3] * 5, [3] * 3], torch.tensor([True, False]))
    rollout = Rollout(conversations, ["", ""], LOGPROBS, torch.zeros(2, 5), VALUES)
    rewards = Segmentation(IDS)
    units = Units(REFERENCE, own=rewards, readings=rewards, rewards=rewards, actions=Segmentation(actions))
    return rollout, units, Scores(torch.zeros(2), torch.tensor(REWARDS), torch.tensor(REWARDS))


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
    experience = densify(config, Accelerator(cpu=True), *batch(torch.tensor(actions)))
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
    plain = PPOConfig(reward_model_path="x", kl_coef=0.1, missing_eos_penalty=2.0, whiten_advantages=False)
    unwhitened = densify(plain, Accelerator(cpu=True), *batch(torch.tensor(actions)))
    assert torch.equal(unwhitened.weights, unwhitened.advantages)
    assert torch.equal(unwhitened.returns, experience.returns)


def test_a_terminal_reward_is_not_spread():
    config = PPOConfig(reward_model_path="x", kl_coef=0.0, reward_rule="terminal", interpolation="even")
    rollout, units, scores = batch(IDS)
    whole = Segmentation(torch.where(IDS >= 0, 0, -1))
    units = Units(REFERENCE, own=units.own, readings=units.own, rewards=whole, actions=units.actions)
    scores = Scores(scores.scores, scores.readings, torch.tensor([[3.0], [-1.0]]))
    experience = densify(config, Accelerator(cpu=True), rollout, units, scores)
    assert experience.token_rewards.tolist() == [[0, 0, 0, 0, 3.0], [0, 0, -1.0, 0, 0]]
