"""Data sets in columns of their own: one table of small functions from a row to a row in TRL's columns."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]


class Unusable(Exception):
    """Why a row gives nothing to train on; such rows are counted by this reason."""


def _others(row: Row, *used: str) -> Row:
    return {column: value for column, value in row.items() if column not in used}


_SPEAKER = re.compile(r"(?:^|\n\n)(?:## )?(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant", "human": "user", "gpt": "assistant", "system": "system"}


def _turns(dialogue: str) -> list[Row]:
    r"""Split "\n\nHuman: …\n\nAssistant: …" into messages."""
    _, *parts = _SPEAKER.split(dialogue)
    return [
        {"role": _ROLES[speaker], "content": text.strip()}
        for speaker, text in zip(parts[::2], parts[1::2], strict=True)
    ]


def _is_dialogue(value: Any) -> bool:
    return isinstance(value, str) and _SPEAKER.match(value) is not None


def _hh(row: Row) -> Row:
    """Anthropic's whole dialogues, or a prompt that ends with "Assistant:" and two answers (full-hh-rlhf)."""
    start = row["prompt"] if isinstance(row.get("prompt"), str) else ""
    dialogues = {side: _turns(start + (row[side] or "")) for side in ("chosen", "rejected")}
    return _others(row, "prompt", "response") | dialogues


def _is_hh(row: Row) -> bool:
    sides = row.get("chosen"), row.get("rejected")
    if not all(isinstance(side, str) for side in sides):
        return False
    if row.get("prompt") is None:
        return all(map(_is_dialogue, sides))
    return _is_dialogue(row["prompt"]) and row["prompt"].rstrip().endswith("Assistant:")


def _scored_dialogues(row: Row) -> Row:
    """Two dialogues with a score each, as DSP repackages HH-RLHF and WebGPT."""
    texts, scores = row["text"], row["score"]
    if len(texts) != 2 or scores[0] == scores[1]:
        raise Unusable("tie")
    better = int(scores[1] > scores[0])
    return _others(row, "text", "score") | {"chosen": _turns(texts[better]), "rejected": _turns(texts[1 - better])}


def _is_scored_dialogues(row: Row) -> bool:
    return {"text", "score"} <= set(row) and isinstance(row["text"], list) and all(map(_is_dialogue, row["text"]))


def _tldr(row: Row) -> Row:
    """OpenAI's comparisons of summaries, with the prompt of MA-RLHF (2410.02743)."""
    info, summaries, choice = row["info"], row["summaries"], row["choice"]
    if not info.get("post"):
        raise Unusable("no Reddit post")  # news articles of CNN/DailyMail are in the same set
    if choice not in (0, 1) or len(summaries) != 2:
        raise Unusable("no choice between two summaries")
    prompt = f"POST\nSubreddit: r/{info.get('subreddit') or ''}\n{info['post']}\nTL;DR:"
    chosen, rejected = summaries[choice]["text"], summaries[1 - choice]["text"]
    return {"id": info.get("id"), "prompt": prompt, "chosen": chosen, "rejected": rejected}


def _webgpt(row: Row) -> Row:
    """OpenAI's comparisons of answers; the one of higher score is better, equal scores are a tie."""
    scores = row["score_0"], row["score_1"]
    if scores[0] == scores[1]:
        raise Unusable("tie")
    better = int(scores[1] > scores[0])
    question = row["question"]
    text = question["full_text"] if isinstance(question, dict) else question
    return {"prompt": text, "chosen": row[f"answer_{better}"], "rejected": row[f"answer_{1 - better}"]}


def _sharegpt(row: Row) -> Row:
    """LLaMA-Factory's preference records: conversations with from/value, and one answer for each side."""

    def message(turn: Row) -> Row:
        return {"role": _ROLES.get(turn["from"], turn["from"]), "content": turn["value"]}

    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    prompt = system + [message(turn) for turn in row["conversations"]]
    sides = {side: [message(row[side])] for side in ("chosen", "rejected")}
    return _others(row, "conversations", "system") | {"prompt": prompt} | sides


def _is_sharegpt(row: Row) -> bool:
    return "conversations" in row and all(
        isinstance(row.get(side), dict) and "value" in row[side] for side in ("chosen", "rejected")
    )


def _whole_conversations(row: Row) -> Row:
    """Sets whose two conversations are whole: their prompt column only repeats the first message."""
    return _others(row, "prompt")


def _apps(row: Row) -> Row:
    """A programming problem with its tests: {"inputs", "outputs"}, and "fn_name" where a function is called.

    Without `fn_name` a program reads standard input; starter code with a class asks for a method.
    """
    tests = row["input_output"]
    try:
        tests = json.loads(tests) if isinstance(tests, str) else tests
    except json.JSONDecodeError:
        tests = None
    if not tests or not tests.get("inputs"):
        raise Unusable("no tests")
    call = "Use Call-Based format" if tests.get("fn_name") else "Use Standard Input format"
    starter = f"{row['starter_code']}\n" if row.get("starter_code") else ""
    prompt = f"\nQUESTION:\n{row['question']}\n{starter}\n{call}\n\nANSWER:\n"
    return _others(row, "question", "input_output") | {"prompt": prompt, "tests": tests}


