"""Preference pairs: reading them from files or the hub, and saying exactly what is wrong with a row."""

import gzip
import json
import math
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from segrew.chat import ChatFormat, Message

EMBEDDED_PAIRS = "everyday"
IDENTICAL = "identical answers"


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
        prompt: messages up to where the assistant speaks.
        chosen, rejected: the answers' text.
        faults: marked stretches of `rejected`, if known.
        subset: of a benchmark, else empty.
        margin: by how much the score of `chosen` should lead, if the data say so.
    """

    prompt: list[Message]
    chosen: str
    rejected: str
    id: str = ""
    subset: str = ""
    faults: tuple[Fault, ...] = ()
    margin: float | None = None


@dataclass
class LoadedPairs:
    """Usable pairs, and how many rows were left out for which reason."""

    pairs: list[PreferencePair] = field(default_factory=list)
    skipped: Counter = field(default_factory=Counter)


def _open_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    opener: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            for number, line in enumerate(file, 1):
                yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{path}: not a readable gzip file ({error}).") from None


def read_records(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ("file, line n", record) from a .jsonl, .jsonl.gz or .json file of objects.

    Raises:
        ValueError: the file is missing, empty or malformed; the message names file and line.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file.")
    if path.name.removesuffix(".gz").endswith(".json"):
        yield from _read_json_array(path)
        return
    count = 0
    for number, line in _open_lines(path):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError:
            raise ValueError(f"{where}: not UTF-8; convert the file to UTF-8.") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not valid JSON ({error.msg} at column {error.colno}).") from None
        if not isinstance(record, dict):
            raise ValueError(f"{where}: expected a JSON object, found {type(record).__name__}.")
        count += 1
        yield where, record
    if count == 0:
        raise ValueError(f"{path}: the file holds no rows.")


def _read_json_array(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    content = b"".join(line for _, line in _open_lines(path))
    try:
        records = json.loads(content)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}).") from None
    if not isinstance(records, list) or not records:
        raise ValueError(f"{path}: expected a non-empty JSON list of objects.")
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict):
            raise ValueError(f"{path}, item {number}: expected a JSON object, found {type(record).__name__}.")
        yield f"{path}, item {number}", record


def records_of(name_or_path: str, split: str = "train") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield records from a local file, a directory of files, or a data set of the hub."""
    path = Path(name_or_path)
    if path.is_dir():
        found = sorted(p for p in path.iterdir() if ".json" in p.name)
        if not found:
            raise ValueError(f"{path}: no .jsonl, .jsonl.gz or .json file in this directory.")
        for part in found:
            yield from read_records(part)
        return
    if path.is_file() or ".json" in path.name:
        yield from read_records(path)
        return
    import datasets

    try:
        rows = datasets.load_dataset(name_or_path, split=split)
    except Exception as error:  # the hub's errors are many; each means that the set cannot be had
        raise ValueError(f"'{name_or_path}' is no local file, and the hub gives no such data set: {error}") from None
    for number, row in enumerate(rows, 1):
        yield f"{name_or_path} [{split}], row {number}", row


def as_messages(value: Any, where: str, column: str) -> list[Message]:
    """Return a prompt or conversation column as messages; plain text becomes one user message.

    Raises:
        ValueError: the value is neither text nor a list of {"role", "content"}.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, list) and all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in value):
        return [{"role": str(m["role"]), "content": m["content"]} for m in value]
    raise ValueError(f"{where}: column '{column}' is neither text nor a list of role/content messages.")


def _prompt_and_answers(record: dict[str, Any], where: str) -> tuple[list[Message], Any, Any]:
    """Split a record into prompt, chosen and rejected text, in any of TRL's preference shapes."""
    for column in ("chosen", "rejected"):
        if column not in record:
            raise ValueError(
                f"{where}: no column '{column}' (found: {', '.join(sorted(record))}). A preference row has "
                "'chosen' and 'rejected', and 'prompt' unless both are whole conversations."
            )
    chosen, rejected = record["chosen"], record["rejected"]
    prompt = as_messages(record["prompt"], where, "prompt") if record.get("prompt") is not None else []
    if isinstance(chosen, list) and isinstance(rejected, list):
        whole_chosen, whole_rejected = (
            answer if prompt and answer[: len(prompt)] == prompt else prompt + answer  # some sets repeat the prompt
            for answer in (as_messages(chosen, where, "chosen"), as_messages(rejected, where, "rejected"))
        )
        if not whole_chosen or not whole_rejected or whole_chosen[:-1] != whole_rejected[:-1]:
            return [], None, None
        return whole_chosen[:-1], whole_chosen[-1]["content"], whole_rejected[-1]["content"]
    return prompt, chosen, rejected


