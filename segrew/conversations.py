"""Conversations as token ids, and the one place that turns them into hidden states."""

import inspect
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from math import inf
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor, nn

from segrew.language_models import plain_model, trunk_of
from segrew.packed_attention import CannotPack, packed_states
from segrew.packing import PackedRows, in_common, lay_out, padded_groups
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
    """Hidden states around each response token, row after row: n tokens in all.

    Args:
        flat: states of tokens that were run, all that are read among them.
        index_before, index_at: the place in it of the state that produced a token, and of the state after it.
        mask: True on response tokens.
    """

    flat: Float[Tensor, "m d"]
    index_before: Int64[Tensor, "n"]
    index_at: Int64[Tensor, "n"]
    mask: Bool[Tensor, "b t"]

    @property
    def before(self) -> Float[Tensor, "n d"]:
        """State that produced each token: log-probabilities and values are read here."""
        return self.flat[self.index_before]

    @property
    def at(self) -> Float[Tensor, "n d"]:
        """State after each token: rewards are read here."""
        return self.flat[self.index_at]

    def spread(self, values: Shaped[Tensor, "n ..."]) -> Shaped[Tensor, "b t ..."]:
        """Lay what was read of each token out in rows; 0 in padding."""
        return in_rows(values, self.mask)


def in_rows(values: Shaped[Tensor, "n ..."], mask: Bool[Tensor, "b t"]) -> Shaped[Tensor, "b t ..."]:
    """Lay values of real tokens, row after row, out in rows; 0 in padding."""
    rows = values.new_zeros(*mask.shape, *values.shape[1:])
    return rows.masked_scatter(mask.view(*mask.shape, *[1] * (values.ndim - 1)), values)


def _padded_states(
    trunk: nn.Module, conversations: Conversations, *, left: bool = False
) -> tuple[Float[Tensor, "n d"], list[list[int]]]:
    """Run rows padded on one side, in groups of similar length; return the states that are read, and each row's places.

    They are of its prompt's last token and of its response.
    """
    device = next(trunk.parameters()).device
    takes_positions = "position_ids" in inspect.signature(trunk.forward).parameters
    prompts, responses = conversations.prompts, conversations.responses
    rows = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    read: list[list[int]] = [[]] * len(rows)
    states, done = [], 0
    for group in padded_groups([len(row) for row in rows], len(lay_out(prompts, responses).ids)):
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
        for k, i in enumerate(group):
            first, count = starts[k] + len(prompts[i]) - 1, 1 + len(responses[i])
            states.append(output.last_hidden_state[k, first : first + count].clone())  # else all of the pass stays
            read[i] = list(range(done, done + count))
            done += count
    return torch.cat(states), read


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


def runs_padded(model: nn.Module) -> bool:
    """Whether a pass has found that the model, or one inside it, cannot take packed rows."""
    return any(module in _padded_because for module in model.modules())


def _alike_in_position(trunk: nn.Module, conversations: Conversations) -> Iterator[list[int]]:
    """Yield the rows that may share a pass: LongRoPE (2402.13753) turns all of one by the length of its longest row."""
    rope = getattr(trunk.config.get_text_config(), "rope_parameters", None) or {}  # type: ignore[union-attr, operator]
    most = rope["original_max_position_embeddings"] if rope.get("rope_type") == "longrope" else inf
    sizes = [len(p) + len(r) for p, r in zip(conversations.prompts, conversations.responses, strict=True)]
    for beyond in (False, True):
        if rows := [row for row, size in enumerate(sizes) if (size > most) == beyond]:
            yield rows


