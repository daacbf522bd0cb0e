"""Token credits that cost one pass of a model that is there anyway: what segment rewards have to beat.

Axes: b responses, t response tokens, d width.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from reward_models.reading import read_head
from segrew.conversations import Conversations, response_states
from segrew.language_models import trunk_of


@torch.no_grad()
def prefix_values(
    model: nn.Module, head: nn.Module, conversations: Conversations
) -> tuple[Float[Tensor, "b t"], Float[Tensor, "b t"]]:
    """R(y_≤j) and R(y_<j) of every response token, from one pass; their difference is its credit (RED, 2411.08302)."""
    states = response_states(model, conversations)
    return states.spread(read_head(head, states.at)), states.spread(read_head(head, states.before))


@torch.no_grad()
def final_attention(model: nn.Module, prompt: list[int], response: list[int]) -> Float[Tensor, "t"]:
    """Share of the last token's attention that each response token gets (ABC, arXiv 2402.00782).

    Last layer, mean over heads, renormalized over the response. R(y) times it is the redistributed reward. Needs eager
    attention, one response at a time; only the last layer's weights are kept.

    Raises:
        ValueError: the model's attention gives no weights.
    """
    trunk: Any = trunk_of(model)
    layers = trunk.config.get_text_config().num_hidden_layers
    last = [m for m in trunk.modules() if getattr(m, "layer_idx", None) == layers - 1 and _is_attention(m)]
    kept: list[Tensor] = []

    def keep(_: nn.Module, __: Any, output: Any) -> None:
        if isinstance(output, tuple) and len(output) > 1 and isinstance(output[1], Tensor):
            kept.append(output[1][0, :, -1, len(prompt) :].float().mean(0))

    handles = [module.register_forward_hook(keep) for module in last]
    try:
        with _eager(trunk):
            trunk(input_ids=torch.tensor([prompt + response], device=next(trunk.parameters()).device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    if len(kept) != 1:
        raise ValueError(
            f"{type(trunk).__name__}: its last layer gives no attention weights, so the attention baseline of "
            "--benchmark localisation cannot be had from this model."
        )
    return kept[0] / kept[0].sum()


def _is_attention(module: nn.Module) -> bool:
    return "attention" in type(module).__name__.lower()


@contextmanager
def _eager(trunk: Any) -> Iterator[None]:
    previous = trunk.config._attn_implementation
    trunk.config._attn_implementation = "eager"
    try:
        yield
    finally:
        trunk.config._attn_implementation = previous
