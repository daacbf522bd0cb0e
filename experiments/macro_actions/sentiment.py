"""VADER's compound sentiment of an answer, from -1 to 1: the reward at its end."""

from functools import cache
from typing import Any


@cache
def _analyzer() -> Any:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()


def vader(prompts: list, completions: list[str]) -> list[float]:
    """Reward function for `segrew ppo`."""
    return [_analyzer().polarity_scores(text)["compound"] for text in completions]
