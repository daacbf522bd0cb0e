"""How much the KL to the reference weighs: the estimate that is charged, and the controller of its coefficient."""

from typing import Literal

from jaxtyping import Float
from torch import Tensor

from policy.losses import kl_estimates
from segrew.advantages import Scale
from segrew.masking import fill_padding
from segrew.segmentation import Segmentation

KLController = Literal["fixed", "adaptive"]
KLEstimator = Literal["k1", "k2", "k3"]
KLPlace = Literal["reward", "loss"]


def charged_kl(
    logprobs: Float[Tensor, "b t"], ref_logprobs: Float[Tensor, "b t"], estimator: KLEstimator
) -> Float[Tensor, "b t"]:
    """The estimate of KL(π ‖ π_ref) that the reward or the loss is charged for each token."""
    return dict(zip(("k1", "k2", "k3"), kl_estimates(logprobs, ref_logprobs), strict=True))[estimator]


def scaled_kl(kl: Float[Tensor, "b t"], actions: Segmentation, scale: Scale) -> Float[Tensor, "b t"]:
    """The KL as an action pays for it: that of each token, or with scale `unit` their mean, as in MA-RLHF's code."""
    kl = fill_padding(kl, actions.mask)
    return kl if scale == "token" else kl / actions.unit_lengths.clamp(min=1)


def adapted_coefficient(coefficient: float, kl: float, *, target: float, answers: int, horizon: int) -> float:
    """β ← β (1 + e · answers / horizon), e = clip(KL / target − 1, −0.2, 0.2) (Ziegler et al., 1909.08593, 2.2).

    Args:
        kl: mean over answers of the sum over tokens; answers: how many it was measured on.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * answers / horizon)
