"""The clipped policy and value losses of PPO at any action granularity, and three estimates of the KL.

Axes: b batch, t response token, s unit. Each function computes in full precision, ignores
whatever stands in padding, and returns detached scalar tensors beside its loss, so that nothing here waits
for the device.
"""

import math
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from segrew.macro_actions import sum_by_unit
from segrew.masking import fill_padding, full_precision, masked_mean
from segrew.segmentation import Segmentation

Ratio = Literal["token", "joint", "geometric"]
Reduction = Literal["token", "sequence", "unit"]
Stats = dict[str, Tensor]

# exp(20) is 5e8: a ratio beyond it says only "far away", and float32 would soon overflow into inf · 0 = NaN.
LOG_RATIO_BOUND = 20.0
# k3 continues along its tangent from here; squares of differences up to 1e18 are still finite in float32.
LOG_K3_BOUND, LOG_DIFFERENCE_BOUND = 40.0, 1e18


def policy_loss(
    logprobs: Float[Tensor, "b t"],
    old_logprobs: Float[Tensor, "b t"],
    advantages: Float[Tensor, "b t"],
    segmentation: Segmentation,
    *,
    clip: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    ratio: Ratio = "token",
    reduction: Reduction = "token",
    normalizer: int | float | Tensor | None = None,
) -> tuple[Float[Tensor, ""], Stats]:
    """Clipped surrogate loss over tokens or over the units of `segmentation`.

    L = −(1/N) Σ_u c_u min(ρ_u A_u, clip(ρ_u, 1−ε, 1+ε) A_u), N = number of tokens (PPO, eq. 7)

    token:      u is a token,  ρ_j = π(y_j)/π_old(y_j),                    c = 1
    joint:      u is a unit,   ρ_u = Π_{j∈u} ρ_j (MA-PPO, 2410.02743),     c = 1
    geometric:  u is a unit,   ρ_u = (Π_{j∈u} ρ_j)^{1/|u|} (as in GSPO),   c = |u|

    With these c all three have the same gradient at π = π_old. A unit's advantage is the mean of its tokens'
    advantages, which `macro_advantages` makes equal.

    Args:
        clip: ε. clip_high: ε above 1 where it differs, as in DAPO (2503.14476).
        dual_clip: c > 1, a floor c·A under the surrogate where A < 0, which is else unbounded (1912.09729, eq. 5).
        reduction: `token` divides by all tokens; `sequence` averages within each response, then over
            responses; `unit` averages within each unit, then over units.
        normalizer: The number of tokens (responses, units) to divide by when this is one micro-batch of a
            larger batch, so that accumulated gradients are those of the whole. None: those of this batch.

    Returns:
        The loss, and `clip_fraction` (share of ratios whose clipped term was taken), `ratio_max`,
        `approx_kl` (k3 of π_old against π, mean over tokens).
    """
    mask = segmentation.mask
    advantages = fill_padding(advantages, mask)
    log_ratio = fill_padding(_difference(logprobs, old_logprobs), mask)
    approx_kl = masked_mean(kl_estimates(torch.zeros_like(log_ratio), log_ratio.detach())[2], mask)

    weights = _token_weights(segmentation, reduction, normalizer)
    if ratio != "token":
        mask, tokens = segmentation.unit_mask, segmentation.lengths.clamp(min=1)
        log_ratio = sum_by_unit(log_ratio, segmentation)
        weights = sum_by_unit(weights, segmentation) / tokens
        advantages = sum_by_unit(advantages, segmentation) / tokens
        if ratio == "geometric":
            log_ratio, weights = log_ratio / tokens, weights * tokens

    ratios = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    unclipped = ratios * advantages
    clipped = ratios.clamp(1 - clip, 1 + (clip if clip_high is None else clip_high)) * advantages
    surrogate = torch.minimum(unclipped, clipped)
    if dual_clip is not None:
        surrogate = torch.where(advantages < 0, torch.maximum(surrogate, dual_clip * advantages), surrogate)
    loss = -(weights * surrogate).sum()
    stats = {
        "clip_fraction": masked_mean((surrogate.detach() != unclipped.detach()).float(), mask),
        "ratio_max": fill_padding(ratios.detach(), mask).max(),
        "approx_kl": approx_kl,
    }
    return loss, stats


def value_loss(
    values: Float[Tensor, "b t"],
    old_values: Float[Tensor, "b t"],
    returns: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    *,
    clip: float | None = None,
    normalizer: int | float | Tensor | None = None,
) -> tuple[Float[Tensor, ""], Stats]:
    """Clipped squared error of the critic.

    L = ½ (1/N) Σ_j max((V_j − G_j)², (V_old,j + clip(V_j − V_old,j, −ε, ε) − G_j)²)

    Args:
        clip: ε; None takes the plain squared error.
        normalizer: The number of tokens to divide by when this is one micro-batch of a larger batch.

    Returns:
        The loss, and `clip_fraction`, the share of tokens whose clipped error was the larger.
    """
    values, old_values, returns = (fill_padding(x, mask) for x in (values, old_values, returns))
    unclipped = (values - returns).square()
    clipped = unclipped
    if clip is not None:
        clipped = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
    count = mask.sum().clamp(min=1) if normalizer is None else normalizer
    loss = 0.5 * (fill_padding(torch.maximum(unclipped, clipped), mask) / count).sum()
    return loss, {"clip_fraction": masked_mean((clipped > unclipped).float(), mask)}


def kl_estimates(
    logprobs: Float[Tensor, "..."], ref_logprobs: Float[Tensor, "..."]
) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."], Float[Tensor, "..."]]:
    """Per-token estimates of KL(π ‖ π_ref) from tokens that π sampled (Schulman 2020).

    With d = log π − log π_ref:  k1 = d,  k2 = ½ d²,  k3 = e^{−d} − 1 + d

    k1 is unbiased and may be negative; k2 and k3 never are. Values and gradients are finite for any finite
    input: k3 continues along its tangent where e^{−d} would overflow.
    """
    k1 = _difference(logprobs, ref_logprobs)
    d = k1.clamp(-LOG_DIFFERENCE_BOUND, LOG_DIFFERENCE_BOUND)
    near = (-d).clamp(max=LOG_K3_BOUND)
    tangent = math.expm1(LOG_K3_BOUND) * (-d - near)
    return k1, 0.5 * d.square(), (near.expm1() - near + tangent).clamp(min=0.0)


def _difference(x: Float[Tensor, "..."], y: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """x − y in full precision, finite for finite input."""
    difference = full_precision(x) - full_precision(y)
    bound = torch.finfo(difference.dtype).max
    return difference.clamp(-bound, bound)


def _token_weights(
    segmentation: Segmentation, reduction: Reduction, normalizer: int | float | Tensor | None
) -> Float[Tensor, "b t"]:
    """The weight of each token in the mean over tokens, over responses or over units; 0 in padding."""
    mask = segmentation.mask
    lengths = mask.sum(-1, keepdim=True)
    if reduction == "token":
        groups, size = lengths.sum(), torch.ones_like(lengths)
    elif reduction == "sequence":
        groups, size = (lengths > 0).sum(), lengths
    else:
        groups, size = segmentation.counts.sum(), segmentation.unit_lengths
    count = groups.clamp(min=1) if normalizer is None else normalizer
    return mask / (count * size.clamp(min=1))
