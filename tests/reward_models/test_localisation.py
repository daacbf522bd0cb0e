"""Whether a fault's segment counts as low, on hand-made segments."""

import pytest

from reward_models.localisation import in_lowest_third, localisation, segment_of_fault
from reward_models.scored_responses import Segment
from segrew.preferences import Fault


def segments(rewards, normalized=None):
    """Segments of ten characters each."""
    normalized = normalized or [None] * len(rewards)
    return [
        Segment("x" * 10, 10 * k, 10 * k + 10, 3, reward, other, (k + 1) / len(rewards))
        for k, (reward, other) in enumerate(zip(rewards, normalized, strict=True))
    ]


def test_the_segment_that_shares_most_characters_is_the_faults():
    cut = segments([0.0, 0.0, 0.0])
    assert segment_of_fault(cut, Fault(8, 15, "rude")) == 1  # 2 characters in the first, 5 in the second
    assert segment_of_fault(cut, Fault(5, 11, "rude")) == 0
    assert segment_of_fault(cut, Fault(0, 30, "rude")) == 0  # a draw goes to the first


def test_lowest_third_counts_strictly_lower_segments():
    cut = segments([3.0, 1.0, 2.0, 4.0, 5.0, 6.0])
    assert [in_lowest_third(cut, k) for k in range(6)] == [False, True, True, False, False, False]
    assert in_lowest_third(segments([1.0]), 0)
    assert in_lowest_third(segments([1.0, 2.0]), 0) and not in_lowest_third(segments([1.0, 2.0]), 1)


def test_normalized_rewards_decide_where_there_are_any():
    cut = segments([1.0, 2.0, 3.0], normalized=[3.0, 2.0, 1.0])
    assert in_lowest_third(cut, 2) and not in_lowest_third(cut, 0)


def test_share_and_chance_by_hand():
    low, high = Fault(0, 10, "rude"), Fault(20, 30, "rude")
    found = localisation([(segments([1.0, 2.0, 3.0]), [low, high]), (segments([1.0, 2.0, 3.0, 4.0]), [low])])
    assert found.n == 3
    assert found.share == pytest.approx(2 / 3)
    assert found.chance == pytest.approx((1 / 3 + 1 / 3 + 2 / 4) / 3)
    assert found.ci95[0] < found.share < found.ci95[1]


def test_no_marked_fault_is_refused():
    with pytest.raises(ValueError, match="no response carries a marked fault"):
        localisation([(segments([1.0]), [])])
