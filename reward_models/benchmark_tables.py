"""The terminal tables of `segrew rewardbench`: whatever a result holds, in the same few shapes."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from reward_models.length_bias import describe_length_bias

_FIGURES = {
    "auc": "AUC in a response",
    "auc_pooled": "AUC over all tokens",
    "lowest_unit": "lowest unit hits a span",
    "words_split": "words with several rewards",
    "word_difference": "step in a word, in std",
}


def print_results(record: Mapping[str, Any], console: Console) -> None:
    """Print the table of subsets and sections, then the parts that this benchmark has."""
    console.print(results_table(record))
    for name, entry in record["subsets"].items():
        if "matrix" in entry:
            rows = "; ".join(" ".join(f"{value:.3f}" for value in row) for row in entry["matrix"])
            console.print(f"{name}: chosen (rows) against rejected style, concise, detailed, markdown: {rows}")
        if "parts" in entry:
            console.print(f"{name}: " + ", ".join(f"{k} {v:.3f}" for k, v in entry["parts"].items()))
    if "methods" in record:
        console.print(methods_table(record))
    if "comparison" in record:
        console.print(comparison_table(record["comparison"]))
    if "length_bias" in record:
        console.print(describe_length_bias(record["length_bias"]))
    absent = [*map(str, record["missing"])]
    absent += [f"{part} (of {name})" for name, s in record["sections"].items() for part in s.get("missing", [])]
    if absent:
        console.print(f"Missing: {', '.join(absent)} (left out of the means)")
    if record.get("unmapped"):
        console.print(f"In no section: {', '.join(record['unmapped'])} (left out of the total)")


def results_table(record: Mapping[str, Any]) -> Table:
    """Return subsets and sections with accuracy (of marked spans, mean AUC), n, interval and ties, and the baseline."""
    baseline, label = record.get("length_baseline"), record["settings"]["subset_label"]
    name_column = Column("", overflow="fold")
    figure = "mean AUC" if "methods" in record else "accuracy"
    table = Table(name_column, "n", figure, "95 % interval", "ties", "longer wins", title=record["benchmark"])

    def longer(kind: str, name: str) -> str:
        return _share(baseline[kind][name]["accuracy"]) if baseline else ""

    for name, entry in record["subsets"].items():
        count = f"{entry['n']} of {entry['count']}" if entry.get("count") else str(entry["n"])
        table.add_row(
            f"{name} ({label})" if label else name,
            count,
            _share(entry["accuracy"]),
            _interval(entry["ci95"], ".3f", " - "),
            str(entry["ties"]),
            longer("subsets", name),
        )
    table.add_section()
    for name, entry in record["sections"].items():
        table.add_row(name, str(entry["n"]), _share(entry["accuracy"]), "", "", longer("sections", name))
    totals = {"overall": "overall", "section_mean": "mean of four sections"}
    totals |= {level: level for level in ("hard", "normal", "easy")}
    for key, shown in totals.items():
        if record.get(key) is not None and (key != "overall" or len(record["subsets"]) > 1):
            table.add_row(shown, "", _share(record[key]), "", "", _share(baseline[key]) if baseline else "")
    return table


def methods_table(record: Mapping[str, Any]) -> Table:
    """Return each figure on marked spans for each method, with what segments gain over it."""
    table = Table("", "mean over responses", "segments - it", title="Low rewards against marked spans (95 % intervals)")
    chance = {"auc": {"value": 0.5}, "auc_pooled": {"value": 0.5}, **record["chance"]}
    for key, shown in _FIGURES.items():
        table.add_section()
        table.add_row(shown, "", "", style="bold")
        held = {name: figures[key] for name, figures in record["methods"].items()}
        held |= {"chance": chance[key]} if key in chance else {}
        for name, figure in held.items():
            table.add_row(f"  {name}", _figure(figure, ".3f"), _figure(figure.get("ours_minus_this"), "+.3f"))
    return table


def comparison_table(comparison: Mapping[str, Any]) -> Table:
    """Return the paired differences to another model."""
    title = f"Compared to {comparison['to']}, on the rows of both"
    table = Table("", "n", "difference", "95 % interval", "better", "worse", "p (exact)", title=title)
    for name, entry in {**comparison["subsets"], "all": comparison["all"]}.items():
        difference, interval = f"{entry['difference']:+.3f}", _interval(entry["ci95"], "+.3f")
        numbers = (difference, interval, str(entry["better"]), str(entry["worse"]))
        table.add_row(name, str(entry["n"]), *numbers, f"{entry['p']:.3g}")
    left = comparison["only_ours"] + comparison["only_theirs"]
    if left:
        table.caption = f"{left} rows are in one of the two runs only and left out"
    return table


def _share(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}"


def _figure(figure: Mapping[str, Any] | None, form: str) -> str:
    """Value and interval as text."""
    if not figure or figure["value"] is None:
        return ""
    return f"{figure['value']:{form}}" + (f" ({_interval(figure['ci95'], form)})" if "ci95" in figure else "")


def _interval(ends: Sequence[float] | None, form: str, between: str = " to ") -> str:
    """Both ends as text; a single row has no interval."""
    return between.join(f"{end:{form}}" for end in ends) if ends else "n/a"
