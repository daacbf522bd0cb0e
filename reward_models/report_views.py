"""The answers of the report: which are shown, beside which, and in what order."""

from collections import defaultdict
from typing import Any

from reward_models.report_answers import Answer, RewardScale, answer_view, fault_contrast, faults_of, segments_of
from reward_models.report_runs import RunFiles

FEATURED, MORE = 8, 40


def answers(run: RunFiles) -> dict[str, Any] | None:
    """Responses coloured by segment reward, chosen and rejected of one pair side by side."""
    rows = [row for row in run.answers if segments_of(row)]
    if not rows:
        return None
    scale = RewardScale.of(rows)
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for i, row in enumerate(rows):
        groups[str(row["id"]) if row.get("id") is not None and row.get("side") else f"row {i}"].append(row)
    ordered = _reading_order(list(groups.values()))
    shown, more = ordered[:FEATURED], ordered[FEATURED : FEATURED + MORE]
    return {
        "name": run.name,
        "normalized": scale.normalized,
        "shown": [_group(group, scale) for group in shown],
        "more": [_group(group, scale) for group in more],
        "total": len(ordered),
        "with_faults": sum(any(faults_of(row) for row in group) for group in ordered),
        "contrast": fault_contrast(rows, scale),
    }


def _reading_order(groups: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """Marked faults first, their kinds in turn, answers of four segments or more first, short ones first.

    Never by result: the page must not pick the answers that flatter the model.
    """

    def ease(group: list[dict[str, Any]]) -> tuple[bool, int]:
        most = max(len(segments_of(row)) for row in group)
        return most < 4, sum(len(str(row.get("response") or "")) for row in group)

    turns: dict[str, int] = defaultdict(int)
    places = []
    for group in sorted(groups, key=ease):
        kind = next((fault[2] for row in group for fault in faults_of(row)), "")
        places.append(((not kind, turns[kind]), group))
        turns[kind] += 1
    return [group for _, group in sorted(places, key=lambda place: place[0])]


def _group(rows: list[dict[str, Any]], scale: RewardScale) -> dict[str, Any]:
    views = sorted((answer_view(row, scale) for row in rows), key=lambda answer: answer.side or "")
    chosen, rejected = ([a.score for a in views if a.side == side] for side in ("chosen", "rejected"))
    verdict = None
    if len(chosen) == len(rejected) == 1 and chosen[0] is not None and rejected[0] is not None:
        verdict = "right" if chosen[0] > rejected[0] else "tie" if chosen[0] == rejected[0] else "wrong"
    return {"answers": views, "prompt": views[0].prompt, "earlier": views[0].earlier, "verdict": verdict}


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
        "normalized": scale.normalized,
        "coloured": any(segments_of(row) for row in run.samples),
        "shown": groups[:4],
        "more": groups[4 : 4 + MORE],
        "total": len(run.samples),
        "prompts": len(groups),
    }
