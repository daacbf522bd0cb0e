"""Tables and the learning curve of the LoRA grid, from data.json, runs.jsonl and frozen.jsonl beside this file.

    python experiments/lora_grid/table.py

Intervals are 95 % bootstrap, drawing seeds and items anew; differences are paired, on the same items and seeds.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
PLACES = {
    "valid": "held-out pairs",
    "rewardbench": "RewardBench, rebuilt",
    "auc": "AUC of low reward for marked errors",
}
Grid = np.ndarray  # [seeds, items]; nan where an item has no figure
Runs = list[dict[str, Any]]


def read(name: str) -> Runs:
    path = HERE / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def grid(runs: Runs, place: str) -> Grid:
    """Figures of one arm: a row for each seed."""
    rows = [run["curve"][place.partition("@")[2]] if "@" in place else run[place] for run in runs]
    if isinstance(rows[0], str):
        return np.array([[float(digit) for digit in row] for row in rows])
    return np.array([[np.nan if value is None else value for value in row] for row in rows], dtype=float)


def interval(values: Grid, resamples: int = 2000) -> tuple[float, float, float]:
    """Mean with its interval."""
    generator = np.random.default_rng(0)
    seeds, items = values.shape
    means = []
    for _ in range(resamples):
        rows, columns = generator.integers(seeds, size=seeds), generator.integers(items, size=items)
        means.append(np.nanmean(values[rows].mean(0)[columns]))
    low, high = np.percentile(means, (2.5, 97.5))
    return float(np.nanmean(values)), float(low), float(high)


def cell(values: Grid, signed: bool = False) -> str:
    mean, low, high = interval(values)
    return f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]" if signed else f"{mean:.3f} [{low:.3f}, {high:.3f}]"


def by(runs: Runs, *keys: str) -> dict[Any, Runs]:
    """Group runs, each group in the order of seeds."""
    groups: dict[Any, Runs] = defaultdict(list)
    for run in runs:
        groups[tuple(run[key] for key in keys)].append(run)
    return {key: sorted(group, key=lambda run: run["seed"]) for key, group in groups.items()}


def paired(left: Runs, right: Runs, place: str, other: str | None = None) -> Grid:
    """Differences on the seeds that both have."""
    seeds = {run["seed"] for run in left} & {run["seed"] for run in right}
    first, second = ([run for run in runs if run["seed"] in seeds] for runs in (left, right))
    return grid(first, place) - grid(second, other or place)


def compared(groups: dict[str, Runs], base: str) -> list[str]:
    """Each arm in each place, and its difference to the response reading."""
    lines = ["| arm | seeds | " + " | ".join(PLACES.values()) + " |", "|---|---|" + "---|" * len(PLACES)]
    for name, runs in groups.items():
        lines.append(f"| {name} | {len(runs)} | " + " | ".join(cell(grid(runs, place)) for place in PLACES) + " |")
    lines += [
        "",
        "Difference to the response reading, paired; for the AUC, to the response model's prefix differences:",
        "",
    ]
    lines += lines[:2]
    for name, runs in groups.items():
        if name != base:
            differences = [
                paired(runs, groups[base], place, "auc_prefix_difference" if place == "auc" else None)
                for place in PLACES
            ]  # fmt: skip
            lines.append(f"| {name} | {len(runs)} | " + " | ".join(cell(d, signed=True) for d in differences) + " |")
    return lines


def curves(groups: dict[str, Runs], total: int) -> list[str]:
    """Accuracy on held-out pairs by pairs seen, as a table and as curve.png."""
    sizes = [int(size) for size in next(iter(groups.values()))[0]["curve"]]
    places = [*(f"valid@{size}" for size in sizes), "valid"]
    lines = [
        "| arm | " + " | ".join(f"{size} pairs" for size in (*sizes, total)) + " |",
        "|---|" + "---|" * len(places),
    ]
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    for (name, runs), marker in zip(groups.items(), "os^Dv", strict=False):
        found = [interval(grid(runs, place)) for place in places]
        lines.append(
            f"| {name} | " + " | ".join(f"{mean:.3f} [{low:.3f}, {high:.3f}]" for mean, low, high in found) + " |"
        )
        axes.plot([*sizes, total], [mean for mean, _, _ in found], marker=marker, label=name)
    axes.axhline(0.5, color="grey", linewidth=0.8, linestyle=":")
    axes.set(xlabel="pairs seen", ylabel="accuracy on held-out pairs", xscale="log", xticks=[*sizes, total])
    axes.set_xticklabels([*sizes, total])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(HERE / "curve.png", dpi=120)
    return lines


def main() -> None:
    data, runs, frozen = json.loads((HERE / "data.json").read_text()), read("runs.jsonl"), read("frozen.jsonl")
    rate = data["settings"]["learning_rate"]
    groups = {arm: held for (arm, used), held in by(runs, "arm", "learning_rate").items() if used == rate}
    longer = np.array([[float(digit) for digit in data["valid_longer"]]])
    surprisal = np.array([[np.nan if value is None else value for value in data["auc_surprisal"]]])
    lines = ["## LoRA", "", *compared(groups, "response"), ""]
    lines += [
        f'"The longer answer wins" on held-out pairs: {cell(longer)}. AUC of the response model\'s prefix differences: '
        f"{cell(grid(groups['response'], 'auc_prefix_difference'))}, of the frozen model's surprisal: "
        f"{cell(surprisal)}.",
        "", "Accuracy on held-out pairs by pairs seen:", "", *curves(groups, data["settings"]["train"]), "",
    ]  # fmt: skip
    if frozen:
        cells = by(frozen, "rule", "aggregator", "size")
        size = max(run["size"] for run in frozen)
        heads = {f"{rule}, {kind}": held for (rule, kind, used), held in cells.items() if used == size}
        heads = {name.replace("response, mean", "response"): held for name, held in heads.items()}
        lines += [f"## Frozen trunk, {size} pairs", "", *compared(heads, "response"), ""]
    (HERE / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
