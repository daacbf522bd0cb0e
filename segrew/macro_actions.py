"""Tokens ↔ units: sum over a unit, value of a unit, spread back to its tokens."""

from typing import Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from segrew.masking import fill_padding
from segrew.segmentation import Segmentation

ValueScheme = Literal["mean", "last", "decayed", "first"]


def sum_by_unit(x: Shaped[Tensor, "b t"], segmentation: Segmentation) -> Float[Tensor, "b s"]:
    """Xτ = Σ x_j over the tokens j of unit τ."""
    x = fill_padding(x, segmentation.mask)
    sums = x.new_zeros(x.shape[0], segmentation.size)
    return sums.scatter_add(1, segmentation.slots, x)


def spread_to_tokens(x: Shaped[Tensor, "b s"], segmentation: Segmentation) -> Float[Tensor, "b t"]:
    """Give each token the value of its unit."""
    return fill_padding(x.gather(1, segmentation.slots), segmentation.mask)


def value_by_unit(
    values: Float[Tensor, "b t"], segmentation: Segmentation, *, scheme: ValueScheme = "mean"
) -> Float[Tensor, "b s"]:
    """Vτ = Σ σ_i V_i over the tokens i = 0 … |ω|−1 of unit τ, with Σ σ_i = 1 (2410.02743, section 3.2).

    `mean` σ_i = 1/|ω|; `last` and `first` take one token; `decayed` σ_i ∝ 1/(|ω|−i), so that weights grow
    toward the last token. `first` is the value of the state in which the unit is chosen.
    """
    values = fill_padding(values, segmentation.mask)
    weights = _weights(segmentation, scheme, values.dtype)
    total = sum_by_unit(weights, segmentation)
    return sum_by_unit(weights * values, segmentation) / total.masked_fill(~segmentation.unit_mask, 1.0)


def _weights(segmentation: Segmentation, scheme: ValueScheme, dtype: torch.dtype) -> Tensor:
    if scheme == "mean":
        return segmentation.mask.to(dtype)
    if scheme == "first":
        return segmentation.first.to(dtype)
    if scheme == "last":
        return segmentation.last.to(dtype)
    if scheme == "decayed":
        return (segmentation.unit_lengths - segmentation.positions).clamp(min=1).to(dtype).reciprocal()
    raise ValueError(f"unknown value scheme {scheme!r}: choose mean, last, decayed or first")
