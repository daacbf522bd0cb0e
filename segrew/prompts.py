"""Prompts for rollouts: messages, with the other columns of their row beside them."""

from dataclasses import dataclass, field
from typing import Any

from segrew.chat import Message
from segrew.preferences import EMBEDDED_PAIRS, as_messages, everyday_pairs, records_of


@dataclass(frozen=True)
class Prompt:
    """What the policy answers: messages, and the row's other columns for reward functions."""

    messages: list[Message]
    columns: dict[str, Any] = field(default_factory=dict)


def load_prompts(name_or_path: str, split: str = "train") -> list[Prompt]:
    """Load prompts from a file, a directory, the hub, or the embedded pairs ("everyday").

    A row has `prompt` (text or messages) or `messages`; of a conversation that ends with the assistant,
    its last message is dropped. Equal prompts are kept once.

    Raises:
        ValueError: what is wrong, in which file and line.
    """
    prompts: dict[str, Prompt] = {}
    if name_or_path == EMBEDDED_PAIRS:
        return [Prompt(pair.prompt, {"id": pair.id}) for pair in everyday_pairs(split)]
    for where, record in records_of(name_or_path, split):
        column = next((c for c in ("prompt", "messages") if record.get(c)), None)
        if column is None:
            raise ValueError(f"{where}: no column 'prompt' or 'messages' (found: {', '.join(sorted(record))}).")
        messages = as_messages(record[column], where, column)
        if messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if not messages or any(not isinstance(m["content"], str) for m in messages):
            raise ValueError(f"{where}: column '{column}' holds no text to answer.")
        others = {key: value for key, value in record.items() if key != column}
        prompts.setdefault(repr(messages), Prompt(messages, others))
    return list(prompts.values())
