"""Does the score follow the length of the answer?"""

import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from segrew.metrics import correlation_interval


def length_bias(scores: Sequence[float], lengths: Sequence[int], prompts: Sequence[Hashable]) -> dict[str, Any]:
    """Correlation and slope of score on response length, over all answers and among answers to one prompt.

    The second removes what prompts differ in: both columns are taken about their mean over the prompt's answers.

    Args:
        lengths: in tokens. prompts: which prompt each answer is to.

    Returns:
        n, correlation with its 95 % interval (ci95), slope in score per 100 tokens; within: the same among answers
        to one prompt. Correlations are None where either column does not vary.
    """
    x, y = np.asarray(lengths, dtype=np.float64), np.asarray(scores, dtype=np.float64)
    number: dict[Hashable, int] = {}
    group = np.array([number.setdefault(prompt, len(number)) for prompt in prompts], dtype=np.int64)
    sizes = np.bincount(group)
    several = sizes[group] > 1

    def about_prompt(values: np.ndarray) -> np.ndarray:
        return (values - (np.bincount(group, weights=values) / sizes)[group])[several]

    spare = int((sizes > 1).sum())  # a prompt's mean costs one degree of freedom
    return _line(x, y, 0) | {"within": _line(about_prompt(x), about_prompt(y), spare)}


def describe_length_bias(report: dict[str, Any]) -> str:
    """Say it in one line."""

    def one(figures: dict[str, Any]) -> str:
        if figures["correlation"] is None:
            return "n/a"
        low, high = figures["ci95"]
        return f"{figures['correlation']:+.2f} ({low:+.2f} to {high:+.2f}), slope {figures['slope']:+.3f}"

    return (
        f"Score against length: correlation {one(report)} per 100 tokens over {report['n']} answers; among answers to "
        f"one prompt {one(report['within'])}"
    )


def _line(x: np.ndarray, y: np.ndarray, spare: int) -> dict[str, Any]:
    n = len(x)
    if n < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return {"n": n, "correlation": None, "ci95": None, "slope": None}
    dx, dy = x - x.mean(), y - y.mean()
    correlation = float(dx @ dy / math.sqrt((dx @ dx) * (dy @ dy)))
    interval = list(correlation_interval(correlation, n - spare))
    return {"n": n, "correlation": correlation, "ci95": interval, "slope": 100 * float(dx @ dy / (dx @ dx))}
