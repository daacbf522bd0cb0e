"""Story openings to go on from, and VADER's compound sentiment (from -1 to 1) of what was written."""

import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

NAMES = ("Lily", "Tom", "Mia", "Ben", "Sue", "Max", "Anna", "Tim")
OPENINGS = (
    "Once upon a time, there was a girl called {}. One day she", "{} went to the park with a friend. They",
    "{} was sad because it was raining. Then", "{} saw a big dog. The dog", "One day, {} found a box. In the box",
    "{} did not want to share the toy. Mom said", "It was dark and {} was scared. But",
    "{} fell down and cried. A friend",
)  # fmt: skip
MORE_OPENINGS = (
    "{} had a red ball. The ball", "{} wanted to eat some cake. Mom", "{} and a cat were in the garden. The cat",
    "One morning, {} woke up and", "{} lost a shoe in the mud. So", "{} heard a loud noise. It was",
    "{} made a card for Dad. Dad", "{} was playing with a new friend. Suddenly",
)  # fmt: skip
HELD_OUT_OPENINGS = (
    "{} climbed a tall tree. At the top", "{} broke a cup. Dad", "A bird sat on the roof. {} looked at it and",
    "{} was sick and had to stay in bed. Grandma", "{} went to the beach. The water", "{} was lost in the woods. Then",
    "It was the birthday of {}. Everyone", "{} did not like the soup. Mom",
)  # fmt: skip


def prompts(openings: Sequence[str], names: Sequence[str] = NAMES) -> list[str]:
    """Every opening with every name, in a fixed random order."""
    texts = [opening.format(name) for opening in openings for name in names]
    random.Random(0).shuffle(texts)
    return texts


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write a file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_prompts(path: Path, openings: Sequence[str]) -> Path:
    """Write prompts as `segrew ppo` reads them."""
    return write_rows(path, [{"prompt": text} for text in prompts(openings)])


@cache
def _analyzer() -> Any:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()


def sentiment(text: str) -> float:
    """VADER's compound score."""
    return _analyzer().polarity_scores(text)["compound"]


def vader(prompts: list, completions: list[str]) -> list[float]:
    """Reward function for `segrew ppo`."""
    return [sentiment(text) for text in completions]
