"""Sampling answers: what was drawn, where it ended, and how likely the policy found it."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from rich.progress import track
from torch import Tensor, nn
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from segrew.chat import ChatFormat
from segrew.language_models import Conversations, micro_batches, plain_model, unused_pad_id


@dataclass(frozen=True)
class Sampling:
    """Temperature sampling; without top_k and top_p the log-probabilities describe the samples.

    Args:
        max_new_tokens: where an answer is cut off.
        temperature: of sampling, and of every log-probability taken of the samples.
        top_k, top_p: keep the likeliest tokens only; 0 and 1 keep all.
        stop_token_ids: stop tokens besides the template's turn end and the tokenizer's end token.
        stop_strings: texts that end an answer; they stay in the ids and leave the text.
        batch_size: answers drawn at once.
        greedy: take the likeliest token instead of drawing one, which PPO never does.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    batch_size: int = 32
    greedy: bool = False

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(
                f"--temperature {self.temperature}: must be positive. PPO samples its answers, and log-probabilities "
                "are taken at the temperature of sampling; 1.0 is usual."
            )
        if any(token < 0 for token in self.stop_token_ids):
            raise ValueError(f"--stop_token_ids {list(self.stop_token_ids)}: must not be negative.")
        if self.top_k < 0:
            raise ValueError(f"--top_k {self.top_k}: must be positive, or 0 for all tokens.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top_p {self.top_p}: must lie above 0 and at most be 1, which keeps all tokens.")
        if self.max_new_tokens < 1:
            raise ValueError(f"--max_new_tokens {self.max_new_tokens}: an answer has at least one token.")

    @property
    def warning(self) -> str | None:
        """What is wrong with learning from samples drawn like this; None if nothing is."""
        filters = [name for name, off in (("top_k", 0), ("top_p", 1.0)) if getattr(self, name) != off]
        if not filters:
            return None
        given = " and ".join(f"--{name} {getattr(self, name)}" for name in filters)
        return (
            f"{given}: answers come from a filtered distribution, but log-probabilities, KL and ratios are those of "
            "the whole one. They do not describe the samples: the KL estimate k1 may stay negative, and tokens that "
            "are never drawn count as likely."
        )

    def at(self, temperature: float) -> "Sampling":
        """The same at another temperature, where 0 is greedy."""
        return replace(self, temperature=temperature or 1.0, greedy=temperature == 0)

    def stop_ids(self, chat: ChatFormat) -> tuple[int, ...]:
        """Every token that ends an answer."""
        return tuple(dict.fromkeys((*chat.stop_ids, *self.stop_token_ids)))

    def check(self, chat: ChatFormat) -> None:
        """Refuse stop tokens that the tokenizer does not have.

        Raises:
            ValueError: naming them.
        """
        unknown = [token for token in self.stop_token_ids if token >= len(chat.tokenizer)]
        if unknown:
            raise ValueError(
                f"--stop_token_ids {unknown}: the tokenizer has the ids 0 to {len(chat.tokenizer) - 1}, so no answer "
                "would ever stop there; look the token up with `tokenizer.convert_tokens_to_ids`."
            )

    def effective(self, chat: ChatFormat) -> dict[str, Any]:
        """The settings in force, to be logged."""
        stop_ids = list(self.stop_ids(chat))
        return {
            "do_sample": not self.greedy,
            "temperature": 0.0 if self.greedy else self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "repetition_penalty": 1.0,
            "max_new_tokens": self.max_new_tokens,
            "stop_ids": stop_ids,
            "stop_tokens": chat.tokenizer.convert_ids_to_tokens(stop_ids),
            "stop_strings": list(self.stop_strings),
        }


@dataclass(frozen=True)
class Answers:
    """Sampled answers, before anything is known of them.

    Args:
        conversations: prompts and answers as ids, up to and including the stop token; an answer that ran out
            of room has `ended` False and no stop token.
        texts: the answers without stop tokens, cut at a stop string.
    """

    conversations: Conversations
    texts: list[str]


@dataclass(frozen=True)
class Rollout:
    """Answers, and what the policy and the critic said of them when they were drawn. 0 in padding.

    Args:
        conversations, texts: as in `Answers`.
        logprobs: log π_old(y_j) at the sampling temperature.
        entropy: of the distribution that produced y_j, in nats at temperature 1.
        values: the critic's value of the state that produced y_j; 0 without a critic.
        values_after: the critic's value after the last token of an answer that was cut off, if it is asked for.
    """

    conversations: Conversations
    texts: list[str]
    logprobs: Float[Tensor, "b t"]
    entropy: Float[Tensor, "b t"]
    values: Float[Tensor, "b t"]
    values_after: Float[Tensor, " b"] | None = None

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
    stop_ids = list(sampling.stop_ids(chat))
    pad_id = unused_pad_id(chat.tokenizer, chat.stop_ids)
    ids, mask = left_pad(prompts, pad_id, next(model.parameters()).device)
    criteria = StoppingCriteriaList()
    if sampling.stop_strings:
        criteria.append(_StopAtStrings(chat, sampling.stop_strings, ids.shape[1]))
    settings = GenerationConfig(
        do_sample=not sampling.greedy,
        temperature=sampling.temperature,
        top_k=None if sampling.greedy else sampling.top_k,
        top_p=sampling.top_p,
        max_new_tokens=sampling.max_new_tokens,
        eos_token_id=stop_ids,
        pad_token_id=pad_id,
        use_cache=True,
    )
    with _own_generation_config(model):
        output = model.generate(
            input_ids=ids, attention_mask=mask, generation_config=settings, stopping_criteria=criteria
        )
    return output[:, ids.shape[1] :].tolist()


@torch.no_grad()
def sample_answers(
    model: nn.Module,
    chat: ChatFormat,
    prompts: list[list[int]],
    sampling: Sampling,
    generator: torch.Generator,
    description: str = "",
) -> Answers:
    """Draw one answer to each prompt; the model's own generation settings play no part.

    Args:
        generator: the source of all randomness; drawn from once.
        description: label of the progress bar; empty for none.
    """
    inner = plain_model(model)
    stop_ids = frozenset(sampling.stop_ids(chat))
    responses: list[list[int]] = [[]] * len(prompts)
    texts, ended = [""] * len(prompts), [False] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    with _drawn_from(generator, next(inner.parameters()).device):
        starts = range(0, len(order), sampling.batch_size)
        for start in track(starts, description, disable=not description):
            rows = order[start : start + sampling.batch_size]
            drawn = _generate(inner, chat, [prompts[i] for i in rows], sampling)
            for i, ids in zip(rows, drawn, strict=True):
                ids, stopped = trim(ids, stop_ids)
                responses[i], texts[i], spelled = trim_at_string(ids, sampling.stop_strings, chat.decode)
                ended[i] = stopped or spelled
    return Answers(Conversations(prompts, responses, torch.tensor(ended)), texts)


def in_micro_batches(
    compute: Callable[[Conversations], tuple[Tensor, ...]], conversations: Conversations, max_tokens: int
) -> tuple[Float[Tensor, "b t ..."], ...]:
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
