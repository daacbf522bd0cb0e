"""Advantages at any granularity: one recursion, whatever the units are."""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from segrew.macro_actions import ValueScheme, spread_to_tokens, sum_by_unit, value_by_unit
from segrew.masking import fill_padding, full_precision
from segrew.segmentation import Segmentation

Scale = Literal["unit", "token"]


def generalized_advantages(
    rewards: Float[Tensor, "b n"],
    values: Float[Tensor, "b n"],
    mask: Bool[Tensor, "b n"],
    *,
    gamma: float | int | Float[Tensor, "b n"],
    lambda_: float | int | Float[Tensor, "b n"],
    bootstrap: Float[Tensor, " b"] | None = None,
) -> tuple[Float[Tensor, "b n"], Float[Tensor, "b n"]]:
    """Aₜ = δₜ + γₜλₜ Aₜ₊₁ with δₜ = rₜ + γₜ Vₜ₊₁ − Vₜ (GAE, 1506.02438, eq. 16); returns Gₜ = Aₜ + Vₜ.

    t + 1 is the next real position: those outside the mask take no part. After a row's last one V is
    `bootstrap`, or 0.

    Returns:
        The advantages, unwhitened, and the returns.
    """
    rewards, values = fill_padding(rewards, mask), fill_padding(values, mask)
    gamma = _per_position(gamma, mask, values)
    decay = gamma * _per_position(lambda_, mask, values)
    after = rewards.new_zeros(len(rewards)) if bootstrap is None else full_precision(bootstrap)
    next_values = torch.cat([values, after.to(values)[:, None]], 1).gather(1, _next_real(mask))
    deltas = fill_padding(rewards + gamma * next_values - values, mask)
    # Padding passes on what comes after it.
    advantages = fill_padding(_reverse_scan(deltas, decay.masked_fill(~mask, 1.0)), mask)
    return advantages, advantages + values


def _per_position(x: float | int | Tensor, mask: Tensor, like: Tensor) -> Tensor:
    return fill_padding(x, mask).to(like) if isinstance(x, Tensor) else torch.full_like(like, x)


def _next_real(mask: Bool[Tensor, "b n"]) -> Tensor:
    """Column of the next real position after each, n where there is none."""
    width = mask.shape[1]
    column = torch.arange(width, device=mask.device).expand_as(mask).masked_fill(~mask, width)
    return pad(column[:, 1:], (0, 1), value=width).flip(1).cummin(1).values.flip(1)


def _reverse_scan(x: Float[Tensor, "b n"], decay: Float[Tensor, "b n"]) -> Float[Tensor, "b n"]:
    """Solve yₜ = xₜ + dₜ yₜ₊₁ by doubling: after k steps y holds the terms of 2ᵏ positions."""
    step = 1
    while step < x.shape[1]:
        x = torch.cat([x[:, :-step] + decay[:, :-step] * x[:, step:], x[:, -step:]], 1)
        decay = torch.cat([decay[:, :-step] * decay[:, step:], decay[:, -step:]], 1)
        step *= 2
    return x


def macro_advantages(
    token_rewards: Float[Tensor, "b t"],
    token_values: Float[Tensor, "b t"],
    segmentation: Segmentation,
    *,
    gamma: float | int,
    lambda_: float | int,
    value_scheme: ValueScheme = "mean",
    gamma_scale: Scale = "unit",
    lambda_scale: Scale = "unit",
    bootstrap: Float[Tensor, " b"] | None = None,
) -> tuple[Float[Tensor, "b t"], Float[Tensor, "b t"]]:
    """GAE over units, Aτ = δτ + γλ Aτ₊₁, with Rτ = Σ r_j and Vτ = Σ σ_i V_i (MA-PPO, 2410.02743).

    Scale `token` makes one step of a unit ω worth |ω| steps of a token: γ^|ω| with Rτ = Σ γⁱ r_i, and λ^|ω|.
    `bootstrap` is the value after each response's last token, where the response was cut off.

    Returns:
        Advantages and returns Aτ + Vτ of the units, spread to their tokens.
    """
    values = value_by_unit(token_values, segmentation, scheme=value_scheme)
    discount: float | int | Tensor = gamma
    if gamma_scale == "token":
        token_rewards = fill_padding(token_rewards, segmentation.mask)
        token_rewards = token_rewards * _powers(gamma, segmentation.positions, token_rewards)
        discount = _powers(gamma, segmentation.lengths, values)
    trace = lambda_ if lambda_scale == "unit" else _powers(lambda_, segmentation.lengths, values)
    rewards = sum_by_unit(token_rewards, segmentation)
    advantages, returns = generalized_advantages(
        rewards, values, segmentation.unit_mask, gamma=discount, lambda_=trace, bootstrap=bootstrap
    )
    return spread_to_tokens(advantages, segmentation), spread_to_tokens(returns, segmentation)


def _powers(base: float | int, exponents: Tensor, like: Tensor) -> Tensor:
    return torch.full_like(like, base).pow(exponents.to(like.dtype))


def leave_one_out(
    scores: Float[Tensor, " b"], group_size: int, *, mask: Bool[Tensor, " b"] | None = None
) -> Float[Tensor, " b"]:
    """Aᵢ = sᵢ − mean of the other scores of its group (RLOO, 2402.14740); groups are consecutive.

    Scores outside the mask take no part; they, and a score without others, get 0.
    """
    scores, real, total, count = _groups(scores, group_size, mask)
    others = (total - scores) / (count - 1).clamp(min=1)
    return (scores - others).masked_fill(~real | (count < 2), 0.0).view(-1)


def group_moments(
    scores: Float[Tensor, " b"], group_size: int, *, mask: Bool[Tensor, " b"] | None = None
) -> tuple[Float[Tensor, " b"], Float[Tensor, " b"]]:
    """Mean and standard deviation (population) of each score's group, as in GRPO (2402.03300, 4.1.2).

    Groups are consecutive; scores outside the mask take no part.
    """
    scores, real, total, count = _groups(scores, group_size, mask)
    mean = total / count.clamp(min=1)
    variance = (scores - mean).square().masked_fill(~real, 0.0).sum(1, keepdim=True) / count.clamp(min=1)
    return mean.expand_as(scores).reshape(-1), variance.sqrt().expand_as(scores).reshape(-1)


def _groups(scores: Tensor, group_size: int, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores as [groups, size], which of them are real, and each group's sum and number."""
    if group_size < 2:
        raise ValueError(f"group_size {group_size} must be at least 2: the others are the baseline")
    if scores.shape[0] % group_size:
        raise ValueError(f"{scores.shape[0]} scores do not divide into groups of {group_size}")
    mask = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask
    groups, real = fill_padding(scores, mask).view(-1, group_size), mask.view(-1, group_size)
    return groups, real, groups.sum(1, keepdim=True), real.sum(1, keepdim=True)
