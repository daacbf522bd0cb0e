"""Conversations as token ids, and the one place that turns them into hidden states."""

import inspect
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from segrew.language_models import plain_model, trunk_of
from segrew.packed_attention import CannotPack, packed_states
from segrew.packing import PackedRows, in_common, padded_groups
from segrew.token_statistics import token_statistics

Layout = Literal["packed", "padded", "padded_left"]
TOKENS_PER_BATCH = 8192


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
) -> tuple[Float[Tensor, "n d"], list[list[int]]]:
    """Run rows padded on one side, in groups of similar length; return all states and where each row's are."""
    device = next(trunk.parameters()).device
    takes_positions = "position_ids" in inspect.signature(trunk.forward).parameters
    paths: list[list[int]] = [[]] * len(rows)
    states, done = [], 0
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
            begin = done + place * width + starts[place]
            paths[i] = list(range(begin, begin + len(rows[i])))
        done += len(group) * width
    return torch.cat(states), paths


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

    Rows go in flat, without padding and with what they begin with alike computed once; a model whose attention
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
        states, paths = packed[0], packed[1].paths
    elif layout == "packed":
        raise ValueError(f"{type(trunk).__name__} cannot run on packed rows: {_padded_because[trunk]}.")
    else:
        joined = [p + r for p, r in zip(conversations.prompts, conversations.responses, strict=True)]
        states, paths = _padded_states(trunk, joined, left=layout == "padded_left")
    mask = conversations.mask
    read = [path[len(prompt) - 1 :] for path, prompt in zip(paths, conversations.prompts, strict=True)]
    places = torch.tensor([row + [0] * (mask.shape[1] + 1 - len(row)) for row in read])
    before, at = (part.where(mask, 0).to(states.device) for part in (places[:, :-1], places[:, 1:]))
    return ResponseStates(states, before, at, mask.to(states.device))


def _logit_shape(config: Any) -> tuple[float | None, float]:
    """The soft cap of a model's logits and what they are multiplied by, under the names its family has for them."""

    def held(name: str) -> float | None:
        return getattr(config, name, None)

    softcap = held("final_logit_softcapping") or held("logits_soft_cap")  # Gemma; RecurrentGemma
    scale = held("logit_scale") or held("lm_head_multiplier")  # Cohere; Falcon-H1
    divisor = held("logits_scaling") or 1.0  # Granite
    if config.model_type.startswith("hyperclovax"):  # it multiplies where Granite divides
        return softcap, divisor
    return softcap, scale or 1.0 / divisor


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
    softcap, logit_scale = _logit_shape(trunk_of(model).config.get_text_config())  # type: ignore[union-attr, operator]
    logprobs, entropy = token_statistics(
        before[mask],
        head.weight,
        conversations.response_ids.to(before.device)[mask],
        temperature=temperature,
        bias=head.bias,
        softcap=softcap,
        logit_scale=logit_scale,
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
        max_tokens: of a batch, counting each prompt once, and once the head (a system prompt) that all begin with.
            A row that has more is a batch of its own.
        max_rows: of a batch.
    """
    rows_of: dict[tuple[int, ...], list[int]] = {}
    for row, prompt in enumerate(conversations.prompts):
        rows_of.setdefault(tuple(prompt), []).append(row)
    lengths = conversations.lengths
    head = in_common(min(rows_of, default=()), max(rows_of, default=()))
    groups = sorted(rows_of.items(), key=lambda item: (-len(item[0]) - max(lengths[i] for i in item[1]), item))
    batch: list[int] = []
    tokens = head
    for shared, rows in groups:
        own = len(shared) - head
        if batch and max_tokens is not None and tokens + own + sum(lengths[i] for i in rows) > max_tokens:
            yield batch
            batch, tokens = [], head
        tokens += own
        for row in rows:
            full = max_tokens is not None and tokens + lengths[row] > max_tokens
            if batch and (full or len(batch) == max_rows):
                yield batch
                batch, tokens = [], len(shared)
            batch.append(row)
            tokens += lengths[row]
    if batch:
        yield batch
