"""Whether the policy in training would cut answers where its frozen reference does."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from policy.readings import Units
from policy.rollout import Rollout
from segrew.response_text import ResponseText
from segrew.segmentation import Segmentation, segment


def boundary_agreement(ours: Segmentation, theirs: Segmentation) -> Float[Tensor, ""]:
    """F₁ of the boundaries inside responses, 2 |A ∩ B| / (|A| + |B|); 1 where neither has any."""
    inside = [s.first & (s.ids > 0) for s in (ours, theirs)]
    both, total = (inside[0] & inside[1]).sum(), inside[0].sum() + inside[1].sum()
    return torch.where(total > 0, 2 * both / total.clamp(min=1), 1.0)


def live_agreement(
    rollout: Rollout, units: Units, texts: Sequence[ResponseText] | None, temperature: float
) -> dict[str, Float[Tensor, ""]]:
    """Agreement of the first rule that reads a model with its cut by the sampling policy; {} if no rule does.

    Perplexity spans are compared at temperature 1 only, where the rollout's log-probabilities are those of the rule.
    """
    for rule, cut in units.cuts.items():
        if rule.needs_model and (rule.rule == "entropy" or temperature == 1):
            live = segment(
                rule,
                rollout.mask,
                entropy=rollout.entropy,
                logprobs=rollout.logprobs,
                texts=texts,
                ended=rollout.ended,
            )
            return {"units/live_agreement": boundary_agreement(live, cut)}
    return {}
