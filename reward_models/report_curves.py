"""The charts of the report: reward against location, and what training logged."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from reward_models.charts import Series, line_chart, location_chart, number
from reward_models.report_runs import RunFiles, finite, held_out_scores

_TRAINING_TITLES = {
    "Loss": {"loss": "training", "eval_loss": "evaluation"},
    "Accuracy": {"accuracy": "training", "eval_accuracy": "evaluation"},
    "Learning rate": {"learning_rate": "learning rate"},
}
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
_BOOKKEEPING = {
    "epoch",
    "total_flos",
    "eval_runtime",
    "eval_samples_per_second",
    "eval_steps_per_second",
    "train_samples_per_second",
    "train_steps_per_second",
}


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
    spread_line = f"{number(normalizer.w_sigma)} ln p {_plus(normalizer.b_sigma)}"
    return {
        "name": run.name,
        "charts": [
            {"title": "Mean reward", "svg": means, "note": _r2(normalizer.r2.get("mean")), "legend": []},
            {"title": "Spread of the reward", "svg": spreads, "note": _r2(normalizer.r2.get("std")), "legend": []},
        ],
        "mean_formula": f"{number(normalizer.w_mu)} ln p {_plus(normalizer.b_mu)}",
        "std_formula": f"exp({spread_line})" if normalizer.link == "log" else spread_line,
        "floor": normalizer.std_floor,
        "range": normalizer.fitted_range,
        "count": sum(b.count for b in bins),
        "bins": bins,
        "end_offset": normalizer.end_offset,
        "rule": normalizer.rule or normalizer.fingerprint,
    }


def training_curves(run: RunFiles) -> dict[str, Any]:
    """Loss and accuracy of training and evaluation in one chart each, then what else was logged."""
    columns = {key: points for key, points in _columns(run.training).items() if key not in _BOOKKEEPING}
    charts = []
    for title, keys in _TRAINING_TITLES.items():
        held = [Series(name, columns.pop(key)) for key, name in keys.items() if len(columns.get(key, [])) > 1]
        charts += [_chart(title, held)] if held else []
    return {"name": run.name, "charts": charts, **_rest(columns)}


def policy_curves(run: RunFiles) -> dict[str, Any]:
    """The curves that tell whether PPO works, then all others."""
    columns = _columns(run.policy)
    if held_out := held_out_scores(run):
        columns["eval/score"] = held_out
    main = [key for key in _POLICY_TITLES if len(columns.get(key, [])) > 1]
    charts = [_chart(_POLICY_TITLES[key], [Series(_POLICY_TITLES[key], columns.pop(key))]) for key in main]
    return {"name": run.name, "charts": charts, **_rest(columns)}


def _rest(columns: Mapping[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """Curves without a title of their own; what has one value only is no curve but a fact."""
    names = sorted(columns)
    return {
        "more": [_chart(name, [Series(name, columns[name])]) for name in names if len(columns[name]) > 1],
        "facts": [f"{name} {number(columns[name][0][1])}" for name in names if len(columns[name]) == 1],
    }


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
