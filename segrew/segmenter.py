"""The frozen SFT model read over a data set once: entropies that cut responses, and states for a frozen trunk.

Entropies are stored, not cuts, so another threshold costs no forward pass.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from rich.progress import track
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from segrew.embedded_model import cache_directory
from segrew.language_models import (
    Conversations,
    micro_batches,
    model_fingerprint,
    response_states,
    statistics_of_states,
)


@dataclass(frozen=True)
class ResponseFeatures:
    """What one pass of a frozen model says about each response token; 0 in padding.

    Args:
        logprobs, entropy: of the distribution that produced the token, in nats.
        states: hidden state after each token, real tokens only, row after row; None if not asked for.
    """

    logprobs: Float[Tensor, "b t"]
    entropy: Float[Tensor, "b t"]
    states: Float[Tensor, "n d"] | None


def _cache_file(model: nn.Module, conversations: Conversations, with_states: bool) -> Path:
    digest = hashlib.sha256(f"features 1 {model_fingerprint(model)} {with_states}".encode())
    for prompt, response in zip(conversations.prompts, conversations.responses, strict=True):
        digest.update(repr((prompt, response)).encode())
    return cache_directory() / "features" / f"{digest.hexdigest()[:32]}.safetensors"


@torch.no_grad()
def _compute(
    model: nn.Module, conversations: Conversations, batch_size: int, with_states: bool, description: str
) -> dict[str, Tensor]:
    mask = conversations.mask
    offsets = torch.tensor([0, *conversations.lengths]).cumsum(0)
    flat = {name: torch.zeros(int(offsets[-1])) for name in ("logprobs", "entropy")}
    batches = list(micro_batches(conversations, batch_size))
    for rows in track(batches, description, disable=not description):
        part = conversations.select(rows)
        states = response_states(model, part)
        logprobs, entropy = statistics_of_states(model, states.before, part)
        values = {"logprobs": logprobs, "entropy": entropy}
        if with_states:
            values["states"] = states.at
        for k, row in enumerate(rows):
            place = slice(int(offsets[row]), int(offsets[row + 1]))
            for name, value in values.items():
                if name not in flat:
                    flat[name] = torch.zeros(int(offsets[-1]), value.shape[-1], dtype=value.dtype)
                flat[name][place] = value[k, : conversations.lengths[row]].cpu()
    assert flat["entropy"].numel() == int(mask.sum())
    return flat


def response_features(
    model: nn.Module,
    conversations: Conversations,
    *,
    batch_size: int = 16,
    with_states: bool = False,
    description: str = "",
) -> ResponseFeatures:
    """Run a frozen causal model over responses once and keep the outcome in segrew's cache.

    The cache key covers the model's weights and every token id, so a stale entry is never read.

    Args:
        with_states: also keep the hidden state after each token, in the model's dtype.
        description: label of the progress bar; empty for none.
    """
    path = _cache_file(model, conversations, with_states)
    if path.exists():
        flat = load_file(path)
    else:
        flat = _compute(model, conversations, batch_size, with_states, description)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        save_file(flat, partial)
        os.replace(partial, path)
    mask = conversations.mask
    empty = torch.zeros(mask.shape)
    return ResponseFeatures(
        logprobs=empty.masked_scatter(mask, flat["logprobs"]),
        entropy=empty.masked_scatter(mask, flat["entropy"]),
        states=flat.get("states"),
    )
