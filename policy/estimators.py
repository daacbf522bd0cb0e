"""From token rewards to advantages: with a critic, or against the other answers to the prompt.

Axes: b answers, t response token, s unit. Torch only.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from segrew.advantages import Scale, generalized_advantages, group_moments, leave_one_out, macro_advantages
from segrew.macro_actions import ValueScheme, spread_to_tokens, value_by_unit
from segrew.masking import masked_whiten
from segrew.segmentation import Segmentation, segment_by_response

Estimator = Literal["gae", "rloo", "group", "reinforce"]
Whitening = Literal["token", "unit", "none"]
Compat = Literal["ma_rlhf_release"]
# Answers to a prompt that spread less score alike: there is nothing to divide by, and nothing to credit either.
SPREAD_FLOOR = 1e-4


@dataclass(frozen=True)
class AdvantageSettings:
    """How advantages over units are computed.

    Args:
        estimator: gae takes the critic's values. The others take what a unit is followed by,
            Gτ = Σ γᵏ Rτ₊ₖ, less a baseline b made of whole answers' G₀: rloo (2402.14740) the mean of the other
            answers to the prompt; group (GRPO, 2402.03300) the mean of all of them, and the difference is divided
            by their standard deviation; reinforce none.
        group_size: answers to each prompt, consecutive rows.
        compat: ma_rlhf_release, see `released_advantages`.
    """

    estimator: Estimator = "gae"
    gamma: float | int = 1.0
    lambda_: float | int = 0.95
    value_scheme: ValueScheme = "mean"
    gamma_scale: Scale = "unit"
    lambda_scale: Scale = "unit"
    group_size: int = 1
    compat: Compat | None = None


def estimate_advantages(
    token_rewards: Float[Tensor, "b t"],
    token_values: Float[Tensor, "b t"],
    actions: Segmentation,
    settings: AdvantageSettings,
    bootstrap: Float[Tensor, " b"] | None = None,
) -> tuple[Float[Tensor, "b t"], Float[Tensor, "b t"]]:
    """Advantages and returns of the action units, spread to their tokens; rows without tokens take no part.

    Args:
        bootstrap: value after the last token, 0 where an answer ended.
    """
    if settings.compat is not None:
        return released_advantages(token_rewards, token_values, actions, gamma=settings.gamma, lambda_=settings.lambda_)
    critic = settings.estimator == "gae"
    advantages, returns = macro_advantages(
        token_rewards,
        token_values if critic else torch.zeros_like(token_values),
        actions,
        gamma=settings.gamma,
        lambda_=settings.lambda_ if critic else 1.0,
        value_scheme=settings.value_scheme,
        gamma_scale=settings.gamma_scale,
        lambda_scale=settings.lambda_scale,
        bootstrap=bootstrap,
    )
    if settings.estimator in ("rloo", "group"):
        real = actions.mask.any(1)
        baseline, scale = _baseline(whole_returns(returns, actions), settings, real)
        advantages = ((advantages - baseline[:, None]) / scale[:, None]).masked_fill(~actions.mask, 0.0)
    return advantages, returns


def whole_returns(returns: Float[Tensor, "b t"], actions: Segmentation) -> Float[Tensor, " b"]:
    """G₀, the return from each answer's first token on."""
    return value_by_unit(returns, segment_by_response(actions.mask), scheme="first")[:, 0]


def _baseline(scores: Tensor, settings: AdvantageSettings, real: Tensor) -> tuple[Tensor, Tensor]:
    """What is subtracted, and what the difference is divided by: infinity where there is nothing to compare with."""
    if settings.estimator == "rloo":
        alone = real.view(-1, settings.group_size).sum(1) < 2
        baseline = scores - leave_one_out(scores, settings.group_size, mask=real)
        return baseline, torch.ones_like(scores).masked_fill(alone.repeat_interleave(settings.group_size), torch.inf)
    mean, spread = group_moments(scores, settings.group_size, mask=real)
    return mean, (spread + SPREAD_FLOOR).masked_fill(spread < SPREAD_FLOOR, torch.inf)


def whiten_advantages(advantages: Float[Tensor, "b t"], actions: Segmentation, how: Whitening) -> Float[Tensor, "b t"]:
    """Standardize over real tokens, or over units with each counting once; `none` leaves them."""
    if how == "none":
        return advantages
    if how == "token":
        return masked_whiten(advantages, actions.mask)
    of_units = value_by_unit(advantages, actions, scheme="first")
    return spread_to_tokens(masked_whiten(of_units, actions.unit_mask), actions)


def released_units(actions: Segmentation) -> Segmentation:
    """The macro actions of MA-RLHF's released code: the last token is always one of its own."""
    count = actions.counts[:, None]
    last = segment_by_response(actions.mask).last
    alone = actions.unit_lengths == 1
    return Segmentation(actions.ids + (last & ~alone & (count > 0)).long(), bound=actions.size + 1)


def released_advantages(
    token_rewards: Float[Tensor, "b t"],
    token_values: Float[Tensor, "b t"],
    actions: Segmentation,
    *,
    gamma: float | int,
    lambda_: float | int,
) -> tuple[Float[Tensor, "b t"], Float[Tensor, "b t"]]:
    """Macro GAE as MA-RLHF's released code computes it (actor of commit 70e1556 and later).

    Rewards are averaged inside a macro action like values, so the KL of a macro of n tokens weighs 1/n. Where the
    n-grams already end before the last token, that border is noted twice: a macro action of no tokens, value 0 and
    reward 0 stands before the last one. It shifts the bootstrap by one and costs one more γλ.
    """
    alone = (actions.lengths == 1) & (actions.unit_mask.cumsum(1) == actions.counts[:, None])
    phantom = (alone & actions.unit_mask & (actions.counts[:, None] > 1)).any(1)
    units = released_units(actions)
    order = torch.arange(units.size, device=units.ids.device)[None]
    is_last = order == units.counts[:, None] - 1
    place = order + (is_last & phantom[:, None])
    shape = (len(place), units.size + 1)

    def chain(x: Tensor) -> Tensor:
        of_units = value_by_unit(x, units).masked_fill(~units.unit_mask, 0.0)
        return of_units.new_zeros(shape).scatter_add(1, place, of_units)

    length = units.counts + phantom
    mask: Bool[Tensor, "b n"] = torch.arange(shape[1], device=units.ids.device)[None] < length[:, None]
    results = generalized_advantages(chain(token_rewards), chain(token_values), mask, gamma=gamma, lambda_=lambda_)
    advantages, returns = (spread_to_tokens(x.gather(1, place), units) for x in results)
    return advantages, returns
