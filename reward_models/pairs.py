"""Preference pairs cut into units: what training, calibration and evaluation all start from."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from rich.progress import track
from torch import Tensor, nn

from reward_models.segment_reward_model import Readings, SegmentRewardModel
from segrew.aggregation import aggregate
from segrew.chat import ChatFormat
from segrew.conversations import TOKENS_PER_BATCH, Conversations, micro_batches
from segrew.encoding import EncodedPair, Overlong, conversations_of, encode_pairs
from segrew.preferences import PreferencePair
from segrew.segmentation import Segmentation, SegmentationConfig, read_columns, segment
from segrew.segmenter import ResponseFeatures, response_features


@dataclass(frozen=True)
class SegmentedPairs:
    """Encoded pairs with their units; rows 2i and 2i + 1 of the conversations are chosen and rejected of pair i.

    Args:
        pairs: the pairs that were kept.
        features: what the frozen segmenter said of every response token; None where nothing needs it.
        rule: the rule with its threshold in nats.
        fitted: how many pairs were left out or cut to fit, by reason.
    """

    pairs: list[PreferencePair]
    encoded: list[EncodedPair]
    conversations: Conversations
    features: ResponseFeatures | None
    segmentation: Segmentation
    rule: SegmentationConfig
    fitted: Counter = field(default_factory=Counter)

    def __len__(self) -> int:
        return len(self.encoded)

    def __getitem__(self, index: int) -> "SegmentedPair":
        return SegmentedPair(index, self.encoded[index], self.segmentation.ids[2 * index : 2 * index + 2])

    @property
    def margins(self) -> Float[Tensor, " n"] | None:
        """By how much each chosen score should lead; None where the data say nothing.

        Raises:
            ValueError: some pairs have a margin and others none.
        """
        known = [pair.margin for pair in self.pairs if pair.margin is not None]
        if known and len(known) < len(self):
            raise ValueError(
                f"{len(self) - len(known)} of {len(self)} pairs have no 'margin' while the others do; give every "
                "row one (0 for none), or drop the column."
            )
        return torch.tensor(known) if known else None


class SegmentedPair(NamedTuple):
    """One pair of `SegmentedPairs`: its place there, its token ids, and the units of chosen and rejected."""

    place: int
    encoded: EncodedPair
    unit_ids: Int64[Tensor, "2 t"]


def segment_pairs(
    pairs: list[PreferencePair],
    chat: ChatFormat,
    rule: SegmentationConfig,
    segmenter: nn.Module | None,
    *,
    max_length: int,
    overlong: Overlong = "truncate_prompt_left",
    max_tokens: int = TOKENS_PER_BATCH,
    with_states: bool = False,
    for_training: bool = True,
    fingerprint: str | None = None,
    description: str = "",
) -> SegmentedPairs:
    """Encode pairs and cut their responses with the frozen segmenter, once.

    A threshold given as a quantile or a wanted length is resolved to nats on these pairs.

    Args:
        overlong: what becomes of a prompt and response of more than `max_length` tokens.
        for_training: leave out pairs that are identical within `max_length`, and keep states in the cache.
        fingerprint: of the segmenter, where it is known.

    Raises:
        ValueError: no pair is left after encoding.
    """
    count = len(pairs)
    pairs, encoded, fitted = encode_pairs(pairs, chat, max_length, overlong, keep_identical=not for_training)
    if not encoded:
        reasons = ", ".join(f"{number} {reason}" for reason, number in fitted.items())
        raise ValueError(f"0 of {count} pairs are left within --max_length {max_length} tokens ({reasons}); raise it.")
    conversations, features = conversations_of(encoded), None
    if segmenter is not None and (rule.needs_model or with_states):
        features = response_features(
            segmenter,
            conversations,
            max_tokens=max_tokens,
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
    return SegmentedPairs(pairs, encoded, conversations, features, segmentation, rule, fitted)


@torch.no_grad()
def readings_of(
    reward_model: SegmentRewardModel, data: SegmentedPairs, *, max_tokens: int = TOKENS_PER_BATCH, description: str = ""
) -> Readings:
    """Return raw rewards and scores of segmented pairs; from their states where the trunk was frozen."""
    card, unit_mask = reward_model.card, data.segmentation.unit_mask
    if card.trunk_is_segmenter:
        states, unit_mask = unit_states(data, reward_model.read_position)
        weight: Tensor = reward_model.head.weight  # type: ignore[assignment]
        rewards = torch.zeros(unit_mask.shape).masked_scatter(unit_mask, states.float() @ weight[0].float().cpu())
        return Readings(rewards, aggregate(rewards, unit_mask, kind=card.aggregator, temperature=card.temperature))
    rewards, scores = torch.zeros(unit_mask.shape), torch.zeros(len(unit_mask))
    batches = list(micro_batches(data.conversations, max_tokens))
    device = next(reward_model.model.parameters()).device
    for rows in track(batches, description, disable=not description):
        cut = Segmentation(data.segmentation.ids[rows, : max(data.conversations.select(rows).lengths)].to(device))
        part = reward_model.read(data.conversations.select(rows), cut)
        rewards[rows, : part.rewards.shape[1]], scores[rows] = part.rewards.cpu(), part.scores.cpu()
    return Readings(rewards, scores)


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
        overlong=reward_model.card.overlong,
        with_states=reward_model.card.trunk_is_segmenter,
        fingerprint=reward_model.segmenter_fingerprint,
        **options,
    )
