"""Scores of the same prompts before and after training: where in the distribution the gain lies."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from policy.best_of import Candidates
from segrew.chat import Message
from segrew.metrics import bootstrap_interval
from segrew.records import read_records
from segrew.run_directory import RUN_FILE, read_json, write_json

GROUPS = ("worst quarter", "second quarter", "third quarter", "best quarter")
Scores = dict[str, list[float]]


def _key(prompt: list[Message]) -> str:
    return json.dumps([[message["role"], message["content"]] for message in prompt])


def scores_before(name: str, reward_model: str, prompts: list[list[Message]]) -> Scores:
    """Read the scores of a run of `segrew generate` or `segrew score`, by prompt.

    Raises:
        ValueError: there are none, none of these prompts, or they are another reward model's.
    """
    path = Path(name) / "scores.jsonl" if Path(name).is_dir() else Path(name)
    run_file = next((d / RUN_FILE for d in (path.parent, path.parent.parent) if (d / RUN_FILE).is_file()), None)
    other = read_json(run_file)["config"].get("reward_model") if run_file else None
    if other is not None and Path(other).resolve() != Path(reward_model).resolve():
        raise ValueError(
            f"--compare_to {name}: those answers were scored by {other}, these are by {reward_model}; scores of two "
            "reward models do not compare. Score the answers again with `segrew score`."
        )
    scores: Scores = defaultdict(list)
    for where, row in read_records(path):
        if not isinstance(row.get("score"), int | float) or not isinstance(row.get("prompt"), list):
            raise ValueError(f"{where}: no 'score' and 'prompt'; name what `segrew generate` or `segrew score` wrote.")
        if row.get("side"):
            raise ValueError(f"{where}: a side of a preference pair, not an answer of a model.")
        scores[_key(row["prompt"])].append(float(row["score"]))
    if not any(_key(prompt) in scores for prompt in prompts):
        raise ValueError(f"--compare_to {name}: it scored answers to none of these prompts.")
    return dict(scores)


def write_comparison(directory: Path, before: Scores, candidates: list[Candidates], console: Console) -> None:
    """Compare the scores of answers just drawn with earlier ones; write and print what came of it."""
    after: Scores = defaultdict(list)
    for one in candidates:
        after[_key(one.prompt)] += one.scores
    record = compare(before, after)
    write_json(directory / "comparison.json", record)
    plot_comparison(record, directory / "comparison.svg")
    console.print(comparison_table(record))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def compare(before: Scores, after: Scores) -> dict[str, Any]:
    """Gain in mean score by quarter of the earlier score, with paired bootstrap intervals over prompts.

    A prompt ranked worst by a noisy score gains from a second draw alone. So where each prompt has two earlier
    answers or more, one half of them ranks it and the other half is what the gain is measured from.
    """
    shared = [key for key in before if key in after]
    halves = all(len(before[key]) > 1 for key in shared)
    rank, base = ({key: _mean(before[key][start::step]) for key in shared}
                  for start, step in (((0, 2), (1, 2)) if halves else ((0, 1), (0, 1))))  # fmt: skip
    ordered = sorted(shared, key=lambda key: rank[key])
    cuts = [round(len(ordered) * part / len(GROUPS)) for part in range(len(GROUPS) + 1)]
    parts = {name: ordered[low:high] for name, low, high in zip(GROUPS, cuts, cuts[1:], strict=False)}
    groups = [_group(name, keys, base, after) for name, keys in parts.items() if keys]
    everything = {key: _mean(before[key]) for key in shared}
    return {
        "prompts": len(shared),
        "only_before": len(before) - len(shared),
        "only_after": len(after) - len(shared),
        "ranked_by": "half of the earlier answers, gains from the other half" if halves else "the same earlier answer",
        "groups": [*groups, _group("all", shared, everything, after)],
        "joint": [[everything[key], _mean(after[key])] for key in shared],
    }


def _group(name: str, keys: list[str], base: dict[str, float], after: Scores) -> dict[str, Any]:
    gains = [_mean(after[key]) - base[key] for key in keys]
    earlier = _mean([base[key] for key in keys])
    row = {"group": name, "prompts": len(keys), "before": earlier, "after": earlier + _mean(gains)}
    return row | {"gain": _mean(gains), "ci95": list(bootstrap_interval(gains))}


def comparison_table(record: dict[str, Any]) -> Table:
    """The gains as a table; its title warns where regression to the mean is part of them."""
    warning = "" if "half" in record["ranked_by"] else " (one earlier answer a prompt: quarters regress to the mean)"
    table = Table(
        "earlier score", "prompts", "before", "after", "gain", "95 % interval", title=f"Gain in score{warning}"
    )
    for row in record["groups"]:
        numbers = (f"{row[name]:+.3f}" for name in ("before", "after", "gain"))
        table.add_row(row["group"], str(row["prompts"]), *numbers, f"{row['ci95'][0]:+.3f} to {row['ci95'][1]:+.3f}")
    return table


def plot_comparison(record: dict[str, Any], path: Path) -> None:
    """Draw the joint distribution of both scores, and the gain by quarter of the earlier one."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    joint, gains = figure.subplots(1, 2)
    before, after = zip(*record["joint"], strict=True)
    ends = [min(before + after), max(before + after)]
    joint.plot(ends, ends, color="0.6", lw=1)
    joint.plot(before, after, "o", ms=4, alpha=0.5)
    joint.set(xlabel="score before", ylabel="score after", title="One dot a prompt; on the line: no change")
    rows = record["groups"]
    errors = [[abs(row["gain"] - row["ci95"][side]) for row in rows] for side in (0, 1)]
    gains.errorbar(range(len(rows)), [row["gain"] for row in rows], yerr=errors, fmt="o", capsize=3)
    gains.axhline(0, color="0.6", lw=1)
    gains.set_xticks(range(len(rows)), [row["group"].replace(" ", "\n") for row in rows])
    gains.set(ylabel="gain", title="Gain by the earlier score, 95 %")
    figure.savefig(path)
