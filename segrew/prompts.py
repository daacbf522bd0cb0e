"""Prompts for rollouts: messages, with the other columns of their row beside them."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from segrew.chat import ChatFormat, Message
from segrew.data_options import DataOptions
from segrew.dataset_formats import Row, Unusable
from segrew.encoding import Overlong
from segrew.preferences import as_messages, common_prompt, says_something, template_arguments
from segrew.sources import Source, load, prompt_key, stage_key

_NOT_COLUMNS = {"prompt", "messages", "chosen", "rejected", "tools", "chat_template_kwargs"}


@dataclass(frozen=True)
class Prompt:
    """What the policy answers: messages, and the row's other columns for reward functions.

    Args:
        template: further arguments of the chat template, such as tools.
        where: file and line, for messages.
    """

    messages: list[Message]
    columns: dict[str, Any] = field(default_factory=dict)
    template: dict[str, Any] = field(default_factory=dict)
    where: str = ""


@dataclass
class LoadedPrompts:
    """Prompts, each once, and what was read of each data set."""

    prompts: list[Prompt] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)


def _messages_of(row: Row, where: str) -> list[Message]:
    """Find what is to be answered: `prompt`, a conversation without its last answer, or what two answers share."""
    column = next((c for c in ("prompt", "messages") if row.get(c)), None)
    if column is not None:
        messages = as_messages(row[column], where, column)
        return messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages
    if isinstance(row.get("chosen"), list) and isinstance(row.get("rejected"), list):
        return common_prompt(*(as_messages(row[side], where, side) for side in ("chosen", "rejected")))[0]
    if "prompt" in row or "messages" in row:
        raise Unusable("empty prompt")
    raise ValueError(
        f"{where}: no column 'prompt' or 'messages', nor conversations in 'chosen' and 'rejected' (found: "
        f"{', '.join(sorted(row))}); rename a column, or name the format with --dataset_format."
    )


def prompt_of(row: Row, where: str) -> Prompt:
    """Turn a row in TRL's columns into a prompt.

    Raises:
        Unusable: there is no text to answer.
        ValueError: the row has another shape; the message names file and line.
    """
    messages = _messages_of(row, where)
    if not messages or not says_something(messages):
        raise Unusable("no text in the prompt")
    columns = {column: value for column, value in row.items() if column not in _NOT_COLUMNS}
    return Prompt(messages, columns, template_arguments(row, where), where)


def load_prompts(
    names: str | list[str],
    split: str = "train",
    options: DataOptions | None = None,
    *,
    limit: int | None = None,
    seed: int = 0,
) -> LoadedPrompts:
    """Load prompts from files, directories, the hub, or the embedded pairs ("everyday"); equal ones once.

    A row has `prompt` (text or messages) or `messages`; of a conversation that ends with the assistant, its last
    message is dropped. Preference pairs give the prompt that their answers share.

    Args:
        limit, seed: of several data sets, see `segrew.sources.load`.

    Raises:
        ValueError: what is wrong, in which file and line; also when no prompt is left.
    """
    seen: set[str] = set()

    def convert(row: Row, where: str) -> Prompt:
        prompt = prompt_of(row, where)
        key = prompt_key(prompt.messages)
        if key in seen:
            raise Unusable("repeated prompt")
        seen.add(key)
        return prompt

    prompts, sources = load(
        names, split, options or DataOptions(), convert, lambda p: stage_key(p.messages), what="prompts",
        limit=limit, seed=seed,
    )  # fmt: skip
    return LoadedPrompts(prompts, sources)


def encode_prompts(
    prompts: list[Prompt], chat: ChatFormat, max_length: int, overlong: Overlong = "drop"
) -> tuple[list[Prompt], list[list[int]], Counter]:
    """Encode prompts; those of more than `max_length` tokens are left out, or cut on their left.

    Returns:
        The prompts that are left, their ids, and how many were left out or cut, by reason.

    Raises:
        ValueError: the template refuses a prompt, a prompt is too long under `error`, or none is left.
    """
    kept: list[Prompt] = []
    encoded: list[list[int]] = []
    counts = Counter[str]()
    for prompt in prompts:
        try:
            ids = chat.prompt_ids(prompt.messages, prompt.template, room=max_length)
        except ValueError as error:
            raise ValueError(f"{prompt.where}: {error}") from None
        if len(ids) > max_length:
            if overlong == "error":
                raise ValueError(f"{prompt.where}: more than --max_prompt_length {max_length} tokens.")
            if overlong != "truncate_prompt_left":
                counts["prompts left out: longer than --max_prompt_length"] += 1
                continue
            counts["prompts cut to --max_prompt_length"] += 1
            ids = ids[-max_length:]
        kept.append(prompt)
        encoded.append(ids)
    if not kept:
        raise ValueError(f"--max_prompt_length {max_length}: all {len(prompts)} prompts are longer; none is left.")
    return kept, encoded, counts
