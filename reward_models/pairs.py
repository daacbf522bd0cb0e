"""Preference pairs cut into units: what training, calibration and evaluation all start from."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from rich.progress import track
from torch import Tensor, nn

from reward_models.segment_reward_model import SegmentRewardModel
from segrew.chat import ChatFormat
from segrew.language_models import Conversations, micro_batches
from segrew.preferences import EncodedPair, PreferencePair, encode_pair
from segrew.segmentation import Segmentation, SegmentationConfig, read_columns, segment
from segrew.segmenter import ResponseFeatures, response_features


@dataclass(frozen=True)
class SegmentedPairs:
    """Encoded pairs with their units; rows 2i and 2i + 1 of the conversations are chosen and rejected of pair i.

    Args:
        pairs: the pairs that were kept.
        features: what the frozen segmenter said of every response token; None where nothing needs it.
        rule: the rule with its threshold in nats.
    """

    pairs: list[PreferencePair]
    encoded: list[EncodedPair]
    conversations: Conversations
    features: ResponseFeatures | None
    segmentation: Segmentation
    rule: SegmentationConfig

    def __len__(self) -> int:
        return len(self.encoded)

    def __getitem__(self, index: int) -> tuple[EncodedPair, Int64[Tensor, "2 t"]]:
        return self.encoded[index], self.segmentation.ids[2 * index : 2 * index + 2]


def conversations_of(encoded: list[EncodedPair]) -> Conversations:
    """Lay pairs out as rows: chosen, rejected, chosen, rejected, …"""
    return Conversations(
        prompts=[pair.prompt for pair in encoded for _ in range(2)],
        responses=[ids for pair in encoded for ids in (pair.chosen, pair.rejected)],
        ended=torch.tensor([flag for pair in encoded for flag in pair.ended], dtype=torch.bool),
    )


def segment_pairs(
    pairs: list[PreferencePair],
    chat: ChatFormat,
    rule: SegmentationConfig,
    segmenter: nn.Module | None,
    *,
    max_length: int,
    batch_size: int = 16,
    with_states: bool = False,
    for_training: bool = True,
    fingerprint: str | None = None,
    description: str = "",
) -> SegmentedPairs:
    """Encode pairs and cut their responses with the frozen segmenter, once.

    A threshold given as a quantile or a wanted length is resolved to nats on these pairs.

    Args:
        for_training: leave out pairs that are identical within `max_length`, and keep states in the cache.
        fingerprint: of the segmenter, where it is known.

    Raises:
        ValueError: no pair is left after encoding.
    """
    encoded = [encode_pair(pair, chat, max_length) for pair in pairs]
    kept = [i for i, pair in enumerate(encoded) if not for_training or pair.chosen != pair.rejected]
    if not kept:
        raise ValueError(f"0 of {len(pairs)} pairs differ within --max_length {max_length} tokens; raise it.")
    pairs, encoded = [pairs[i] for i in kept], [encoded[i] for i in kept]
    conversations, features = conversations_of(encoded), None
    if segmenter is not None and (rule.needs_model or with_states):
        features = response_features(
            segmenter,
            conversations,
            batch_size=batch_size,
            with_states=with_states,
            store=for_training or not with_states,
            fingerprint=fingerprint,
            description=description,
        )
        rule = rule.resolve(features.entropy, conversations.mask)
    segmentation = segment(
        rule,
        conversations.mask,
        entropy=features.entropy if features else None,
        logprobs=features.logprobs if features else None,
        texts=chat.response_texts(conversations.responses),
        ended=conversations.ended,
    )
    return SegmentedPairs(pairs, encoded, conversations, features, segmentation, rule)


def unit_rewards_of(
    reward_model: SegmentRewardModel, data: SegmentedPairs, *, batch_size: int = 16, description: str = ""
) -> Float[Tensor, "b s"]:
    """Return the raw reward of every unit of segmented pairs; from their states where the trunk was frozen."""
    if reward_model.card.trunk_is_segmenter:
        states, unit_mask = unit_states(data, reward_model.read_position)
        weight: Tensor = reward_model.head.weight  # type: ignore[assignment]
        with torch.no_grad():
            return torch.zeros(unit_mask.shape).masked_scatter(unit_mask, states.float() @ weight[0].float().cpu())
    rewards = torch.zeros(data.segmentation.unit_mask.shape)
    batches = list(micro_batches(data.conversations, batch_size))
    device = next(reward_model.model.parameters()).device
    with torch.no_grad():
        for rows in track(batches, description, disable=not description):
            cut = Segmentation(data.segmentation.ids[rows, : max(data.conversations.select(rows).lengths)].to(device))
            values = reward_model.unit_rewards(data.conversations.select(rows), cut)
            rewards[rows, : values.shape[1]] = values.cpu()
    return rewards


def unit_states(data: SegmentedPairs, read_position: Any = "end") -> tuple[Float[Tensor, "n d"], Bool[Tensor, "b s"]]:
    """Pick the cached hidden state of each unit's read column; real units only, row after row.

    Raises:
        ValueError: the pairs were segmented without keeping states.
    """
    if data.features is None or data.features.states is None:
        raise ValueError("the pairs carry no hidden states; segment them with with_states=True.")
    columns = read_columns(data.segmentation, data.conversations.ended, read_position)
    first = torch.tensor([0, *data.conversations.lengths]).cumsum(0)[:-1, None]
    unit_mask = data.segmentation.unit_mask
    return data.features.states[(first + columns)[unit_mask]], unit_mask


def segmenter_for(reward_model: SegmentRewardModel) -> nn.Module | None:
    """Return the frozen model where its entropies cut responses or its states are what is read."""
    needed = reward_model.segmentation.needs_model or reward_model.card.trunk_is_segmenter
    return reward_model.segmenter() if needed else None


def segment_for(reward_model: SegmentRewardModel, pairs: list[PreferencePair], **options: Any) -> SegmentedPairs:
    """Cut pairs as a trained reward model does; `options` are those of `segment_pairs`."""
    return segment_pairs(
        pairs,
        reward_model.chat,
        reward_model.segmentation,
        segmenter_for(reward_model),
        max_length=reward_model.card.max_length,
        with_states=reward_model.card.trunk_is_segmenter,
        fingerprint=reward_model.segmenter_fingerprint,
        **options,
    )
