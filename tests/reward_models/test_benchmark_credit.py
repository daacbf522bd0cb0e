"""What one row is worth, and what rows come to."""

import math

import pytest

from reward_models.benchmark_credit import (
    has_tie,
    row_credits,
    row_scores,
    share_of_top,
    share_of_wins,
    shares_top,
    tally_by_subset,
)


def test_share_of_wins_is_strict_and_over_all_pairs():
    assert share_of_wins([1.0], [0.0]) == 1 and share_of_wins([1.0], [1.0]) == 0
    # 3 > 2; 3 > 1; 1 > 2 no; 1 > 1 no
    assert share_of_wins([3.0, 1.0], [2.0, 1.0]) == 0.5
    assert has_tie([3.0, 1.0], [2.0, 1.0]) and not has_tie([3.0, 1.0], [2.0, 0.0])


def test_share_of_top_splits_a_shared_first_place():
    assert share_of_top([2.0], [1.0, 0.0, 1.5]) == 1
    assert share_of_top([2.0], [2.0, 0.0, 2.0]) == pytest.approx(1 / 3)
    assert share_of_top([2.0], [3.0, 0.0, 2.0]) == 0
    assert shares_top([2.0], [2.0, 0.0]) and not shares_top([2.0], [1.0]) and not shares_top([2.0], [3.0, 2.0])


def test_rows_name_their_scores_in_either_way():
    assert row_scores({"scores": [1, 2, 3], "correct": 2}, 1) == ([1.0, 2.0], [3.0])
    assert row_scores({"score_chosen": 1, "score_rejected": 2}, 1) == ([1.0], [2.0])
    with pytest.raises(ValueError, match=r"row 4 \(id 'a', subset 'b'\): score 2 of 2 is nan"):
        row_scores({"id": "a", "subset": "b", "scores": [1, math.nan]}, 4)
    with pytest.raises(ValueError, match="2 of 2 answers cannot be the better ones"):
        row_scores({"scores": [1, 2], "correct": 2}, 1)


def test_partial_credit_is_summed_and_keyed_by_text():
    rows = [
        {"id": 1, "subset": "a", "digest": "x", "scores": [1.0, 1.0, 0.0]},
        {"id": 2, "subset": "a", "digest": "y", "scores": [2.0, 1.0, 0.0]},
    ]
    with pytest.warns(UserWarning, match="1 of 2 pairs are ties"):
        subsets, pooled = tally_by_subset(rows, share_of_top)
    assert subsets["a"] == pooled and (pooled["accuracy"], pooled["ties"]) == (0.75, 1)
    assert row_credits(rows, share_of_top) == {("a", "1", "x"): 0.5, ("a", "2", "y"): 1.0}
