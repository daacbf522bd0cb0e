"""The attention that keeps rows apart which lie flat in one sequence, for any model of transformers' registry.

The layout goes down to every attention layer as a keyword argument of the model's forward. The registry leads each
layer to `_attend`, which lets a token see its own row only: with one scaled dot product per block of rows, or on CUDA
with FlexAttention under a block mask.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils._triton import has_triton
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from segrew.packing import PackedRows, Stretch, lay_out

NAME = "segrew_packed"
TILE = 128  # FlexAttention's own block, in tokens
_NO_WINDOW = 2**30
SMALLEST_HEAD = 16  # its kernels multiply no narrower
# Row totals, precision, gradients, heads, caps and windows each make a kernel of their own. Past dynamo's limit, which
# is 8, it would run uncompiled without a word, holding every pair of tokens.
KERNELS = 64
REPEATED = 1 / 8  # a shared head up to this share of what follows runs as queries again
_ABSENT: Any = object()
# What attention may be asked for that the packed forms do not know: sinks, learned biases, sparse choices of keys.
_UNSERVED = ("s_aux", "sinks", "position_bias", "indices", "block_indices")


class CannotPack(ValueError):
    """A model's attention cannot be cut to rows that lie in one sequence; the message says why."""


def _by_blocks(
    query: Float[Tensor, "1 h n d"],
    key: Float[Tensor, "1 g n d"],
    value: Float[Tensor, "1 g n e"],
    packed: PackedRows,
    *,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    dropout: float,
) -> Float[Tensor, "1 h n e"]:
    """Attention of one flat row, block by block: each sees the heads that it shares and, causally, itself."""
    outputs = []
    for block in packed.blocks:
        places = [*block.before, block[:2]]
        own, shared = block.stop - block.start, sum(stop - start for start, stop in block.before)
        # A short head asks once more, so that causality says it all: it skips keys, which a mask does not.
        queried, visible = places, None
        if softcap or REPEATED * own < shared or (window is not None and window < shared + own):
            queried, visible = [block[:2]], query.new_ones(own, shared + own, dtype=torch.bool).tril(shared)
            if window is not None:
                visible = visible.triu(shared - window + 1)
        q, k, v = _at(query, queried), _at(key, places), _at(value, places)
        output = _dot_product(q, k, v, visible, scaling=scaling, softcap=softcap, dropout=dropout)
        outputs.append(output[:, :, -own:])
    return torch.cat(outputs, 2)


def _at(x: Tensor, stretches: list[Stretch]) -> Tensor:
    parts = [x[:, :, start:stop] for start, stop in stretches]
    return torch.cat(parts, 2) if len(parts) > 1 else parts[0]


def _dot_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Bool[Tensor, "q k"] | None,
    *,
    scaling: float | None,
    softcap: float | None,
    dropout: float,
) -> Tensor:
    """softmax(c tanh(s q·k / c)) v over visible keys (Gemma 2, 2408.00118); without a cap, softmax(s q·k) v."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:  # on CUDA no kernel takes a mask and unrepeated heads both
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if softcap is None or visible is None:
        return nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, dropout_p=dropout, is_causal=visible is None, scale=scaling
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = softcap * torch.tanh(query @ key.mT * (scale / softcap))
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1, dtype=torch.float32).to(query.dtype)
    return nn.functional.dropout(weights, dropout) @ value


def mask_function(packed: PackedRows, window: int | None, device: torch.device) -> Callable[..., Tensor]:
    """Return FlexAttention's question: may query q of the flat row see key k?"""
    end, position = (
        torch.tensor(numbers, device=device, dtype=torch.int32) for numbers in (packed.ends, packed.positions)
    )
    earliest = position - ((window or _NO_WINDOW) - 1)  # a tensor: a number would become an unknown of the kernel
    # Lambdas, as the mask and the cap are compiled into the kernel: nothing may wrap them.
    return lambda batch, head, q, k: (k <= q) & (q < end[k]) & (position[k] >= earliest[q])


