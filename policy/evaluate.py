"""Scoring a policy's answers: the reward model reads the very tokens that were drawn."""

import torch
from rich.progress import track

from reward_models import SegmentRewardModel
from reward_models.scored_responses import ScoredResponse
from segrew.conversations import TOKENS_PER_BATCH, Conversations, micro_batches


@torch.no_grad()
def score_tokens(
    reward_model: SegmentRewardModel,
    conversations: Conversations,
    max_tokens: int = TOKENS_PER_BATCH,
    *,
    generator: torch.Generator,
    description: str = "",
) -> list[ScoredResponse]:
    """Score answers on the very tokens that were drawn, in order.

    Args:
        max_tokens: of one pass of the reward model, each prompt counted once.
        generator: for a segmentation rule that draws.
        description: label of the progress bar; empty for none.
    """
    scored: dict[int, ScoredResponse] = {}
    batches = list(micro_batches(conversations, max_tokens))
    for rows in track(batches, description, disable=not description):
        part = conversations.select(rows)
        units, readings = reward_model.segment_and_read(part, generator=generator)
        records = reward_model.describe(units, readings, part)
        scored.update(zip(rows, records, strict=True))
    return [scored[i] for i in range(len(conversations))]
