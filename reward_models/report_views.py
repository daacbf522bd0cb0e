"""The answers of the report: which are shown, beside which, and in what order."""

import json
from collections import defaultdict
from collections.abc import Sequence
from math import isclose
from statistics import StatisticsError, correlation
from typing import Any

from reward_models.report_answers import Answer, RewardScale, answer_view, fault_contrast, faults_of, segments_of
from reward_models.report_runs import RunFiles, finite
from segrew.metrics import correlation_interval

FEATURED, MORE = 8, 40
MOST_SEGMENTS = 20_000  # on the page in all, so that it opens at once whatever the rule

Item = list[dict[str, Any]]  # one answer as each run of a view scored it
Texts = dict[tuple[str, int], dict[str, Any]]  # rows by what they score


def answers(runs: Sequence[RunFiles]) -> list[dict[str, Any]]:
    """Responses coloured by segment reward: both sides of a pair together, and all models that scored the same texts.

    Runs stand side by side where they share at least half of the answers of the smaller one; only what they share is
    shown then.
    """
    texts = [_texts(run.answers) for run in runs]
    texts = [{} if any(_repeats(held, other) for other in texts) else held for held in texts]
    views: list[tuple[list[int], list[tuple[str, int]]]] = []
    for i, held in enumerate(texts):
        for members, shared in views:
            common = [text for text in shared if text in held]
            if 2 * len(common) >= max(1, min(len(shared), len(held))):
                members.append(i)
                shared[:] = common
                break
        else:
            views += [([i], list(held))] if held else []
    return [
        _view([runs[i] for i in members], [[texts[i][t] for i in members] for t in shared]) for members, shared in views
    ]


def _repeats(held: Texts, other: Texts) -> bool:
    """Whether scores without segments are those that the same model has with segments elsewhere."""
    if any(segments_of(row) for row in held.values()) or not any(segments_of(row) for row in other.values()):
        return False
    pairs = [(finite(row.get("score")), finite(other.get(text, {}).get("score"))) for text, row in held.items()]
    return all(a is not None and b is not None and isclose(a, b, rel_tol=0.01, abs_tol=0.01) for a, b in pairs)


def _texts(rows: Sequence[dict[str, Any]]) -> Texts:
    """Rows by prompt and response, and by how many rows before have the same: pairs may share an answer."""
    held: Texts = {}
    times: dict[str, int] = defaultdict(int)
    for row in rows:
        turns = row.get("prompt") if row.get("prompt") is not None else [row.get("id"), row.get("side")]
        text = json.dumps([turns, row.get("response")], sort_keys=True, default=str)
        held[text, times[text]] = row
        times[text] += 1
    return held


def _view(runs: list[RunFiles], items: list[Item]) -> dict[str, Any]:
    scales = [RewardScale.of([item[k] for item in items]) for k in range(len(runs))]
    groups: dict[str, list[Item]] = defaultdict(list)
    for i, item in enumerate(items):
        row = item[0]
        groups[str(row["id"]) if row.get("id") is not None and row.get("side") else f"row {i}"].append(item)
    ordered = _reading_order(list(groups.values()))
    drawn, count = 0, 0
    for group in ordered[: FEATURED + MORE]:
        count += sum(len(segments_of(row)) for item in group for row in item)
        if drawn and count > MOST_SEGMENTS:
            break
        drawn += 1
    names = [run.name for run in runs]
    shown = [_group(group, names, scales) for group in ordered[:drawn]]
    contrasts = [fault_contrast([item[k] for item in items], scale) for k, scale in enumerate(scales)]
    return {
        "name": " · ".join(names),
        "scales": _scale_notes(names, scales, items),
        "coloured": any("reward" in segment for item in items for row in item for segment in segments_of(row)),
        "shown": shown[:FEATURED],
        "more": shown[FEATURED:],
        "total": len(ordered),
        "unshared": [(run.name, len(run.answers)) for run in runs if len(run.answers) > len(items) and len(runs) > 1],
        "with_faults": sum(any(faults_of(row) for item in group for row in item) for group in ordered),
        "contrasts": [(name, found) for name, found in zip(names, contrasts, strict=True) if found],
        "agreement": [_agreement(names, items, list(groups.values()), k) for k in range(1, len(runs))],
    }


def _scale_notes(names: list[str], scales: list[RewardScale], items: list[Item]) -> list[str]:
    """What the colours of each model mean, said once where it is the same for all."""
    notes = []
    for k, scale in enumerate(scales):
        if not any("reward" in segment for item in items for segment in segments_of(item[k])):
            notes.append("no rewards of segments: only the text, its units where known, and the score of the whole")
        elif scale.normalized:
            notes.append("−2 to +2 standard deviations from what is usual at that place in an answer")
        else:
            notes.append("−2 to +2 standard deviations of the raw segment rewards (no normalizer)")
    return notes[:1] if len(set(notes)) == 1 else [f"{n}: {note}" for n, note in zip(names, notes, strict=True)]


