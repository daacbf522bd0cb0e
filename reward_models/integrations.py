"""Bridges to other packages: rewards for TRL's trainers, and an entry for the `rewardbench` program.

Neither package is needed to import this module.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reward_models.segment_reward_model import SegmentRewardModel
from segrew.chat import ChatFormat, Message
from segrew.preferences import as_messages

RewardFunction = Callable[..., list[float]]


def reward_function(
    reward_model: SegmentRewardModel | str | Path,
    *,
    batch_size: int = 16,
    stop_ids: Sequence[int] | None = None,
    name: str = "segrew",
) -> RewardFunction:
    """Make an entry of `reward_funcs` for TRL's GRPOTrainer and RLOOTrainer: f(prompts, completions, **columns).

    Prompts and completions are text, or messages; a prompt of plain text is taken as one user message, as in
    segrew's own data. The score is e(x, y), by the reward model's own rule and aggregator.

    Args:
        stop_ids: tokens that end a completion of the policy. A completion without one was cut off, and is then read
            without a stop token; None takes every completion as finished.
        name: what TRL calls the reward in its logs.
    """
    model = _loaded(reward_model)

    def score(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        rows = [
            _prompt_and_response(prompt, completion, f"sample {i}")
            for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
        ]
        finished = None
        if stop_ids is not None and columns.get("completion_ids") is not None:
            finished = [any(int(i) in stop_ids for i in ids[-1:]) for ids in columns["completion_ids"]]
        scored = model.score([row[0] for row in rows], [row[1] for row in rows], batch_size, finished=finished)
        return [record.score for record in scored]

    score.__name__ = name
    return score


def _loaded(reward_model: SegmentRewardModel | str | Path) -> SegmentRewardModel:
    return (
        reward_model
        if isinstance(reward_model, SegmentRewardModel)
        else SegmentRewardModel.from_pretrained(reward_model)
    )


def _prompt_and_response(prompt: Any, completion: Any, where: str) -> tuple[list[Message], str]:
    messages = as_messages(prompt, where, "prompt")
    if isinstance(completion, str):
        return messages, completion
    turns = as_messages(completion, where, "completion")
    if not turns or turns[-1]["role"] != "assistant" or not isinstance(turns[-1]["content"], str):
        raise ValueError(f"{where}: a completion must end with an assistant's message of text.")
    return messages + turns[:-1], turns[-1]["content"]


class RewardBenchPipeline:
    """What the `rewardbench` program calls on batches of conversations, which come as text or as messages."""

    def __init__(self, task: str, model: Any, tokenizer: Any, *, reward_model: SegmentRewardModel):
        self.task, self.model, self.tokenizer, self.reward_model = task, model, tokenizer, reward_model

    def __call__(self, samples: list[Any], **options: Any) -> Tensor:
        """Return the score e(x, y) of each conversation; cut to the reward model's own `max_length`."""
        chat = self.reward_model.chat
        rows = [split_conversation(sample, chat) for sample in samples]
        scored = self.reward_model.score(
            [row[0] for row in rows], [row[1] for row in rows], options.get("batch_size", 16)
        )
        return torch.tensor([record.score for record in scored])


def split_conversation(sample: Any, chat: ChatFormat) -> tuple[list[Message] | str, str]:
    """Split a conversation, as messages or as the chat template's text, into its prompt and its last answer.

    Raises:
        ValueError: the template writes nothing between a question and its answer, so text cannot be split.
    """
    if not isinstance(sample, str):
        return sample[:-1], sample[-1]["content"]
    probe = [{"role": "user", "content": "question-probe"}, {"role": "assistant", "content": "answer-probe"}]
    rendered = chat.tokenizer.apply_chat_template(probe, tokenize=False)
    border = rendered.partition("question-probe")[2].partition("answer-probe")[0]
    before, found, after = sample.rpartition(border) if border else ("", "", "")
    if not found:
        raise ValueError(
            f"the conversation {sample[:60]!r}… does not show where its answer begins, as this model's chat template "
            f"would ({border!r}); render it with the template of the reward model's own tokenizer."
        )
    stop = chat.tokenizer.decode([chat.stop_id])
    return before + found, after.rpartition(stop)[0] if stop in after else after


def register_rewardbench(directory: str | Path, *, name: str | None = None) -> str:
    """Add a reward model to the `rewardbench` package's table, so that its program scores with it.

    `rewardbench --model NAME` then works in this process: call `rewardbench.rewardbench.main()`.

    Args:
        name: under which the program knows it; default the directory, from which it also takes the tokenizer.

    Raises:
        ImportError: the package is not installed.
    """
    from rewardbench.models import REWARD_MODEL_CONFIG

    reward_model, name = SegmentRewardModel.from_pretrained(directory), name or str(directory)

    def build_pipeline(task: str, model: Any, tokenizer: Any) -> RewardBenchPipeline:
        return RewardBenchPipeline(task, model, tokenizer, reward_model=reward_model)

    REWARD_MODEL_CONFIG[name] = {
        "model_builder": lambda *_, **__: reward_model.model,
        "pipeline_builder": build_pipeline,
        "quantized": False,
        "custom_dialogue": False,
        "model_type": "Seq. Classifier",
    }
    return name
