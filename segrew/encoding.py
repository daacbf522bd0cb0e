"""Pairs and answers as token ids within a maximum length: one rule for training, evaluation and scoring.

What is cut depends on a prompt and its answer alone, never on the answer beside it, so an answer has one score
wherever it is scored.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from segrew.chat import ChatFormat, Message
from segrew.conversations import Conversations
from segrew.preferences import PreferencePair

Overlong = Literal["drop", "truncate_prompt_left", "truncate_response", "error"]


def cutting(overlong: Overlong) -> Overlong:
    """Return how a reward model trained under this policy reads what is too long: scoring leaves nothing out."""
    return "truncate_response" if overlong == "truncate_response" else "truncate_prompt_left"


def require_room(max_length: int) -> None:
    """Refuse a maximum length in which no prompt and answer fit.

    Raises:
        ValueError: it is below 8.
    """
    if max_length < 8:
        raise ValueError(f"--max_length {max_length}: no room for an answer; use at least 8.")


@dataclass(frozen=True)
class EncodedAnswer:
    """A prompt and one response to it as token ids.

    Args:
        ended: whether the response still has its stop token.
        cut: what had to be cut to fit, of "prompt" and "answer".
    """

    prompt: list[int]
    response: list[int]
    ended: bool
    cut: tuple[str, ...] = ()


@dataclass(frozen=True)
class EncodedPair:
    """A pair as token ids; responses end with the stop token unless cut.

    Args:
        prompts: of chosen and rejected: the same, unless one answer left less room for it.
        ended: whether each response still has its stop token.
        cut: what had to be cut to fit, of "prompt" and "answer".
    """

    prompts: tuple[list[int], list[int]]
    chosen: list[int]
    rejected: list[int]
    ended: tuple[bool, bool]
    cut: frozenset[str] = frozenset()


def fit(
    prompt: list[int], response: list[int], ended: bool, max_length: int, overlong: Overlong = "truncate_prompt_left"
) -> EncodedAnswer | None:
    """Bring a prompt and its response within `max_length` tokens; None where they are to be dropped.

    The prompt is cut on its left, a response on its right, and then it has no stop token. Both policies that cut
    leave the other part whole where half of `max_length` suffices for what is cut first.

    Args:
        overlong: `truncate_prompt_left` cuts the prompt first, `truncate_response` the response.

    Raises:
        ValueError: it does not fit, and `overlong` is `error`.
    """
    whole, half = len(prompt) + len(response), max_length // 2
    if whole <= max_length:
        return EncodedAnswer(prompt, response, ended)
    if overlong == "drop":
        return None
    if overlong == "error":
        raise ValueError(f"{whole} tokens with its prompt, more than --max_length {max_length} (--overlong error).")
    if overlong == "truncate_prompt_left":
        keep = min(len(prompt), max(max_length - len(response), half))
    else:
        keep = min(len(prompt), max_length - min(len(response), max(max_length - len(prompt), half)))
    kept = response[: max_length - keep]
    lengths = (("prompt", len(prompt) - keep), ("answer", len(response) - len(kept)))
    return EncodedAnswer(prompt[-keep:], kept, ended and len(kept) == len(response), tuple(n for n, k in lengths if k))


def encode_answer(
    messages: list[Message] | str,
    text: str,
    chat: ChatFormat,
    max_length: int,
    overlong: Overlong = "truncate_prompt_left",
    template: dict[str, Any] | None = None,
    *,
    finished: bool = True,
) -> EncodedAnswer | None:
    """Encode an answer to a prompt, messages or rendered text, within `max_length` tokens (see `fit`).

    Args:
        template: further arguments of the chat template.
        finished: False for an answer that was cut off: it gets no stop token, unless it has no other.
    """
    prompt = chat.prompt_ids(messages, template, room=max_length)
    response = chat.response_ids(text, room=max_length)
    if not finished and len(response) > 1:
        return fit(prompt, response[:-1], False, max_length, overlong)
    return fit(prompt, response, True, max_length, overlong)


def _sides(pair: PreferencePair, chat: ChatFormat, max_length: int, overlong: Overlong) -> list[EncodedAnswer | None]:
    if pair.ids is None:
        prompt = chat.prompt_ids(pair.prompt, pair.template, room=max_length)
        answers = [chat.response_ids(text, room=max_length) for text in (pair.chosen, pair.rejected)]
    else:
        prompt, *answers = pair.ids
        highest, vocabulary = max(map(max, pair.ids)), len(chat.tokenizer)
        if highest >= vocabulary:
            raise ValueError(f"token id {highest} is none of the tokenizer's {vocabulary}: another one made it.")
    return [fit(prompt, ids, ids[-1] in chat.stop_ids, max_length, overlong) for ids in answers]


def encode_pair(
    pair: PreferencePair, chat: ChatFormat, max_length: int, overlong: Overlong = "truncate_prompt_left"
) -> EncodedPair | None:
    """Encode both sides of a pair, each within `max_length` tokens by itself; None where either is to be dropped.

    Raises:
        ValueError: the template refuses the prompt, or the pair does not fit; the message names file and line.
    """
    try:
        chosen, rejected = _sides(pair, chat, max_length, overlong)
    except ValueError as error:
        raise ValueError(f"{pair.where or pair.id}: {error}") from None
    if chosen is None or rejected is None:
        return None
    return EncodedPair(
        (chosen.prompt, rejected.prompt),
        chosen.response,
        rejected.response,
        (chosen.ended, rejected.ended),
        frozenset(chosen.cut + rejected.cut),
    )


def encode_pairs(
    pairs: list[PreferencePair],
    chat: ChatFormat,
    max_length: int,
    overlong: Overlong = "truncate_prompt_left",
    *,
    keep_identical: bool = False,
) -> tuple[list[PreferencePair], list[EncodedPair], Counter]:
    """Encode pairs; leave out those that are too long by `overlong`, or the same once they are cut.

    Pairs of token ids get the text of their ids.

    Returns:
        The pairs that are left, the same encoded, and how many were left out or cut, by reason.
    """
    kept, encoded, counts = [], [], Counter[str]()
    for pair in pairs:
        ids = encode_pair(pair, chat, max_length, overlong)
        if ids is None:
            counts["pairs left out: longer than --max_length"] += 1
        elif ids.chosen == ids.rejected and not keep_identical:
            counts["pairs left out: identical within --max_length"] += 1
        else:
            counts.update(f"pairs with {part} cut to --max_length" for part in sorted(ids.cut))
            if pair.ids is not None:
                pair = replace(pair, chosen=chat.decode(ids.chosen), rejected=chat.decode(ids.rejected))
            kept.append(pair)
            encoded.append(ids)
    return kept, encoded, counts


def conversations_of(encoded: list[EncodedPair]) -> Conversations:
    """Lay pairs out as rows: chosen, rejected, chosen, rejected, …"""
    return Conversations(
        prompts=[prompt for pair in encoded for prompt in pair.prompts],
        responses=[ids for pair in encoded for ids in (pair.chosen, pair.rejected)],
        ended=torch.tensor([flag for pair in encoded for flag in pair.ended], dtype=torch.bool),
    )
