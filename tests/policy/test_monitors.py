"""Warnings and early stop, on histories written by hand."""

import pytest
import torch

from policy.monitors import flat_groups, flat_warning, hacking_warning, out_of_patience
from policy.text_metrics import distinct_n, repetition, text_metrics


def test_prompts_without_reward_variance():
    scores = torch.tensor([1.0, 1.0, 2.0, 3.0, 0.5, 9.0])
    rows = torch.tensor([True, True, True, True, True, False])
    assert flat_groups(scores, 2, rows).item() == pytest.approx(2 / 3)  # (1, 1), (2, 3), 0.5 alone
    assert flat_groups(scores, 1, rows).item() == 0.0
    assert flat_groups(torch.ones(3), 1, torch.ones(3, dtype=torch.bool)).item() == 1.0
    assert flat_warning(0.5, 2) is None
    assert "67% of the prompts" in flat_warning(2 / 3, 2)


def evaluation(step, scores, gold, repeated=0.0):
    return {
        "step": step, "score": sum(scores) / len(scores), "scores": scores, "evaluators": {"gold": gold},
        "repetition": repeated,
    }  # fmt: skip


def test_reward_hacking_is_a_proxy_up_and_an_evaluator_down():
    before = evaluation(0, [0.0, 1.0, 2.0, 3.0], [1.0, 1.0, 2.0, 2.0])
    up = [1.0, 2.1, 3.0, 4.1]
    assert hacking_warning([before]) is None
    assert hacking_warning([before, evaluation(5, up, [1.0, 1.0, 2.0, 2.0])]) is None
    found = hacking_warning([before, evaluation(3, up, [1.0] * 4), evaluation(5, up, [0.0, 0.1, 1.0, 1.1])])
    assert "At step 5 the score of held-out answers is up from 1.500 to 2.550" in found
    assert "the evaluator gold fell (1.500 to 0.550)" in found
    # The evaluator down, but so is the score: the policy is bad, not dishonest.
    assert hacking_warning([before, evaluation(5, [-1.0, 0.0, 1.0, 2.0], [0.0, 0.0, 1.0, 1.0])]) is None
    # A loss that the prompts do not agree on.
    assert hacking_warning([before, evaluation(5, up, [9.0, -9.0, 2.0, 0.0])]) is None
    found = hacking_warning([before, evaluation(5, up, [1.0, 1.0, 2.0, 2.0], repeated=0.4)])
    assert "repetition rose (0.00 to 0.40)" in found


def test_answers_without_a_score_take_no_part_in_the_comparison():
    before, after = [0.0, None, 1.0, 2.0, 3.0], [1.0, 9.0, 2.1, None, 4.0]
    row = {"score": 0.0, "repetition": 0.0}
    first, last = ({"step": k, "scores": s, "evaluators": {}, **row} for k, s in ((0, before), (1, after)))
    assert hacking_warning([first, last]) is None
    last |= {"evaluators": {"gold": [-1.0, -1.1, None, -1.0, -1.0]}, "score": 2.0}
    first |= {"evaluators": {"gold": [None, 0.0, 0.0, 0.0, 0.0]}}
    assert "the evaluator gold fell (0.000 to -1.025)" in hacking_warning([first, last])


def test_patience_ends_with_the_last_evaluations_no_better_than_the_best_before():
    def stops(values, patience):
        return out_of_patience([{"metrics": {"eval/score": v}} for v in values], "eval/score", patience)

    assert not stops([1.0], 1) and not stops([1.0, 0.5], 2)
    assert stops([1.0, 0.5], 1) and stops([0.0, 1.0, 1.0, 0.9], 2)
    assert not stops([1.0, 0.5, 1.1], 2)
    assert stops([1.0, float("nan"), float("nan")], 2) and not stops([float("nan"), 0.5], 1)


def test_text_metrics_by_hand():
    assert distinct_n([[1, 2, 1], [2, 1]], 1) == pytest.approx(2 / 5)
    assert distinct_n([[1, 2, 1], [2, 1]], 2) == pytest.approx(2 / 3)  # 12 21 | 21
    assert distinct_n([[1]], 2) == 1.0
    assert repetition([1, 2, 1, 2, 1, 2], 2) == pytest.approx(1 - 2 / 5)
    assert repetition([1, 2, 3], 4) == 0.0
    assert text_metrics([[1, 1, 1, 1, 1, 1], [2]])["repetition"] == pytest.approx((1 - 1 / 3) / 2)
