"""Score against length, on points whose line is plain to see."""

import math

import pytest

from reward_models.length_bias import describe_length_bias, length_bias


def test_slope_and_correlation_by_hand():
    # x - 3 = -2 -1 0 1 2; y - 2 = -1 -2 1 0 2: Sxy = 2 + 2 + 0 + 0 + 4, Sxx = Syy = 10
    report = length_bias([1.0, 0.0, 3.0, 2.0, 4.0], [1, 2, 3, 4, 5], list("abcde"))
    assert report["correlation"] == pytest.approx(0.8) and report["slope"] == pytest.approx(80.0)
    half = 1.959964 / math.sqrt(2)
    assert report["ci95"] == pytest.approx([math.tanh(math.atanh(0.8) - half), math.tanh(math.atanh(0.8) + half)])
    assert report["within"] == {"n": 0, "correlation": None, "ci95": None, "slope": None}


def test_within_a_prompt_what_prompts_differ_in_is_gone():
    """Long prompts' answers score high, but among answers to one prompt the shorter wins."""
    scores, lengths = [2.0, 1.0, 12.0, 11.0, 22.0, 21.0], [10, 20, 110, 120, 210, 220]
    report = length_bias(scores, lengths, ["a", "a", "b", "b", "c", "c"])
    assert report["correlation"] > 0.9
    assert report["within"]["correlation"] == pytest.approx(-1.0) and report["within"]["slope"] == pytest.approx(-10.0)
    assert "+0.99" in describe_length_bias(report) and "-1.00" in describe_length_bias(report)


def test_equal_lengths_have_no_correlation():
    report = length_bias([1.0, 2.0], [7, 7], ["a", "a"])
    assert report["correlation"] is None and "n/a" in describe_length_bias(report)