def _unusable(prompt: list[Message], chosen: Any, rejected: Any) -> str | None:
    """Return why a pair cannot be used, or None."""
    if not prompt or any(not isinstance(m["content"], str) for m in prompt):
        return "no common prompt"
    if not all(isinstance(text, str) and text.strip() for text in (chosen, rejected)):
        return "empty answer"
    return IDENTICAL if chosen == rejected else None


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
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{where}: column 'margin' is {value!r}; it must be a finite number.")
    return float(value)


def load_preferences(name_or_path: str, split: str = "train", *, keep_identical: bool = False) -> LoadedPairs:
    """Load preference pairs from a file, a directory, the hub, or the embedded set ("everyday").

    Rows without a usable pair are counted by reason; a row of another shape is an error.

    Args:
        keep_identical: keep pairs of equal answers, which an evaluation counts as ties.

    Raises:
        ValueError: what is wrong, in which file and line; also when no usable pair is left.
    """
    if name_or_path == EMBEDDED_PAIRS:
        return LoadedPairs(everyday_pairs(split))
    loaded, rows = LoadedPairs(), 0
    for rows, (where, record) in enumerate(records_of(name_or_path, split), 1):
        prompt, chosen, rejected = _prompt_and_answers(record, where)
        reason = _unusable(prompt, chosen, rejected)
        if reason and not (keep_identical and reason == IDENTICAL):
            loaded.skipped[reason] += 1
            continue
        loaded.pairs.append(
            PreferencePair(
                prompt,
                chosen,
                rejected,
                id=str(record.get("id", rows)),
                subset=record.get("subset") or "",
                faults=_faults(record.get("faults"), rejected, where),
                margin=_margin(record.get("margin"), where),
            )
        )
    if not loaded.pairs:
        reasons = ", ".join(f"{count} {reason}" for reason, count in loaded.skipped.items())
        raise ValueError(f"{name_or_path}: 0 of {rows} rows are usable pairs ({reasons}).")
    return loaded


def everyday_pairs(split: str) -> list[PreferencePair]:
    """Return the pairs that ship with segrew (CC0): "train" (70 % of the prompts) or "test"."""
    source = files("segrew") / "data" / "everyday_pairs.jsonl"
    pairs = []
    for line in source.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["split"] == split:
            faults = tuple(Fault(**fault) for fault in row["faults"])
            pairs.append(
                PreferencePair(row["prompt"], row["chosen"], row["rejected"], row["id"], row["category"], faults)
            )
    if not pairs:
        raise ValueError(f"the embedded pairs have the splits 'train' and 'test', not '{split}'.")
    return pairs


@dataclass(frozen=True)
class EncodedPair:
    """A pair as token ids: one prompt, two responses that end with the stop token unless cut."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    ended: tuple[bool, bool]


def encode_answers(
    messages: list[Message] | str, texts: list[str], chat: ChatFormat, max_length: int
) -> tuple[list[int], list[list[int]], list[bool]]:
    """Encode answers to one prompt within `max_length` tokens each, prompt included.

    The prompt is cut on its left first, by what the longest answer needs, down to half of `max_length`; an answer
    that still does not fit is cut on its right and then has no stop token.

    Returns:
        Prompt ids, the ids of each answer, and whether each kept its stop token.
    """
    prompt = chat.prompt_ids(messages)
    answers = [chat.response_ids(text) for text in texts]
    prompt = prompt[-max(max_length - max(map(len, answers)), max_length // 2) :]
    kept = [ids[: max_length - len(prompt)] for ids in answers]
    return prompt, kept, [len(part) == len(ids) for part, ids in zip(kept, answers, strict=True)]


def encode_pair(pair: PreferencePair, chat: ChatFormat, max_length: int) -> EncodedPair:
    """Encode a pair within `max_length` tokens a side; both sides keep the same prompt (see `encode_answers`)."""
    prompt, (chosen, rejected), ended = encode_answers(pair.prompt, [pair.chosen, pair.rejected], chat, max_length)
    return EncodedPair(prompt, chosen, rejected, (ended[0], ended[1]))


def longer_wins(pairs: list[PreferencePair]) -> float:
    """Share of pairs in which the chosen answer has more characters."""
    return sum(len(pair.chosen) > len(pair.rejected) for pair in pairs) / len(pairs)
