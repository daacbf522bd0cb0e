"""From hidden states to unit rewards and the score: what training, evaluation and PPO have in common."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import linear

from reward_models.card import RewardModelCard
from segrew.aggregation import aggregate, attention_weights
from segrew.conversations import Conversations, in_rows, response_states
from segrew.language_models import plain_model
from segrew.segmentation import Segmentation, read_columns


@dataclass(frozen=True)
class Readings:
    """What a reward model says of a batch.

    Args:
        rewards: raw reward of each unit; 0 in padding.
        scores: e(x, y), the score of each response.
    """

    rewards: Float[Tensor, "b s"]
    scores: Float[Tensor, "b"]


def read_head(head: Any, states: Float[Tensor, "*n d"]) -> Float[Tensor, "*n"]:
    """w · h of each state, in float32 (2501.02790, section 3)."""
    with torch.autocast(states.device.type, enabled=False):
        # FSDP may hold the head in bfloat16 during a pass.
        bias = None if head.bias is None else head.bias.float()
        return linear(states.float(), head.weight.float(), bias).squeeze(-1)


def read_tokens(
    model: Any, states: Float[Tensor, "n d"], mask: Bool[Tensor, "b t"], card: RewardModelCard
) -> Float[Tensor, "b t k"]:
    """What the heads of a model say after every token: the reward, and the attention's logit where it is learned.

    Args:
        states: after each token, row after row.
    """
    plain = plain_model(model)
    heads = [plain.score, plain.unit_attention] if card.aggregator == "learned" else [plain.score]
    return in_rows(torch.stack([read_head(head, states) for head in heads], -1), mask)


def at_units(
    outputs: Float[Tensor, "b t k"], ended: Bool[Tensor, "b"], segmentation: Segmentation, card: RewardModelCard
) -> Readings:
    """Pick the heads' outputs at the units' read columns, and aggregate them to the score."""
    unit_mask = segmentation.unit_mask
    columns = read_columns(segmentation, ended.to(outputs.device), card.read_position)
    picked = outputs.gather(1, columns[..., None].expand(-1, -1, outputs.shape[-1]))
    rewards, *logits = picked.masked_fill(~unit_mask[..., None], 0.0).unbind(-1)
    weights = attention_weights(logits[0], unit_mask, temperature=card.temperature) if logits else None
    scores = aggregate(rewards, unit_mask, kind=card.aggregator, temperature=card.temperature, weights=weights)
    return Readings(rewards, scores)


def read_units(
    model: nn.Module, conversations: Conversations, segmentation: Segmentation, card: RewardModelCard
) -> Readings:
    """Run the trunk over conversations and read each unit."""
    states = response_states(model, conversations)
    outputs = read_tokens(model, states.at, states.mask, card)
    return at_units(outputs, conversations.ended, segmentation, card)
