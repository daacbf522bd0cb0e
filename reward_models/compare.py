"""Two reward models on the same rows: paired tests, which see what two separate intervals hide."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reward_models.benchmark_credit import Row
from segrew.metrics import bootstrap_interval, sign_test
from segrew.run_directory import read_json, read_jsonl

Credits = Mapping[tuple[str, str, str], float]


def load_scored_rows(dir_or_results: str, benchmark: str) -> list[Row]:
    """Read the rows that another run of the same benchmark scored.

    Args:
        dir_or_results: its --output_dir, or the results.json in it.

    Raises:
        ValueError: there is no finished run of this benchmark.
    """
    path = Path(dir_or_results)
    directory = path if path.is_dir() else path.parent
    scores = directory / "scores.jsonl"
    if not (directory / "results.json").is_file() or not scores.is_file():
        raise ValueError(f"--compare_to {dir_or_results}: no finished run with results.json and scores.jsonl there.")
    other = read_json(directory / "results.json").get("benchmark")
    if other != benchmark:
        raise ValueError(f"--compare_to {dir_or_results}: holds results of --benchmark {other}, not of {benchmark}.")
    return list(read_jsonl(scores))


def compare_credits(ours: Credits, theirs: Credits) -> dict[str, Any]:
    """Compare on the rows that both have, with equal subset, id and texts.

    Returns:
        all, and subsets by name: n, difference (ours - theirs, mean credit a row), its bootstrap interval over rows
        (ci95; None of a single one), better and worse (rows), and p of McNemar's exact test on these two. only_ours,
        only_theirs: rows left out.

    Raises:
        ValueError: they share no row.
    """
    shared = [key for key in ours if key in theirs]
    if not shared:
        raise ValueError("--compare_to: the two runs share no row (same subset, id and texts); nothing to compare.")
    by_subset: dict[str, list[float]] = {}
    for key in shared:
        by_subset.setdefault(key[0], []).append(ours[key] - theirs[key])
    return {
        "all": _paired([difference for held in by_subset.values() for difference in held]),
        "subsets": {name: _paired(held) for name, held in by_subset.items()} if len(by_subset) > 1 else {},
        "only_ours": len(ours) - len(shared),
        "only_theirs": len(theirs) - len(shared),
    }


def _paired(differences: list[float]) -> dict[str, Any]:
    better, worse = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    return {
        "n": len(differences),
        "difference": sum(differences) / len(differences),
        "ci95": list(bootstrap_interval(differences)) if len(differences) > 1 else None,
        "better": better,
        "worse": worse,
        "p": sign_test(better, worse),
    }
