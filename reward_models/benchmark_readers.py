"""A row of each benchmark's own record format as an item; `read_items` reads them from a file or the hub."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from reward_models.benchmark_items import Item, item_of_pair
from reward_models.rewardbench_sections import PRIOR_SETS
from segrew.data_options import DataOptions
from segrew.dataset_formats import Row, Unusable
from segrew.preferences import Fault, as_messages, pair_of, template_arguments
from segrew.sources import Source, load, stage_key

ReadRow = Callable[[Row, str], Item]

_JUDGEBENCH_SOURCES = {
    "mmlu-pro": "knowledge",
    "livebench-reasoning": "reasoning",
    "livebench-math": "math",
    "livecodebench": "coding",
}


def read_items(
    dataset: str, split: str, read: ReadRow, options: DataOptions | None = None
) -> tuple[list[Item], list[Source]]:
    """Read a benchmark's rows; those that cannot be scored are left out and counted by reason.

    Raises:
        ValueError: a row is not in the format; the message names file and line.
    """

    def key(item: Item) -> str:
        return str(item.ids[0]) if item.ids else stage_key(item.prompt) if item.prompt else item.answers[0]

    return load(dataset, split, options or DataOptions(), read, key, what="rows")


def read_prior_sets(dataset: str, options: DataOptions | None = None) -> tuple[list[Item], list[Source]]:
    """Read RewardBench's prior sets: a file whose rows name their subset, or the hub's set with a split for each."""
    if Path(dataset).exists() or ".json" in Path(dataset).name:
        return read_items(dataset, "train", prior_item, options)
    read = partial(pair_item, keep_identical=True)
    parts = [read_items(dataset, name, read, options) for name in PRIOR_SETS]
    items = [replace(item, subset=name) for name, (held, _) in zip(PRIOR_SETS, parts, strict=True) for item in held]
    return items, [source for _, sources in parts for source in sources]


def pair_item(row: Row, where: str, *, keep_identical: bool = False) -> Item:
    """A preference pair; RewardBench's own rows all count, so there equal answers stay, as ties."""
    return item_of_pair(pair_of(row, where, keep_identical=keep_identical))


def rewardbench_item(row: Row, where: str) -> Item:
    """RewardBench v1: prompt, chosen, rejected, subset, id."""
    item = pair_item(row, where, keep_identical=True)
    if not item.subset:
        raise ValueError(f"{where}: rows without a 'subset' are not in RewardBench's format; use --benchmark pairs.")
    return item


def prior_item(row: Row, where: str) -> Item:
    """A pair of one of RewardBench's prior sets."""
    item = rewardbench_item(row, where)
    if item.subset not in PRIOR_SETS:
        raise ValueError(f"{where}: {item.subset} is none of the prior sets ({', '.join(PRIOR_SETS)}).")
    return item


def judgebench_item(row: Row, where: str) -> Item:
    """JudgeBench: question, two responses and a label, or the same as a pair with its subset."""
    if "response_A" in row:
        _require(row, ("question", "response_B", "label", "source"), where)
        if row["label"] not in ("A>B", "B>A"):
            raise ValueError(f"{where}: label is {row['label']!r}; JudgeBench has A>B and B>A.")
        sides = ("A", "B") if row["label"] == "A>B" else ("B", "A")
        answers, prompt = [row[f"response_{side}"] for side in sides], as_messages(row["question"], where, "question")
        item = Item(_name(row | {"id": row.get("pair_id")}, where), str(row["source"]), prompt, _texts(answers))
    else:
        item = rewardbench_item(row, where)
    known = next((to for start, to in _JUDGEBENCH_SOURCES.items() if item.subset.startswith(start)), None)
    return replace(item, subset=known or item.subset.removeprefix("judgebench-"))


def list_item(row: Row, where: str, *, subset: str) -> Item:
    """Chosen and rejected as lists of answers: RM-Bench (subset by domain) and RewardBench 2."""
    _require(row, ("prompt", "chosen", "rejected", subset), where)
    for side in ("chosen", "rejected"):
        if not isinstance(row[side], list) or not row[side]:
            raise ValueError(f"{where}: '{side}' is no list of answers; this benchmark gives several a side.")
    correct = len(row["chosen"])
    if (row.get("num_correct") or correct) != correct:
        raise ValueError(f"{where}: num_correct is {row['num_correct']} but 'chosen' holds {correct} answers.")
    prompt, template = as_messages(row["prompt"], where, "prompt"), template_arguments(row, where)
    answers = _texts([*row["chosen"], *row["rejected"]])
    return Item(_name(row, where), str(row[subset]), prompt, answers, correct, template=template)


def marked_item(row: Row, where: str) -> Item:
    """An answer with marked error spans: `response` with `spans`, or a pair whose rejected answer has `faults`.

    A span is {"start", "end", "kind" or "type"}: character offsets [start, end).
    """
    if "response" not in row and "chosen" in row:
        pair = pair_of(row | {"faults": None}, where, keep_identical=True)
        row = row | {"prompt": pair.prompt, "response": pair.rejected}
    row = row | {"response": row.get("response", row.get("rejected"))}
    _require(row, ("prompt", "response"), where)
    (text,) = _texts([row["response"]])
    spans = _spans(row.get("spans", row.get("faults")), text, where)
    prompt, template = as_messages(row["prompt"], where, "prompt"), template_arguments(row, where)
    return Item(_name(row, where), str(row.get("subset") or ""), prompt, [text], spans=spans, template=template)


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


def _name(row: Row, where: str) -> str:
    return where.rsplit(" ", 1)[-1] if row.get("id") is None else str(row["id"])


def _require(row: Row, columns: tuple[str, ...], where: str) -> None:
    missing = [column for column in columns if row.get(column) is None]
    if missing:
        raise ValueError(f"{where}: lacks {', '.join(missing)} (found: {', '.join(sorted(row))}).")


def _texts(answers: list[Any]) -> list[str]:
    if not all(isinstance(answer, str) and answer.strip() for answer in answers):
        raise Unusable("empty answer")
    return answers
