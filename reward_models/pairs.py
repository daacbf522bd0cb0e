"""Preference pairs cut into units: what training, calibration and evaluation all start from."""

from collections import Counter
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from reward_models.segment_reward_model import ScoredResponse, SegmentRewardModel
from segrew.chat import ChatFormat
from segrew.language_models import Conversations
from segrew.preferences import EncodedPair, PreferencePair, encode_pair
from segrew.segmentation import Segmentation, SegmentationConfig, segment
from segrew.segmenter import ResponseFeatures, response_features


@dataclass(frozen=True)
class SegmentedPairs:
    """Encoded pairs with their units; rows 2i and 2i + 1 of the conversations are chosen and rejected of pair i.

    Args:
        pairs: the pairs that were kept; skipped: how many were left out, by reason.
        features: what the frozen segmenter said of every response token; None for rules that need no model.
        rule: the rule with its threshold in nats.
    """

    pairs: list[PreferencePair]
    encoded: list[EncodedPair]
    conversations: Conversations
    features: ResponseFeatures | None
    segmentation: Segmentation
    rule: SegmentationConfig
    skipped: Counter

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
    description: str = "",
) -> SegmentedPairs:
    """Encode pairs and cut their responses with the frozen segmenter, once.

    A threshold given as a quantile or a wanted length is resolved to nats on these pairs.

    Raises:
        ValueError: no pair is left after encoding.
    """
    encoded = [encode_pair(pair, chat, max_length) for pair in pairs]
    kept = [(pair, ids) for pair, ids in zip(pairs, encoded, strict=True) if ids is not None]
    if not kept:
        raise ValueError(f"0 of {len(pairs)} pairs differ within --max_length {max_length} tokens; raise it.")
    conversations = conversations_of([ids for _, ids in kept])
    features = None
    if segmenter is not None and (rule.needs_model or with_states):
        features = response_features(
            segmenter, conversations, batch_size=batch_size, with_states=with_states, description=description
        )
    mask = conversations.mask
    if features is not None:
        rule = rule.resolve(features.entropy, mask)
    segmentation = segment(
        rule,
        mask,
        entropy=features.entropy if features else None,
        logprobs=features.logprobs if features else None,
        ended=conversations.ended,
    )
    skipped = Counter({"identical within max_length": len(pairs) - len(kept)} if len(kept) < len(pairs) else {})
    return SegmentedPairs(
        [pair for pair, _ in kept],
        [ids for _, ids in kept],
        conversations,
        features,
        segmentation,
        rule,
        skipped,
    )


@dataclass(frozen=True)
class ScoredPair:
    """Scores of one pair with the units of both answers."""

    pair: PreferencePair
    chosen: ScoredResponse
    rejected: ScoredResponse


def score_pairs(
    reward_model: SegmentRewardModel,
    pairs: list[PreferencePair],
    *,
    batch_size: int = 16,
    description: str = "",
) -> list[ScoredPair]:
    """Score both answers of each pair."""
    prompts = [pair.prompt for pair in pairs for _ in range(2)]
    answers = [text for pair in pairs for text in (pair.chosen, pair.rejected)]
    scored = reward_model.score(prompts, answers, batch_size, description)
    return [ScoredPair(pair, scored[2 * i], scored[2 * i + 1]) for i, pair in enumerate(pairs)]