def _as_it_is(row: Row) -> Row:
    return row


@dataclass(frozen=True)
class HubSet:
    """Where a data set of the hub keeps what we want: its configuration, and the names of its splits."""

    config: str | None = None
    splits: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Format:
    """Rows of one kind.

    Args:
        label: what they are, in words.
        convert: a row to a row in TRL's columns. recognise: tells by its columns; None only by name.
        hub: data sets of the hub that have this format, in lower case.
    """

    label: str
    convert: Callable[[Row], Row] = _as_it_is
    recognise: Callable[[Row], bool] | None = None
    hub: dict[str, HubSet] = field(default_factory=dict)


FORMATS: dict[str, Format] = {
    "hh": Format("hh-rlhf dialogues", _hh, _is_hh, {"anthropic/hh-rlhf": HubSet(), "dahoas/full-hh-rlhf": HubSet()}),
    "scored_dialogues": Format("dialogues with scores", _scored_dialogues, _is_scored_dialogues),
    "preference_700k": Format(
        "preference_700K conversations", _whole_conversations, None, {"hendrydong/preference_700k": HubSet()}
    ),
    "ultrafeedback": Format(
        "UltraFeedback conversations",
        _whole_conversations,
        None,
        {
            "huggingfaceh4/ultrafeedback_binarized": HubSet(splits={"train": "train_prefs", "test": "test_prefs"}),
            "argilla/ultrafeedback-binarized-preferences-cleaned": HubSet(),
        },
    ),
    "tldr": Format(
        "TL;DR comparisons",
        _tldr,
        {"info", "summaries", "choice"}.issubset,
        {"openai/summarize_from_feedback": HubSet("comparisons", {"test": "validation"})},
    ),
    "webgpt": Format(
        "WebGPT comparisons",
        _webgpt,
        {"question", "answer_0", "answer_1", "score_0", "score_1"}.issubset,
        {"openai/webgpt_comparisons": HubSet()},
    ),
    "sharegpt": Format("ShareGPT preferences", _sharegpt, _is_sharegpt),
    "apps": Format(
        "APPS problems", _apps, {"question", "input_output", "starter_code"}.issubset, {"codeparrot/apps": HubSet()}
    ),
    "trl": Format("TRL columns"),
}


_IDS = ("chosen_ids", "chosen_input_ids", "rejected_ids", "rejected_input_ids")


def trl_type(row: Row) -> str:
    """Name the type of TRL's that a row's columns make, such as "preference, implicit prompt, conversational"."""
    have = {column for column, value in row.items() if value is not None}
    if have & set(_IDS):
        return "preference, token ids"
    form = (
        "conversational" if any(isinstance(row.get(c), list) for c in ("prompt", "chosen", "messages")) else "standard"
    )
    if {"chosen", "rejected"} <= set(row):
        return f"preference, {'explicit' if 'prompt' in have else 'implicit'} prompt, {form}"
    kinds = {
        "stepwise supervision": {"prompt", "completions", "labels"},
        "unpaired preference": {"prompt", "completion", "label"},
        "prompt-completion": {"prompt", "completion"},
        "prompts with responses": {"prompt", "response"},
        "prompt-only": {"prompt"},
    }
    known = next((kind for kind, columns in kinds.items() if columns <= have), None)
    known = known or ("language modeling" if have & {"messages", "text"} else None)
    return f"{known}, {form}" if known else f"unknown, with columns {', '.join(sorted(row))}"


def gives_pairs(format_: "Format", row: Row) -> bool:
    """Whether rows are preference pairs; the others are prompts."""
    if format_ is FORMATS["trl"]:
        return not {"chosen", "rejected", *_IDS}.isdisjoint(row)
    return format_ is not FORMATS["apps"]


def hub_set(name: str) -> tuple[str | None, HubSet]:
    """Return the format and the settings of a data set that is known by name, else (None, defaults)."""
    for key, format_ in FORMATS.items():
        if name.lower() in format_.hub:
            return key, format_.hub[name.lower()]
    return None, HubSet()


def format_of(row: Row, name: str | None = None) -> Format:
    """Return the format called `name`, or the one that the row's columns show; TRL's if none does.

    Raises:
        ValueError: there is no format of that name.
    """
    if name is not None and name not in FORMATS:
        raise ValueError(f"--dataset_format {name}: there is none of that name; choose one of {', '.join(FORMATS)}.")
    if name is not None:
        return FORMATS[name]
    return next((f for f in FORMATS.values() if f.recognise and f.recognise(row)), FORMATS["trl"])
