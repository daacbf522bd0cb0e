"""What every benchmark comes down to: a prompt, answers of which the first few are the better ones, their scores."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.progress import track

from reward_models.segment_reward_model import ScoredResponse, SegmentRewardModel
from segrew.chat import Message
from segrew.language_models import Conversations, micro_batches
from segrew.preferences import Fault, PreferencePair, encode_answers
from segrew.segmentation import Segmentation
from segrew.text_rules import warn_of_fallbacks


@dataclass(frozen=True)
class Item:
    """One row of a benchmark.

    Args:
        answers: the better ones first; correct: how many these are.
        spans: marked stretches of the only answer, where a benchmark is about these.
    """

    id: str
    subset: str
    prompt: list[Message]
    answers: list[str]
    correct: int = 1
    spans: tuple[Fault, ...] = ()

    @property
    def digest(self) -> str:
        """Short hash of the texts, by which a row is known again in another run."""
        return hashlib.sha256(repr((self.prompt, self.answers)).encode("utf-8", "surrogatepass")).hexdigest()[:12]


def item_of_pair(pair: PreferencePair) -> Item:
    """A preference pair as a row."""
    return Item(pair.id, pair.subset, pair.prompt, [pair.chosen, pair.rejected])


@dataclass(frozen=True)
class ScoredItem:
    """A row with the units and score of each answer.

    Args:
        truncated: whether prompt or an answer did not fit into the reward model's `max_length`.
    """

    item: Item
    answers: list[ScoredResponse]
    truncated: bool

    def row(self) -> dict[str, Any]:
        """Return the line of `scores.jsonl`."""
        return score_fields(self.item, [answer.score for answer in self.answers]) | {
            "units": [len(answer.segments) for answer in self.answers],
            "tokens": [sum(segment.tokens for segment in answer.segments) for answer in self.answers],
            "truncated": self.truncated,
        }


def score_fields(item: Item, scores: Sequence[int | float]) -> dict[str, Any]:
    """Return what a benchmark's scorer reads of a row; the two scores of a pair also by name."""
    fields = {"id": item.id, "subset": item.subset, "digest": item.digest, "correct": item.correct, "scores": [*scores]}
    return fields | ({"score_chosen": scores[0], "score_rejected": scores[1]} if len(scores) == 2 else {})


@dataclass(frozen=True)
class EncodedItems:
    """Items as token ids, equal answers of an item once.

    Args:
        rows: for each item, the row of `conversations` that holds each of its answers. texts: of each row.
    """

    conversations: Conversations
    texts: list[str]
    rows: list[list[int]]
    truncated: list[bool]

    def batches(self, batch_size: int) -> Iterator[tuple[list[int], Conversations, list[str]]]:
        """Yield row numbers with their conversations and texts, long rows first."""
        for rows in micro_batches(self.conversations, batch_size):
            yield rows, self.conversations.select(rows), [self.texts[row] for row in rows]


def encode_items(reward_model: SegmentRewardModel, items: Sequence[Item]) -> EncodedItems:
    """Encode the answers of each item behind one and the same prompt, as training does."""
    chat, limit = reward_model.chat, reward_model.card.max_length
    prompts: list[list[int]] = []
    responses: list[list[int]] = []
    ended: list[bool] = []
    texts: list[str] = []
    rows, truncated = [], []
    for item in items:
        distinct = list(dict.fromkeys(item.answers))
        prompt, kept, whole = encode_answers(item.prompt, distinct, chat, limit)
        rows.append([len(responses) + distinct.index(answer) for answer in item.answers])
        truncated.append(not all(whole) or len(prompt) < len(chat.prompt_ids(item.prompt)))
        prompts += [prompt] * len(kept)
        responses += kept
        ended += whole
        texts += distinct
    flags = torch.tensor(ended, dtype=torch.bool)
    return EncodedItems(Conversations(prompts, responses, flags), texts, rows, truncated)


def score_items(
    reward_model: SegmentRewardModel, items: Sequence[Item], *, batch_size: int = 16, description: str = ""
) -> list[ScoredItem]:
    """Score every answer of every item; equal answers to one prompt get the same score."""
    encoded = encode_items(reward_model, items)
    scored: dict[int, ScoredResponse] = {}
    cuts: list[Segmentation] = []
    for rows, part, texts in track(list(encoded.batches(batch_size)), description, disable=not description):
        segmentation, rewards = reward_model.segment_and_read(part)
        cuts.append(segmentation)
        scored.update(zip(rows, reward_model.describe(segmentation, rewards, part, texts), strict=True))
    warn_of_fallbacks(cuts)
    return [
        ScoredItem(item, [scored[row] for row in rows], truncated)
        for item, rows, truncated in zip(items, encoded.rows, encoded.truncated, strict=True)
    ]
