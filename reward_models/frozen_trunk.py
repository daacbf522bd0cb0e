"""A head on a frozen trunk: states are computed once, then a convex fit takes seconds."""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from reward_models.losses import reward_model_loss
from segrew.aggregation import aggregate


def scores_of(
    weight: Float[Tensor, " d"],
    states: Float[Tensor, "n d"],
    unit_mask: Bool[Tensor, "b s"],
    *,
    aggregator: Any,
    temperature: float = 1.0,
) -> Float[Tensor, " b"]:
    """Return the score of each row under the head w: r_k = w · h_k, e = f(r)."""
    rewards = torch.zeros(unit_mask.shape).masked_scatter(unit_mask, states @ weight)
    return aggregate(rewards, unit_mask, kind=aggregator, temperature=temperature)


def fit_head(
    states: Float[Tensor, "n d"],
    unit_mask: Bool[Tensor, "b s"],
    *,
    aggregator: Any,
    temperature: float = 1.0,
    penalty: float = 0.01,
    margin: Float[Tensor, " pairs"] | None = None,
    center_rewards_coefficient: float | None = None,
    steps: int = 200,
) -> Float[Tensor, " d"]:
    """Minimise the reward-model loss plus penalty · ‖σ ∘ w‖² / 2 by L-BFGS, σ the spread of each feature.

    Rows 2i and 2i + 1 are the chosen and the rejected answer of pair i. For the mean and the sum this is
    logistic regression on differences of features.
    """
    states = states.float()
    spread = states.std(0).clamp(min=1e-6)
    scaled = states / spread
    weight = torch.zeros(states.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=steps, history_size=20, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        scores = scores_of(weight, scaled, unit_mask, aggregator=aggregator, temperature=temperature)
        loss = reward_model_loss(scores, margin=margin, center_rewards_coefficient=center_rewards_coefficient)
        loss = loss + 0.5 * penalty * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    return weight.detach() / spread
