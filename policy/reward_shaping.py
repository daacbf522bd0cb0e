"""From unit rewards to the one token reward vector that every action granularity consumes.

u_j = interpolation(clamp(r))_j − β k1_j − penalty · [j is the last token of an unfinished answer]
"""

from typing import Literal

from jaxtyping import Bool, Float
from torch import Tensor

from segrew.macro_actions import spread_to_tokens
from segrew.masking import fill_padding
from segrew.segmentation import Segmentation, segment_by_response

Interpolation = Literal["even", "last", "repeat"]


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
        shares = unit_rewards[:, :width] / segmentation.lengths[:, :width].clamp(min=1)
        return spread_to_tokens(shares, segmentation)
    rewards = spread_to_tokens(unit_rewards, segmentation)
    return rewards if how == "repeat" else rewards.masked_fill(~segmentation.last, 0.0)


def shape_rewards(
    unit_rewards: Float[Tensor, "b s"],
    segmentation: Segmentation,
    kl: Float[Tensor, "b t"],
    ended: Bool[Tensor, "b"],
    *,
    kl_coef: float,
    how: Interpolation = "even",
    clip: float | None = 10.0,
    missing_eos_penalty: float | None = None,
    mask: Bool[Tensor, "b t"] | None = None,
) -> Float[Tensor, "b t"]:
    """The token reward u_j = interpolation(clamp(r, ±clip))_j − β k1_j, less a penalty for cut-off answers.

    Unit rewards are clamped before they are split: afterwards the bound would hardly bind in a long unit.

    Args:
        kl: k1_j, log π_old(y_j) − log π_ref(y_j).
        kl_coef: β.
        missing_eos_penalty: Taken once, from the last token of an answer that was cut off; None for none.
        mask: response tokens, where some are in no unit; default the tokens of the units.
    """
    if clip is not None:
        unit_rewards = unit_rewards.clamp(-clip, clip)
    mask = segmentation.mask if mask is None else mask
    rewards = spread_rewards(unit_rewards, segmentation, how=how) - kl_coef * fill_padding(kl, mask)
    if missing_eos_penalty is not None:
        unfinished = segment_by_response(mask).last & ~ended[:, None]
        rewards = rewards - missing_eos_penalty * unfinished
    return rewards
