"""The charts of the report: units, reward against location and length, and what training logged."""

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reward_models.charts import Series, histogram, line_chart, location_chart, number, scatter_chart
from reward_models.length_bias import describe_length_bias, length_bias
from reward_models.report_answers import segments_of, tokens_of
from reward_models.report_runs import RunFiles, finite, mapping

_TRAINING_TITLES = {
    "Loss": {"loss": "training", "eval_loss": "evaluation"},
    "Accuracy": {"accuracy": "training", "eval_accuracy": "evaluation"},
    "Learning rate": {"learning_rate": "learning rate"},
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
DOTS, BINS = 400, 24  # points of a scatter chart, bars of a histogram


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
            figure("Mean reward", means, _r2(normalizer.r2.get("mean"))),
            figure("Spread of the reward", spreads, _r2(normalizer.r2.get("std"))),
        ],
        "mean_formula": f"{number(normalizer.w_mu)} ln p {_plus(normalizer.b_mu)}",
        "std_formula": f"exp({spread_line})" if normalizer.link == "log" else spread_line,
        "floor": normalizer.std_floor,
        "range": normalizer.fitted_range,
        "count": sum(b.count for b in bins),
        "bins": bins,
        "end_offset": normalizer.end_offset,
        "rule": normalizer.rule or normalizer.fingerprint,
        "mode": normalizer.mode,
        "length_bias": _length_bias_note(run),
    }


def _length_bias_note(run: RunFiles) -> str:
    """Score against length over the answers that the normalizer was fitted on, as `segrew calibrate` says it."""
    try:
        return describe_length_bias(mapping(run.calibration.get("length_bias"))).replace("-", "−")
    except (KeyError, TypeError, ValueError):
        return ""


def unit_lengths(run: RunFiles) -> dict[str, Any] | None:
    """How many tokens the units have: equal bars up to twice the 90 % quantile, the last with all that is longer."""
    lengths = sorted(
        int(n) for row in run.answers for s in segments_of(row) if (n := finite(s.get("tokens"))) and n > 0
    )
    if not lengths:
        return None
    long = lengths[int(0.9 * (len(lengths) - 1))]
    width = max(1, -(-2 * long // BINS))
    places = max(8, min(-(-lengths[-1] // width), BINS))
    counts = [0] * places
    for n in lengths:
        counts[min((n - 1) // width, places - 1)] += 1
    beyond = sum(n > places * width for n in lengths)
    title = "Tokens of a unit"
    note = f"mean {number(round(statistics.fmean(lengths), 2))}, median {number(lengths[(len(lengths) - 1) // 2])}, "
    note += f"90 % at most {long}, longest {number(lengths[-1])}; {number(len(lengths))} units"
    bars = [(i * width + 1, (i + 1) * width, count) for i, count in enumerate(counts)]
    svg = histogram(bars, label=f"{title}, {run.name}", x_label="tokens (share of units)")
    beyond_note = f"The last bar also holds {beyond} longer ones." if beyond else ""
    return figure(run.name, svg, says=f"{note}. {beyond_note}")


def length_bias_chart(run: RunFiles) -> dict[str, Any] | None:
    """Score against length of the scored answers, with the straight line through all of them."""
    scored = [
        (tokens, score, json.dumps(row.get("prompt"), sort_keys=True, default=str))
        for row in run.answers
        if (score := finite(row.get("score"))) is not None and (tokens := tokens_of(row))
    ]
    if len(scored) < 3:
        return None
    found = length_bias([y for _, y, _ in scored], [x for x, *_ in scored], [prompt for *_, prompt in scored])
    line, slope = None, found["slope"]
    if slope is not None:
        x0, y0 = statistics.fmean(x for x, *_ in scored), statistics.fmean(y for _, y, _ in scored)
        line = (slope / 100, y0 - slope / 100 * x0)
    points = [(x, y) for x, y, _ in scored[:: -(-len(scored) // DOTS)]]
    svg = scatter_chart(points, line, label=f"Score against length, {run.name}", x_label="tokens of the answer")
    drawn = "" if len(points) == len(scored) else f" {len(points)} of {len(scored)} are drawn."
    return figure(run.name, svg, says=f"{describe_length_bias(found)}.{drawn}".replace("-", "−"))


def training_curves(run: RunFiles) -> dict[str, Any]:
    """Loss and accuracy of training and evaluation in one chart each, then what else was logged."""
    columns = {key: points for key, points in columns_of(run.training).items() if key not in _BOOKKEEPING}
    charts = []
    for title, keys in _TRAINING_TITLES.items():
        held = [Series(name, columns.pop(key)) for key, name in keys.items() if len(columns.get(key, [])) > 1]
        charts += [chart(title, held)] if held else []
    return {"name": run.name, "charts": charts, **rest(columns)}


def rest(columns: Mapping[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """Curves without a title of their own; what has one value only is no curve but a fact."""
    names = sorted(columns)
    return {
        "more": [chart(name, [Series(name, columns[name])]) for name in names if len(columns[name]) > 1],
        "facts": [f"{name} {number(columns[name][0][1])}" for name in names if len(columns[name]) == 1],
    }


def columns_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    columns: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for i, row in enumerate(rows):
        step = finite(row.get("step"))
        for key, value in row.items():
            if key != "step" and (y := finite(value)) is not None:
                columns[str(key)].append((float(i) if step is None else step, y))
    return dict(columns)


def chart(title: str, series: list[Series], *, legend: bool = True) -> dict[str, Any]:
    """A line chart with its caption; without a legend the page must say elsewhere which line is which."""
    values = [number(s.points[-1][1]) for s in series if s.points]
    names = [s.name for s in series] if legend and len(series) > 1 else []
    return figure(title, line_chart(series, label=title), f"last {', '.join(values)}" if legend else "", legend=names)


def figure(title: str, svg: str, note: str = "", *, says: str = "", legend: Sequence[str] = ()) -> dict[str, Any]:
    """A chart as the template takes it: note beside the title, says below the drawing."""
    return {"title": title, "svg": svg, "note": note, "says": says, "legend": legend}


def _plus(value: float) -> str:
    return f"{'+' if value >= 0 else '−'} {number(abs(value))}"


def _r2(value: float | None) -> str:
    return "R² not defined: one location" if value is None else f"R² = {number(round(value, 2))}"
