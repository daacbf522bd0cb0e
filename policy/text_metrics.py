"""What tells that answers degenerate: repetition inside an answer, sameness across answers."""

from collections.abc import Sequence


def ngrams(ids: Sequence[int], n: int) -> list[tuple[int, ...]]:
    """All runs of n tokens."""
    return [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]


def distinct_n(answers: Sequence[Sequence[int]], n: int) -> float:
    """Different n-grams over all n-grams of a batch of answers (1510.03055, 4.3); 1 where there is none."""
    found = [gram for ids in answers for gram in ngrams(ids, n)]
    return len(set(found)) / len(found) if found else 1.0


def repetition(ids: Sequence[int], n: int = 4) -> float:
    """Share of an answer's n-grams that it has had before; 0 where it is too short to have any."""
    found = ngrams(ids, n)
    return 1 - len(set(found)) / len(found) if found else 0.0


def text_metrics(answers: Sequence[Sequence[int]]) -> dict[str, float]:
    """Distinct 1- and 2-grams of a batch, and the mean repetition of its answers."""
    return {
        "distinct_1": distinct_n(answers, 1),
        "distinct_2": distinct_n(answers, 2),
        "repetition": sum(map(repetition, answers)) / max(len(answers), 1),
    }
