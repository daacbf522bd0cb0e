"""The frozen SFT model read over a data set once: entropies that cut responses, and states for a frozen trunk.

Entropies are stored, not cuts, so another threshold costs no forward pass.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Float
from rich.progress import Progress
from torch import Tensor, nn

from segrew import feature_cache
from segrew.conversations import (
    TOKENS_PER_BATCH,
    Conversations,
    in_rows,
    micro_batches,
    response_states,
    statistics_of_states,
)
from segrew.language_models import model_fingerprint, trunk_of

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

    def of_rows(self, rows: list[int], lengths: list[int]) -> tuple[Tensor, ...]:
        """Return log-probabilities and entropies of some rows, and their states, where kept, row after row.

        Args:
            lengths: of all rows.
        """
        width = max((lengths[row] for row in rows), default=0)
        found = (self.logprobs[rows, :width], self.entropy[rows, :width])
        if self.states is None:
            return found
        firsts = list(accumulate(lengths, initial=0))
        return (*found, torch.cat([self.states[firsts[row] : firsts[row + 1]] for row in rows]))


@torch.no_grad()
def _compute(
    model: nn.Module, conversations: Conversations, max_tokens: int, with_states: bool, advance: Callable[[int], None]
) -> dict[str, Tensor]:
    """Run the model over rows; return flat tensors over real tokens, row after row."""
    offsets = torch.tensor([0, *conversations.lengths]).cumsum(0)
    flat = {name: torch.zeros(int(offsets[-1])) for name in ("logprobs", "entropy")}
    for rows in micro_batches(conversations, max_tokens):
        part = conversations.select(rows)
        states = response_states(model, part)
        logprobs, entropy = statistics_of_states(model, states.before, part)
        values = {"logprobs": logprobs.cpu()[part.mask], "entropy": entropy.cpu()[part.mask]}
        if with_states:
            values["states"] = at = states.at.cpu()
            flat.setdefault("states", torch.zeros(int(offsets[-1]), at.shape[-1], dtype=at.dtype))
        places = torch.cat([torch.arange(int(offsets[row]), int(offsets[row + 1])) for row in rows])
        for name, value in values.items():
            flat[name][places] = value
        advance(len(rows))
    return flat


_NO_SETTINGS = ("_name_or_path", "architectures", "dtype", "transformers_version", "use_cache")


def _settings_of(config: Any) -> str:
    """What a model's configuration says beside its weights, such as rotary scaling, windows and caps of logits."""
    matter = {
        name: value
        for name, value in config.to_dict().items()
        if name not in _NO_SETTINGS and not name.endswith("_token_id")
    }
    return json.dumps(matter, sort_keys=True, default=str)


def response_features(
    model: nn.Module,
    conversations: Conversations,
    *,
    max_tokens: int = TOKENS_PER_BATCH,
    with_states: bool = False,
    store: bool = True,
    fingerprint: str | None = None,
    description: str = "",
) -> ResponseFeatures:
    """Run a frozen causal model over responses once and keep the outcome in segrew's cache.

    Chunks of rows are kept one by one, so an interrupted pass goes on where it stopped. The key of a chunk covers
    the model's weights, dtype and settings and every token id, so a stale entry is never read.

    Args:
        max_tokens: of one forward pass.
        with_states: also keep the hidden state after each token, in the model's dtype.
        store: write what is not in the cache yet to it.
        fingerprint: of the model, where it is known: hashing every weight takes a while.
        description: label of the progress bar; empty for none.
    """
    parts = []
    dtype = str(next(model.parameters()).dtype)
    config: Any = trunk_of(model).config
    identity = f"{fingerprint or model_fingerprint(model)} {dtype} {_settings_of(config)}"
    name = str(getattr(config, "_name_or_path", ""))
    with Progress(disable=not description) as progress:
        bar = progress.add_task(description, total=len(conversations))
        advance = partial(progress.advance, bar)
        for start in range(0, len(conversations), CHUNK_ROWS):
            part = conversations.select(list(range(start, min(start + CHUNK_ROWS, len(conversations)))))
            key = feature_cache.key_of(identity, part.prompts, part.responses)
            flat = feature_cache.load(key, part.lengths, with_states=with_states)
            if flat is not None:
                advance(len(part))
            else:
                flat = _compute(model, part, max_tokens, with_states, advance)
                if store:
                    feature_cache.store(key, flat, part.lengths, model=name, dtype=dtype.removeprefix("torch."))
            parts.append(flat)
    mask = conversations.mask
    return ResponseFeatures(
        logprobs=in_rows(torch.cat([part["logprobs"] for part in parts]), mask),
        entropy=in_rows(torch.cat([part["entropy"] for part in parts]), mask),
        states=torch.cat([part["states"] for part in parts]) if with_states else None,
    )
