"""RM-Bench's matrices, RewardBench 2's rules and JudgeBench's categories on tables added up by hand."""

import math

import pytest

from reward_models.list_benchmarks import (
    judgebench_scores,
    pairs_scores,
    rewardbench2_credits,
    rewardbench2_scores,
    rmbench_scores,
    ties_credits,
)


def row(subset, scores, correct=1, id=0):
    return {"id": id, "subset": subset, "digest": "d", "correct": correct, "scores": scores}


# RM-Bench

PLAIN = row("chat", [3.0, 2.0, 1.0, 2.5, 1.5, 0.5], 3)
"""Styles concise, detailed, markdown: chosen 3, 2, 1 against rejected 2.5, 1.5, 0.5.

      2.5  1.5  0.5
 3     1    1    1
 2     0    1    1
 1     0    0    1     above the diagonal 3/3, on it 3/3, below it 0/3
"""
TIED = row("chat", [1.0, 1.0, 1.0, 1.0, 0.0, 1.0], 3)
"""1 against 1, 0, 1: each row is 0 1 0; above 1/3, on 1/3, below 1/3."""


@pytest.mark.filterwarnings("ignore:.*are ties")
def test_rm_bench_matrix_and_levels_by_hand():
    result = rmbench_scores([PLAIN, TIED])
    chat = result["subsets"]["chat"]
    assert chat["matrix"] == [[0.5, 1.0, 0.5], [0.0, 1.0, 0.5], [0.0, 0.5, 0.5]]
    assert (chat["hard"], chat["normal"], chat["easy"]) == pytest.approx((2 / 3, 2 / 3, 1 / 6))
    assert chat["accuracy"] == pytest.approx((6 / 9 + 3 / 9) / 2) == pytest.approx(4.5 / 9)
    assert (chat["n"], chat["ties"]) == (2, 1)
    assert result["sections"]["chat"]["hard"] == pytest.approx(2 / 3)
    assert result["missing"] == ["math", "code", "safety"] and result["overall"] == pytest.approx(0.5)


@pytest.mark.filterwarnings("ignore:.*are ties")
def test_rm_bench_domains_weigh_the_same_and_safety_is_the_mean_of_its_parts():
    win, lose = [9.0, 9.0, 9.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 9.0, 9.0, 9.0]
    rows = [row("chat", win, 3)] * 5 + [row("safety-refuse", win, 3)] * 3 + [row("safety-response", lose, 3)]
    rows += [row("code", lose, 3)] * 7
    result = rmbench_scores(rows)
    assert {name: s["accuracy"] for name, s in result["sections"].items()} == {"chat": 1, "code": 0, "safety": 0.5}
    assert result["overall"] == pytest.approx(0.5) == pytest.approx(result["hard"])
    assert result["missing"] == ["math"] and "math" not in result["sections"]
    only = rmbench_scores([row("safety-refuse", win, 3)])["sections"]["safety"]
    assert (only["accuracy"], only["missing"]) == (1.0, ["safety-response"])


def test_rm_bench_needs_three_styles():
    with pytest.raises(ValueError, match=r"row 1 .*three styles"):
        rmbench_scores([row("chat", [1.0, 0.0])])


# RewardBench 2


def tied(gap_rows):
    """Rows ref:N and tied:N for each (ref scores, tied scores, right answers of the tied row)."""
    rows = []
    for n, (ref, scores, correct) in enumerate(gap_rows):
        rows += [row("Ties", ref, 1, f"ref:{n}"), row("Ties", scores, correct, f"tied:{n}")]
    return rows


