"""Language models: loading, identity, and the one place that turns conversations into hidden states."""

import hashlib
import inspect
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from segrew.embedded_model import resolve_model
from segrew.packed_attention import CannotPack, packed_states
from segrew.packing import PackedRows, padded_groups
from segrew.run_directory import read_json
from segrew.token_statistics import token_statistics

Layout = Literal["packed", "padded", "padded_left"]
TOKENS_PER_BATCH = 8192


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
        return AutoTokenizer.from_pretrained(resolve_model(name_or_path), trust_remote_code=False)
    except OSError as error:
        raise ValueError(f"no tokenizer at '{name_or_path}': {str(error).splitlines()[0]}") from None
    except Exception as error:  # of a damaged file, tokenizers knows no narrower one
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"no tokenizer can be read from '{name_or_path}': {reason[:300]}") from None


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
            trust_remote_code=False,
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


def context_length(model: nn.Module) -> int | None:
    """Return how many tokens the model has positions for; None where nothing bounds them."""
    config: Any = trunk_of(model).config.get_text_config()  # type: ignore[union-attr, operator]
    return getattr(config, "max_position_embeddings", None)


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
    """Hidden states around each response token, laid out as [b, t] when they are asked for.

    Args:
        flat: states of all tokens that were run.
        index_before, index_at: the place in it of the state that produced token j, and of the state after it.
        mask: True on response tokens.
    """

    flat: Float[Tensor, "n d"]
    index_before: Int64[Tensor, "b t"]
    index_at: Int64[Tensor, "b t"]
    mask: Bool[Tensor, "b t"]

    @property
    def before(self) -> Float[Tensor, "b t d"]:
        """State that produced token j (log-probabilities and values are read here); 0 in padding."""
        return self.flat[self.index_before].masked_fill(~self.mask[..., None], 0)

    @property
    def at(self) -> Float[Tensor, "b t d"]:
        """State after token j (rewards are read here); 0 in padding."""
        return self.flat[self.index_at].masked_fill(~self.mask[..., None], 0)


def _padded_states(
    trunk: nn.Module, rows: list[list[int]], *, left: bool = False
) -> tuple[Float[Tensor, "n d"], list[int]]:
    """Run rows padded on one side, in groups of similar length; return all states and where each row begins."""
    device = next(trunk.parameters()).device
    takes_positions = "position_ids" in inspect.signature(trunk.forward).parameters
    states, begins, done = [], [0] * len(rows), 0
    for group in padded_groups([len(row) for row in rows]):
        width = len(rows[group[0]])
        starts = [width - len(rows[i]) if left else 0 for i in group]
        ids = [[0] * a + rows[i] + [0] * (width - len(rows[i]) - a) for i, a in zip(group, starts, strict=True)]
        places = torch.arange(width)[None] - torch.tensor(starts)[:, None]
        mask = (places >= 0) & (places < torch.tensor([len(rows[i]) for i in group])[:, None])
        positions = {"position_ids": places.clamp(min=0).to(device)} if left and takes_positions else {}
        output = trunk(
            input_ids=torch.tensor(ids, device=device),
            attention_mask=mask.to(device).long(),
            use_cache=False,
            **positions,
        )
        states.append(output.last_hidden_state.flatten(0, 1))
        for place, i in enumerate(group):
            begins[i] = done + place * width + starts[place]
        done += len(group) * width
    return torch.cat(states), begins


_padded_because: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def packed_or_none(
    trunk: nn.Module, prompts: list[list[int]], responses: list[list[int]], **cache: Any
) -> tuple[Float[Tensor, "n d"], PackedRows] | None:
    """Run rows packed, as `packed_states` does; None where the model cannot, which is said once."""
    if trunk in _padded_because:
        return None
    try:
        return packed_states(trunk, prompts, responses, **cache)
    except CannotPack as reason:
        _padded_because[trunk] = str(reason)
        warnings.warn(
            f"{type(trunk).__name__} runs on padded rows of similar length instead of packed ones, which takes longer "
            f"and gives the same: {reason}.",
            stacklevel=3,
        )
        return None


def response_states(model: nn.Module, conversations: Conversations, *, layout: Layout | None = None) -> ResponseStates:
    """Run the trunk once and return the hidden states around every response token.

    Rows go in flat, without padding and with equal prompts computed once; a model whose attention
    cannot be cut that way gets padded rows, and says so once. Both give the same states.

    Args:
        layout: default what the model can take; padded is padded on the right.

    Raises:
        ValueError: a prompt is empty, or the model cannot take the layout that was asked for.
    """
    trunk = trunk_of(model)
    for row, prompt in enumerate(conversations.prompts):
        if not prompt:
            raise ValueError(f"row {row}: an empty prompt; the first response token needs a token before it.")
    packed = None
    if layout in (None, "packed"):
        packed = packed_or_none(trunk, conversations.prompts, conversations.responses)
    if packed is not None:
        states, starts, prompt_last = packed[0], packed[1].starts, packed[1].prompt_last
    elif layout == "packed":
        raise ValueError(f"{type(trunk).__name__} cannot run on packed rows: {_padded_because[trunk]}.")
    else:
        joined = [p + r for p, r in zip(conversations.prompts, conversations.responses, strict=True)]
        states, begins = _padded_states(trunk, joined, left=layout == "padded_left")
        starts = [begin + len(prompt) for begin, prompt in zip(begins, conversations.prompts, strict=True)]
        prompt_last = [start - 1 for start in starts]
    mask = conversations.mask.to(states.device)
    columns = torch.arange(mask.shape[1], device=mask.device)[None]
    at = (torch.tensor(starts, device=mask.device)[:, None] + columns).where(mask, 0)
    before = torch.cat([torch.tensor(prompt_last, device=mask.device)[:, None], at[:, :-1]], 1)[:, : mask.shape[1]]
    return ResponseStates(states, before.where(mask, 0), at, mask)


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


def micro_batches(
    conversations: Conversations, max_tokens: int | None = TOKENS_PER_BATCH, *, max_rows: int | None = None
) -> Iterator[list[int]]:
    """Yield row numbers, longest rows first and rows of one prompt together.

    Args:
        max_tokens: of a batch, as it is laid out: each prompt once. A row that has more is a batch of its own.
        max_rows: of a batch.
    """
    rows_of: dict[tuple[int, ...], list[int]] = {}
    for row, prompt in enumerate(conversations.prompts):
        rows_of.setdefault(tuple(prompt), []).append(row)
    lengths = conversations.lengths
    groups = sorted(rows_of.items(), key=lambda item: (-len(item[0]) - max(lengths[i] for i in item[1]), item))
    batch: list[int] = []
    tokens = 0
    for shared, rows in groups:
        together = len(shared) + sum(lengths[i] for i in rows)
        if batch and max_tokens is not None and tokens + together > max_tokens:
            yield batch
            batch, tokens = [], 0
        tokens += len(shared)
        for row in rows:
            full = max_tokens is not None and tokens + lengths[row] > max_tokens
            if batch and (full or len(batch) == max_rows):
                yield batch
                batch, tokens = [], len(shared)
            batch.append(row)
            tokens += lengths[row]
    if batch:
        yield batch