def _read_states(
    trunk: nn.Module, conversations: Conversations, layout: Layout | None
) -> tuple[Float[Tensor, "m d"], list[list[int]]]:
    """Run rows in one layout; return states and, of each row, where its prompt's last token and its response are."""
    packed = None
    if layout in (None, "packed"):
        packed = packed_or_none(trunk, conversations.prompts, conversations.responses)
    if packed is not None:
        states, rows = packed
        return states, [path[len(p) - 1 :] for path, p in zip(rows.paths, conversations.prompts, strict=True)]
    if layout == "packed":
        raise ValueError(f"{type(trunk).__name__} cannot run on packed rows: {_padded_because[trunk]}.")
    return _padded_states(trunk, conversations, left=layout == "padded_left")


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
    parts: list[Tensor] = []
    read: list[list[int]] = [[]] * len(conversations)
    for rows in _alike_in_position(trunk, conversations):
        offset = sum(map(len, parts))
        states, places = _read_states(trunk, conversations.select(rows), layout)
        parts.append(states)
        for row, of_row in zip(rows, places, strict=True):
            read[row] = [offset + place for place in of_row]
    before, at = ([place for row in read for place in row[cut]] for cut in (slice(None, -1), slice(1, None)))
    flat = torch.cat(parts) if len(parts) > 1 else parts[0]
    device = flat.device
    index_before, index_at = torch.tensor(before, device=device).long(), torch.tensor(at, device=device).long()
    return ResponseStates(flat, index_before, index_at, conversations.mask.to(device))


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
    before: Float[Tensor, "n d"],
    conversations: Conversations,
    *,
    temperature: float = 1.0,
) -> tuple[Float[Tensor, "b t"], Float[Tensor, "b t"]]:
    """Return log-probability and entropy (nats, temperature 1) from the states that produced each token.

    Args:
        before: row after row, as `ResponseStates.before`.
    """
    head = plain_model(model).get_output_embeddings()
    softcap, logit_scale = _logit_shape(trunk_of(model).config.get_text_config())  # type: ignore[union-attr, operator]
    logprobs, entropy = token_statistics(
        before,
        head.weight,
        torch.tensor(list(chain.from_iterable(conversations.responses)), device=before.device).long(),
        temperature=temperature,
        bias=head.bias,
        softcap=softcap,
        logit_scale=logit_scale,
    )
    mask = conversations.mask.to(before.device)
    return in_rows(logprobs, mask), in_rows(entropy, mask)


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


@torch.no_grad()
def check_head(model: nn.Module) -> None:
    """Compare, on three tokens, what the output embedding says of a model's last states with its own logits.

    Raises:
        ValueError: the head does more (a layer before it, another multiplier), or positions do not count from 0.
    """
    ids = [3, 4, 5]
    found, _ = response_statistics(model, Conversations([ids[:1]], [ids[1:]], torch.tensor([False])))
    logits = model(input_ids=torch.tensor([ids], device=found.device), use_cache=False).logits[0, :-1].float()
    gap = (found[0] - logits.log_softmax(-1)[[0, 1], ids[1:]]).abs().max()
    if gap > 0.1 + 0.02 * logits.abs().max():  # bfloat16 rounds to 0.004 of a logit
        raise ValueError(
            f"{type(model).__name__}: its output embedding on its last states gives other log-probabilities than its "
            f"own logits do ({gap:.2g} nats apart), so entropies, ratios and KL would be wrong. segrew knows heads of "
            "one matrix, a bias, a multiplier and a soft cap; take a model that has such a head."
        )


def micro_batches(
    conversations: Conversations,
    max_tokens: int | None = TOKENS_PER_BATCH,
    *,
    max_rows: int | None = None,
    padded: bool = False,
) -> Iterator[list[int]]:
    """Yield row numbers, longest rows first and rows of one prompt together.

    Args:
        max_tokens: of a batch, counting each prompt once, and once the head (a system prompt) that all begin with.
            A row that has more is a batch of its own.
        max_rows: of a batch.
        padded: each row will be run whole, so count it whole.
    """
    rows_of: dict[tuple[int, ...], list[int]] = {}
    for row, ids in enumerate(conversations.prompts):
        rows_of.setdefault(tuple(ids), []).append(row)
    lengths = conversations.lengths
    groups = sorted(rows_of.items(), key=lambda item: (-len(item[0]) - max(lengths[i] for i in item[1]), item))
    head = 0 if padded else in_common(min(rows_of, default=()), max(rows_of, default=()))
    batch: list[int] = []
    tokens = head
    for prompt, rows in groups:
        own = 0 if padded else len(prompt) - head  # counted once, else with each row
        sizes = {row: lengths[row] + padded * len(prompt) for row in rows}
        if batch and max_tokens is not None and tokens + own + sum(sizes.values()) > max_tokens:
            yield batch
            batch, tokens = [], head
        tokens += own
        for row, size in sizes.items():
            full = max_tokens is not None and tokens + size > max_tokens
            if batch and (full or len(batch) == max_rows):
                yield batch
                batch, tokens = [], head + own
            batch.append(row)
            tokens += size
    if batch:
        yield batch
