"""What a run warns of: rewards that teach nothing, a proxy that rises while what it stands for falls."""

import math
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from segrew.metrics import mean_interval

# A rise of this much in the share of repeated 4-grams of held-out answers is a rise.
REPETITION_RISE = 0.1


def flat_groups(scores: Float[Tensor, " b"], group_size: int, rows: Bool[Tensor, " b"]) -> Float[Tensor, ""]:
    """Share of prompts whose answers all score alike; of a batch with one answer a prompt, 1 or 0 for all of it.

    Args:
        rows: answers that have a score.
    """
    size = group_size if group_size > 1 else len(scores)
    groups, real = scores.view(-1, size), rows.view(-1, size)
    low = groups.masked_fill(~real, math.inf).amin(1)
    high = groups.masked_fill(~real, -math.inf).amax(1)
    return (high - low <= 1e-6).float().mean()


def flat_warning(share: float, group_size: int) -> str | None:
    """What to say when most prompts show no difference in reward."""
    if share <= 0.5:
        return None
    whose = f"of {share:.0%} of the prompts all answers" if group_size > 1 else "all answers of the batch"
    return (
        f"{whose} got the same score: there is nothing to credit. Is the reward constant, the temperature too low, "
        "are the prompts too easy or too hard?"
    )


def hacking_warning(evaluations: list[dict[str, Any]]) -> str | None:
    """What to say when held-out answers please the reward more than at first, and an evaluator less, or repeat more.

    A difference counts where its paired 95 % interval over prompts leaves out 0.
    """
    if len(evaluations) < 2:
        return None
    first, last = evaluations[0], evaluations[-1]
    if _gain(first["scores"], last["scores"])[0] <= 0:
        return None
    found = [
        f"the evaluator {name} fell ({mean_given(first['evaluators'][name]):.3f} to {mean_given(scores):.3f})"
        for name, scores in last["evaluators"].items()
        if _gain(first["evaluators"][name], scores)[1] < 0
    ]
    if last["repetition"] > first["repetition"] + REPETITION_RISE:
        found.append(f"repetition rose ({first['repetition']:.2f} to {last['repetition']:.2f})")
    if not found:
        return None
    return (
        f"reward hacking? At step {last['step']} the score of held-out answers is up from {first['score']:.3f} to "
        f"{last['score']:.3f}, but {' and '.join(found)}. Read samples.jsonl; raise --kl_coef, stop earlier "
        "(--early_stopping_patience) or mend the reward."
    )


def mean_given(values: list[float | None]) -> float:
    """Mean of the scores that there are; NaN where there is none."""
    given = [value for value in values if value is not None]
    return sum(given) / len(given) if given else math.nan


def _gain(before: list[float | None], after: list[float | None]) -> tuple[float, float]:
    """95 % interval of the mean difference over answers that have both scores."""
    pairs = zip(before, after, strict=True)
    found = [b - a for a, b in pairs if a is not None and b is not None]
    return mean_interval(found)[1:] if found else (-math.inf, math.inf)


def best_of(evaluations: list[dict[str, Any]], metric: str) -> int:
    """Position of the best evaluation, the first of equals; one without a score is the worst."""
    found = [evaluation["metrics"][metric] for evaluation in evaluations]
    values = [-math.inf if math.isnan(value) else value for value in found]
    return values.index(max(values))


def out_of_patience(evaluations: list[dict[str, Any]], metric: str, patience: int) -> bool:
    """Whether the last `patience` evaluations are all no better than the best one before them."""
    return len(evaluations) - 1 - best_of(evaluations, metric) >= patience
