"""From scored rollouts to what the update learns from: token rewards, advantages, returns."""

from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from jaxtyping import Bool, Float
from torch import Tensor

from policy.ppo_config import PPOConfig
from policy.reward_shaping import shape_rewards
from policy.rollout import Rollout
from policy.scoring import Scores, Units
from segrew.advantages import macro_advantages
from segrew.masking import masked_whiten


@dataclass(frozen=True)
class Experience:
    """What the update learns from. 0 in padding.

    Args:
        token_rewards: u_j, the dense reward less the KL.
        advantages: of the action units, spread to their tokens, before whitening; weights: as they enter the loss.
        returns: targets of the critic.
    """

    token_rewards: Float[Tensor, "b t"]
    advantages: Float[Tensor, "b t"]
    weights: Float[Tensor, "b t"]
    returns: Float[Tensor, "b t"]


def densify(config: PPOConfig, accelerator: Accelerator, rollout: Rollout, units: Units, scores: Scores) -> Experience:
    """Spread the unit rewards, subtract the KL, and compute advantages over the action units."""
    token_rewards = shape_rewards(
        scores.rewards,
        units.rewards,
        rollout.logprobs - units.ref_logprobs,
        rollout.ended,
        kl_coef=config.kl_coef,
        how="last" if config.reward_rule == "terminal" else config.interpolation,
        clip=config.reward_clip,
        missing_eos_penalty=config.missing_eos_penalty,
        mask=rollout.mask,
    )
    advantages, returns = macro_advantages(
        token_rewards,
        rollout.values,
        units.actions,
        gamma=config.gamma,
        lambda_=config.lam,
        value_scheme=config.value_scheme,
        gamma_scale=config.gamma_scale,
        lambda_scale=config.lambda_scale,
    )
    weights = whiten(accelerator, advantages, rollout.mask) if config.whiten_advantages else advantages
    return Experience(token_rewards, advantages, weights, returns)


def whiten(accelerator: Accelerator, x: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]) -> Float[Tensor, "b t"]:
    """Standardize over the answer tokens of all processes."""
    if accelerator.num_processes == 1:
        return masked_whiten(x, mask)
    everywhere: Any = accelerator.gather(accelerator.pad_across_processes(x, dim=1))
    masks: Any = accelerator.gather(accelerator.pad_across_processes(mask, dim=1))
    own = slice(accelerator.process_index * len(x), (accelerator.process_index + 1) * len(x))
    return masked_whiten(everywhere, masks)[own, : x.shape[1]]
