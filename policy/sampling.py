"""How answers are drawn, and what draws them."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from segrew.chat import ChatFormat


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
        if "" in self.stop_strings:
            raise ValueError("--stop_strings '': the empty text would end every answer before its first word.")
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


class Drawn(NamedTuple):
    """One answer as an engine drew it.

    Args:
        ids: up to and including the first stop token or the token that completes a stop string, perhaps with more
            behind it, which nobody reads.
        logprobs: of the ids at the sampling temperature, as the engine has them; None where it tells none.
    """

    ids: list[int]
    logprobs: list[float] | None = None


@runtime_checkable
class GenerationEngine(Protocol):
    """What draws answers: transformers in place, or an inference engine with weights of its own."""

    def sync_weights(self, model: nn.Module) -> None:
        """Draw from this model, as it is now, from here on."""

    def generate(
        self, prompts: list[list[int]], sampling: Sampling, generator: torch.Generator, description: str = ""
    ) -> list[Drawn]:
        """Draw one answer to each prompt, in their order; equal prompts that stand together are several samples.

        Args:
            generator: the source of all randomness; drawn from once.
            description: label of the progress bar; empty for none.
        """
        ...
