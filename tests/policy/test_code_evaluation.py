"""pass@k, against counting by hand."""

from itertools import combinations

import pytest

from policy.code_evaluation import Solved, pass_at_k, pass_rates, solve
from policy.code_promises import trusted_launcher
from policy.code_rewards import CodeExecution


@pytest.mark.parametrize(
    "samples, passed, k, value",
    [(1, 0, 1, 0.0), (1, 1, 1, 1.0), (10, 3, 1, 0.3), (5, 2, 2, 0.7), (5, 4, 2, 1.0), (4, 1, 4, 1.0), (4, 0, 4, 0.0)],
)
def test_by_hand(samples, passed, k, value):
    assert pass_at_k(samples, passed, k) == pytest.approx(value)


def test_it_is_the_share_of_subsets_with_a_pass():
    answers = [True, False, False, True, False, False, False]
    for k in range(1, 8):
        subsets = [any(chosen) for chosen in combinations(answers, k)]
        assert pass_at_k(7, 2, k) == pytest.approx(sum(subsets) / len(subsets))


def test_many_answers_stay_exact():
    assert pass_at_k(1000, 1, 500) == pytest.approx(0.5)


@pytest.mark.parametrize("samples, passed, k", [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)])
def test_impossible_numbers_are_refused(samples, passed, k):
    with pytest.raises(ValueError):
        pass_at_k(samples, passed, k)


def test_rates_by_difficulty_with_intervals_over_problems():
    problems = [Solved(2, 2, "introductory"), Solved(2, 1, "introductory"), Solved(2, 0, "interview"), Solved(2, 1)]
    rates = pass_rates(problems, 1)
    assert {name: (rate.value, rate.problems) for name, rate in rates.items()} == {
        "all": (0.5, 4), "introductory": (0.75, 2), "interview": (0.0, 1),
    }  # fmt: skip
    # Two problems of 1 and 1/2: each resampled mean is 1/2, 3/4 or 1, the outer two a quarter of the time each.
    assert rates["introductory"].ci95 == (0.5, 1.0) and rates["interview"].ci95 == (0.0, 0.0)
    assert pass_rates(problems, 2)["all"].value == 0.75
    assert pass_rates(problems, 1) == rates


def test_no_problems_are_refused():
    with pytest.raises(ValueError, match="no problems"):
        pass_rates([], 1)


def test_answers_to_problems_are_run_and_counted():
    try:
        trusted_launcher()
    except ValueError as error:
        pytest.skip(str(error))
    problems = [
        {"tests": {"inputs": ["1"], "outputs": ["2"]}, "difficulty": "introductory"},
        {"input_output": '{"inputs": [[3]], "outputs": [9], "fn_name": "f"}'},
    ]
    answers = [["print(2)", "```python\nprint(3)\n```", "print(int(input()) + 1)"], ["def f(n): return n * n"]]
    solved = solve(problems, answers, CodeExecution(allow_code_execution=True, code_timeout=20.0, code_workers=2))
    assert solved == [Solved(3, 2, "introductory"), Solved(1, 1, "")]
    with pytest.raises(ValueError, match="problem 0, column 'input_output': no tests"):
        solve([{"question": "?"}], [["print(1)"]], CodeExecution(allow_code_execution=True))
