"""Sampling answers: what was drawn, where it ended, and how likely the policy found it."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from rich.progress import track
from torch import Tensor, nn
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from policy.prefill import prefill
from policy.sampling import Drawn, GenerationEngine, Sampling
from segrew.chat import ChatFormat
from segrew.conversations import Conversations, micro_batches
from segrew.language_models import plain_model, unused_pad_id

LEAVE_EVERY = 32  # tokens after which finished answers leave the batch


@dataclass(frozen=True)
class Answers:
    """Sampled answers, before anything is known of them.

    Args:
        conversations: prompts and answers as ids, up to and including the stop token; an answer that ran out
            of room has `ended` False and no stop token.
        texts: the answers without stop tokens, cut at a stop string.
        logprobs: of each answer's tokens, as the engine that drew it has them; None where it tells none.
    """

    conversations: Conversations
    texts: list[str]
    logprobs: list[list[float] | None]

    def logprob_gap(self, logprobs: Float[Tensor, "b t"]) -> Float[Tensor, "b t"] | None:
        """|ln π_engine − ln π| of each token, 0 in padding; None where the engine tells nothing."""
        told = [row for row in self.logprobs if row is not None]
        if len(told) < len(self.logprobs):
            return None
        theirs = torch.tensor([value for row in told for value in row], device=logprobs.device)
        mask = self.conversations.mask.to(logprobs.device)
        return torch.zeros_like(logprobs).masked_scatter(mask, (theirs - logprobs[mask]).abs().to(logprobs))


@dataclass(frozen=True)
class Rollout:
    """Answers, and what the policy and the critic said of them when they were drawn. 0 in padding.

    Args:
        conversations, texts: as in `Answers`.
        logprobs: log π_old(y_j) at the sampling temperature.
        entropy: of the distribution that produced y_j, in nats at temperature 1.
        values: the critic's value of the state that produced y_j; 0 without a critic.
        values_after: the critic's value after the last token of an answer that was cut off, if it is asked for.
        logprob_gap: how far the engine's own log-probability of each token is off; None where it tells none.
    """

    conversations: Conversations
    texts: list[str]
    logprobs: Float[Tensor, "b t"]
    entropy: Float[Tensor, "b t"]
    values: Float[Tensor, "b t"]
    values_after: Float[Tensor, " b"] | None = None
    logprob_gap: Float[Tensor, "b t"] | None = None

    @property
    def mask(self) -> Bool[Tensor, "b t"]:
        """True on answer tokens."""
        return self.conversations.mask.to(self.logprobs.device)

    @property
    def ended(self) -> Bool[Tensor, "b"]:
        """Whether each answer stopped by itself."""
        return self.conversations.ended.to(self.logprobs.device)


def trim(ids: list[int], stop_ids: Collection[int]) -> tuple[list[int], bool]:
    """Keep everything up to and including the first stop token; say whether there was one."""
    for j, token in enumerate(ids):
        if token in stop_ids:
            return ids[: j + 1], True
    return ids, False


def trim_at_string(ids: list[int], stop_strings: Collection[str], decode: Callable) -> tuple[list[int], str, bool]:
    """Keep the tokens up to the one that completes a stop string, and the text before that string."""
    text = decode(ids)
    found = [place for place in map(text.find, stop_strings) if place >= 0]
    if not found:
        return ids, text, False
    low, high = 0, len(ids) - 1
    while low < high:  # a string that has appeared stays, so the first token that completes one can be bisected
        middle = (low + high) // 2
        prefix = decode(ids[: middle + 1])
        if any(string in prefix for string in stop_strings):
            high = middle
        else:
            low = middle + 1
    return ids[: low + 1], text[: min(found)], True


class _StopAtStrings(StoppingCriteria):
    """Ends a row once its newest tokens spell a stop string."""

    def __init__(self, chat: ChatFormat, stop_strings: tuple[str, ...], prompt_width: int):
        self.chat, self.stop_strings, self.prompt_width = chat, stop_strings, prompt_width
        self.window = max(len(string.encode()) for string in stop_strings) + 8

    def __call__(self, input_ids: Tensor, scores: Tensor | None, **_: Any) -> Tensor:  # type: ignore[override]
        newest = input_ids[:, self.prompt_width :][:, -self.window :].tolist()
        texts = [self.chat.decode(row) for row in newest]
        done = [any(string in text for string in self.stop_strings) for text in texts]
        return torch.tensor(done, device=input_ids.device)


def left_pad(
    prompts: list[list[int]], pad_id: int, device: torch.device
) -> tuple[Int64[Tensor, "b p"], Int64[Tensor, "b p"]]:
    """Return ids padded on the left, and the attention mask, which comes from lengths."""
    width = max(map(len, prompts))
    ids = [[pad_id] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


@contextmanager
def _drawn_from(generator: torch.Generator, device: torch.device) -> Iterator[None]:
    """Let code that draws from torch's global state draw from `generator`, and leave that state as it was."""
    seed = int(torch.randint(2**62, (), generator=generator))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


@contextmanager
def _own_generation_config(model: Any) -> Iterator[None]:
    """Hide the model's generation_config: `generate` fills whatever ours leaves open from it."""
    hidden, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = hidden


