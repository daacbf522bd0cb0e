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
