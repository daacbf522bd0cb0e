"""What makes models faster on a CPU: oneDNN for float32 products where torch's own choice is slow, and memory kept.

Torch multiplies float32 matrices by MKL, which keeps to 256-bit instructions on processors that Intel did not make.
oneDNN, a part of torch too (bfloat16 always goes through it), uses all 512 bits that they have. Sums are rounded in
another order, nothing else differs.
"""

import ctypes
import functools
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
KEPT_BYTES = 2**31 - 1  # the most that mallopt takes
LEAST_PRODUCTS = 2**21  # below, a call of oneDNN costs more than it saves


@functools.cache
def onednn_is_faster() -> bool:
    """Whether models run on an AMD processor with 512-bit vectors and torch has both libraries."""
    if torch.accelerator.is_available() or not torch.backends.mkl.is_available():
        return False
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    described = Path("/proc/cpuinfo")
    vendor = described.read_text() if described.is_file() else platform.processor()
    if "AuthenticAMD" not in vendor:
        return False
    try:  # the operator is torch's own business, so another version may have it otherwise
        x = torch.eye(16)
        return bool(torch.equal(_onednn(x, x, None), x))
    except (AttributeError, RuntimeError, TypeError):
        return False


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _suits(x: Tensor, weight: Tensor) -> bool:
    return (
        x.ndim >= 2
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and x.numel() * len(weight) >= LEAST_PRODUCTS
        and onednn_is_faster()
    )


def times_transposed(x: Tensor, weight: Tensor) -> Tensor:
    """x Wᵀ of any two matrices, [n d] and [v d] → [n v], without gradients."""
    return _onednn(x, weight, None) if _suits(x, weight) else torch.mm(x, weight.T)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        return (
            times_transposed(rows, weight.T).view(x.shape) if of_x else None,
            _outer(rows.T, x.flatten(0, -2).T) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


def _outer(a: Tensor, b: Tensor) -> Tensor:
    """a Bᵀ, with the taller matrix second: the other way round, thin gradients (of LoRA) take five times as long."""
    return times_transposed(a, b) if len(a) <= len(b) else times_transposed(b, a).T


class OneDNNLinear(nn.Linear):
    """A linear layer that multiplies float32 by oneDNN; anything else as its parent does."""

    def forward(self, x: Tensor) -> Tensor:
        if _suits(x, self.weight) and not torch.is_autocast_enabled("cpu"):
            return _Linear.apply(x, self.weight, self.bias)
        return super().forward(x)


@functools.cache
def keep_freed_memory() -> bool:
    """Have the C library keep the memory of large tensors for the next ones, where models run on the CPU.

    It maps and returns each block above 32 MiB by itself, so that the kernel clears its pages for every operation: of
    scoring with passes over 8,192 tokens that took an eighth. A process peaks 3 to 6 % higher.

    Returns:
        whether it takes such a wish; only glibc does.
    """
    if torch.accelerator.is_available() or not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all([mallopt(what, KEPT_BYTES) for what in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD)])


def fit_to_cpu(model: nn.Module) -> None:
    """Let a model's linear layers multiply by oneDNN, in place, where that is faster; no weight changes.

    Also lets this process keep freed memory, see `keep_freed_memory`.
    """
    keep_freed_memory()
    if onednn_is_faster():
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = OneDNNLinear
