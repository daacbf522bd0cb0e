"""PPO in the report: runs that differ in the seed alone drawn as one, with the band that the seeds span."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reward_models.charts import LINES, Series, number
from reward_models.report_curves import chart, columns_of, rest
from reward_models.report_runs import RunFiles, finite, held_out_scores, mapping

_TITLES = {
    "eval/score": "Score on held-out prompts",
    "reward/score": "Score of sampled answers",
    "kl/k1": "KL to the reference (k1)",
    "response/length": "Tokens per answer",
    "units/count": "Units per answer",
    "policy/entropy": "Policy entropy",
    "value/explained_variance": "Explained variance of values",
    "policy/clip_fraction": "Clipped share of tokens",
}
_PLACE = {"seed", "output_dir", "overwrite_output_dir", "resume_from_checkpoint", "report_to"}  # no part of a method


@dataclass(frozen=True)
class Arm:
    """Runs of the same settings, under a name that tells them from the others."""

    name: str
    runs: list[RunFiles]


def arms(runs: Sequence[RunFiles]) -> list[Arm]:
    """Gather runs by their settings without seed and place; a run whose settings are unknown stands alone."""
    groups: dict[str, list[RunFiles]] = defaultdict(list)
    for run in runs:
        config = _method(run)
        groups[json.dumps(config, sort_keys=True, default=str) if config else f"run {run.name}"].append(run)
    configs = [_method(held[0]) for held in groups.values()]
    keys = _telling(configs)
    found = []
    for held, config in zip(groups.values(), configs, strict=True):
        name = ", ".join(f"{key} {config[key]}" for key in keys if key in config) or held[0].name
        found.append(Arm(f"{name}, {len(held)} seeds" if len(held) > 1 else name, held))
    return found


def _method(run: RunFiles) -> dict[str, Any]:
    return {key: value for key, value in mapping(run.run.get("config")).items() if key not in _PLACE}


def _telling(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The fewest settings, taken one by one, that tell the arms apart: the two rules before any other."""
    known = [config for config in configs if config]

    def kinds(keys: list[str]) -> int:
        return len({json.dumps([config.get(key) for key in keys], default=str) for config in known})

    found: list[str] = []
    all_keys = dict.fromkeys(key for config in known for key in config)
    for key in sorted(all_keys, key=lambda key: (not key.endswith("_rule"), -kinds([key]))):
        if kinds([*found, key]) > kinds(found):
            found.append(key)
    return found


def policy_curves(runs: Sequence[RunFiles]) -> list[dict[str, Any]]:
    """The curves that tell whether PPO works, then all others; so many arms on a chart as can be told apart."""
    held = arms([run for run in runs if run.policy])
    several = len(held) > 1 or any(len(arm.runs) > 1 for arm in held)
    return [_curves(held[i : i + LINES], several) for i in range(0, len(held), LINES)]


def _curves(held: list[Arm], several: bool) -> dict[str, Any]:
    columns = [[_columns(run) for run in arm.runs] for arm in held]
    keys = dict.fromkeys(key for of_arm in columns for of_run in of_arm for key in of_run)
    series = {key: _series(key, held, columns) for key in keys}
    curves = {key: lines for key, lines in series.items() if any(len(one.points) > 1 for one in lines)}
    main = [chart(title, curves.pop(key), legend=not several) for key, title in _TITLES.items() if key in curves]
    more = [chart(key, curves[key], legend=not several) for key in sorted(curves)]
    facts = [] if several else rest(columns[0][0])["facts"]
    return {
        "name": " · ".join(arm.name for arm in held),
        "charts": main,
        "more": more,
        "facts": facts,
        "bands": any(len(arm.runs) > 1 for arm in held),
        "arms": [_line(i, arm, columns[i]) for i, arm in enumerate(held)] if several else [],
    }


def _columns(run: RunFiles) -> dict[str, list[tuple[float, float]]]:
    columns = columns_of(run.policy)
    if scores := held_out_scores(run):
        columns["eval/score"] = scores
    return columns


def _series(key: str, held: list[Arm], columns: list[list[dict[str, list[tuple[float, float]]]]]) -> list[Series]:
    """One line an arm, in the order of the arms: the mean of its seeds at the steps that all of them have."""
    lines = []
    for arm, of_arm in zip(held, columns, strict=True):
        found = [dict(of_run[key]) for of_run in of_arm if key in of_run]
        steps = [x for x in found[0] if all(x in one for one in found)] if found else []
        values = [(x, [one[x] for one in found]) for x in steps]
        points = [(x, sum(ys) / len(ys)) for x, ys in values]
        lines.append(Series(arm.name, points, [(x, min(ys), max(ys)) for x, ys in values] if len(found) > 1 else []))
    return lines


def _line(i: int, arm: Arm, columns: list[dict[str, list[tuple[float, float]]]]) -> dict[str, Any]:
    """First and last figures of an arm, each a mean over its seeds with the lowest and the highest."""

    def of_seeds(key: str, place: int) -> str:
        values = [one[key][place][1] for one in columns if one.get(key)]
        if not values:
            return ""
        mean = number(round(sum(values) / len(values), 3))
        between = f" ({number(round(min(values), 3))} to {number(round(max(values), 3))})" if len(values) > 1 else ""
        return mean + between

    key = "eval/score" if any(one.get("eval/score") for one in columns) else "reward/score"
    timed = [
        [s for name, v in row.items() if name.startswith("time/") and (s := finite(v))]
        for run in arm.runs
        for row in run.policy
    ]
    timed = [row for row in timed if row]
    return {
        "number": i,
        "name": arm.name,
        "steps": number(max((x for one in columns for x, _ in one.get("reward/score", [])), default=None)),
        "first": of_seeds(key, 0),
        "last": of_seeds(key, -1),
        "kl": of_seeds("kl/k1", -1),
        "seconds": number(round(sum(map(sum, timed)) / len(timed), 2)) if timed else "",
    }
