"""From unit rewards to the one token reward vector that every action granularity consumes.

u_j = Σ_sources w · interpolation(clamp(r))_j − β kl_j − penalty · [j is the last token of an unfinished answer]
"""

from typing import Literal

from jaxtyping import Bool, Float
from torch import Tensor

from policy.kl_control import scaled_kl
from segrew.advantages import Scale
from segrew.macro_actions import spread_to_tokens
from segrew.masking import fill_padding, full_precision
from segrew.segmentation import Segmentation, segment_by_response

Interpolation = Literal["even", "last", "repeat"]
RewardScale = Literal["none", "unit", "token"]


def spread_rewards(
    unit_rewards: Float[Tensor, "b s"], segmentation: Segmentation, *, how: Interpolation = "even"
) -> Float[Tensor, "b t"]:
    """Interpolate unit rewards to tokens.

    even: r_u / |u| on each token;  last: r_u on the unit's last token;  repeat: r_u on each token

    `even` and `last` keep the sum of the rewards, `repeat` multiplies each by its unit's length. Tokens
    outside the response get 0. At one token a unit all three are equal; with one unit `last` is the terminal
    reward.
    """
    if how == "even":
        width = min(unit_rewards.shape[1], segmentation.size)
        shares = full_precision(unit_rewards[:, :width]) / segmentation.lengths[:, :width].clamp(min=1)
        return spread_to_tokens(shares, segmentation)
    rewards = spread_to_tokens(unit_rewards, segmentation)
    return rewards if how == "repeat" else rewards.masked_fill(~segmentation.last, 0.0)


def dense_rewards(
    unit_rewards: Float[Tensor, "b s"],
    segmentation: Segmentation,
    *,
    how: Interpolation = "even",
    clip: float | None = 10.0,
    scale: RewardScale = "none",
) -> Float[Tensor, "b t"]:
    """interpolation(clamp(r, ±clip) / scale)_j, the part of the token rewards that one source of reward pays.

    Unit rewards are clamped before they are split: afterwards the bound would hardly bind in a long unit.

    Args:
        scale: divide by the answer's number of units, or of tokens, so that more of them do not pay more; tokens are
            `length_norm` of the code of 2501.02790.
    """
    rewards = unit_rewards if clip is None else unit_rewards.clamp(-clip, clip)
    if scale != "none":
        number = segmentation.counts if scale == "unit" else segmentation.mask.sum(1)
        rewards = rewards / number.clamp(min=1)[:, None]
    return spread_rewards(rewards, segmentation, how=how)


def shape_rewards(
    dense: Float[Tensor, "b t"],
    kl: Float[Tensor, "b t"],
    actions: Segmentation,
    ended: Bool[Tensor, "b"],
    *,
    kl_coef: float,
    kl_scale: Scale = "token",
    missing_eos_penalty: float | None = None,
) -> Float[Tensor, "b t"]:
    """The token reward u_j = dense_j − β kl_j, less a penalty for cut-off answers; 0 where there is no action.

    Args:
        dense: what the sources of reward pay, already spread.
        kl: the estimate for each token, of log π_old(y_j) − log π_ref(y_j).
        kl_coef: β. kl_scale: see `scaled_kl`.
        missing_eos_penalty: Taken once, from the last token of an answer that was cut off; None for none.
    """
    mask = actions.mask
    rewards = fill_padding(dense, mask) - kl_coef * scaled_kl(kl, actions, kl_scale)
    if missing_eos_penalty is not None:
        unfinished = segment_by_response(mask).last & ~ended[:, None]
        rewards = rewards - missing_eos_penalty * unfinished
    return rewards
