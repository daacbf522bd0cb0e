"""Language models: loading, identity, and the one place that turns conversations into hidden states."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from segrew.embedded_model import resolve_model
from segrew.run_directory import read_json
from segrew.token_statistics import token_statistics


def best_device() -> torch.device:
    """Return the accelerator if there is one, else the CPU."""
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def best_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 where the processor computes in it, float32 elsewhere."""
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


def adapter_base(name_or_path: str) -> str | None:
    """Return the model that a LoRA adapter directory belongs to; None if it is no such directory."""
    config = Path(name_or_path) / "adapter_config.json"
    return read_json(config)["base_model_name_or_path"] if config.is_file() else None


def load_tokenizer(name_or_path: str) -> Any:
    """Load a tokenizer from a directory or the hub; an adapter without one takes its base model's.

    Raises:
        ValueError: there is none under that name.
    """
    base = adapter_base(name_or_path)
    if base is not None and not (Path(name_or_path) / "tokenizer_config.json").is_file():
        return load_tokenizer(base)
    try:
        return AutoTokenizer.from_pretrained(resolve_model(name_or_path))
    except OSError as error:
        raise ValueError(f"no tokenizer at '{name_or_path}': {str(error).splitlines()[0]}") from None


def load_causal_lm(
    name_or_path: str, *, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> nn.Module:
    """Load a causal language model in evaluation mode, without any pattern of dropout left on.

    A directory with a LoRA adapter gives its base model with the adapter merged.

    Args:
        dtype: of the weights; default float32 on CPU without bfloat16 units, see `best_dtype`.

    Raises:
        ValueError: there is no model under that name.
    """
    device = device or best_device()
    base = adapter_base(name_or_path)
    if base is not None:
        from peft import PeftModel

        start: Any = load_causal_lm(base, dtype=torch.float32, device=device)
        merged: Any = PeftModel.from_pretrained(start, name_or_path).merge_and_unload()
        return merged.to(dtype or best_dtype(device)).eval()
    loaded: Any
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            resolve_model(name_or_path),
            dtype=dtype or best_dtype(device),
            output_loading_info=True,
        )
    except (OSError, KeyError) as error:
        raise ValueError(f"no language model at '{name_or_path}': {str(error).splitlines()[0]}") from None
    model, info = loaded
    if info["missing_keys"]:
        raise ValueError(
            f"'{name_or_path}' is no whole language model: {', '.join(sorted(info['missing_keys']))} missing from the "
            "checkpoint, and random stand-ins would make its entropies noise."
        )
    return model.to(device).eval()


def unused_pad_id(tokenizer: Any, stop_ids: tuple[int, ...]) -> int:
    """Choose a padding token that no stop token equals, for readers that find a row's end by it.

    Raises:
        ValueError: every special token ends a response.
    """
    names = ["<|endoftext|>", "<pad>", "[PAD]", "<unk>"]
    candidates = [tokenizer.pad_token_id, *tokenizer.convert_tokens_to_ids(names), *tokenizer.all_special_ids]
    for candidate in candidates:
        if candidate is not None and candidate not in stop_ids:
            return candidate
    raise ValueError("every special token of the tokenizer is a stop token; add one to pad with ('<pad>').")


def plain_model(model: Any) -> Any:
    """Return the transformers model inside a peft model, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def trunk_of(model: nn.Module) -> nn.Module:
    """Return the transformer below the head, LoRA layers included."""
    return plain_model(model).base_model


def model_fingerprint(model: nn.Module) -> str:
    """Short hash of every weight of a language model, in bfloat16: equal after loading in float32 or bfloat16."""
    weights = dict(trunk_of(model).named_parameters())
    lm_head = plain_model(model).get_output_embeddings()
    if lm_head is not None and all(lm_head.weight is not weight for weight in weights.values()):
        weights["lm_head"] = lm_head.weight
    digest = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        digest.update(f"{name}{tuple(weight.shape)}".encode())
        digest.update(weight.detach().bfloat16().contiguous().view(torch.int16).cpu().numpy().data)
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Conversations:
    """Prompts with their responses, as token ids; rows are independent and of any length.

    Args:
        prompts: ids of each prompt, at least one a row.
        responses: ids of each response, with its stop token if it ended.
        ended: whether the last response token is a stop token.
    """

    prompts: list[list[int]]
    responses: list[list[int]]
    ended: Bool[Tensor, "b"]

    def __len__(self) -> int:
        return len(self.responses)

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each response."""
        return [len(response) for response in self.responses]

    @property
    def response_ids(self) -> Int64[Tensor, "b t"]:
        """Response ids from column 0 on; 0 in padding."""
        width = max(self.lengths, default=0)
        rows = [response + [0] * (width - len(response)) for response in self.responses]
        return torch.tensor(rows, dtype=torch.int64).reshape(len(self), width)

    @property
    def mask(self) -> Bool[Tensor, "b t"]:
        """True on response tokens; made from lengths, never from ids."""
        width = max(self.lengths, default=0)
        return torch.arange(width)[None] < torch.tensor(self.lengths, dtype=torch.int64)[:, None]

    def select(self, rows: list[int]) -> "Conversations":
        """Return the given rows, in the given order."""
        return Conversations([self.prompts[i] for i in rows], [self.responses[i] for i in rows], self.ended[rows])


