"""Preference pairs: what a row of a data set says, and what is wrong with it."""

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from segrew.chat import Message
from segrew.data_options import DataOptions
from segrew.dataset_formats import Row, Unusable
from segrew.records import EMBEDDED_PAIRS
from segrew.sources import Source, load, prompt_key, stage_key

IDENTICAL = "identical answers"
_IDS = {
    "prompt": ("prompt_ids", "prompt_input_ids"),
    "chosen": ("chosen_ids", "chosen_input_ids"),
    "rejected": ("rejected_ids", "rejected_input_ids"),
}


@dataclass(frozen=True)
class Fault:
    """A stretch of the rejected answer that is wrong: character offsets [start, end) and its kind."""

    start: int
    end: int
    kind: str


@dataclass(frozen=True)
class PreferencePair:
    """A prompt with a better and a worse answer.

    Args:
        prompt: messages up to where the assistant speaks; none where the answers are whole texts.
        chosen, rejected: the answers' text.
        subset: of a benchmark, else empty.
        faults: marked stretches of `rejected`, if known.
        margin: by how much the chosen score should lead, if known.
        template: further arguments of the chat template, such as tools.
        ids: prompt, chosen and rejected as token ids, where the row holds these instead of texts.
        where: file and line, for messages.
    """

    prompt: list[Message]
    chosen: str
    rejected: str
    id: str = ""
    subset: str = ""
    faults: tuple[Fault, ...] = ()
    margin: float | None = None
    template: dict[str, Any] = field(default_factory=dict)
    ids: tuple[list[int], list[int], list[int]] | None = None
    where: str = ""


@dataclass
class LoadedPairs:
    """Usable pairs, and what was read of each data set."""

    pairs: list[PreferencePair] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)

    @property
    def skipped(self) -> Counter:
        """How many rows were left out for which reason."""
        return sum((source.skipped for source in self.sources), Counter())


def as_messages(value: Any, where: str, column: str) -> list[Message]:
    """Return a prompt or conversation column as messages; plain text becomes one user message.

    Raises:
        ValueError: the value is neither text nor a list of {"role", "content"}.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, list) and all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in value):
        # The hub fills in None where some other message has a key; templates ask whether the key is there.
        return [{k: v for k, v in m.items() if v is not None or k == "content"} for m in value]
    raise ValueError(f"{where}: column '{column}' is neither text nor a list of role/content messages.")


def says_something(prompt: list[Message]) -> bool:
    """Whether every message is text or calls a tool, and the user's last one is not blank."""
    texts = all(isinstance(m["content"], str) or m.get("tool_calls") for m in prompt)
    blank = bool(prompt) and prompt[-1]["role"] == "user" and not (prompt[-1]["content"] or "").strip()
    return texts and not blank


def template_arguments(row: Row, where: str) -> dict[str, Any]:
    """Return what a row gives its chat template: TRL's `chat_template_kwargs` and `tools` (a list, or JSON of one).

    Raises:
        ValueError: one of them is of another kind.
    """
    given = {name: row.get(name) for name in ("chat_template_kwargs", "tools")}
    try:
        given = {name: json.loads(value) if isinstance(value, str) else value for name, value in given.items()}
    except json.JSONDecodeError:
        raise ValueError(f"{where}: 'tools' and 'chat_template_kwargs' must be JSON where they are text.") from None
    arguments, tools = given["chat_template_kwargs"] or {}, given["tools"]
    if not isinstance(arguments, dict) or not isinstance(tools or [], list):
        raise ValueError(f"{where}: 'tools' must be a list, and 'chat_template_kwargs' names with values.")
    return {**arguments, "tools": tools} if tools else dict(arguments)


def common_prompt(chosen: list[Message], rejected: list[Message]) -> tuple[list[Message], Any, Any]:
    """Split two conversations into the messages they share and the answer that ends each."""
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    if chosen == rejected and chosen:
        shared -= 1
    if shared == 0 or not shared == len(chosen) - 1 == len(rejected) - 1:
        raise Unusable("conversations part before the last message" if shared else "no common prompt")
    if {chosen[-1]["role"], rejected[-1]["role"]} != {"assistant"}:
        raise Unusable("last message is not the assistant's")
    return chosen[:-1], chosen[-1]["content"], rejected[-1]["content"]


def _repeats(side: list[Message], prompt: list[Message]) -> bool:
    """Whether a side is a whole conversation, as some sets have beside its prompt, or beside its last question."""
    if not prompt or not side or side[: len(prompt)] == prompt:
        return bool(prompt)
    continues = side[0]["role"] == "assistant" or prompt[-1]["role"] != "user"
    return not continues and prompt_key(prompt[-1:]) in [prompt_key([message]) for message in side[:-1]]


def _prompt_and_answers(row: Row, where: str) -> tuple[list[Message], Any, Any]:
    """Split a row into prompt, chosen and rejected text, in any of TRL's preference shapes."""
    for column in ("chosen", "rejected"):
        if column not in row:
            raise ValueError(
                f"{where}: no column '{column}' (found: {', '.join(sorted(row))}). A preference row has "
                "'chosen' and 'rejected', and 'prompt' unless both are whole conversations."
            )
    chosen, rejected = row["chosen"], row["rejected"]
    prompt = as_messages(row["prompt"], where, "prompt") if row.get("prompt") is not None else []
    if isinstance(chosen, list) and isinstance(rejected, list):
        sides = as_messages(chosen, where, "chosen"), as_messages(rejected, where, "rejected")
        whole = [side if _repeats(side, prompt) else prompt + side for side in sides]
        return common_prompt(whole[0], whole[1])
    return prompt, chosen, rejected


