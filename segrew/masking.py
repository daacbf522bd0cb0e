"""Statistics over the real positions of padded tensors. In every mask True is real."""

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor


def full_precision(x: Shaped[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return x, of any type, in float32; float64 stays as it is."""
    return x if x.dtype == torch.float64 else x.float()


def fill_padding(
    x: Shaped[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], value: float | int = 0.0
) -> Float[Tensor, "*shape"]:
    """Return x in full precision with `value` in padding; whatever padding held, even NaN, ends here."""
    return full_precision(x).masked_fill(~mask, value)


def masked_mean(x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Mean over the real positions; 0 when there are none."""
    return fill_padding(x, mask).sum() / mask.sum().clamp(min=1)


def masked_whiten(x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """(x − mean) / std over the real positions, with the population variance.

    Fewer than two values come back as they are, equal values become 0.
    """
    x = fill_padding(x, mask)
    if x.numel() == 0:
        return x
    # Whitening does not depend on the scale; in units of the largest value no square overflows or vanishes.
    largest = x.detach().abs().amax()
    scaled = x / torch.where(largest > 0, largest, 1.0)
    # Measured from one of its own values, a constant x is exactly 0, without a rounding error to blow up.
    pivot = scaled.detach().masked_fill(~mask, -torch.inf).amax()
    shifted = fill_padding(scaled - pivot, mask)
    centred = fill_padding(shifted - masked_mean(shifted, mask), mask)
    variance = masked_mean(centred.square(), mask)
    whitened = centred * torch.where(variance > 0, variance, 1.0).rsqrt()
    return torch.where(mask.sum() < 2, x, whitened)
