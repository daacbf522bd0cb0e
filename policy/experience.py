"""From scored rollouts to what the update learns from: token rewards, advantages, returns."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from policy.estimators import AdvantageSettings, estimate_advantages, whiten_advantages
from policy.kl_control import charged_kl
from policy.ppo_config import PPOConfig
from policy.readings import Scores, Units
from policy.reward_shaping import dense_rewards, shape_rewards
from policy.rollout import Rollout
from segrew.masking import fill_padding


@dataclass(frozen=True)
class Experience:
    """What the update learns from. 0 in padding and in rows that take no part.

    Args:
        units: with actions only in the rows that take part.
        dense: what the sources of reward pay. token_rewards: u_j, the same less the KL.
        advantages: of the action units, spread to their tokens, before whitening; weights: as they enter the loss.
        returns: targets of the critic.
    """

    units: Units
    dense: Float[Tensor, "b t"]
    token_rewards: Float[Tensor, "b t"]
    advantages: Float[Tensor, "b t"]
    weights: Float[Tensor, "b t"]
    returns: Float[Tensor, "b t"]


def densify(config: PPOConfig, rollout: Rollout, units: Units, scores: Scores, kl_coef: float) -> Experience:
    """Spread the rewards of all sources, subtract the KL, and compute advantages over the action units."""
    units = units.only(taking_part(config, rollout, scores))
    dense = torch.stack(
        [
            weight
            * dense_rewards(
                r.rewards,
                r.segmentation,
                how=r.how or config.interpolation,
                clip=config.reward_clip,
                scale=config.reward_scale,
            )
            for weight, r in zip(scores.weights, scores.readings, strict=True)
        ]
    ).sum(0)
    token_rewards = shape_rewards(
        dense,
        charged_kl(rollout.logprobs, units.ref_logprobs, config.kl_estimator),
        units.actions,
        rollout.ended,
        kl_coef=kl_coef if config.kl_in == "reward" else 0.0,
        kl_scale=config.kl_scale,
        missing_eos_penalty=config.missing_eos_penalty,
    )
    bootstrap = rollout.values_after if config.truncated_answers == "bootstrap" else None
    advantages, returns = estimate_advantages(
        token_rewards, rollout.values, units.actions, advantage_settings(config), bootstrap
    )
    weights = whiten_advantages(advantages, units.actions, config.whitening)
    return Experience(units, fill_padding(dense, units.actions.mask), token_rewards, advantages, weights, returns)


def taking_part(config: PPOConfig, rollout: Rollout, scores: Scores) -> Bool[Tensor, " b"]:
    """Which answers the update learns from."""
    return ~scores.bad & (rollout.ended if config.truncated_answers == "mask" else ~torch.zeros_like(scores.bad))


def advantage_settings(config: PPOConfig) -> AdvantageSettings:
    """How the run computes advantages."""
    return AdvantageSettings(
        estimator=config.advantage_estimator,
        gamma=config.gamma,
        lambda_=config.lam,
        value_scheme=config.value_scheme,
        gamma_scale=config.gamma_scale,
        lambda_scale=config.lambda_scale,
        group_size=config.num_samples_per_prompt,
        compat=config.compat,
    )
