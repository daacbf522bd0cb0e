"""One function per part of the report: from a run's files to what the template prints."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reward_models.charts import Series, line_chart, location_chart, number
from reward_models.report_answers import (
    Answer,
    RewardScale,
    answer_view,
    fault_contrast,
    faults_of,
    segments_of,
)
from reward_models.report_runs import RunFiles, finite, finite_pair, mapping, records

FEATURED, MORE = 8, 40
_SHARES = ("accuracy", "share", "rate", "spans", "wins")  # words of a label whose figure is shown in per cent
_POLICY_TITLES = {
    "eval/score": "Score on held-out prompts",
    "reward/score": "Score of sampled answers",
    "kl/k1": "KL to the reference (k1)",
    "response/length": "Tokens per answer",
    "units/count": "Units per answer",
    "policy/entropy": "Policy entropy",
    "value/explained_variance": "Explained variance of values",
    "policy/clip_fraction": "Clipped share of tokens",
}


# at a glance


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
    found = [tile for kind in (_benchmark_tile, _fault_tile, _policy_tile) for run in runs if (tile := kind(run))]
    return [_tile(tile) for tile in found]


def _tile(item: Mapping[str, Any]) -> dict[str, Any]:
    value, low, high = (finite(item.get(key)) for key in ("value", "low", "high"))
    label = str(item.get("label") or "")
    inside_one = value is not None and all(x is None or 0 <= x <= 1 for x in (value, low, high))
    is_share = inside_one and any(word in label.lower() for word in _SHARES)

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
    start, end = (0.0, 1.0) if is_share else (-reach, reach)
    places = {"low": low, "high": high, "value": value, "tick": reference}
    strip = {k: None if x is None else f"{100 * (x - start) / (end - start):.1f}" for k, x in places.items()}
    strip |= {"from": show(start), "to": show(end), "middle": None if reference is None else show(reference)}
    return {**tile, "interval": f"{show(low)} to {show(high)}", "strip": strip}


def _benchmark_tile(run: RunFiles) -> dict[str, Any] | None:
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
        "label": "Mean reward in marked faults",
        "value": round(contrast["faulty"], 2),
        "note": f"{beside}; in standard deviations",
    }


def _policy_tile(run: RunFiles) -> dict[str, Any] | None:
    scores = [score for row in run.policy if (score := finite(row.get("eval/score"))) is not None]
    if len(scores) < 2:
        return None
    return {
        "label": "Score change by PPO",
        "value": scores[-1] - scores[0],
        "note": f"{number(scores[0])} before, {number(scores[-1])} after, on held-out prompts",
    }


# answers


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


# location


def location(run: RunFiles) -> dict[str, Any]:
    """Reward against location: the bins of the fit with both curves, and the figures of the fit."""
    normalizer = run.normalizer
    assert normalizer is not None
    bins = normalizer.bins
    means = location_chart(
        [(b.location, b.mean, b.count) for b in bins],
        normalizer.mean,
        band=normalizer.std,
        label="Mean reward by location, with one standard deviation",
    )
    spreads = location_chart(
        [(b.location, b.std, b.count) for b in bins],
        normalizer.std,
        label="Standard deviation of the reward by location",
    )
    return {
        "name": run.name,
        "charts": [
            {"title": "Mean reward", "svg": means, "note": _r2(normalizer.r2.get("mean")), "legend": []},
            {"title": "Spread of the reward", "svg": spreads, "note": _r2(normalizer.r2.get("std")), "legend": []},
        ],
        "mean_formula": f"{number(normalizer.w_mu)} ln p {_plus(normalizer.b_mu)}",
        "std_formula": f"{number(normalizer.w_sigma)} ln p {_plus(normalizer.b_sigma)}",
        "floor": normalizer.std_floor,
        "range": normalizer.fitted_range,
        "count": sum(b.count for b in bins),
        "bins": bins,
        "rule": normalizer.rule or normalizer.fingerprint,
    }


# curves


def training_curves(run: RunFiles) -> dict[str, Any] | None:
    """Loss of training and evaluation in one chart, then evaluation accuracy, then what else was logged."""
    columns = _columns(run.training)
    charts = []
    losses = [
        Series(name, columns.pop(key))
        for key, name in (("loss", "training"), ("eval_loss", "evaluation"))
        if key in columns
    ]
    if losses:
        charts.append(_chart("Loss", losses))
    for key, title in (("eval_accuracy", "Accuracy on evaluation pairs"), ("learning_rate", "Learning rate")):
        if key in columns:
            charts.append(_chart(title, [Series(title, columns.pop(key))]))
    skipped = ("train_", "epoch", "total_flos", "eval_runtime", "eval_samples", "eval_steps")
    more = [_chart(key, [Series(key, points)]) for key, points in columns.items() if not key.startswith(skipped)]
    return {"name": run.name, "charts": charts, "more": [c for c in more if c["svg"]]} if charts or more else None


def policy_curves(run: RunFiles) -> dict[str, Any] | None:
    """The curves that tell whether PPO works, then all others."""
    columns = _columns(run.policy)
    charts = [
        _chart(title, [Series(title, columns.pop(key))]) for key, title in _POLICY_TITLES.items() if key in columns
    ]
    more = [_chart(key, [Series(key, points)]) for key, points in sorted(columns.items()) if len(points) > 1]
    return {"name": run.name, "charts": charts, "more": more} if charts or more else None


def _columns(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    columns: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for i, row in enumerate(rows):
        step = finite(row.get("step"))
        for key, value in row.items():
            if key != "step" and (y := finite(value)) is not None:
                columns[str(key)].append((float(i) if step is None else step, y))
    return dict(columns)


def _chart(title: str, series: list[Series]) -> dict[str, Any]:
    values = [number(s.points[-1][1]) for s in series]
    last = "last " + ", ".join(values)
    return {
        "title": title,
        "svg": line_chart(series, label=title),
        "note": last,
        "legend": [s.name for s in series] if len(series) > 1 else [],
    }


def _plus(value: float) -> str:
    return f"{'+' if value >= 0 else '−'} {number(abs(value))}"


def _r2(value: float | None) -> str:
    return "R² not defined: one location" if value is None else f"R² = {value:.2f}"