def _agreement(names: list[str], items: list[Item], groups: list[list[Item]], k: int) -> str:
    """How far the scores of the first model and of another go together, in words."""
    scores = [(finite(item[0].get("score")), finite(item[k].get("score"))) for item in items]
    both = [(a, b) for a, b in scores if a is not None and b is not None]
    said = f"{names[0]} and {names[k]}"
    try:
        r = correlation([a for a, _ in both], [b for _, b in both]) if len(both) > 2 else None
    except StatisticsError:  # one of them gives every answer the same score
        r = None
    if r is None:
        said += ": correlation of scores not defined"
    else:
        low, high = correlation_interval(r, len(both))
        said += f": correlation of scores {r:.2f} ({low:.2f} to {high:.2f}, 95 %) over {len(both)} answers"
    verdicts = [tuple(_verdict([item[j] for item in group]) for j in (0, k)) for group in groups]
    pairs = [pair for pair in verdicts if None not in pair]
    same = sum(a == b for a, b in pairs)
    return said.replace("-", "−") + (f"; the same verdict on {same} of {len(pairs)} pairs." if pairs else ".")


def _reading_order(groups: list[list[Item]]) -> list[list[Item]]:
    """Marked faults first, their kinds in turn, answers of four segments or more first, short ones first.

    Never by result: the page must not pick the answers that flatter a model.
    """

    def ease(group: list[Item]) -> tuple[bool, int]:
        most = max(len(segments_of(row)) for item in group for row in item)
        return most < 4, sum(len(str(item[0].get("response") or "")) for item in group)

    turns: dict[str, int] = defaultdict(int)
    places = []
    for group in sorted(groups, key=ease):
        kind = next((fault[2] for item in group for row in item for fault in faults_of(row)), "")
        places.append(((not kind, turns[kind]), group))
        turns[kind] += 1
    return [group for _, group in sorted(places, key=lambda place: place[0])]


def _group(group: list[Item], names: list[str], scales: list[RewardScale]) -> dict[str, Any]:
    """What belongs together on the page: `rows` of answers, a pair in one row for one model, a row a side for more."""
    items = sorted(group, key=lambda item: str(item[0].get("side") or ""))
    views = [[answer_view(row, scale) for row, scale in zip(item, scales, strict=True)] for item in items]
    several = len(names) > 1
    verdicts = [(name if several else "", _verdict([item[k] for item in items])) for k, name in enumerate(names)]
    first = views[0][0]
    who = [[(name if several else "", answer) for name, answer in zip(names, row, strict=True)] for row in views]
    return {
        "rows": who if several else [[answer for row in who for answer in row]],
        "prompt": first.prompt or first.identity,
        "earlier": first.earlier,
        "verdicts": [(name, verdict) for name, verdict in verdicts if verdict],
    }


def _verdict(rows: list[dict[str, Any]]) -> str | None:
    chosen, rejected = ([finite(r.get("score")) for r in rows if r.get("side") == s] for s in ("chosen", "rejected"))
    if not (len(chosen) == len(rejected) == 1) or chosen[0] is None or rejected[0] is None:
        return None
    return "right" if chosen[0] > rejected[0] else "tie" if chosen[0] == rejected[0] else "wrong"


def samples(run: RunFiles) -> dict[str, Any] | None:
    """For each prompt its first and last answer over training, the prompts with most change of step first."""
    scale = RewardScale.of(run.samples)
    by_prompt: dict[str, list[Answer]] = defaultdict(list)
    for row in run.samples:
        view = answer_view(row, scale)
        if view.length or view.score is not None:
            by_prompt[view.prompt].append(view)
    groups = []
    for prompt, views in by_prompt.items():
        views.sort(key=lambda answer: answer.step if answer.step is not None else -1.0)
        ends = [views[0], views[-1]] if len(views) > 1 else views
        groups.append({"prompt": prompt, "ends": ends, "between": views[1:-1][:MORE]})
    groups.sort(key=lambda group: len(group["between"]), reverse=True)
    if not groups:
        return None
    return {
        "name": run.name,
        "scales": _scale_notes([run.name], [scale], [[row] for row in run.samples]),
        "coloured": any(segments_of(row) for row in run.samples),
        "shown": groups[:4],
        "more": groups[4 : 4 + MORE],
        "total": len(run.samples),
        "prompts": len(groups),
    }