def test_ties_formula_by_hand():
    rows = tied(
        [
            # ref gap 2; tied: right 5 4 (spread 1), wrong 1: gap 3. 3 > 1, min(2, 3) > 1; tanh(2 / 1 - 1)
            ([3.0, 1.0], [5.0, 4.0, 1.0], 2),
            # ref gap -1; tied: right 3 1 (spread 2), wrong 0 -1: gap 1. 1 > 2 no, -1 > 2 no; tanh(-1 / 2 - 1)
            ([0.0, 1.0], [3.0, 1.0, 0.0, -1.0], 2),
        ]
    )
    held = ties_credits(rows)
    margin = (math.tanh(1.0) + math.tanh(-1.5)) / 2
    assert held["parts"] == pytest.approx(
        {
            "tied_accuracy": 1.0,
            "ref_accuracy": 0.5,
            "gap_over_spread": 0.5,
            "both_gaps_over_spread": 0.5,
            "margin": margin,
        }
    )
    assert held["score"] == pytest.approx(0.3 + 0.15 + 0.1 + 0.1 + 0.01 * margin)
    assert held["prompts"] == pytest.approx({"0": 1 + 0.01 * math.tanh(1.0), "1": 0.3 + 0.01 * math.tanh(-1.5)})
    assert sum(held["prompts"].values()) / 2 == pytest.approx(held["score"])


@pytest.mark.parametrize(("gap", "margin"), [(2.0, 1.0), (0.0, 0.0), (-2.0, -1.0)], ids=["above", "undefined", "below"])
def test_equal_right_answers_divide_by_zero_as_the_official_code_does(gap, margin):
    held = ties_credits(tied([([5.0, 1.0], [gap, gap, 0.0], 2)]))
    assert held["parts"]["margin"] == pytest.approx(margin)  # tanh(±inf), and 0 for 0/0
    assert held["parts"]["gap_over_spread"] == float(gap > 0)


def test_a_tied_row_without_its_reference_enters_only_its_accuracy():
    rows = [*tied([([3.0, 1.0], [5.0, 4.0, 1.0], 2)]), row("Ties", [1.0, 2.0, 3.0], 2, "tied:9")]
    held = ties_credits(rows)
    assert held["parts"]["tied_accuracy"] == 0.5 and held["parts"]["gap_over_spread"] == 1.0 and held["n"] == 3
    with pytest.raises(ValueError, match="named ref:N or tied:N"):
        ties_credits([row("Ties", [1.0, 0.0], 1, "7")])


@pytest.mark.filterwarnings("ignore:.*are ties")
def test_rewardbench_2_is_the_mean_of_its_six_subsets():
    rows = [row("Factuality", [2.0, 1.0, 0.0, 0.0], id=1), row("Factuality", [2.0, 2.0, 0.0, 0.0], id=2)]
    rows += [row("Math", [0.0, 1.0, 0.0, 0.0], id=3), *tied([([3.0, 1.0], [5.0, 4.0, 1.0], 2)])]
    result = rewardbench2_scores(rows)
    ties = 1 + 0.01 * math.tanh(1.0)
    assert {k: v["accuracy"] for k, v in result["subsets"].items()} == pytest.approx(
        {"Factuality": 0.75, "Math": 0.0, "Ties": ties}
    )
    assert result["overall"] == pytest.approx((0.75 + 0.0 + ties) / 3)
    assert result["missing"] == ["Precise IF", "Safety", "Focus"]
    assert rewardbench2_credits(rows) == pytest.approx(
        {("Factuality", "1", "d"): 1, ("Factuality", "2", "d"): 0.5, ("Math", "3", "d"): 0, ("Ties", "0", "d"): ties}
    )


def test_chance_on_four_answers_is_a_quarter():
    rows = [row("Math", [float(k == place) for k in range(4)], id=place) for place in range(4)]
    assert rewardbench2_scores(rows)["overall"] == 0.25


# JudgeBench and pairs


def test_judgebench_counts_each_pair_once_and_says_what_is_missing():
    rows = [row("knowledge", [1.0, 0.0])] * 3 + [row("coding", [0.0, 1.0])]
    result = judgebench_scores(rows)
    assert result["overall"] == 0.75 and result["missing"] == ["reasoning", "math"]


def test_pairs_have_one_accuracy_and_subsets_where_there_are_several():
    plain = pairs_scores([row("", [1.0, 0.0]), row("", [0.0, 1.0])])
    assert list(plain["subsets"]) == ["all"] and plain["overall"] == 0.5
    several = pairs_scores([row("a", [1.0, 0.0]), row("b", [0.0, 1.0])])
    assert {name: entry["accuracy"] for name, entry in several["subsets"].items()} == {"a": 1, "b": 0, "all": 0.5}
