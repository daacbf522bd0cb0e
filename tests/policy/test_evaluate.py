"""Scores of a policy are those of the very tokens it drew, and two policies are compared on equal terms."""

import pytest
import torch

from policy.evaluate import evaluate_policy
from policy.rollout import Sampling
from reward_models import SegmentRewardModel
from segrew.chat import ChatFormat
from segrew.language_models import load_causal_lm, load_tokenizer

PROMPTS = [[{"role": "user", "content": text}] for text in ("Say hi.", "Name a colour.", "Go.", "Why?")]


@pytest.fixture(scope="module")
def parts(policy_dir, reward_dirs):
    device = torch.device("cpu")
    return (
        load_causal_lm(str(policy_dir), dtype=torch.float32, device=device),
        ChatFormat.from_tokenizer(load_tokenizer(str(policy_dir))),
        SegmentRewardModel.from_pretrained(reward_dirs["entropy"], device=device),
    )


def test_scores_are_means_of_the_segments_that_tile_the_answer(parts):
    evaluation = evaluate_policy(*parts, PROMPTS, Sampling(max_new_tokens=9, batch_size=3))
    assert len(evaluation.responses) == len(evaluation.scored) == 4
    for text, record in zip(evaluation.responses, evaluation.scored, strict=True):
        assert "".join(segment.text for segment in record.segments) == text
        assert record.score == pytest.approx(sum(s.reward for s in record.segments) / len(record.segments), abs=1e-6)
    assert evaluation.mean == pytest.approx(sum(evaluation.scores) / 4)


def test_one_seed_draws_the_same_answers_whatever_the_global_state(parts):
    sampling = Sampling(max_new_tokens=9)
    first = evaluate_policy(*parts, PROMPTS, sampling, seed=1)
    torch.rand(3)
    again = evaluate_policy(*parts, PROMPTS, sampling, seed=1)
    other = evaluate_policy(*parts, PROMPTS, sampling, seed=2)
    assert first.responses == again.responses and first.scores == again.scores
    assert first.responses != other.responses


def test_evaluation_leaves_the_models_mode_alone(parts):
    model = parts[0].train()
    evaluate_policy(*parts, PROMPTS[:1], Sampling(max_new_tokens=2))
    assert model.training
    model.eval()
