"""What a reward model is trained on."""

import torch
from jaxtyping import Float
from torch import Tensor


def preference_loss(
    scores_chosen: Float[Tensor, " b"],
    scores_rejected: Float[Tensor, " b"],
    margin: Float[Tensor, " b"] | int | float | None = None,
) -> Float[Tensor, ""]:
    """L = mean of -log σ(e_w - e_l - margin), in float32 (Bradley and Terry).

    σ is never formed, so a lead of any size has a finite loss and gradient.
    """
    difference = scores_chosen.float() - scores_rejected.float()
    if margin is not None:
        difference = difference - margin
    return -torch.nn.functional.logsigmoid(difference).mean()


def reward_centering(scores_chosen: Float[Tensor, " b"], scores_rejected: Float[Tensor, " b"]) -> Float[Tensor, ""]:
    """Mean of (e_w + e_l)², which Bradley-Terry leaves free: it holds scores near 0 (arXiv 2312.09244, as in TRL)."""
    return (scores_chosen.float() + scores_rejected.float()).square().mean()


def reward_model_loss(
    scores: Float[Tensor, " rows"],
    *,
    margin: Float[Tensor, " b"] | None = None,
    center_rewards_coefficient: float | None = None,
) -> Float[Tensor, ""]:
    """L = preference loss + coefficient · centering; rows 2i and 2i + 1 are chosen and rejected of pair i."""
    chosen, rejected = scores[0::2], scores[1::2]
    loss = preference_loss(chosen, rejected, margin)
    if center_rewards_coefficient:
        loss = loss + center_rewards_coefficient * reward_centering(chosen, rejected)
    return loss
