"""Log-probability and entropy of tokens, straight from hidden states, without ever holding the [n v] logits.

    z = s · (W h + bias), and c · tanh(z / c) of it where there is a soft cap c
    ln π(y) = z_y / T − ln Σ exp(z / T)        H = −Σ p ln p, p = softmax(z / T_H)

Rows go through in chunks. With the head frozen, ∂ ln π(y)/∂h = (s / T) · (W_y − Σ p W) is a by-product of the
forward pass and all that is kept; a head that learns costs a second pass over the chunks.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from segrew.cpu import times_transposed
from segrew.masking import full_precision

# A chunk holds at most 128 MiB of float32 logits. Narrower than 128 rows the matrix product slows down; wider than
# 1/32 of the rows it does not get faster, only larger.
MOST_ELEMENTS, FEWEST_ROWS, CHUNKS = 2**25, 128, 32


class _Head(NamedTuple):
    """What turns hidden states into logits and logits into distributions."""

    temperature: float
    entropy_temperature: float
    softcap: float | None
    logit_scale: float
    chunk_size: int


def token_statistics(
    hidden: Float[Tensor, "n d"],
    lm_head_weight: Float[Tensor, "v d"],
    targets: Int64[Tensor, " n"],
    *,
    temperature: float | int = 1.0,
    entropy_temperature: float | int = 1.0,
    bias: Float[Tensor, " v"] | None = None,
    softcap: float | int | None = None,
    logit_scale: float | int = 1.0,
    chunk_size: int | None = None,
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Return ln π(targets[i]) at `temperature` and the entropy in nats at `entropy_temperature`.

    hidden[i] predicts targets[i]. Gradients flow through the log-probabilities to `hidden`, and to the weight
    and bias if they require any; the entropy is detached.
    """
    for name, knob in {"temperature": temperature, "entropy_temperature": entropy_temperature}.items():
        if not knob > 0:
            raise ValueError(f"{name} {knob} must be positive")
    if chunk_size is None:
        chunk_size = max(16, min(MOST_ELEMENTS // len(lm_head_weight), max(FEWEST_ROWS, len(hidden) // CHUNKS)))
    head = _Head(temperature, entropy_temperature, softcap, logit_scale, chunk_size)
    head_learns = lm_head_weight.requires_grad or (bias is not None and bias.requires_grad)
    keeps_slope = torch.is_grad_enabled() and hidden.requires_grad and not head_learns
    with torch.autocast(hidden.device.type, enabled=False):
        hidden, weight = full_precision(hidden), full_precision(lm_head_weight)
        bias = None if bias is None else full_precision(bias)
        return _TokenStatistics.apply(hidden, weight, bias, targets, head, keeps_slope)


class _TokenStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: _Head,
        keeps_slope: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy = hidden.new_empty(len(hidden)), hidden.new_empty(len(hidden))
        slope = torch.empty_like(hidden) if keeps_slope else None
        for start in range(0, len(hidden), head.chunk_size):
            rows = slice(start, start + head.chunk_size)
            logprobs[rows], entropy[rows], towards = _read(
                hidden[rows], weight, bias, targets[rows], head, wants_slope=keeps_slope
            )
            if slope is not None and towards is not None:
                slope[rows] = times_transposed(towards, weight.T)
            del towards  # or it would be a third buffer beside the next chunk's two
        ctx.head = head
        ctx.save_for_backward(slope, *((None,) * 4 if keeps_slope else (hidden, weight, bias, targets)))
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        slope, hidden, weight, bias, targets = ctx.saved_tensors
        if slope is not None:
            return grad[:, None] * slope, None, None, None, None, None
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        d_bias = None if bias is None else torch.zeros_like(bias)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(hidden), ctx.head.chunk_size):
                rows = slice(start, start + ctx.head.chunk_size)
                towards = _read(hidden[rows], weight, bias, targets[rows], ctx.head, wants_slope=True)[2]
                assert towards is not None
                towards *= grad[rows, None]
                d_hidden[rows] = times_transposed(towards, weight.T)
                d_weight.addmm_(towards.T, hidden[rows])
                if d_bias is not None:
                    d_bias += towards.sum(0)
                del towards
        return d_hidden, d_weight, d_bias, None, None, None


def _read(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, head: _Head, *, wants_slope: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return ln π(y), H and, if wanted, ∂ ln π(y)/∂(W h + bias) of one chunk, with two [rows v] buffers at a time."""
    logits = times_transposed(hidden, weight)
    if bias is not None:
        logits += bias
    if head.logit_scale != 1.0:
        logits *= head.logit_scale
    cap_slope = None
    if head.softcap is not None:
        logits.div_(head.softcap).tanh_()
        cap_slope = 1.0 - logits.square() if wants_slope else None
        logits *= head.softcap
    logits -= logits.amax(1, keepdim=True)
    if head.temperature != 1.0:
        logits /= head.temperature
    exps = logits.exp()
    total = exps.sum(1)
    logprobs = logits.gather(1, targets[:, None])[:, 0] - total.log()
    entropy = _entropy(logits, exps, total, head)
    return logprobs, entropy, _slope(exps, total, targets, cap_slope, head) if wants_slope else None


def _entropy(logits: Tensor, exps: Tensor, total: Tensor, head: _Head) -> Tensor:
    """H = ln Σ eᶻ − Σ eᶻ z / Σ eᶻ. Overwrites `logits`."""
    logits.clamp_(min=-1e30)  # an impossible token adds 0, where 0 · −∞ would be NaN
    if head.entropy_temperature != head.temperature:
        logits *= head.temperature / head.entropy_temperature
        exps = logits.exp()
        total = exps.sum(1)
    return total.log() - logits.mul_(exps).sum(1) / total


def _slope(exps: Tensor, total: Tensor, targets: Tensor, cap_slope: Tensor | None, head: _Head) -> Tensor:
    """∂ ln π(y)/∂(W h + bias) = (s / T) · (1[y] − p), times the slope of the cap. Overwrites `exps`."""
    scale = head.logit_scale / head.temperature
    slope = exps.mul_(-scale / total[:, None])
    slope.scatter_add_(1, targets[:, None], torch.full_like(slope[:, :1], scale))
    return slope if cap_slope is None else slope.mul_(cap_slope)
