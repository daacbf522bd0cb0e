"""How much of a benchmark's row a reward model gets right, and what a subset of rows comes to."""

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from segrew.metrics import wilson_interval

Row = Mapping[str, Any]


def row_scores(row: Row, number: int) -> tuple[list[float], list[float]]:
    """Return the scores of the better answers and those of the others.

    Args:
        row: `scores` with the `correct` better ones first, or `score_chosen` and `score_rejected`.

    Raises:
        ValueError: a score is no number, or one side has none.
    """
    given: dict[str, Any] = {"score_chosen": row.get("score_chosen"), "score_rejected": row.get("score_rejected")}
    if "scores" in row:
        given = {f"score {k} of {len(row['scores'])}": score for k, score in enumerate(row["scores"], 1)}
    scores, correct = [], int(row.get("correct", 1))
    for field, value in given.items():
        try:
            score = float(value)
        except (TypeError, ValueError):
            score = math.nan
        if math.isnan(score):
            raise ValueError(
                f"{row_name(row, number)}: {field} is {value!r}, not a number. It is no loss but a fault in "
                "the scoring (overflow, an empty answer): score this row again or leave it out"
            )
        scores.append(score)
    if not 0 < correct < len(scores):
        raise ValueError(f"{row_name(row, number)}: {correct} of {len(scores)} answers cannot be the better ones")
    return scores[:correct], scores[correct:]


def row_name(row: Row, number: int) -> str:
    """Name a row in messages."""
    return f"row {number} (id {row.get('id')!r}, subset {row.get('subset')!r})"


def share_of_wins(better: Sequence[float], others: Sequence[float]) -> float:
    """Share of the (better, other) pairs in which the better answer scores strictly higher; a tie is no win."""
    return sum(a > b for a in better for b in others) / (len(better) * len(others))


def share_of_top(better: Sequence[float], others: Sequence[float]) -> float:
    """1/k where the first answer scores highest, k answers sharing that score; else 0 (RewardBench 2)."""
    top = max(*better, *others)
    return 1 / (better.count(top) + others.count(top)) if better[0] == top else 0.0


def shares_top(better: Sequence[float], others: Sequence[float]) -> bool:
    """Whether the first answer scores highest, but not alone."""
    return 0 < share_of_top(better, others) < 1


def has_tie(better: Sequence[float], others: Sequence[float]) -> bool:
    """Whether some better answer scores the same as some other one."""
    return not set(better).isdisjoint(others)


Credit = Callable[[Sequence[float], Sequence[float]], float]


def row_credits(rows: Iterable[Row], credit: Credit = share_of_wins) -> dict[tuple[str, str, str], float]:
    """Return the credit of each row by (subset, id, digest of its texts)."""
    return {
        (str(row.get("subset")), str(row.get("id")), str(row.get("digest"))): credit(*row_scores(row, number))
        for number, row in enumerate(rows, 1)
    }


def tally_by_subset(
    rows: Iterable[Row], credit: Credit = share_of_wins, tied: Callable[..., bool] = has_tie
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Return accuracy, n, ties and Wilson interval of each subset in order of appearance, and of all rows together.

    Raises:
        ValueError: no rows, one without a subset, or a score that is no number.
    """
    outcomes: dict[str, list[tuple[float, bool]]] = defaultdict(list)
    for number, row in enumerate(rows, 1):
        scores = row_scores(row, number)
        outcomes[_subset(row, number)].append((credit(*scores), tied(*scores)))
    if not outcomes:
        raise ValueError("no rows to score: the benchmark file has no usable row")
    pooled = tally([outcome for held in outcomes.values() for outcome in held])
    warn_of_ties(pooled)
    return {name: tally(held) for name, held in outcomes.items()}, pooled


def _subset(row: Row, number: int) -> str:
    if not isinstance(row.get("subset"), str):
        raise ValueError(f"{row_name(row, number)} has no subset name: benchmarks average by subset, so set 'subset'")
    return row["subset"]


def tally(outcomes: Sequence[tuple[float, bool]]) -> dict[str, Any]:
    """Accuracy, n, ties and 95 % interval of (credit, tied) rows."""
    won, n = sum(credit for credit, _ in outcomes), len(outcomes)
    ties = sum(tied for _, tied in outcomes)
    return {"accuracy": won / n, "n": n, "ties": ties, "ci95": list(wilson_interval(won, n))}


def warn_of_ties(pooled: Mapping[str, Any]) -> None:
    """Say so where more than 1 % of the rows have a tie."""
    if pooled["ties"] > 0.01 * pooled["n"]:
        warnings.warn(
            f"{pooled['ties']} of {pooled['n']} pairs are ties, which are no wins: a reward model that gives "
            "different answers the same score is constant, saturated or compared in too few digits",
            stacklevel=3,
        )


def mean_of_present(values: Mapping[str, float], names: Sequence[str]) -> tuple[float | None, list[str]]:
    """Return the plain mean over the names that have a value (None without any), and the names that have none."""
    present = [values[name] for name in names if name in values]
    return (sum(present) / len(present) if present else None), [name for name in names if name not in values]
