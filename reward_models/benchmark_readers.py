"""Reading a benchmark's own record format, from a file or the hub, into items."""

import warnings
from pathlib import Path
from typing import Any

from reward_models.benchmark_items import Item, item_of_pair
from reward_models.rewardbench_sections import PRIOR_SETS
from segrew.preferences import EMBEDDED_PAIRS, Fault, as_messages, everyday_pairs, load_preferences, records_of

_JUDGEBENCH_SOURCES = {
    "mmlu-pro": "knowledge",
    "livebench-reasoning": "reasoning",
    "livebench-math": "math",
    "livecodebench": "coding",
}


def read_pairs(dataset: str, split: str) -> list[Item]:
    """Read preference pairs; equal answers stay, as ties, and what cannot be scored is said to be left out."""
    loaded = load_preferences(dataset, split, keep_identical=True)
    if loaded.skipped:
        reasons = ", ".join(f"{count} {reason}" for reason, count in loaded.skipped.items())
        warnings.warn(f"{dataset}: rows left out of the benchmark: {reasons}", stacklevel=2)
    return [item_of_pair(pair) for pair in loaded.pairs]


def read_rewardbench(dataset: str, split: str) -> list[Item]:
    """Read RewardBench v1: prompt, chosen, rejected, subset, id."""
    items = read_pairs(dataset, split)
    if not all(item.subset for item in items):
        raise ValueError(f"{dataset}: rows without a 'subset' are not in RewardBench's format; use --benchmark pairs.")
    return items


def read_prior_sets(dataset: str) -> list[Item]:
    """Read RewardBench's prior sets: a file whose rows name their subset, or the hub's set with a split for each."""
    if _is_local(dataset):
        items = read_rewardbench(dataset, "")
        others = sorted({item.subset for item in items} - set(PRIOR_SETS))
        if others:
            raise ValueError(f"{dataset}: {', '.join(others)} are none of the prior sets ({', '.join(PRIOR_SETS)}).")
        return items
    return [Item(item.id, name, item.prompt, item.answers) for name in PRIOR_SETS for item in read_pairs(dataset, name)]


def _is_local(dataset: str) -> bool:
    return Path(dataset).exists() or ".json" in Path(dataset).name


def read_judgebench(dataset: str, split: str) -> list[Item]:
    """Read JudgeBench: question, two responses and a label, or the same as a pair with its subset."""
    items = []
    for number, (where, row) in enumerate(records_of(dataset, split), 1):
        if "response_A" in row:
            _require(row, ("question", "response_B", "label", "source"), where)
            if row["label"] not in ("A>B", "B>A"):
                raise ValueError(f"{where}: label is {row['label']!r}; JudgeBench has A>B and B>A.")
            a_wins = row["label"] == "A>B"
            answers = [row["response_A"], row["response_B"]] if a_wins else [row["response_B"], row["response_A"]]
            question, source, name = row["question"], str(row["source"]), row.get("pair_id", number)
        else:
            _require(row, ("prompt", "chosen", "rejected", "subset"), where)
            question, answers, source, name = row["prompt"], [row["chosen"], row["rejected"]], row["subset"], row["id"]
        subset = next((to for start, to in _JUDGEBENCH_SOURCES.items() if source.startswith(start)), None)
        subset = subset or source.removeprefix("judgebench-")
        items.append(Item(str(name), subset, as_messages(question, where, "question"), _texts(answers, where)))
    return items


def read_lists(dataset: str, split: str, *, subset: str) -> list[Item]:
    """Read rows whose chosen and rejected are lists of answers: RM-Bench (by domain) and RewardBench 2 (by subset)."""
    items = []
    for number, (where, row) in enumerate(records_of(dataset, split), 1):
        _require(row, ("prompt", "chosen", "rejected", subset), where)
        for side in ("chosen", "rejected"):
            if not isinstance(row[side], list) or not row[side]:
                raise ValueError(f"{where}: '{side}' is no list of answers; this benchmark gives several a side.")
        correct = row.get("num_correct") or len(row["chosen"])
        if correct != len(row["chosen"]):
            raise ValueError(f"{where}: num_correct is {correct} but 'chosen' holds {len(row['chosen'])} answers.")
        answers = _texts([*row["chosen"], *row["rejected"]], where)
        prompt = as_messages(row["prompt"], where, "prompt")
        items.append(Item(str(row.get("id", number)), str(row[subset]), prompt, answers, correct))
    return items


def read_marked(dataset: str, split: str) -> list[Item]:
    """Read answers with marked error spans: `response` with `spans`, or pairs whose rejected answer has `faults`.

    A span is {"start", "end", "kind" or "type"}: character offsets [start, end).
    """
    if dataset == EMBEDDED_PAIRS:
        pairs = everyday_pairs(split)
        return [Item(pair.id, pair.subset, pair.prompt, [pair.rejected], spans=pair.faults) for pair in pairs]
    items = []
    for number, (where, row) in enumerate(records_of(dataset, split), 1):
        response = row.get("response", row.get("rejected"))
        _require(row | {"response": response}, ("prompt", "response"), where)
        (text,) = _texts([response], where)
        spans = _spans(row.get("spans", row.get("faults")), text, where)
        prompt = as_messages(row["prompt"], where, "prompt")
        items.append(Item(str(row.get("id", number)), str(row.get("subset") or ""), prompt, [text], spans=spans))
    if not any(item.spans for item in items):
        raise ValueError(f"{dataset}: no response has a marked span ('spans' or 'faults'); nothing can be located.")
    return items


def _spans(marks: Any, text: str, where: str) -> tuple[Fault, ...]:
    try:
        spans = tuple(
            Fault(mark["start"], mark["end"], str(mark.get("kind", mark.get("type")))) for mark in marks or ()
        )
        inside = all(0 <= span.start < span.end <= len(text) for span in spans)
    except (TypeError, KeyError, AttributeError):
        inside = False
    if not inside:
        raise ValueError(
            f"{where}: 'spans' needs objects with start, end and kind (or type), 0 <= start < end <= the "
            f"{len(text)} characters of the response."
        )
    return spans


def _require(row: dict[str, Any], columns: tuple[str, ...], where: str) -> None:
    missing = [column for column in columns if row.get(column) is None]
    if missing:
        raise ValueError(f"{where}: lacks {', '.join(missing)} (found: {', '.join(sorted(row))}).")


def _texts(answers: list[Any], where: str) -> list[str]:
    for answer in answers:
        if not isinstance(answer, str) or not answer.strip():
            raise ValueError(f"{where}: an answer is {answer!r}; each must be a text that is not empty.")
    return answers
