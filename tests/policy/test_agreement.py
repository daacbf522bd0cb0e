"""Agreement of two segmentations of the same answers."""

import pytest
import torch

from policy.agreement import boundary_agreement, live_agreement
from policy.readings import Units
from policy.rollout import Rollout
from segrew.conversations import Conversations
from segrew.segmentation import Segmentation, SegmentationConfig, segment_by_response


def test_f1_of_inner_boundaries():
    ours = Segmentation(torch.tensor([[0, 0, 1, 1, 2], [0, 1, 1, -1, -1]]))  # before tokens 2, 4 | 1
    theirs = Segmentation(torch.tensor([[0, 0, 1, 2, 2], [0, 0, 0, -1, -1]]))  # before 2, 3 |
    assert boundary_agreement(ours, theirs).item() == pytest.approx(2 * 1 / (3 + 2))
    assert boundary_agreement(ours, ours).item() == 1.0
    whole = segment_by_response(ours.mask)
    assert boundary_agreement(whole, whole).item() == 1.0 and boundary_agreement(ours, whole).item() == 0.0


def test_the_live_policy_is_compared_by_the_rule_that_reads_a_model():
    conversations = Conversations([[1]], [[5] * 4], torch.tensor([False]))
    entropy = torch.tensor([[9.0, 1.0, 3.0, 1.0]])
    rollout = Rollout(conversations, [""], -entropy, entropy, entropy)
    reference = Segmentation(torch.tensor([[0, 1, 2, 2]]))
    tokens = Segmentation(torch.tensor([[0, 1, 2, 3]]))
    cuts = {SegmentationConfig(rule="token"): tokens, SegmentationConfig(rule="entropy", threshold=2.0): reference}
    found = live_agreement(rollout, Units(torch.zeros(1, 4), cuts, reference, tokens), None, 1.0)
    assert found["units/live_agreement"].item() == pytest.approx(2 * 1 / (1 + 2))  # live: before 2; reference: 1, 2
    assert live_agreement(rollout, Units(torch.zeros(1, 4), {}, tokens, tokens), None, 1.0) == {}
    spans = {SegmentationConfig(rule="perplexity"): reference}
    assert live_agreement(rollout, Units(torch.zeros(1, 4), spans, reference, tokens), None, 0.7) == {}
