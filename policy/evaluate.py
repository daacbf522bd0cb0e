"""Scoring a policy: answers to held-out prompts, read by the reward model on the very tokens that were drawn."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from policy.minibatches import step_generator
from policy.rollout import Sampling, sample_answers
from reward_models import SegmentRewardModel
from reward_models.segment_reward_model import ScoredResponse
from segrew.chat import ChatFormat, Message
from segrew.language_models import TOKENS_PER_BATCH, Conversations, micro_batches

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
    max_tokens: int = TOKENS_PER_BATCH,
    seed: int = 0,
    statistics: Statistics | None = None,
) -> Evaluation:
    """Answer each prompt once and score the answer.

    Two models evaluated with one seed draw with the same random numbers, which makes their comparison paired.

    Args:
        max_tokens: of one pass of the reward model.
        statistics: log-probabilities and entropies of the segmenter; default those of the reward model's own.
    """
    was_training = model.training
    model.eval()
    generator = step_generator(seed, 0, -2)
    answers = sample_answers(model, chat, [chat.prompt_ids(p) for p in prompts], sampling, generator)
    model.train(was_training)
    conversations = answers.conversations
    scored: dict[int, ScoredResponse] = {}
    for rows in micro_batches(conversations, max_tokens):
        part = conversations.select(rows)
        units, rewards = reward_model.segment_and_read(part, statistics=statistics, generator=generator)
        records = reward_model.describe(units, rewards, part)
        scored.update(zip(rows, records, strict=True))
    return Evaluation(prompts, answers.texts, [scored[i] for i in range(len(prompts))])