@dataclass(frozen=True)
class ResponseStates:
    """Hidden states around each response token.

    Args:
        before: state that produced token j (log-probabilities and values are read here); 0 in padding.
        at: state after token j (rewards are read here); 0 in padding.
    """

    before: Float[Tensor, "b t d"]
    at: Float[Tensor, "b t d"]


@dataclass(frozen=True)
class _Layout:
    """Rows laid out flat, without padding, equal prompts once.

    Args:
        ids: all tokens; positions: their position ids.
        blocks: for attention, (first query, end of queries, first key of the shared prompt, its end).
        starts: index of each row's first response token; prompt_last: index of its last prompt token.
    """

    ids: list[int]
    positions: list[int]
    blocks: list[tuple[int, int, int, int]]
    starts: list[int]
    prompt_last: list[int]


def _lay_out(conversations: Conversations) -> _Layout:
    flat = _Layout([], [], [], [0] * len(conversations), [0] * len(conversations))
    rows_of: dict[tuple[int, ...], list[int]] = {}
    for row, prompt in enumerate(conversations.prompts):
        rows_of.setdefault(tuple(prompt), []).append(row)
    for shared, rows in rows_of.items():
        begin, width = len(flat.ids), len(shared)
        flat.ids.extend(shared)
        flat.positions.extend(range(width))
        for k, row in enumerate(rows):
            response = conversations.responses[row]
            flat.starts[row], flat.prompt_last[row] = len(flat.ids), begin + width - 1
            first_query = begin if k == 0 else len(flat.ids)  # the prompt runs with its first response
            flat.ids.extend(response)
            flat.positions.extend(range(width, width + len(response)))
            flat.blocks.append((first_query, len(flat.ids), begin, begin if k == 0 else begin + width))
    return flat


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    segrew_blocks: list[tuple[int, int, int, int]] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one flat row: each block sees its shared prompt and, causally, itself."""
    assert segrew_blocks is not None, "the packed layout was not passed down to attention"
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    outputs = []
    for start, stop, prompt_start, prompt_stop in segrew_blocks:
        if stop == start:  # an empty response behind a shared prompt
            continue
        shared = prompt_stop - prompt_start
        own_key, own_value, bias = key[:, :, start:stop], value[:, :, start:stop], None
        if shared:
            own_key = torch.cat([key[:, :, prompt_start:prompt_stop], own_key], 2)
            own_value = torch.cat([value[:, :, prompt_start:prompt_stop], own_value], 2)
            bias = query.new_ones(stop - start, shared + stop - start, dtype=torch.bool).tril(shared)
        outputs.append(
            nn.functional.scaled_dot_product_attention(
                query[:, :, start:stop],
                own_key,
                own_value,
                attn_mask=bias,
                dropout_p=dropout,
                is_causal=bias is None,
                scale=scaling,
            )
        )
    return torch.cat(outputs, 2).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register("segrew_packed", _packed_attention)


def _packs(trunk: nn.Module, longest: int) -> bool:
    """Whether attention of this model may be computed block by block: full, causal, no soft-capping, no sinks.

    Layers that carry a state from token to token would carry it from row to row. Activation checkpointing
    recomputes layers after the forward pass, when its attention is the stock one again.
    """
    checkpointing = trunk.training and any(getattr(m, "gradient_checkpointing", False) for m in trunk.modules())
    config = trunk.config.get_text_config()  # type: ignore[union-attr, operator]
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    return (
        not checkpointing
        and bool(getattr(trunk, "_supports_attention_backend", False))
        and (window is None or window >= longest)
        and kinds <= {"full_attention", "sliding_attention"}
        and not getattr(config, "attn_logit_softcapping", None)
        and not any(hasattr(module, "sinks") for module in trunk.modules())
    )


@contextmanager
def _attention(trunk: nn.Module, name: str) -> Iterator[None]:
    config: Any = trunk.config
    previous = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = previous


def _packed_states(trunk: nn.Module, layout: _Layout, device: torch.device) -> Float[Tensor, "n d"]:
    ids = torch.tensor([layout.ids], device=device)
    positions = torch.tensor([layout.positions], device=device)
    with _attention(trunk, "segrew_packed"):
        output = trunk(input_ids=ids, position_ids=positions, use_cache=False, segrew_blocks=layout.blocks)
    return output.last_hidden_state[0]


def _padded_states(trunk: nn.Module, conversations: Conversations, device: torch.device) -> Float[Tensor, "n d"]:
    rows = [p + r for p, r in zip(conversations.prompts, conversations.responses, strict=True)]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
    mask = torch.arange(width)[None] < torch.tensor([len(row) for row in rows])[:, None]
    output = trunk(input_ids=ids, attention_mask=mask.to(device).long(), use_cache=False)
    return output.last_hidden_state.flatten(0, 1)


def response_states(model: nn.Module, conversations: Conversations, *, layout: str | None = None) -> ResponseStates:
    """Run the trunk once and return the hidden states around every response token.

    Rows go in flat, without padding and with equal prompts computed once; a model whose attention
    cannot be cut that way gets padded rows. Both give the same states.

    Args:
        layout: "packed" or "padded"; default what the model can take.
    """
    trunk = trunk_of(model)
    device = next(trunk.parameters()).device
    for row, prompt in enumerate(conversations.prompts):
        if not prompt:
            raise ValueError(f"row {row}: an empty prompt; the first response token needs a token before it.")
    longest = max(len(p) + len(r) for p, r in zip(conversations.prompts, conversations.responses, strict=True))
    layout = layout or ("packed" if _packs(trunk, longest) else "padded")
    if layout == "packed":
        packed = _lay_out(conversations)
        states, starts, prompt_last = _packed_states(trunk, packed, device), packed.starts, packed.prompt_last
    else:
        states = _padded_states(trunk, conversations, device)
        width = states.shape[0] // len(conversations)
        starts = [i * width + len(prompt) for i, prompt in enumerate(conversations.prompts)]
        prompt_last = [start - 1 for start in starts]
    mask = conversations.mask.to(device)
    columns = torch.arange(mask.shape[1], device=device)[None]
    at = (torch.tensor(starts, device=device)[:, None] + columns).where(mask, 0)
    before = torch.cat([torch.tensor(prompt_last, device=device)[:, None], at[:, :-1]], 1)[:, : mask.shape[1]]
    keep = mask[..., None]
    return ResponseStates(before=states[before.where(mask, 0)] * keep, at=states[at] * keep)


def statistics_of_states(
    model: nn.Module,
    before: Float[Tensor, "b t d"],
    conversations: Conversations,
    *,
    temperature: float = 1.0,
) -> tuple[Float[Tensor, "b t"], Float[Tensor, "b t"]]:
    """Return log-probability and entropy (nats, temperature 1) from the states that produced each token."""
    mask = conversations.mask.to(before.device)
    head = plain_model(model).get_output_embeddings()
    config: Any = trunk_of(model).config.get_text_config()  # type: ignore[union-attr, operator]
    logprobs, entropy = token_statistics(
        before[mask],
        head.weight,
        conversations.response_ids.to(before.device)[mask],
        temperature=temperature,
        bias=head.bias,
        softcap=getattr(config, "final_logit_softcapping", None),
        logit_scale=getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0),
    )
    empty = torch.zeros(mask.shape, device=before.device)
    return empty.masked_scatter(mask, logprobs), empty.masked_scatter(mask, entropy)


def response_statistics(
    model: nn.Module, conversations: Conversations, *, temperature: float = 1.0
) -> tuple[Float[Tensor, "b t"], Float[Tensor, "b t"]]:
    """Return log-probability and entropy of each response token in one pass; 0 in padding.

    Column j belongs to token j and to the distribution that produced it.

    Args:
        temperature: of the log-probabilities; that of sampling, so that they describe the samples.
    """
    before = response_states(model, conversations).before
    return statistics_of_states(model, before, conversations, temperature=temperature)


def micro_batches(conversations: Conversations, batch_size: int) -> Iterator[list[int]]:
    """Yield row numbers, longest rows first and rows of one prompt together, at most `batch_size` at a time."""
    sizes = [len(p) + len(r) for p, r in zip(conversations.prompts, conversations.responses, strict=True)]
    widest: dict[tuple[int, ...], int] = {}
    for prompt, size in zip(conversations.prompts, sizes, strict=True):
        widest[tuple(prompt)] = max(size, widest.get(tuple(prompt), 0))
    keys = [(-widest[tuple(prompt)], prompt) for prompt in conversations.prompts]
    order = sorted(range(len(sizes)), key=lambda row: (keys[row], row))
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]
