"""Figures of where low rewards are, on responses small enough to count."""

import numpy as np
import pytest

from reward_models.localisation_metrics import (
    chance_of_split,
    inside_words,
    low_reward_auc,
    lowest_unit_hit,
    mean_of_known,
    paired_difference,
    pooled_aucs,
    unit_rewards,
    words_of_tokens,
)


def test_auc_counts_pairs_and_halves_draws():
    # wrong 1, 2; sound 2, 3, 0: (1<2, 1<3, no) and (=, 2<3, no): 3.5 of 6
    assert low_reward_auc(np.array([1.0, 2.0, 2.0, 3.0, 0.0]), np.array([True, True, False, False, False])) == (
        pytest.approx(3.5 / 6)
    )
    assert low_reward_auc(np.array([0.0, 1.0]), np.array([True, False])) == 1.0
    assert low_reward_auc(np.zeros(4), np.array([True, False, False, True])) == 0.5
    assert low_reward_auc(np.array([0.0, 1.0]), np.array([False, False])) is None


def test_units_gather_and_the_lowest_is_looked_up():
    rewards, units = np.array([1.0, 2.0, -1.0, 4.0]), np.array([0, 0, 1, 2])
    assert unit_rewards(rewards, units, "sum").tolist() == [3.0, -1.0, 4.0]
    assert unit_rewards(rewards, units, "mean").tolist() == [1.5, -1.0, 4.0]
    overlaps = np.array([False, True, False])
    assert lowest_unit_hit(np.array([3.0, -1.0, 4.0]), overlaps) == (1.0, pytest.approx(1 / 3))
    assert lowest_unit_hit(np.array([-1.0, -1.0, 4.0]), overlaps)[0] == 0.5  # two share the lowest place


def test_words_are_runs_without_white_space():
    text = "ab cde\nf"
    spans = [(0, 1), (1, 2), (2, 5), (5, 6), (6, 7), (7, 8)]  # a, b, " cd", e, newline, f
    assert words_of_tokens(spans, text).tolist() == [0, 0, 1, 1, -1, 2]


def test_inconsistency_inside_words_by_hand():
    words = np.array([0, 0, 1, 1, 1, 2, -1])
    rewards = np.array([1.0, 1.0, 1.0, 3.0, 3.0, 9.0, 0.0])
    # words 0 and 1 have several tokens; word 1 is split; steps inside words: 0, 2, 0
    split, step = inside_words(rewards, words)
    assert split == 0.5 and step == pytest.approx((2 / 3) / rewards.std())
    assert inside_words(rewards, np.arange(7)) == (None, None)
    assert inside_words(np.ones(7), words) == (0.0, 0.0)


def test_chance_of_a_split_word_by_counting_all_cuts():
    words, units = np.array([0, 0, 1, 2, 2, 2]), np.array([0, 0, 1, 1, 2, 2])
    # 2 cuts on 5 gaps, 10 ways: the first word's gap is among them in 4, one of the last word's two gaps in 7
    assert chance_of_split(words, units) == pytest.approx((4 / 10 + 7 / 10) / 2)
    assert chance_of_split(np.arange(4), np.zeros(4, dtype=np.int64)) is None


def test_means_leave_out_what_is_unknown():
    assert mean_of_known([None, 1.0, 3.0]) | {"ci95": None} == {"value": 2.0, "ci95": None, "n": 2}
    low, high = mean_of_known([1.0, 3.0])["ci95"]
    assert (low, high) == (1.0, 3.0)
    assert paired_difference([1.0, None, 3.0], [0.5, 1.0, 1.5])["value"] == 1.0
    assert mean_of_known([None, 2.0]) == {"value": 2.0, "ci95": None, "n": 1}  # one value says nothing of its spread
    assert mean_of_known([None]) == {"value": None, "ci95": None, "n": 0}


def test_pooled_auc_is_that_of_all_tokens_together():
    rewards = [np.array([0.0, 1.0]), np.array([5.0, 9.0]), np.array([2.0])]
    wrong = [np.array([True, False]), np.array([True, False]), np.array([False])]
    opposite = [-r for r in rewards]
    found = pooled_aucs({"segments": rewards, "other": opposite}, wrong)
    # wrong 0, 5; sound 1, 9, 2: 0 below all three, 5 below one of three
    assert found["segments"]["value"] == pytest.approx(4 / 6) == 1 - found["other"]["value"]
    assert found["other"]["ours_minus_this"]["value"] == pytest.approx(2 / 6)
    low, high = found["segments"]["ci95"]
    assert low <= 4 / 6 <= high and "ours_minus_this" not in found["segments"]
    assert pooled_aucs({"segments": rewards[:1]}, wrong[:1])["segments"] == {"value": 1.0, "ci95": None, "n": 1}
