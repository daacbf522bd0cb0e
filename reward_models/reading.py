"""From hidden states to unit rewards and the score: what training, evaluation and PPO have in common."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn.functional import linear

from reward_models.card import RewardModelCard
from segrew.aggregation import aggregate, attention_weights
from segrew.language_models import Conversations, plain_model, response_states
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


def read_rewards(
    head: Any,
    states: Float[Tensor, "b t d"],
    columns: Int64[Tensor, "b s"],
    unit_mask: Bool[Tensor, "b s"],
) -> Float[Tensor, "b s"]:
    """r_k = w · h at unit k's read column, in float32; 0 in padding (2501.02790, section 3)."""
    index = columns[..., None].expand(-1, -1, states.shape[-1])
    with torch.autocast(states.device.type, enabled=False):
        # FSDP may hold the head in bfloat16 during a pass.
        bias = None if head.bias is None else head.bias.float()
        rewards = linear(states.gather(1, index).float(), head.weight.float(), bias).squeeze(-1)
    return rewards.masked_fill(~unit_mask, 0.0)


def read_states(
    model: Any,
    states: Float[Tensor, "b t d"],
    ended: Bool[Tensor, "b"],
    segmentation: Segmentation,
    card: RewardModelCard,
) -> Readings:
    """Read the heads of a model at the units of its own states."""
    plain, unit_mask = plain_model(model), segmentation.unit_mask
    columns = read_columns(segmentation, ended.to(states.device), card.read_position)
    rewards, weights = read_rewards(plain.score, states, columns, unit_mask), None
    if card.aggregator == "learned":
        logits = read_rewards(plain.unit_attention, states, columns, unit_mask)
        weights = attention_weights(logits, unit_mask, temperature=card.temperature)
    scores = aggregate(rewards, unit_mask, kind=card.aggregator, temperature=card.temperature, weights=weights)
    return Readings(rewards, scores)


def read_units(
    model: nn.Module, conversations: Conversations, segmentation: Segmentation, card: RewardModelCard
) -> Readings:
    """Run the trunk over conversations and read each unit."""
    return read_states(model, response_states(model, conversations).at, conversations.ended, segmentation, card)
