"""What the probe found: a recommendation that says how sure it is, and a picture."""

from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

SURE = 0.9
ENOUGH = 8  # micro-batches; resamples of fewer are too much alike to show how unsure the winner is


def wins(rows: list[dict[str, Any]]) -> list[float]:
    """In which share of the resamples each granularity had the least gradient noise."""
    draws = torch.tensor([row["draws"] for row in rows])
    best = draws.argmin(0)
    return [(best == i).double().mean().item() for i in range(len(rows))]


def recommend(rows: list[dict[str, Any]], micro_batches: int) -> str:
    """Say which granularity to train with, or that these rollouts do not tell."""
    shares = wins(rows)
    least = min(rows, key=lambda row: row["gradient_noise"])
    share = shares[rows.index(least)]
    found = (
        f"{least['rule']} has the least gradient noise ({least['gradient_noise']:.3g}; the lowest in {share:.0%} of "
        f"{len(least['draws'])} resamples of the {micro_batches} micro-batches)"
    )
    caution = (
        "Less noise is not more learning: long actions credit their tokens alike, and the same lambda reaches "
        "further over fewer steps (compare with --lambda_scale token)."
    )
    if micro_batches < ENOUGH:
        return f"{found}; that is not clear from fewer than {ENOUGH} micro-batches: more answers would tell. {caution}"
    if share >= SURE:
        return f"{found}: try --action_rule for {least['rule']}. {caution}"
    rivals = [row["rule"] for row, s in zip(rows, shares, strict=True) if s >= 0.05 and row is not least]
    return f"{found}; that is not clear from {', '.join(rivals) or 'the others'}: more answers would tell. {caution}"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot gradient noise with its 90 % interval, and the variance of advantages, against the length of a unit."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    noise, advantages = figure.subplots(1, 2)
    for row in rows:
        low, high = torch.tensor(row["draws"]).quantile(torch.tensor([0.05, 0.95])).tolist()
        x, y = row["unit_length"], row["gradient_noise"]
        noise.errorbar(x, y, [[max(y - low, 0)], [max(high - y, 0)]], fmt="o", color="tab:blue")
        advantages.plot(x, row["advantage_variance"], "o", color="tab:orange")
        for axes, value in ((noise, y), (advantages, row["advantage_variance"])):
            axes.annotate(row["rule"], (x, value), textcoords="offset points", xytext=(5, 4), fontsize=8)
    for axes, title in ((noise, "Gradient noise (variance / mean²)"), (advantages, "Variance of advantages")):
        axes.set(title=title, xlabel="mean tokens of an action", xscale="log", ylim=(0, None))
    figure.savefig(path, dpi=150)
