"""The expected best of n against a count of all subsets, and the sets that TRL trains on."""

from itertools import combinations

import pytest

from policy.best_of import Candidates, expected_best_of, plot_sweep, sweep_row, write_training_sets
from reward_models.scored_responses import ScoredResponse
from segrew.run_directory import read_jsonl

SCORES = [0.3, -1.0, 2.5, 0.3, 0.9, -0.2]
PROMPT = [{"role": "user", "content": "Go."}]


def candidates(texts, scores) -> Candidates:
    scored = [ScoredResponse(score, []) for score in scores]
    return Candidates("q", PROMPT, 1.0, list(texts), [True] * len(texts), scored)


@pytest.mark.parametrize("n", range(1, 7))
def test_the_expected_best_is_the_mean_over_all_subsets(n):
    subsets = list(combinations(SCORES, n))
    assert expected_best_of(SCORES, n) == pytest.approx(sum(map(max, subsets)) / len(subsets), abs=1e-12)


@pytest.mark.parametrize("n", [0, 7])
def test_more_than_was_drawn_cannot_be_told(n):
    with pytest.raises(ValueError, match=f"best of {n} cannot be told from 6"):
        expected_best_of(SCORES, n)


def test_the_first_of_equal_answers_is_best_and_without_scores_the_first():
    assert (candidates("abcd", [1.0, 3.0, 3.0, 1.0]).best, candidates("abcd", [1.0, 3.0, 3.0, 1.0]).worst) == (1, 0)
    assert candidates("ab", []).best == 0


def test_a_sweep_row_is_the_mean_over_prompts_with_an_interval_around_it():
    prompts = [candidates("abcdef", [score + shift for score in SCORES]) for shift in (0.0, 1.0, 5.0)]
    row = sweep_row(prompts, 0.7, 2)
    assert row["score"] == pytest.approx(expected_best_of(SCORES, 2) + 2.0)
    assert row["ci95"][0] < row["score"] < row["ci95"][1]
    assert (row["prompts"], row["samples"], row["best_of"], row["temperature"]) == (3, 6, 2, 0.7)


def test_the_sweep_has_a_picture(tmp_path):
    prompts = [candidates("abcdef", SCORES)] * 2
    rows = [sweep_row(prompts, temperature, n) for temperature in (0.5, 1.0, None) for n in (1, 4)]
    plot_sweep(rows, tmp_path / "sweep.svg")
    assert (tmp_path / "sweep.svg").read_text().count("<path") > 10


@pytest.mark.parametrize("columns", ["messages", "prompt_completion"])
def test_best_and_worst_become_trls_sets(tmp_path, columns):
    answers = [
        candidates(["mid", "bad", "good"], [0.0, -1.0, 2.0]),
        candidates(["same", "same"], [0.1, 0.0]),  # no preference
        candidates(["one", "two"], [0.5, 0.5]),  # no preference
        candidates([" ", "x"], [1.0, 0.0]),  # an empty best answer teaches nothing
        candidates(["x", ""], [1.0, 0.0]),  # an empty worst answer is no pair
    ]
    assert write_training_sets(tmp_path, answers, columns) == {"sft": 4, "preferences": 1}
    (pair,) = read_jsonl(tmp_path / "preferences.jsonl")
    good, bad = ([{"role": "assistant", "content": text}] for text in ("good", "bad"))
    assert pair == {"prompt": PROMPT, "chosen": good, "rejected": bad, "margin": 3.0}
    first = read_jsonl(tmp_path / "sft.jsonl")[0]
    whole = {"messages": PROMPT + good}
    assert first == (whole if columns == "messages" else {"prompt": PROMPT, "completion": good})


def test_rows_have_the_shape_that_segrew_score_writes():
    rows = candidates(["a", "b"], [1.0, 2.0]).rows()
    assert [(row["sample"], row["response"], row["score"]) for row in rows] == [(0, "a", 1.0), (1, "b", 2.0)]
    assert {"id", "prompt", "response", "score", "segments"} <= set(rows[0])
