"""Best-of-N: every answer drawn to a prompt with its score, what N would give, and the data sets it makes."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from matplotlib.figure import Figure

from reward_models.scored_responses import ScoredResponse
from segrew.chat import Message
from segrew.metrics import bootstrap_interval
from segrew.run_directory import write_jsonl

SftColumns = Literal["messages", "prompt_completion"]


@dataclass(frozen=True)
class Candidates:
    """Every answer drawn to one prompt, at one temperature.

    Args:
        texts: the answers. ended: whether each stopped by itself.
        scored: their scores and segments; empty without a reward model.
    """

    id: str
    prompt: list[Message]
    temperature: float
    texts: list[str]
    ended: list[bool]
    scored: list[ScoredResponse] = field(default_factory=list)

    @property
    def scores(self) -> list[float]:
        """e(x, y) of each answer; empty without a reward model."""
        return [record.score for record in self.scored]

    @property
    def best(self) -> int:
        """The first answer of the highest score; without scores the first."""
        return max(range(len(self.scores)), key=lambda i: self.scores[i], default=0)

    @property
    def worst(self) -> int:
        """The first answer of the lowest score; without scores the first."""
        return min(range(len(self.scores)), key=lambda i: self.scores[i], default=0)

    def rows(self) -> list[dict[str, Any]]:
        """Lines of `scores.jsonl`: one an answer, in the shape that `segrew score` writes."""
        rows = []
        for sample, (text, ended, record) in enumerate(zip(self.texts, self.ended, self.scored, strict=True)):
            row = {"id": self.id, "prompt": self.prompt, "response": text, "score": record.score}
            row |= {"sample": sample, "temperature": self.temperature, "ended": ended}
            rows.append(row | {"segments": [asdict(segment) for segment in record.segments]})
        return rows


def expected_best_of(scores: Sequence[float], n: int) -> float:
    """E[max of n] = Σᵢ C(i−1, n−1) / C(N, n) · x₍ᵢ₎, the mean over all n-subsets of the N scores.

    Unbiased for n ≤ N independent samples; x₍₁₎ ≤ … ≤ x₍N₎ (the order-statistic U-estimator, as pass@k uses it).

    Raises:
        ValueError: n is below 1 or above the number of scores.
    """
    total = len(scores)
    if not 1 <= n <= total:
        raise ValueError(f"best of {n} cannot be told from {total} samples.")
    ways = math.comb(total, n)
    return sum(math.comb(i, n - 1) / ways * score for i, score in enumerate(sorted(scores)))


def sweep_row(candidates: list[Candidates], temperature: float | None, n: int) -> dict[str, Any]:
    """Mean over prompts of the expected best of n, with its bootstrap interval over prompts."""
    values = [expected_best_of(one.scores, n) for one in candidates]
    low, high = bootstrap_interval(values)
    row = {"temperature": temperature, "best_of": n, "prompts": len(values), "samples": len(candidates[0].texts)}
    return row | {"score": sum(values) / len(values), "ci95": [low, high]}


def plot_sweep(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the expected best score against n, a line for each temperature."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        line = [row for row in rows if row["temperature"] == temperature]
        scores = [row["score"] for row in line]
        errors = [[abs(row["score"] - row["ci95"][side]) for row in line] for side in (0, 1)]
        label = "the benchmark's temperatures" if temperature is None else f"temperature {temperature:g}"
        axes.errorbar([row["best_of"] for row in line], scores, yerr=errors, marker="o", capsize=3, label=label)
    axes.set_xscale("log", base=2)
    places = sorted({row["best_of"] for row in rows})
    axes.set_xticks(places, [str(place) for place in places])
    axes.set(xlabel="best of n", ylabel="expected score, mean over prompts", title="Best-of-n, 95 % over prompts")
    axes.legend()
    figure.savefig(path)


def write_training_sets(directory: Path, candidates: list[Candidates], columns: SftColumns) -> dict[str, int]:
    """Write the best answers as TRL's SFT rows, and best against worst as its preference rows.

    Prompts whose answers all read or score the same give no preference; empty best answers give neither.

    Returns:
        How many rows each file holds.
    """
    sft, preferences = [], []
    for one in candidates:
        best, worst = one.best, one.worst
        chosen, rejected = ([{"role": "assistant", "content": one.texts[i]}] for i in (best, worst))
        if not one.texts[best].strip():
            continue
        whole = {"messages": one.prompt + chosen}
        sft.append(whole if columns == "messages" else {"prompt": one.prompt, "completion": chosen})
        margin = one.scores[best] - one.scores[worst]
        if one.texts[worst].strip() and one.texts[best] != one.texts[worst]:
            preferences.append({"prompt": one.prompt, "chosen": chosen, "rejected": rejected, "margin": margin})
    write_jsonl(directory / "sft.jsonl", sft)
    write_jsonl(directory / "preferences.jsonl", preferences)
    return {"sft": len(sft), "preferences": len(preferences)}
