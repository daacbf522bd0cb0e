"""Scoring a policy: answers to held-out prompts, read by the reward model on the very tokens that were drawn."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn

from policy.minibatches import step_generator
from policy.rollout import Sampling, sample_answers
from reward_models import SegmentRewardModel
from reward_models.segment_reward_model import ScoredResponse
from segrew.chat import ChatFormat, Message
from segrew.language_models import Conversations, micro_batches

Statistics = Callable[[Conversations], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Evaluation:
    """Answers of a policy with their scores, in the order of the prompts.

    Args:
        responses: the answers' texts. scored: their scores and segments.
    """

    prompts: list[list[Message]]
    responses: list[str]
    scored: list[ScoredResponse]

    @property
    def scores(self) -> list[float]:
        """e(x, y) of each answer."""
        return [record.score for record in self.scored]

    @property
    def mean(self) -> float:
        """Mean score."""
        return sum(self.scores) / len(self.scores)


@torch.no_grad()
def evaluate_policy(
    model: nn.Module,
    chat: ChatFormat,
    reward_model: SegmentRewardModel,
    prompts: list[list[Message]],
    sampling: Sampling,
    *,
    templates: list[dict[str, Any]] | None = None,
    seed: int = 0,
    statistics: Statistics | None = None,
) -> Evaluation:
    """Answer each prompt once and score the answer.

    Two models evaluated with one seed draw with the same random numbers, which makes their comparison paired.

    Args:
        templates: further arguments of the chat template for each prompt, such as tools.
        statistics: log-probabilities and entropies of the segmenter; default those of the reward model's own.
    """
    was_training = model.training
    model.eval()
    generator = step_generator(seed, 0, -2)
    ids = [chat.prompt_ids(p, t) for p, t in zip(prompts, templates or [{}] * len(prompts), strict=True)]
    answers = sample_answers(model, chat, ids, sampling, generator)
    model.train(was_training)
    scored = score_tokens(
        reward_model, answers.conversations, sampling.batch_size, generator=generator, statistics=statistics
    )
    return Evaluation(prompts, answers.texts, scored)


def score_tokens(
    reward_model: SegmentRewardModel,
    conversations: Conversations,
    batch_size: int,
    *,
    generator: torch.Generator,
    statistics: Statistics | None = None,
    description: str = "",
) -> list[ScoredResponse]:
    """Score answers on the very tokens that were drawn, in order.

    Args:
        generator: for a segmentation rule that draws.
        description: label of the progress bar; empty for none.
    """
    scored: dict[int, ScoredResponse] = {}
    batches = list(micro_batches(conversations, batch_size))
    for rows in track(batches, description, disable=not description):
        part = conversations.select(rows)
        units, readings = reward_model.segment_and_read(part, statistics=statistics, generator=generator)
        records = reward_model.describe(units, readings, part)
        scored.update(zip(rows, records, strict=True))
    return [scored[i] for i in range(len(conversations))]
