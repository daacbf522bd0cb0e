"""What a reward model says of a response, as records with text: the score, and the units that it is made of."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from reward_models.normalizers import LocationNormalizer
from reward_models.reading import Readings
from segrew.chat import ChatFormat
from segrew.conversations import Conversations
from segrew.segmentation import Segmentation


@dataclass(frozen=True)
class Segment:
    """One unit of a scored response.

    Args:
        start, end: character offsets in the response, [start, end); the texts of all units rebuild it.
        tokens: number of tokens, a final stop token included.
        reward: raw reading; normalized: by location, None without a normalizer; location: (k + 1) / count.
    """

    text: str
    start: int
    end: int
    tokens: int
    reward: float
    normalized: float | None
    location: float


@dataclass(frozen=True)
class ScoredResponse:
    """A response's score e(x, y) and the units it is made of.

    Args:
        cut: what had to be cut to fit the reward model's maximum length, of "prompt" and "answer".
    """

    score: float
    segments: list[Segment]
    cut: tuple[str, ...] = ()


def describe(
    chat: ChatFormat,
    normalizer: LocationNormalizer | None,
    segmentation: Segmentation,
    readings: Readings,
    conversations: Conversations,
    texts: Sequence[str | None] | None = None,
) -> list[ScoredResponse]:
    """Turn a scored batch into records; see `SegmentRewardModel.describe`."""
    rewards, scores, locations = readings.rewards, readings.scores.tolist(), segmentation.locations
    normalized = normalizer.normalize(rewards, segmentation).tolist() if normalizer else None
    columns = zip(
        segmentation.counts.tolist(),
        segmentation.ends.tolist(),
        segmentation.lengths.tolist(),
        strict=True,
    )
    records = []
    for b, (count, ends, lengths) in enumerate(columns):
        ids = conversations.responses[b]
        own = texts[b] if texts else None
        text = chat.decode(ids) if own is None else own
        if not math.isfinite(scores[b]):
            raise ValueError(
                f"the reward model gave the score {scores[b]} to {text[:60]!r}: its weights hold numbers that are "
                "not finite, or overflow. Restore its files, or train it again."
            )
        spans = chat.cut_text(ids, ends[:count], own)
        segments = [
            Segment(
                text=text[start:stop],
                start=start,
                end=stop,
                tokens=lengths[k],
                reward=float(rewards[b, k]),
                normalized=normalized[b][k] if normalized else None,
                location=float(locations[b, k]),
            )
            for k, (start, stop) in enumerate(spans)
        ]
        records.append(ScoredResponse(scores[b], segments))
    return records