def _generate(model: Any, chat: ChatFormat, prompts: list[list[int]], sampling: Sampling) -> list[list[int]]:
    stop_ids, pad_id = sampling.stop_ids(chat), unused_pad_id(chat.tokenizer, chat.stop_ids)
    ids, mask = left_pad(prompts, pad_id, next(model.parameters()).device)
    criteria, width = StoppingCriteriaList(), ids.shape[1]
    if sampling.stop_strings:
        criteria.append(_StopAtStrings(chat, sampling.stop_strings, width))
    answers: list[list[int]] = [[] for _ in prompts]
    going, read = list(range(len(prompts))), prefill(model, prompts)
    settings = GenerationConfig(
        do_sample=not sampling.greedy,
        temperature=sampling.temperature,
        top_k=None if sampling.greedy else sampling.top_k,
        top_p=sampling.top_p,
        eos_token_id=list(stop_ids),
        pad_token_id=pad_id,
        use_cache=True,
    )
    stretch = LEAVE_EVERY if read else sampling.max_new_tokens
    for done in range(0, sampling.max_new_tokens, stretch):
        settings.max_new_tokens = min(stretch, sampling.max_new_tokens - done)
        with _own_generation_config(model):
            ids = model.generate(
                input_ids=ids, attention_mask=mask, generation_config=settings, stopping_criteria=criteria, **read
            )
        for row, drawn in zip(going, ids[:, width:].tolist(), strict=True):
            answers[row] = drawn
        left = [k for k, row in enumerate(going) if not _has_ended(answers[row], stop_ids, sampling, chat)]
        if not left:
            break
        if len(left) < len(going):  # finished rows leave
            going, ids, mask = [going[k] for k in left], ids[left], mask[left]
            for cache in read.values():
                cache.batch_select_indices(torch.tensor(left, device=ids.device))
        mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
    return answers


def _has_ended(ids: list[int], stop_ids: Collection[int], sampling: Sampling, chat: ChatFormat) -> bool:
    strings = sampling.stop_strings
    return trim(ids, stop_ids)[1] or bool(strings and trim_at_string(ids, strings, chat.decode)[2])


class TransformersEngine:
    """Draws with the model itself, by transformers' `generate`; the model's own generation settings play no part."""

    def __init__(self, chat: ChatFormat):
        self.chat = chat
        self._model: Any = None

    def sync_weights(self, model: nn.Module) -> None:
        """Take note of the model: there is no copy."""
        self._model = plain_model(model)

    def generate(
        self, prompts: list[list[int]], sampling: Sampling, generator: torch.Generator, description: str = ""
    ) -> list[Drawn]:
        """Draw one answer to each prompt, in batches of prompts of similar length; see `GenerationEngine`."""
        answers = [Drawn([])] * len(prompts)
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        with _drawn_from(generator, next(self._model.parameters()).device):
            starts = range(0, len(order), sampling.batch_size)
            for start in track(starts, description, disable=not description):
                rows = order[start : start + sampling.batch_size]
                drawn = _generate(self._model, self.chat, [prompts[i] for i in rows], sampling)
                for i, ids in zip(rows, drawn, strict=True):
                    answers[i] = Drawn(ids)
        return answers


@torch.no_grad()
def sample_answers(
    model: nn.Module,
    chat: ChatFormat,
    prompts: list[list[int]],
    sampling: Sampling,
    generator: torch.Generator,
    description: str = "",
    engine: GenerationEngine | None = None,
) -> Answers:
    """Draw one answer to each prompt from the model as it is now, and end it at its first stop.

    Args:
        generator: the source of all randomness; drawn from once.
        description: label of the progress bar; empty for none.
        engine: what draws; default transformers.
    """
    engine = engine or TransformersEngine(chat)
    engine.sync_weights(model)
    stop_ids = frozenset(sampling.stop_ids(chat))
    responses, texts, ended, logprobs = [], [], [], []
    for ids, told in engine.generate(prompts, sampling, generator, description):
        ids, stopped = trim(ids, stop_ids)
        ids, text, spelled = trim_at_string(ids, sampling.stop_strings, chat.decode)
        responses.append(ids)
        texts.append(text)
        ended.append(stopped or spelled)
        logprobs.append(None if told is None else told[: len(ids)])
    return Answers(Conversations(prompts, responses, torch.tensor(ended)), texts, logprobs)


def in_micro_batches(
    compute: Callable[[Conversations], tuple[Tensor, ...]], conversations: Conversations, max_tokens: int
) -> tuple[Shaped[Tensor, "b t ..."], ...]:
    """Run `compute` on rows of similar length at a time and lay its [rows, t, …] results out as [b, t, …]."""
    width = max(conversations.lengths)
    whole: tuple[Tensor, ...] = ()
    for rows in micro_batches(conversations, max_tokens):
        parts = compute(conversations.select(rows))
        if not whole:
            whole = tuple(part.new_zeros(len(conversations), width, *part.shape[2:]) for part in parts)
        for target, part in zip(whole, parts, strict=True):
            target[rows, : part.shape[1]] = part
    return whole
