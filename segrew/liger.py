"""Liger's fused kernels (2410.10989) in the layers of loaded models: norms, rotary positions and gated feed-forwards.

Its losses are left out: log-probabilities and entropies come from `token_statistics`, which holds no logits either.
"""

import importlib.util
import warnings
from typing import Any

import torch
from torch import nn

from segrew.language_models import trunk_of

OWN_LOSS = {"cross_entropy": False, "fused_linear_cross_entropy": False}


def check_liger_kernel() -> None:
    """Refuse to go on where the kernels cannot run.

    Raises:
        ValueError: there is no CUDA device, or the package is not installed.
    """
    if not torch.cuda.is_available():
        raise ValueError(
            "--use_liger_kernel true: its kernels run on CUDA, and this machine has no such device; leave it out."
        )
    if importlib.util.find_spec("liger_kernel") is None:
        raise ValueError(
            "--use_liger_kernel true: the package liger-kernel is not installed. pip install 'segrew[liger]', or leave "
            "the option out."
        )


def apply_liger_kernel(*models: nn.Module | None, kernels: dict[str, bool] | None = None) -> None:
    """Put the kernels into the layers of models below their heads, in place; warn of a model that has none.

    Args:
        models: None is passed over.
        kernels: which ones, by Liger's names (rope, rms_norm, swiglu, …); default all that the model's kind has.
    """
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    for model in filter(None, models):
        trunk: Any = trunk_of(model)
        _apply_liger_kernel_to_instance(model=trunk, **(kernels or {}) | OWN_LOSS)
        if not any("forward" in vars(module) for module in trunk.modules()):
            warnings.warn(
                f"--use_liger_kernel true: Liger has no kernels for models of type {trunk.config.model_type}; this one "
                "runs as it is.",
                stacklevel=2,
            )
