"""Unit rewards → one score e(x, y) of the response."""

import math
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from segrew.masking import fill_padding

Aggregator = Literal[
    "mean", "sum", "softmax", "softmin", "log_mean_exp", "softmax_weighted", "max", "min", "last", "learned"
]


def aggregate(
    rewards: Float[Tensor, "b s"],
    unit_mask: Bool[Tensor, "b s"],
    *,
    kind: Aggregator = "mean",
    temperature: float | int = 1.0,
    weights: Float[Tensor, "b s"] | None = None,
) -> Float[Tensor, " b"]:
    """e(x, y) = f(r_1 … r_m) over the units of each row (2501.02790, section 3.2); an empty row gives 0.

    With τ the temperature: `softmax` τ·ln Σ exp(r/τ), `softmin` −τ·ln Σ exp(−r/τ), `log_mean_exp`
    τ·ln mean exp(r/τ), `softmax_weighted` Σ softmax(r/τ)·r, `learned` Σ weights·r.

    Args:
        weights: of `learned`, one per unit; those of `attention_weights` sum to 1.
    """
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature {temperature} must be a positive number")
    if kind == "learned" and weights is None:
        raise ValueError("kind 'learned' needs weights, one per unit; pass weights=…")
    count = unit_mask.sum(1)
    filled = fill_padding(rewards, unit_mask)
    weights = None if weights is None else fill_padding(weights, unit_mask)
    # An empty row counts as zeros on the way, so that no −∞ reaches a gradient; its score is set to 0.
    absent = ~unit_mask & (count > 0)[:, None]
    score = _score(filled, absent, count.clamp(min=1), kind, temperature, weights)
    return score.masked_fill(count == 0, 0.0)


def attention_weights(
    logits: Float[Tensor, "b s"], unit_mask: Bool[Tensor, "b s"], *, temperature: float | int = 1.0
) -> Float[Tensor, "b s"]:
    """softmax(logits / τ) over the units of each row; 0 in padding and in empty rows."""
    absent = ~unit_mask & unit_mask.any(1, keepdim=True)  # an empty row keeps zeros, so that no NaN arises
    scaled = fill_padding(logits, unit_mask) / temperature
    return scaled.masked_fill(absent, -torch.inf).softmax(1).masked_fill(~unit_mask, 0.0)


def _score(
    r: Tensor, absent: Tensor, count: Tensor, kind: Aggregator, tau: float | int, weights: Tensor | None
) -> Tensor:
    low = r.masked_fill(absent, -torch.inf)
    if kind == "sum":
        return r.sum(1)
    if kind == "mean":
        return r.sum(1) / count
    if kind == "softmax":
        return tau * (low / tau).logsumexp(1)
    if kind == "softmin":
        return -tau * (-r / tau).masked_fill(absent, -torch.inf).logsumexp(1)
    if kind == "log_mean_exp":
        return tau * ((low / tau).logsumexp(1) - count.to(r.dtype).log())
    if kind == "softmax_weighted":
        return ((low / tau).softmax(1) * r).sum(1)
    if kind == "max":
        return low.amax(1)
    if kind == "min":
        return r.masked_fill(absent, torch.inf).amin(1)
    if kind == "last":
        return r.gather(1, count[:, None] - 1)[:, 0]
    if kind == "learned" and weights is not None:
        return (weights * r).sum(1)
    raise ValueError(f"unknown aggregator {kind!r}: choose one of {', '.join(get_args(Aggregator))}")
