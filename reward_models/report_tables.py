"""The parts of the report that are tables: benchmark, localisation, judge, seconds per stage, settings."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from reward_models.report_runs import RunFiles, finite, finite_pair, mapping, records
from reward_models.rewardbench_sections import PRIOR_SECTION, PRIOR_SETS, SUBSET_MAPPING

_METHODS = {
    "segments": "segment rewards (this model)",
    "prefix_difference": "differences of a whole-answer score over prefixes",
    "attention": "whole-answer score shared out by attention",
    "surprisal": "log-probability of the frozen model",
}
_SECTION_OF = {name: section for section, names in SUBSET_MAPPING.items() for name in names}
_SECTION_OF |= dict.fromkeys(PRIOR_SETS, PRIOR_SECTION)


def benchmark(run: RunFiles) -> dict[str, Any] | None:
    """Sections with their subsets under them; the length baseline beside each line."""
    results = run.results
    if results.get("methods"):
        return None
    subsets = {k: v for k, v in mapping(results.get("subsets")).items() if mapping(v)}
    sections = {k: v for k, v in mapping(results.get("sections")).items() if mapping(v)}
    if not subsets and not sections:
        return None
    baseline = mapping(results.get("length_baseline"))
    label = mapping(results.get("settings")).get("subset_label")
    lines, placed = [], set()

    def subset_line(name: str) -> dict[str, Any]:
        shown = f"{name} ({label})" if label else name
        return _line(shown, subsets[name], mapping(baseline.get("subsets")).get(name), "subset")

    for section, figures in sections.items():
        lines.append(_line(section, figures, mapping(baseline.get("sections")).get(section), "section"))
        members = [name for name in subsets if _SECTION_OF.get(name) == section]
        placed |= set(members)
        lines += [subset_line(name) for name in members]
    rest = [name for name in subsets if name not in placed]
    if rest and sections:
        lines.append({**_line("In no section", {}, None, "section"), "accuracy": ""})
    lines += [subset_line(name) for name in rest]
    pooled, pooled_baseline = mapping(results.get("pooled")), baseline.get("pooled")
    if pooled and len(subsets) > 1:
        lines.append(_line("All pairs, each counted once", pooled, pooled_baseline, "section"))
    overall, missing = finite(results.get("overall")), results.get("missing")
    return {
        "name": run.name,
        "benchmark": str(results.get("benchmark") or "benchmark"),
        "lines": lines,
        "overall": percent(overall) if overall is not None else None,
        "overall_baseline": percent(finite(baseline.get("overall"))) if baseline else None,
        "missing": [str(name) for name in missing] if sections and isinstance(missing, list) else [],
        "has_baseline": bool(baseline),
    }


def _line(name: str, figures: Mapping[str, Any], baseline: Any, kind: str) -> dict[str, Any]:
    accuracy = finite(figures.get("accuracy"))
    low, high = finite_pair(figures.get("ci95"))
    beside = finite(mapping(baseline).get("accuracy"))
    return {
        "name": name,
        "kind": kind,
        "n": figures.get("n", ""),
        "ties": figures.get("ties", ""),
        "accuracy": percent(accuracy),
        "interval": f"{100 * low:.0f} – {100 * high:.0f}" if low is not None and high is not None else "",
        "baseline": percent(beside) if beside is not None else "",
        "bar": _bar(accuracy, low, high, beside),
    }


def _bar(
    value: float | None,
    low: float | None,
    high: float | None,
    baseline: float | None,
    scale: tuple[float, float] = (0.0, 1.0),
) -> dict[str, str | None]:
    """Places on a gauge over `scale`, in per cent of its width; what lies beyond it is cut off."""

    def at(x: float) -> float:
        return 100 * min(1.0, max(0.0, (x - scale[0]) / (scale[1] - scale[0])))

    return {
        "value": None if value is None else f"{at(value):.1f}",
        "low": None if low is None else f"{at(low):.1f}",
        "width": None if low is None or high is None else f"{at(high) - at(low):.1f}",
        "baseline": None if baseline is None else f"{at(baseline):.1f}",
    }


def localisation(run: RunFiles) -> dict[str, Any] | None:
    """AUC of low reward on marked errors: the model beside the baselines, then by kind of error."""
    results, methods = run.results, mapping(run.results.get("methods"))
    if not methods:
        return None
    by_kind = {k: mapping(v) for k, v in mapping(results.get("subsets")).items() if k != "all" and mapping(v)}
    lines, scale = [], _about_chance([mapping(mapping(v).get("auc")) for v in methods.values()] + [*by_kind.values()])
    for name, figures in methods.items():
        auc, lowest = mapping(mapping(figures).get("auc")), mapping(mapping(figures).get("lowest_unit"))
        beside = mapping(auc.get("ours_minus_this"))
        line = _measure(_METHODS.get(name, name), auc, "section" if name == "segments" else "subset", scale)
        line |= {"difference": _signed(beside), "lowest": percent(finite(lowest.get("value")))}
        lines.append(line)
    kinds = [
        _measure(f"{name.replace('_', ' ')} errors", {**figures, "value": figures.get("accuracy")}, "subset", scale)
        for name, figures in by_kind.items()
    ]
    chance = finite(mapping(mapping(results.get("chance")).get("lowest_unit")).get("value"))
    return {"name": run.name, "lines": lines, "kinds": kinds, "chance": percent(chance), "scale": scale}


def _about_chance(measured: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """A scale with chance, 0.5, in its middle that is just wide enough for every interval."""
    ends = [finite_pair(figures.get("ci95")) for figures in measured]
    reach = max([0.1, *(abs(end - 0.5) for pair in ends for end in pair if end is not None)])
    half = min(0.5, math.ceil(10 * reach - 1e-9) / 10)
    return 0.5 - half, 0.5 + half


def _measure(
    name: str, figures: Mapping[str, Any], kind: str, scale: tuple[float, float] = (0.0, 1.0)
) -> dict[str, Any]:
    """A line of a share in [0, 1] with its interval, to two decimals."""
    value, (low, high) = finite(figures.get("value")), finite_pair(figures.get("ci95"))
    return {
        "name": name,
        "kind": kind,
        "n": figures.get("n", ""),
        "value": "–" if value is None else f"{value:.2f}",
        "interval": "" if low is None or high is None else f"{low:.2f} – {high:.2f}",
        "bar": _bar(value, low, high, None, scale),
    }


def _signed(figures: Mapping[str, Any]) -> str:
    value, (low, high) = finite(figures.get("value")), finite_pair(figures.get("ci95"))
    if value is None or low is None or high is None:
        return ""
    return f"{value:+.2f} ({low:+.2f} to {high:+.2f})".replace("-", "−")


def judge(run: RunFiles) -> dict[str, Any] | None:
    """Wins, ties and losses by dimension, with the win rate and what the order of showing did to it."""
    lines = []
    agreed = mapping(run.judge.get("agreement"))
    for name, figures in mapping(run.judge.get("dimensions")).items():
        figures = mapping(figures)
        parts = {key: mapping(figures.get(key)) for key in ("win", "tie", "loss")}
        shares = {key: finite(part.get("share")) for key, part in parts.items()}
        line = _measure(str(name), {**figures, "value": figures.get("win_rate")}, "subset")
        line["parts"] = [
            (key, parts[key].get("count", ""), f"{100 * (share or 0):.1f}", _share_interval(share, parts[key]))
            for key, share in shares.items()
        ]
        line |= {key: percent(finite(figures.get(key))) for key in ("first", "consistent")}
        line["unreadable"] = figures.get("unreadable", "")
        beside = mapping(agreed.get(name))
        line["agrees"] = f"{percent(finite(beside.get('share')))} of {beside.get('n', 0)}" if beside else ""
        lines.append(line)
    if not lines:
        return None
    lengths = mapping(run.judge.get("characters"))
    return {
        "name": run.name,
        "judge": str(run.judge.get("judge") or "a judge"),
        "pairs": run.judge.get("pairs", ""),
        "lines": lines,
        "agreement": bool(agreed),
        "unmatched": sum(finite(n) or 0 for n in mapping(run.judge.get("unmatched")).values()),
        "lengths": [finite(lengths.get(side)) for side in ("model", "baseline")],
    }


def _share_interval(share: float | None, figures: Mapping[str, Any]) -> str:
    low, high = finite_pair(figures.get("ci95"))
    if share is None or low is None or high is None:
        return ""
    return f"{100 * share:.0f} % ({100 * low:.0f} – {100 * high:.0f})"


def stages(run: RunFiles) -> dict[str, Any] | None:
    """Seconds per stage, as bars on one scale."""
    rows = [
        (str(stage.get("name")), seconds)
        for stage in records(run.summary.get("stages"))
        if (seconds := finite(stage.get("seconds"))) is not None
    ]
    longest = max((seconds for _, seconds in rows), default=0.0)
    if not longest:
        return None
    total = sum(seconds for _, seconds in rows)
    bars = [{"name": n, "time": _duration(s), "width": f"{100 * s / longest:.1f}"} for n, s in rows]
    return {"name": run.name, "bars": bars, "total": _duration(total)}


def settings(run: RunFiles) -> dict[str, Any]:
    """The command, its settings and the versions it ran with, as text."""
    config = sorted(mapping(run.run.get("config")).items())
    return {
        "name": run.name,
        "command": str(run.run.get("command") or ""),
        "config": [(str(key), _plain(value)) for key, value in config],
        "versions": [(str(key), str(value)) for key, value in mapping(run.run.get("versions")).items()],
    }


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "–" if value is None else str(value)


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else f"{int(seconds // 60)} min {int(seconds % 60):02d} s"


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"
