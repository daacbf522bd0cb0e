"""The frozen SFT model read over a data set once: entropies that cut responses, and states for a frozen trunk.

Entropies are stored, not cuts, so another threshold costs no forward pass.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float
from rich.progress import Progress
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from segrew.embedded_model import cache_directory
from segrew.language_models import (
    Conversations,
    micro_batches,
    model_fingerprint,
    response_states,
    statistics_of_states,
)

CHUNK_ROWS = 512


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


def _cache_file(identity: str, conversations: Conversations, with_states: bool) -> Path:
    digest = hashlib.sha256(f"features 2 {identity} {with_states}".encode())
    for prompt, response in zip(conversations.prompts, conversations.responses, strict=True):
        digest.update(repr((prompt, response)).encode())
    return cache_directory() / "features" / f"{digest.hexdigest()[:32]}.safetensors"


@torch.no_grad()
def _compute(
    model: nn.Module, conversations: Conversations, batch_size: int, with_states: bool, advance: Callable[[int], None]
) -> dict[str, Tensor]:
    """Run the model over rows; return flat tensors over real tokens, row after row."""
    offsets = torch.tensor([0, *conversations.lengths]).cumsum(0)
    flat = {name: torch.zeros(int(offsets[-1])) for name in ("logprobs", "entropy")}
    for rows in micro_batches(conversations, batch_size):
        part = conversations.select(rows)
        states = response_states(model, part)
        logprobs, entropy = statistics_of_states(model, states.before, part)
        values = {"logprobs": logprobs, "entropy": entropy}
        if with_states:
            values["states"] = states.at
            width = states.at.shape[-1]
            flat.setdefault("states", torch.zeros(int(offsets[-1]), width, dtype=states.at.dtype))
        for k, row in enumerate(rows):
            place = slice(int(offsets[row]), int(offsets[row + 1]))
            for name, value in values.items():
                flat[name][place] = value[k, : conversations.lengths[row]].cpu()
        advance(len(rows))
    return flat


def _chunk(
    model: nn.Module,
    identity: str,
    conversations: Conversations,
    batch_size: int,
    with_states: bool,
    store: bool,
    advance: Callable[[int], None],
) -> dict[str, Tensor]:
    path = _cache_file(identity, conversations, with_states)
    for kept in (path, _cache_file(identity, conversations, True)):  # a pass that kept states kept the rest too
        if kept.exists():
            advance(len(conversations))
            with safe_open(kept, "pt") as file:
                return {name: file.get_tensor(name) for name in file.keys() if with_states or name != "states"}  # noqa: SIM118
    flat = _compute(model, conversations, batch_size, with_states, advance)
    if store:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        save_file(flat, unfinished)
        os.replace(unfinished, path)
    return flat


def response_features(
    model: nn.Module,
    conversations: Conversations,
    *,
    batch_size: int = 16,
    with_states: bool = False,
    store: bool = True,
    fingerprint: str | None = None,
    description: str = "",
) -> ResponseFeatures:
    """Run a frozen causal model over responses once and keep the outcome in segrew's cache.

    Chunks of rows are kept one by one, so an interrupted pass goes on where it stopped. The key of a chunk covers
    the model's weights and dtype and every token id, so a stale entry is never read.

    Args:
        with_states: also keep the hidden state after each token, in the model's dtype.
        store: write what is not in the cache yet to it.
        fingerprint: of the model, where it is known: hashing every weight takes a while.
        description: label of the progress bar; empty for none.
    """
    parts = []
    identity = f"{fingerprint or model_fingerprint(model)} {next(model.parameters()).dtype}"
    with Progress(disable=not description) as progress:
        bar = progress.add_task(description, total=len(conversations))
        for start in range(0, len(conversations), CHUNK_ROWS):
            rows = list(range(start, min(start + CHUNK_ROWS, len(conversations))))
            advance = partial(progress.advance, bar)
            part = conversations.select(rows)
            parts.append(_chunk(model, identity, part, batch_size, with_states, store, advance))
    mask = conversations.mask
    empty = torch.zeros(mask.shape)
    return ResponseFeatures(
        logprobs=empty.masked_scatter(mask, torch.cat([part["logprobs"] for part in parts])),
        entropy=empty.masked_scatter(mask, torch.cat([part["entropy"] for part in parts])),
        states=torch.cat([part["states"] for part in parts]) if with_states else None,
    )