_OTHER_NAMES = {"question", "instruction", "input", "query", "messages", "conversations", "context"}


def _check_usable(row: Row, where: str, prompt: list[Message], chosen: Any, rejected: Any) -> None:
    """Raise `Unusable` with the reason why a pair cannot be used, if there is one."""
    if not says_something(prompt):
        raise Unusable("no text in the prompt")
    if not all(isinstance(text, str) and text.strip() for text in (chosen, rejected)):
        raise Unusable("empty answer")
    if not prompt and "prompt" in row:
        raise Unusable("no prompt")
    if not prompt and (near := sorted(_OTHER_NAMES & set(row))):
        raise ValueError(
            f"{where}: no column 'prompt', so the answers would be read as whole texts; if '{near[0]}' is the prompt, "
            "rename it or name the format with --dataset_format."
        )


def _faults(marks: Any, rejected: str, where: str) -> tuple[Fault, ...]:
    try:
        faults = tuple(Fault(mark["start"], mark["end"], mark["kind"]) for mark in marks or ())
        inside = all(0 <= fault.start < fault.end <= len(rejected) for fault in faults)
    except (TypeError, KeyError):
        inside = False
    if not inside:
        raise ValueError(
            f"{where}: column 'faults' needs objects with start, end and kind, 0 <= start < end <= the "
            f"{len(rejected)} characters of 'rejected'."
        )
    return faults


def _margin(value: Any, where: str) -> float | None:
    try:
        margin = None if value is None else float(value)
    except (TypeError, ValueError):
        margin = math.nan
    if margin is not None and not math.isfinite(margin):
        raise ValueError(f"{where}: column 'margin' is {value!r}; it must be a finite number, or nothing.")
    return margin


def _ids(row: Row, where: str) -> tuple[list[int], list[int], list[int]] | None:
    """Return a pre-tokenised row's prompt, chosen and rejected ids; None where the row holds texts."""
    found = {part: next((row[c] for c in columns if c in row), None) for part, columns in _IDS.items()}
    if found["chosen"] is None and found["rejected"] is None:
        return None
    for part, ids in found.items():
        if not isinstance(ids, list) or not all(isinstance(i, int) and i >= 0 for i in ids):
            raise ValueError(
                f"{where}: a pre-tokenised row needs {', '.join(columns[0] for columns in _IDS.values())}, each a list "
                f"of token ids ('{part}' is not); without its prompt's ids nobody knows where an answer begins."
            )
        if not ids:
            raise Unusable("no prompt" if part == "prompt" else "empty answer")
    return found["prompt"], found["chosen"], found["rejected"]  # type: ignore[return-value]


def pair_of(row: Row, where: str, *, keep_identical: bool = False) -> PreferencePair:
    """Turn a row in TRL's columns into a pair.

    Raises:
        Unusable: the row is whole but gives no pair.
        ValueError: the row has another shape; the message names file and line.
    """
    ids = _ids(row, where)
    if ids is None:
        prompt, chosen, rejected = _prompt_and_answers(row, where)
        _check_usable(row, where, prompt, chosen, rejected)
    else:
        prompt, chosen, rejected = [], "", ""
    if not keep_identical and (chosen == rejected if ids is None else ids[1] == ids[2]):
        raise Unusable(IDENTICAL)
    return PreferencePair(
        prompt,
        chosen,
        rejected,
        id=where.rsplit(" ", 1)[-1] if row.get("id") is None else str(row["id"]),
        subset=row.get("subset") or "",
        faults=_faults(row.get("faults"), rejected, where),
        margin=_margin(row.get("margin"), where),
        template=template_arguments(row, where),
        ids=ids,
        where=where,
    )


def key_of(pair: PreferencePair, key: Callable[[list[Message]], str] = stage_key) -> str:
    """Return the key of a pair's prompt; a whole text, which has none, stands for itself."""
    return str(pair.ids[0]) if pair.ids else key(pair.prompt) if pair.prompt else pair.chosen


def load_preferences(
    names: str | list[str],
    split: str = "train",
    options: DataOptions | None = None,
    *,
    limit: int | None = None,
    seed: int = 0,
) -> LoadedPairs:
    """Load preference pairs from files, directories, the hub, or the embedded set ("everyday").

    Rows without a usable pair are counted by reason; a row of another shape is an error.

    Args:
        limit, seed: of several data sets, see `segrew.sources.load`.

    Raises:
        ValueError: what is wrong, in which file and line; also when no usable pair is left.
    """
    pairs, sources = load(names, split, options or DataOptions(), pair_of, key_of, what="pairs", limit=limit, seed=seed)
    return LoadedPairs(pairs, sources)


def everyday_pairs(split: str) -> list[PreferencePair]:
    """Return the pairs that ship with segrew (CC0): "train" (70 % of the prompts) or "test"."""
    return load_preferences(EMBEDDED_PAIRS, split).pairs


def longer_wins(pairs: list[PreferencePair]) -> float:
    """Share of pairs in which the chosen answer has more characters."""
    return sum(len(pair.chosen) > len(pair.rejected) for pair in pairs) / len(pairs)
