"""The first screen of the report: the figures that say how good the run is."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from reward_models.charts import number
from reward_models.report_answers import RewardScale, fault_contrast
from reward_models.report_policy import Arm, arms
from reward_models.report_runs import RunFiles, finite, finite_pair, held_out_scores, mapping, records
from segrew.metrics import mean_interval

_SHARES = ("accuracy", "share", "rate", "spans", "wins")  # words of a label whose figure is shown in per cent
MOST = 9  # tiles on the first screen


def facts(runs: Sequence[RunFiles]) -> list[str]:
    """Model, scale and date, each once."""
    found = []
    for run in runs:
        model = run.summary.get("model") or mapping(run.run.get("config")).get("model_name_or_path")
        scale = f"scale {run.summary['scale']}" if run.summary.get("scale") else ""
        found += [str(fact) for fact in (model, scale) if fact]
    started = [str(run.run["started"]) for run in runs if run.run.get("started")]
    when = [f"started {min(started).replace('T', ' ')[:16]}"] if started else []
    return list(dict.fromkeys(found))[:4] + when


def tiles(runs: Sequence[RunFiles]) -> list[dict[str, Any]]:
    """The headline figures of a demo's summary, or else those that the other files give away.

    An item has label, value, low, high, note and may have reference: chance or baseline, a tick on its strip.
    """
    headline = [item for run in runs for item in records(run.summary.get("headline"))]
    if headline:
        return [_tile(item) for item in headline]
    kinds = (_benchmark_tile, _localisation_tile, _fault_tile, _judge_tile)
    found = [(run.name, kind(run)) for kind in kinds for run in runs]
    found += [(arm.name, _policy_tile(arm)) for arm in arms([run for run in runs if held_out_scores(run)])]
    made = [(name, tile) for name, tile in found if tile]
    times = Counter(tile["label"] for _, tile in made)
    for name, tile in made:
        if times[tile["label"]] > 1:
            tile["note"] = f"{name}; {tile['note']}" if tile["note"] else name
    return [_tile(tile) for _, tile in made[:MOST]]


def _tile(item: Mapping[str, Any]) -> dict[str, Any]:
    value, low, high = (finite(item.get(key)) for key in ("value", "low", "high"))
    label = str(item.get("label") or "")
    inside_one = value is not None and all(x is None or 0 <= x <= 1 for x in (value, low, high))
    is_share = inside_one and any(word in label.lower() for word in _SHARES)
    from_0_to_1 = is_share or (inside_one and "AUC" in label)

    def show(x: int | float) -> str:
        return f"{100 * x:.0f}\N{NO-BREAK SPACE}%" if is_share else number(x)

    tile = {
        "label": label,
        "value": str(item.get("value", "–")) if value is None else show(value),
        "note": str(item.get("note") or ""),
        "interval": "",
        "strip": None,
    }
    if value is None or low is None or high is None:
        return tile
    reference = finite(item.get("reference"))
    if reference is None and (not is_share or "accuracy" in label.lower()):
        reference = 0.5 if is_share else 0.0
    reach = 1.15 * max(abs(low), abs(high), abs(value), abs(reference or 0.0), 1e-9)
    start, end = (0.0, 1.0) if from_0_to_1 else (-reach, reach)
    places = {"low": low, "high": high, "value": value, "tick": reference}
    strip = {k: None if x is None else f"{100 * (x - start) / (end - start):.1f}" for k, x in places.items()}
    strip |= {"from": show(start), "to": show(end), "middle": None if reference is None else show(reference)}
    return {**tile, "interval": f"{show(low)} to {show(high)}", "strip": strip}


def _benchmark_tile(run: RunFiles) -> dict[str, Any] | None:
    if run.results.get("methods"):
        return None
    baseline = mapping(run.results.get("length_baseline"))
    accuracy, beside = finite(run.results.get("overall")), finite(baseline.get("overall"))
    low = high = None
    if accuracy is None:  # no sections: all pairs, each counted once
        pooled = mapping(run.results.get("pooled"))
        accuracy, beside = finite(pooled.get("accuracy")), finite(mapping(baseline.get("pooled")).get("accuracy"))
        low, high = finite_pair(pooled.get("ci95"))
    if accuracy is None:
        return None
    note = f"longer answer wins: {100 * beside:.0f} %" if beside is not None else ""
    name = str(run.results.get("benchmark") or "benchmark")
    return {"label": f"{name} accuracy", "value": accuracy, "low": low, "high": high, "note": note}


def _fault_tile(run: RunFiles) -> dict[str, Any] | None:
    scale = RewardScale.of(run.answers)
    contrast = fault_contrast(run.answers, scale)
    if contrast is None:
        return None
    beside = f"{number(round(contrast['other'], 2))} in the {contrast['other_n']} segments beside them"
    return {
        "label": "Mean reward in marked errors",
        "value": round(contrast["faulty"], 2),
        "note": f"{beside}; in standard deviations",
    }


def _localisation_tile(run: RunFiles) -> dict[str, Any] | None:
    auc = mapping(mapping(mapping(run.results.get("methods")).get("segments")).get("auc"))
    if finite(auc.get("value")) is None:
        return None
    low, high = finite_pair(auc.get("ci95"))
    note = f"{auc.get('n', '')} answers with marked errors; 0.5 is chance"
    item = {"label": "AUC of low reward on marked errors", "value": round(auc["value"], 3), "note": note}
    return {**item, "low": low, "high": high, "reference": 0.5}


def _judge_tile(run: RunFiles) -> dict[str, Any] | None:
    dimensions = {name: mapping(row) for name, row in mapping(run.judge.get("dimensions")).items()}
    known = {name: rate for name, row in dimensions.items() if (rate := finite(row.get("win_rate"))) is not None}
    if not known:
        return None
    name = "overall" if "overall" in known else next(iter(known))
    low, high = finite_pair(dimensions[name].get("ci95"))
    note = f"{dimensions[name].get('n', '')} pairs, a tie counts half; 50 % is a draw"
    item = {"label": f"Judge's win rate, {name}", "value": known[name], "note": note}
    return {**item, "low": low, "high": high, "reference": 0.5}


def _policy_tile(arm: Arm) -> dict[str, Any] | None:
    """Change of the held-out score: of one run with its interval over prompts, of several seeds with their range."""
    ends = [(scores[0][1], scores[-1][1]) for run in arm.runs if len(scores := held_out_scores(run)) > 1]
    if not ends:
        return None
    before, after = (sum(column) / len(ends) for column in zip(*ends, strict=True))
    note = f"{number(round(before, 3))} before, {number(round(after, 3))} after, on held-out prompts"
    tile: dict[str, Any] = {"label": "Score change by PPO", "value": round(after - before, 3), "note": note}
    if len(ends) > 1:
        changes = [b - a for a, b in ends]
        low, high = (number(round(edge(changes), 3)) for edge in (min, max))
        return {**tile, "note": f"{note}; {low} to {high} over {len(ends)} seeds"}
    evaluation = arm.runs[0].evaluation
    pairs = list(zip(*(_scores(evaluation[i]) for i in (0, -1)), strict=False)) if evaluation else []
    changes = [b - a for a, b in pairs if a is not None and b is not None]
    if len(changes) > 1:
        tile["value"], tile["low"], tile["high"] = mean_interval(changes)
    return tile


def _scores(row: Mapping[str, Any]) -> list[float | None]:
    scores = row.get("scores")
    return [finite(score) for score in scores] if isinstance(scores, list) else []
