"""VADER's sentiment with Gaussian noise: the same reward, harder to learn from."""

import zlib
from random import Random

from stories import sentiment

SPREAD = 0.5  # of the noise; VADER itself spreads by about 0.3 over answers of the untrained model


def noisy(prompts: list, completions: list[str]) -> list[float]:
    """Reward function for `segrew ppo`; the noise of an answer is fixed by its text and its place in the batch."""
    seeds = (zlib.crc32(f"{place} {text}".encode()) for place, text in enumerate(completions))
    return [sentiment(text) + Random(seed).gauss(0.0, SPREAD) for text, seed in zip(completions, seeds, strict=True)]
