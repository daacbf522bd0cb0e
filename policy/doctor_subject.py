"""What `segrew doctor` examines: settings, and the parts that checks name as their parameters, each made once."""

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from policy.memory import free_memory
from reward_models import SegmentRewardModel
from reward_models.card import CARD_FILE
from reward_models.checkpoints import find_checkpoint, load_classifier
from reward_models.reading import read_head
from reward_models.score import Answer, load_answers
from reward_models.scored_responses import ScoredResponse
from segrew.chat import ChatFormat
from segrew.chat_templates import template_text
from segrew.config import arg
from segrew.conversations import Conversations, Layout, ResponseStates, response_states, statistics_of_states
from segrew.encoding import encode_answer
from segrew.language_models import best_device, context_length, load_causal_lm, load_tokenizer, plain_model
from segrew.preferences import EMBEDDED_PAIRS

Status = Literal["ok", "warning", "fault", "skipped"]


@dataclass
class DoctorConfig:
    """What to examine; without a model, the machine alone."""

    model_name_or_path: str | None = arg(None, help="A causal language model: a directory or a hub name.")
    reward_model: str | None = arg(None, help="Reward-model directory; beside a model, the two are also compared.")
    chat_template: str | None = arg(None, help="raw, chatml or a .jinja file; default the tokenizer's own.")
    dataset_name: str = arg(EMBEDDED_PAIRS, help="Prompt and response, or preference pairs, to examine on.")
    dataset_split: str = arg("test", help="Split of it.")
    max_rows: int = arg(24, help="Use only the first answers.")
    max_new_tokens: int = arg(128, help="Longest answer that PPO is to draw.")
    max_length: int | None = arg(
        None, help="Tokens of prompt and answer that models read here; default what they have positions for."
    )
    json: bool = arg(False, help="Write the findings to standard output as JSON.")

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "max_length"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)}: must be at least 1.")


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Args:
        measured: what was measured, in a few words. value: the same as a number, if it is one.
        remedy: what to do, in a sentence; empty where nothing is wrong.
    """

    status: Status
    measured: str
    value: int | float | None = None
    remedy: str = ""


class Skip(Exception):
    """A check has nothing to examine; the message says why."""


@dataclass(frozen=True)
class Reader:
    """A model as a function from conversations to one number a response token.

    Args:
        name: of the numbers, in words.
        of_states: from a model, hidden states and their conversations to [b, t].
        reload: loads the model again in another dtype, as the commands do.
    """

    name: str
    model: nn.Module
    conversations: Conversations
    of_states: Callable[[nn.Module, ResponseStates, Conversations], Tensor]
    reload: Callable[[torch.dtype], nn.Module]

    @torch.no_grad()
    def read(
        self, rows: list[int] | None = None, *, layout: Layout | None = None, dtype: torch.dtype | None = None
    ) -> list[Tensor]:
        """Read rows, default all, in one pass: for each its t numbers.

        Args:
            dtype: load the model in it first; default as it is, float32.

        Raises:
            Skip: the memory does not hold a second copy.
        """
        conversations = self.conversations if rows is None else self.conversations.select(rows)
        model = self.model if dtype is None else self._copy(dtype)
        numbers = self.of_states(model, response_states(model, conversations, layout=layout), conversations)
        return [row[:length].float().cpu() for row, length in zip(numbers, conversations.lengths, strict=True)]

    def _copy(self, dtype: torch.dtype) -> nn.Module:
        size, free = sum(p.numel() for p in self.model.parameters()) * 2, free_memory()
        if size > free:
            raise Skip(f"a copy in 16 bits takes {size / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free")
        return self.reload(dtype)


def _name(config: DoctorConfig) -> str:
    name = config.model_name_or_path or config.reward_model
    if name is None:
        raise Skip("no --model_name_or_path and no --reward_model")
    return name


def _tokenizer(config: DoctorConfig) -> Any:
    return load_tokenizer(_name(config))


def _template(tokenizer: Any, config: DoctorConfig) -> str:
    """The chat template as it is written, before its date is frozen."""
    template = tokenizer.chat_template if config.chat_template is None else template_text(config.chat_template)
    return template.get("default", "") if isinstance(template, dict) else template or ""


def _chat(config: DoctorConfig) -> ChatFormat:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the date, which has a check of its own
        return ChatFormat.from_tokenizer(_tokenizer(config), config.chat_template)


def _model(config: DoctorConfig) -> nn.Module:
    if config.model_name_or_path is None:
        raise Skip("no --model_name_or_path")
    return load_causal_lm(config.model_name_or_path, dtype=torch.float32)


def _reference(model: nn.Module) -> nn.Module:
    """What PPO loads beside the policy: the same weights, in the same dtype."""
    return model


def _reward_model(config: DoctorConfig) -> SegmentRewardModel:
    if config.reward_model is None:
        raise Skip("no --reward_model")
    own = (find_checkpoint(config.reward_model) / CARD_FILE).is_file()
    template = None if own else config.chat_template
    loaded = SegmentRewardModel.from_pretrained(config.reward_model, chat_template=template)
    loaded.model.float()
    return loaded


def _answers(config: DoctorConfig) -> list[Answer]:
    return load_answers(config.dataset_name, config.dataset_split, limit=config.max_rows)[0]


def _readers(subject: "Subject", answers: list[Answer], config: DoctorConfig) -> list[Reader]:
    model, reward_model = subject.part_or_none("model"), subject.part_or_none("reward_model")
    readers = []
    if model is not None and (chat := subject.part_or_none("chat")) is not None:
        readers.append(
            Reader(
                "log-probabilities", model, _conversations(answers, chat, config, model),
                lambda model, states, rows: statistics_of_states(model, states.before, rows)[0],
                lambda dtype: load_causal_lm(config.model_name_or_path or "", dtype=dtype),
            )
        )  # fmt: skip
    if reward_model is not None:
        readers.append(
            Reader(
                "rewards", reward_model.model, _conversations(answers, reward_model.chat, config, reward_model.model),
                token_rewards,
                lambda dtype: load_classifier(config.reward_model or "", dtype=dtype).to(best_device()).eval(),
            )
        )  # fmt: skip
    if not readers:
        raise Skip("no model that can be run")
    return readers


def token_rewards(model: nn.Module, states: ResponseStates, conversations: Conversations) -> Float[Tensor, "b t"]:
    """The reward after each response token, whatever the rule."""
    return states.spread(read_head(plain_model(model).score, states.at))


def _conversations(answers: list[Answer], chat: ChatFormat, config: DoctorConfig, model: nn.Module) -> Conversations:
    """Up to six answers, all of different lengths even where the context cuts them: equal ones need no padding."""
    limit = min(config.max_length or 1024, context_length(model) or 1024)
    lengths = [limit * (24 - row) // 24 for row in range(6)]
    encoded = [
        encode_answer(a.prompt, a.response, chat, length, template=a.template)
        for a, length in zip(answers, lengths, strict=False)
    ]
    rows = [row for row in encoded if row is not None]
    ended = torch.tensor([row.ended for row in rows])
    return Conversations([row.prompt for row in rows], [row.response for row in rows], ended)


def _scores(reward_model: SegmentRewardModel, answers: list[Answer]) -> list[ScoredResponse]:
    return reward_model.score(
        [answer.prompt for answer in answers],
        [answer.response for answer in answers],
        templates=[answer.template for answer in answers],
    )


PARTS: dict[str, Callable[..., Any]] = {
    "tokenizer": _tokenizer,
    "template": _template,
    "chat": _chat,
    "model": _model,
    "reference": _reference,
    "reward_model": _reward_model,
    "answers": _answers,
    "readers": _readers,
    "scores": _scores,
}


class Subject:
    """The parts under examination; the first check that needs one that does not load tells of it, later ones skip."""

    def __init__(self, config: DoctorConfig, **parts: Any):
        self._parts: dict[str, Any] = {"config": config, "subject": self, **parts}

    def call(self, function: Callable[..., Any]) -> Any:
        """Call a function whose parameters name parts."""
        return function(*(self.part(name) for name in inspect.signature(function).parameters))

    def part(self, name: str) -> Any:
        """Return a part, making it the first time.

        Raises:
            Skip: it was not asked for, or did not load when it was asked for before.
            ValueError: it does not load.
        """
        if name not in self._parts:
            try:
                self._parts[name] = self.call(PARTS[name])
            except Skip as reason:
                self._parts[name] = reason
            except (ValueError, OSError):
                self._parts[name] = Skip(f"the {name.replace('_', ' ')} is not usable")
                raise
        if isinstance(self._parts[name], Skip):
            raise self._parts[name]
        return self._parts[name]

    def part_or_none(self, name: str) -> Any:
        """Return a part, or None where it is not usable."""
        try:
            return self.part(name)
        except (Skip, ValueError, OSError):
            return None
