"""What a judge's verdicts come to: wins in both orders, intervals, position bias, agreement with a reward model."""

from collections import Counter, defaultdict
from typing import Any

from rich.table import Table

from segrew.metrics import bootstrap_interval, wilson_interval

Judgment = dict[str, Any]


def both_orders(judgments: list[Judgment], dimension: str) -> dict[str, str]:
    """Return the outcome of each pair: win, loss, tie or unreadable.

    A win needs both orders: a pair on which they differ is a tie (the rule of MT-Bench's pairwise mode).
    """
    said: dict[str, list[str | None]] = defaultdict(list)
    for row in judgments:
        said[row["id"]].append(row["verdicts"].get(dimension))
    outcomes = {("model", "model"): "win", ("baseline", "baseline"): "loss"}
    return {
        name: "unreadable" if None in pair or len(pair) != 2 else outcomes.get((str(pair[0]), str(pair[1])), "tie")
        for name, pair in said.items()
    }


def verdicts(judgments: list[Judgment], dimensions: list[str]) -> dict[str, Any]:
    """Count outcomes by dimension, with bootstrap intervals over pairs.

    `win_rate` counts a tie as half. `first` is the share of decided replies for the answer shown first, 0.5 without
    position bias; `consistent` the share of pairs whose two orders agree. Unreadable pairs are in none of them.

    Raises:
        ValueError: not one reply can be read.
    """
    results = {name: _dimension(judgments, name) for name in dimensions}
    if not any(row["n"] for row in results.values()):
        why = next((row["error"] for row in judgments if row.get("error")), f"{judgments[0]['reply'][:100]!r}")
        raise ValueError(f"no pair has a readable verdict in both orders; the judge said: {why}")
    return {"pairs": len({row["id"] for row in judgments}), "dimensions": results}


def _dimension(judgments: list[Judgment], dimension: str) -> dict[str, Any]:
    outcomes = both_orders(judgments, dimension)
    readable = [outcome for outcome in outcomes.values() if outcome != "unreadable"]
    counts, n = Counter(readable), len(readable)
    row: dict[str, Any] = {"n": n, "unreadable": len(outcomes) - n}
    for name in ("win", "tie", "loss"):
        share = bootstrap_interval([float(outcome == name) for outcome in readable])
        row[name] = {"count": counts[name], "share": counts[name] / n if n else None, "ci95": list(share)}
    values = [{"win": 1.0, "tie": 0.5, "loss": 0.0}[outcome] for outcome in readable]
    row |= {"win_rate": sum(values) / n if n else None, "ci95": list(bootstrap_interval(values))}
    return row | _by_order(judgments, dimension, outcomes)


def _by_order(judgments: list[Judgment], dimension: str, outcomes: dict[str, str]) -> dict[str, Any]:
    readable = [row for row in judgments if outcomes[row["id"]] != "unreadable"]
    orders = {
        name: dict(Counter(row["verdicts"][dimension] for row in readable if row["order"] == order))
        for order, name in enumerate(("model_first", "baseline_first"))
    }
    first = orders["model_first"].get("model", 0) + orders["baseline_first"].get("baseline", 0)
    decided = sum(count for order in orders.values() for name, count in order.items() if name != "tie")
    said: dict[str, set[str]] = defaultdict(set)
    for row in readable:
        said[row["id"]].add(row["verdicts"][dimension])
    return {
        "orders": orders,
        "first": first / decided if decided else None,
        "consistent": sum(len(words) == 1 for words in said.values()) / len(said) if said else None,
    }


def agreement(judgments: list[Judgment], margins: dict[str, float], dimensions: list[str]) -> dict[str, Any]:
    """Share of the judge's wins and losses in which a reward model prefers the same answer, with Wilson's interval.

    Args:
        margins: score of the model's answer minus the baseline's; pairs of equal score are left out and counted.
    """
    results = {}
    for name in dimensions:
        decided = {key: said for key, said in both_orders(judgments, name).items() if said in ("win", "loss")}
        preferred = {key: said for key, said in decided.items() if margins[key] != 0}
        agreed = sum((margins[key] > 0) == (said == "win") for key, said in preferred.items())
        n = len(preferred)
        row = {"share": agreed / n if n else None, "n": n, "ci95": list(wilson_interval(agreed, n))}
        results[name] = row | {"equal_scores": len(decided) - n}
    return results


def verdict_table(results: dict[str, Any]) -> Table:
    """Return the outcomes as a table."""
    agreed = results.get("agreement", {})
    columns = ("", "win", "tie", "loss", "unreadable", "win rate", "95 % interval", "first shown wins")
    table = Table(*columns, *(["reward model agrees"] if agreed else []), title=f"Judged by {results['judge']}")
    for name, row in results["dimensions"].items():
        counts = [str(row[outcome]["count"]) for outcome in ("win", "tie", "loss")]
        interval = f"{row['ci95'][0]:.3f} to {row['ci95'][1]:.3f}" if row["n"] else ""
        shares = [_share(row["win_rate"]), interval, _share(row["first"])]
        last = [f"{_share(agreed[name]['share'])} of {agreed[name]['n']}"] if agreed else []
        table.add_row(name, *counts, str(row["unreadable"]), *shares, *last)
    return table


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
