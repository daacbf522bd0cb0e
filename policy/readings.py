"""What passes between a run and its sources of reward: answers in, rewards of some units out."""

from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from policy.reward_shaping import Interpolation
from segrew.chat import ChatFormat
from segrew.conversations import Conversations
from segrew.prompts import Prompt
from segrew.segmentation import Segmentation, SegmentationConfig, segment_by_response


@dataclass(frozen=True)
class Answered:
    """Prompts with an answer each.

    Args:
        conversations: as ids. texts: the answers without stop tokens and stop strings.
    """

    prompts: list[Prompt]
    conversations: Conversations
    texts: list[str]

    def segments(self, chat: ChatFormat, units: Segmentation) -> list[list[str]]:
        """Texts of the units of each answer; together they are its text."""
        return [[text for text, _ in row] for row in segment_texts(chat, self.conversations, units)]


def segment_texts(
    chat: ChatFormat, conversations: Conversations, units: Segmentation
) -> list[list[tuple[str, tuple[int, int]]]]:
    """Text and character offsets of the units of each answer."""
    found = []
    for ids, ends, count in zip(conversations.responses, units.ends.tolist(), units.counts.tolist(), strict=True):
        text = chat.decode(ids)
        spans = chat.cut_text(ids, ends[:count]) if count else []
        found.append([(text[start:stop], (start, stop)) for start, stop in spans])
    return found


@dataclass(frozen=True)
class Units:
    """A batch of answers under the reference: its log-probabilities, and the units of both axes.

    Args:
        ref_logprobs: at the sampling temperature.
        cuts: every rule that was cut by. readings: units of the reward rule.
        actions: units that advantages are computed over; rows that take no part in the update have none.
        outputs: by source, what reward heads on the reference's own states said after every token.
    """

    ref_logprobs: Float[Tensor, "b t"]
    cuts: dict[SegmentationConfig, Segmentation]
    readings: Segmentation
    actions: Segmentation
    outputs: dict[str, Float[Tensor, "b t k"]] = field(default_factory=dict)

    @property
    def whole(self) -> Segmentation:
        """Each answer as one unit."""
        return segment_by_response(self.readings.mask)

    def read_at(self, readings: Segmentation) -> "Units":
        """The same with other reward units."""
        return replace(self, readings=readings)

    def only(self, rows: Bool[Tensor, " b"]) -> "Units":
        """The same with actions in these rows only."""
        ids = self.actions.ids.masked_fill(~rows[:, None], -1)
        return replace(self, actions=Segmentation(ids, bound=self.actions.size))


@dataclass(frozen=True)
class Reading:
    """What one source says of a batch of answers.

    Args:
        source: name of the source.
        segmentation: the units, over the policy's tokens, that its rewards are of.
        raw: rewards as read. rewards: as they enter the sum, normalized if there is a normalizer. 0 in padding.
        scores: e(x, y).
        how: how its rewards spread over tokens; None as the run says.
    """

    source: str
    segmentation: Segmentation
    raw: Float[Tensor, "b s"]
    rewards: Float[Tensor, "b s"]
    scores: Float[Tensor, " b"]
    how: Interpolation | None = None

    @property
    def bad(self) -> Bool[Tensor, " b"]:
        """Answers that have no finite reward."""
        return ~(self.raw.isfinite().all(1) & self.rewards.isfinite().all(1) & self.scores.isfinite())

    def without(self, bad: Bool[Tensor, " b"]) -> "Reading":
        """The same with 0 where an answer is bad."""
        hole = bad[:, None]
        raw, rewards = self.raw.masked_fill(hole, 0.0), self.rewards.masked_fill(hole, 0.0)
        return Reading(self.source, self.segmentation, raw, rewards, self.scores.masked_fill(bad, 0.0), self.how)


@runtime_checkable
class RewardSource(Protocol):
    """Anything that can read rewards off answers."""

    @property
    def name(self) -> str:
        """How messages and metrics call it."""
        ...

    @property
    def normalizer(self) -> Any:
        """What its rewards go through; None if nothing."""
        ...

    def read(self, answered: Answered, units: Units) -> Reading:
        """Read a batch of answers."""
        ...


@dataclass(frozen=True)
class Scores:
    """What all sources said, with their weights; an answer that one of them could not score has zeros throughout.

    Args:
        readings: one for each source.
        bad: answers without a finite reward from every source.
    """

    readings: tuple[Reading, ...]
    weights: tuple[float, ...]
    bad: Bool[Tensor, " b"]

    @property
    def scores(self) -> Float[Tensor, " b"]:
        """e(x, y), the weighted sum."""
        return torch.stack([w * r.scores for w, r in zip(self.weights, self.readings, strict=True)]).sum(0)
