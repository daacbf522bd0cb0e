"""pass@k of a policy on programming problems, by difficulty (Chen et al. 2021, 2107.03374)."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

from policy.code_rewards import CodeExecution, reward_programs
from policy.code_tests import ProgramTests, extract_program
from segrew.metrics import bootstrap_interval


@dataclass(frozen=True)
class Solved:
    """A problem with `samples` answers of which `passed` pass all tests."""

    samples: int
    passed: int
    difficulty: str = ""


@dataclass(frozen=True)
class PassRate:
    """pass@k over some problems, with a 95 % bootstrap interval over problems."""

    k: int
    value: float
    ci95: tuple[float, float]
    problems: int


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Estimate the chance that one of k answers passes: 1 − C(n − c, k) / C(n, k), unbiased for n ≥ k.

    Args:
        samples: n, answers drawn. passed: c, those that pass.

    Raises:
        ValueError: k is not between 1 and n, or c not between 0 and n.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} answers a problem, and k of at least 1; there are {samples}.")
    if not 0 <= passed <= samples:
        raise ValueError(f"{passed} of {samples} answers cannot pass.")
    return 1 - comb(samples - passed, k) / comb(samples, k)


def pass_rates(problems: Sequence[Solved], k: int, *, seed: int = 0) -> dict[str, PassRate]:
    """Return pass@k over all problems ("all") and over those of each difficulty.

    Raises:
        ValueError: there are no problems, or one has fewer than k answers.
    """
    if not problems:
        raise ValueError("pass@k over no problems: there is nothing to average.")
    groups: dict[str, list[float]] = {"all": []}
    for problem in problems:
        value = pass_at_k(problem.samples, problem.passed, k)
        groups["all"].append(value)
        if problem.difficulty:
            groups.setdefault(problem.difficulty, []).append(value)
    return {
        name: PassRate(k, sum(values) / len(values), bootstrap_interval(values, seed=seed), len(values))
        for name, values in groups.items()
    }


def solve(
    problems: Sequence[dict[str, Any]], answers: Sequence[Sequence[str]], execution: CodeExecution
) -> list[Solved]:
    """Run several answers to each problem.

    Args:
        problems: rows with `tests` (or APPS's `input_output`) and perhaps `difficulty`.
        answers: texts, a list for each problem.

    Raises:
        ValueError: a problem has no tests, or programs may or can not be run.
    """
    programs, tests = [], []
    for row, (problem, texts) in enumerate(zip(problems, answers, strict=True)):
        column = "tests" if problem.get("tests") else "input_output"
        read = ProgramTests.read(problem.get(column), f"problem {row}, column '{column}'")
        programs += [extract_program(text) for text in texts]
        tests += [read] * len(texts)
    rewards = iter(reward_programs(programs, tests, execution))
    return [
        Solved(len(texts), sum(next(rewards).status == "passed" for _ in texts), problem.get("difficulty") or "")
        for problem, texts in zip(problems, answers, strict=True)
    ]
