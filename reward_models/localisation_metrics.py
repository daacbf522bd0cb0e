"""Does a low reward mark the tokens that are wrong? The figures of one response, and their means over many.

Axes: n content tokens of one response, m of its units. A method gives each token a reward; ours gives it that of its
unit.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from segrew.metrics import bootstrap_interval

Tokens = Float[np.ndarray, " n"]


def low_reward_auc(rewards: Tokens, wrong: Bool[np.ndarray, " n"]) -> float | None:
    """P(a wrong token's reward is below a sound one's) + P(equal)/2; None without both kinds (Mann-Whitney)."""
    positive, total = int(wrong.sum()), len(wrong)
    if positive in (0, total):
        return None
    return _auc(np.unique(rewards, return_inverse=True)[1], wrong.astype(float), (~wrong).astype(float))


def _auc(rank: np.ndarray, wrong: np.ndarray, sound: np.ndarray) -> float:
    """AUC from weights of wrong and sound tokens, `rank` being that of a token's reward among the distinct ones."""
    wrong_at, sound_at = np.bincount(rank, wrong), np.bincount(rank, sound)
    above = sound_at.sum() - sound_at.cumsum()
    return float(wrong_at @ (above + sound_at / 2) / (wrong_at.sum() * sound_at.sum()))


def unit_rewards(rewards: Tokens, units: Int[np.ndarray, " n"], how: str) -> Float[np.ndarray, " m"]:
    """Gather token rewards into units: sum for parts of a total, mean for a rate or for a unit's own reward."""
    totals = np.bincount(units, rewards)
    return totals if how == "sum" else totals / np.bincount(units)


def lowest_unit_hit(values: Float[np.ndarray, " m"], overlaps: Bool[np.ndarray, " m"]) -> tuple[float, float]:
    """Whether the lowest unit overlaps a marked span, draws shared evenly; beside the chance of a random unit."""
    return float(overlaps[values == values.min()].mean()), float(overlaps.mean())


def words_of_tokens(spans: Sequence[tuple[int, int]], text: str) -> Int[np.ndarray, " n"]:
    """Number the word, a run without white space, in which each token's first visible character lies; -1 for none.

    Args:
        spans: character offsets [start, end) of each token.
    """
    word_at, word = [], -1
    for place, character in enumerate(text):
        word += not character.isspace() and (place == 0 or text[place - 1].isspace())
        word_at.append(-1 if character.isspace() else word)
    return np.array([next((w for w in word_at[a:b] if w >= 0), -1) for a, b in spans], dtype=np.int64)


def inside_words(rewards: Tokens, words: Int[np.ndarray, " n"]) -> tuple[float | None, float | None]:
    """How inconsistent rewards are inside words of several tokens; None without such a word.

    Returns:
        The share of these words whose tokens differ in reward, and the mean absolute difference between neighbouring
        tokens of a word, in standard deviations of the response's token rewards (0 where these are all equal).
    """
    same = (words[1:] == words[:-1]) & (words[1:] >= 0)
    if not same.any():
        return None, None
    steps = np.abs(np.diff(rewards))[same]
    word_of_step = words[1:][same]
    split = {word for word, step in zip(word_of_step.tolist(), steps.tolist(), strict=True) if step > 0}
    spread = float(rewards.std())
    return len(split) / len(set(word_of_step.tolist())), float(steps.mean()) / spread if spread else 0.0


def chance_of_split(words: Int[np.ndarray, " n"], units: Int[np.ndarray, " n"]) -> float | None:
    """Mean chance that a word of several tokens is cut where as many cuts fall on random gaps between tokens.

    A word of k tokens stays whole with probability C(g - (k - 1), c) / C(g, c), for c cuts on g gaps.
    """
    gaps, cuts = len(units) - 1, int((units[1:] != units[:-1]).sum())
    lengths = np.bincount(words[words >= 0])
    chances = [1 - math.comb(gaps - (int(k) - 1), cuts) / math.comb(gaps, cuts) for k in lengths if k > 1]
    return sum(chances) / len(chances) if chances else None


def mean_of_known(values: Sequence[float | None]) -> dict[str, Any]:
    """Mean over responses with their number and its bootstrap interval, which a single response does not have."""
    known = [value for value in values if value is not None]
    if not known:
        return {"value": None, "ci95": None, "n": 0}
    ends = list(bootstrap_interval(known)) if len(known) > 1 else None
    return {"value": sum(known) / len(known), "ci95": ends, "n": len(known)}


def paired_difference(ours: Sequence[float | None], theirs: Sequence[float | None]) -> dict[str, Any]:
    """Mean of ours - theirs over the responses that have both, with its bootstrap interval."""
    both = zip(ours, theirs, strict=True)
    return mean_of_known([a - b if a is not None and b is not None else None for a, b in both])


def pooled_aucs(
    methods: Mapping[str, Sequence[np.ndarray]],
    wrong: Sequence[np.ndarray],
    *,
    resamples: int = 500,
    seed: int = 0,
) -> dict[str, dict[str, Any]]:
    """AUC over the tokens of all responses, and its difference to the first method's; bootstrap over responses."""
    response = np.repeat(np.arange(len(wrong)), [len(w) for w in wrong])
    marked = np.concatenate(list(wrong))
    ranks = {name: np.unique(np.concatenate(list(r)), return_inverse=True)[1] for name, r in methods.items()}
    generator = np.random.default_rng(seed)

    def aucs(weights: np.ndarray) -> dict[str, float]:
        w = weights[response]
        return {name: _auc(rank, w * marked, w * ~marked) for name, rank in ranks.items()}

    def drawn() -> np.ndarray:
        return np.bincount(generator.integers(len(wrong), size=len(wrong)), minlength=len(wrong))

    first = next(iter(methods))
    with np.errstate(invalid="ignore"):  # a draw without a wrong token has no AUC
        whole, draws = aucs(np.ones(len(wrong))), [aucs(drawn()) for _ in range(resamples)]

    def summary(value: float, values: list[float]) -> dict[str, Any]:
        ends = [float(end) for end in np.nanpercentile(values, (2.5, 97.5))] if len(wrong) > 1 else None
        return {"value": value, "ci95": ends, "n": len(wrong)}

    found = {name: summary(whole[name], [draw[name] for draw in draws]) for name in methods}
    for name in methods:
        if name != first:
            differences = [draw[first] - draw[name] for draw in draws]
            found[name]["ours_minus_this"] = summary(whole[first] - whole[name], differences)
    return found
