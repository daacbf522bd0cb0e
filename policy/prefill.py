"""Reading prompts before `generate` goes on from them."""

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from segrew.conversations import packed_or_none
from segrew.language_models import trunk_of


def prefill(model: Any, prompts: list[list[int]]) -> dict[str, DynamicCache]:
    """Read all but the last token of each prompt, without padding and once what prompts begin with alike.

    `generate` would read as many tokens as the longest has for each of them, every sample of a prompt anew.

    Returns:
        the argument of `generate` that holds the keys and values, padded on the left; nothing for a model that cannot
        take packed rows, or that keeps less of a prompt than its keys and values.
    """
    width = max(map(len, prompts)) - 1
    cache: Any = DynamicCache(config=model.config)
    windows = [layer.sliding_window for layer in cache.layers if isinstance(layer, DynamicSlidingWindowLayer)]
    if {type(layer) for layer in cache.layers} - {DynamicLayer, DynamicSlidingWindowLayer}:
        return {}
    if width == 0 or width >= min(windows, default=width + 1):
        return {}
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    flat: Any = DynamicCache()
    packed = packed_or_none(trunk_of(model), [p[:-1] for p in prompts], [[]] * len(prompts), **{name: flat})
    if packed is None:
        return {}
    columns = [[0] * (width - len(path)) + path for path in packed[1].paths]
    for layer, read in zip(cache.layers, flat.layers, strict=True):
        layer.update(*(_rows(part, columns) for part in (read.keys, read.values)))
    return {name: cache}


def _rows(flat: Tensor, columns: list[list[int]]) -> Tensor:
    """[1 heads n d] to [rows heads width d]; what stands left of a prompt is masked where it is read."""
    return flat[0][:, torch.tensor(columns, device=flat.device)].transpose(0, 1)