def block_mask(packed: PackedRows, window: int | None, device: torch.device) -> BlockMask:
    """Name the tiles that hold any visible pair, without ever holding all pairs; inside them the function decides."""
    if window not in packed.masks:
        count = -(-len(packed.ids) // TILE)
        touched = torch.zeros(count, count, dtype=torch.bool)
        for block in packed.blocks:
            queries = slice(block.start // TILE, -(-block.stop // TILE))
            for start, stop in (*block.before, block[:2]):
                touched[queries, start // TILE : -(-stop // TILE)] = True
        touched = touched.tril().to(device)
        tiles = touched.int().argsort(stable=True, descending=True).int()
        packed.masks[window] = BlockMask.from_kv_blocks(
            touched.sum(-1, dtype=torch.int32)[None, None],
            tiles[None, None],
            BLOCK_SIZE=TILE,
            mask_mod=mask_function(packed, window, device),
        )
    return packed.masks[window]


@functools.cache
def _flex_attention(device: str) -> Callable[..., Any]:
    """FlexAttention is a kernel only when compiled; on CPU, for tests, it runs as it is written."""
    attention: Any = flex_attention
    if device == "cuda":
        # Another cap or scale than before is another constant: as an unknown of the kernel, inductor cannot lower it.
        limits: Any = torch._dynamo.config.patch(
            recompile_limit=KERNELS, fail_on_recompile_limit_hit=True, specialize_float=True
        )
        attention = limits(torch.compile(flex_attention))
    return attention


def _cap(softcap: float) -> Callable[..., Tensor]:
    return lambda score, batch, head, q, k: softcap * torch.tanh(score / softcap)


def _by_block_mask(
    query: Float[Tensor, "1 h n d"],
    key: Float[Tensor, "1 g n d"],
    value: Float[Tensor, "1 g n e"],
    packed: PackedRows,
    *,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    dropout: float,
) -> Float[Tensor, "1 h n e"]:
    """The same attention as `_by_blocks`, in one FlexAttention kernel."""
    if dropout:
        raise CannotPack("FlexAttention has no dropout of attention weights; set attention_dropout to 0")
    same = value.dtype  # norms of query and key may have left autocast's
    return _flex_attention(query.device.type)(
        query.to(same),
        key.to(same),
        value,
        score_mod=_cap(softcap) if softcap else None,
        block_mask=block_mask(packed, window, query.device),
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _form_for(device: torch.device, head: int = SMALLEST_HEAD) -> Callable[..., Tensor]:
    """FlexAttention where it is a kernel: on CUDA with Triton, for heads that are wide enough."""
    return _by_block_mask if device.type == "cuda" and has_triton() and head >= SMALLEST_HEAD else _by_blocks


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = _ABSENT,
    softcap: float | None = None,
    segrew_rows: PackedRows | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it, restricted to the rows of the layout.

    Raises:
        CannotPack: the model asks for something that the packed forms do not know.
    """
    if segrew_rows is None:
        raise CannotPack("it passes no arguments of the caller's down to attention")
    if attention_mask is not None:  # the registry makes none for this attention
        raise CannotPack("it puts more into its masks than which token sees which")
    for name in _UNSERVED:
        if others.get(name) is not None:
            raise CannotPack(f"its attention uses {name}")
    if not (getattr(module, "is_causal", True) and others.get("is_causal", True)):
        raise CannotPack("its attention is not causal")
    if sliding_window is _ABSENT:
        sliding_window = None
        declared = getattr(getattr(module, "config", None), "sliding_window", None)
        if declared and declared < segrew_rows.longest:  # some write 0 for none
            raise CannotPack("it keeps its sliding window inside its masks")
    form = _form_for(query.device, min(query.shape[-1], value.shape[-1]))
    output = form(
        query, key, value, segrew_rows, scaling=scaling, window=sliding_window or None, softcap=softcap, dropout=dropout
    )
    return output.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)


@contextmanager
def _attention(trunk: nn.Module) -> Iterator[None]:
    config: Any = trunk.config
    previous = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = previous


@contextmanager
def _recomputed_alike(trunk: nn.Module) -> Iterator[None]:
    """Make checkpointed layers find the packed attention again when the backward pass runs them anew."""
    layers: list[Any] = [m for m in trunk.modules() if hasattr(m, "_gradient_checkpointing_func")]
    own = [layer._gradient_checkpointing_func for layer in layers]

    def wrapped(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        def run(layer: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
            return checkpoint(_attention(trunk)(layer), *inputs, **options)

        return run

    for layer, checkpoint in zip(layers, own, strict=True):
        layer._gradient_checkpointing_func = wrapped(checkpoint)
    try:
        yield
    finally:
        for layer, checkpoint in zip(layers, own, strict=True):
            layer._gradient_checkpointing_func = checkpoint


def _refuse_other_layers(trunk: Any) -> None:
    """Layers that carry a state from token to token would carry it from row to row."""
    config = trunk.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise CannotPack(f"it has layers of kind {', '.join(sorted(kinds))}")
    if getattr(trunk, "_is_stateful", False):
        raise CannotPack("its layers carry a state from token to token")
    if not getattr(trunk, "_supports_attention_backend", False):
        raise CannotPack("its attention does not go through transformers' registry")
    taken = inspect.signature(trunk.forward).parameters.values()
    if not any(p.name == "position_ids" for p in taken) or all(p.kind is not p.VAR_KEYWORD for p in taken):
        raise CannotPack("its forward takes no positions, or no arguments meant for attention")


def packed_states(
    trunk: nn.Module, prompts: list[list[int]], responses: list[list[int]], **cache: Any
) -> tuple[Float[Tensor, "n d"], PackedRows]:
    """Lay rows out flat and run the trunk once over them; return all states, and where each row's are.

    Args:
        cache: an empty one, as the trunk's forward calls it, to be filled with the keys and values of all tokens.

    Raises:
        CannotPack: the model's layers cannot be cut that way.
    """
    _refuse_other_layers(trunk)
    device = next(trunk.parameters()).device
    rows = lay_out(prompts, responses, multiple=TILE if _form_for(device) is _by_block_mask else 1)
    ids, positions = torch.tensor([rows.ids], device=device), torch.tensor([rows.positions], device=device)
    with _attention(trunk), _recomputed_alike(trunk):
        output = trunk(input_ids=ids, position_ids=positions, use_cache=bool(cache), segrew_rows=rows, **cache)
    return output.last_hidden_state[0], rows
