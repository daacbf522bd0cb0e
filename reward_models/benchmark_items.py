"""What every benchmark comes down to: a prompt, answers of which the first few are the better ones, their scores."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from reward_models.scored_responses import ScoredResponse
from reward_models.segment_reward_model import SegmentRewardModel
from segrew.chat import ChatFormat, Message
from segrew.conversations import TOKENS_PER_BATCH, Conversations, micro_batches
from segrew.encoding import EncodedAnswer, encode_pair
from segrew.preferences import Fault, PreferencePair


@dataclass(frozen=True)
class Item:
    """One row of a benchmark.

    Args:
        prompt: messages up to where the assistant speaks; none where the answers are whole texts.
        answers: the better ones first; correct: how many these are.
        spans: marked stretches of the only answer, where a benchmark is about these.
        template: further arguments of the chat template.
        ids: of a pair that holds token ids instead of texts: prompt and both answers. where: file and line.
    """

    id: str
    subset: str
    prompt: list[Message]
    answers: list[str]
    correct: int = 1
    spans: tuple[Fault, ...] = ()
    template: dict[str, Any] = field(default_factory=dict)
    ids: tuple[list[int], list[int], list[int]] | None = None
    where: str = ""

    @property
    def digest(self) -> str:
        """Short hash of the texts, by which a row is known again in another run."""
        return hashlib.sha256(repr((self.prompt, self.answers, self.ids)).encode("utf-8", "surrogatepass")).hexdigest()[
            :12
        ]


def item_of_pair(pair: PreferencePair) -> Item:
    """A preference pair as a row."""
    answers = [pair.chosen, pair.rejected]
    return Item(pair.id, pair.subset, pair.prompt, answers, template=pair.template, ids=pair.ids, where=pair.where)


def with_text(item: Item, chat: ChatFormat) -> Item:
    """Give a row of token ids the text of its answers."""
    return item if item.ids is None else replace(item, answers=[chat.decode(ids) for ids in item.ids[1:]])


@dataclass(frozen=True)
class ScoredItem:
    """A row with the units and score of each answer.

    Args:
        cut: what did not fit into the reward model's `max_length`, of "prompt" and "answer".
    """

    item: Item
    answers: list[ScoredResponse]
    cut: list[str]

    def row(self) -> dict[str, Any]:
        """Return the line of `scores.jsonl`."""
        return score_fields(self.item, [answer.score for answer in self.answers]) | {
            "units": [len(answer.segments) for answer in self.answers],
            "tokens": [sum(segment.tokens for segment in answer.segments) for answer in self.answers],
            "cut": self.cut,
        }


def score_fields(item: Item, scores: Sequence[int | float]) -> dict[str, Any]:
    """Return what a benchmark's scorer reads of a row; the two scores of a pair also by name."""
    fields = {"id": item.id, "subset": item.subset, "digest": item.digest, "correct": item.correct, "scores": [*scores]}
    return fields | ({"score_chosen": scores[0], "score_rejected": scores[1]} if len(scores) == 2 else {})


@dataclass(frozen=True)
class EncodedItems:
    """Items as token ids, equal answers of an item once.

    Args:
        texts: of each row; None where it was token ids.
        rows: for each item, the row of `conversations` that holds each of its answers. cut: what did not fit of it.
    """

    conversations: Conversations
    texts: list[str | None]
    rows: list[list[int]]
    cut: list[list[str]]

    def batches(self, max_tokens: int) -> Iterator[tuple[list[int], Conversations, list[str | None]]]:
        """Yield row numbers with their conversations and texts, long rows first."""
        for rows in micro_batches(self.conversations, max_tokens):
            yield rows, self.conversations.select(rows), [self.texts[row] for row in rows]


def encode_items(reward_model: SegmentRewardModel, items: Sequence[Item]) -> EncodedItems:
    """Encode the distinct answers of each item."""
    encoded: list[EncodedAnswer] = []
    texts: list[str | None] = []
    rows, cut = [], []
    for item in items:
        answers = _encoded(reward_model, item)
        places = {key: len(encoded) + k for k, key in enumerate(answers)}
        rows.append([places[key] for key in _keys(item)])
        encoded += answers.values()
        texts += [None if item.ids else str(key) for key in answers]
        cut.append(sorted({part for answer in answers.values() for part in answer.cut}))
    ended = torch.tensor([answer.ended for answer in encoded], dtype=torch.bool)
    prompts, responses = [answer.prompt for answer in encoded], [answer.response for answer in encoded]
    return EncodedItems(Conversations(prompts, responses, ended), texts, rows, cut)


def _keys(item: Item) -> Sequence[str | tuple[int, ...]]:
    """What tells the answers of an item apart."""
    return item.answers if item.ids is None else [tuple(ids) for ids in item.ids[1:]]


def _encoded(reward_model: SegmentRewardModel, item: Item) -> dict[str | tuple[int, ...], EncodedAnswer]:
    """Encode each distinct answer by itself, so that it has one score whatever stands beside it."""
    if item.ids is None:
        return {text: reward_model.encode(item.prompt, text, template=item.template) for text in item.answers}
    card = reward_model.card
    pair = PreferencePair([], "", "", item.id, ids=item.ids, where=item.where)
    encoded = encode_pair(pair, reward_model.chat, card.max_length, card.overlong)
    assert encoded is not None, "a card never drops"
    sides = zip(encoded.prompts, (encoded.chosen, encoded.rejected), encoded.ended, strict=True)
    answers = [EncodedAnswer(prompt, ids, ended, tuple(encoded.cut)) for prompt, ids, ended in sides]
    return dict(zip(_keys(item), answers, strict=True))


def score_items(
    reward_model: SegmentRewardModel,
    items: Sequence[Item],
    *,
    max_tokens: int = TOKENS_PER_BATCH,
    description: str = "",
) -> list[ScoredItem]:
    """Score every answer of every item; equal answers to one prompt get the same score."""
    encoded = encode_items(reward_model, items)
    scored = reward_model.score_rows(
        encoded.conversations, encoded.texts, max_tokens=max_tokens, description=description
    )
    return [
        ScoredItem(item, [scored[row] for row in rows], cut)
        for item, rows, cut in zip(items, encoded.rows, encoded.cut, strict=True)
    ]
