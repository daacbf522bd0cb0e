"""Scores of answers are those of the very tokens that were drawn."""

import pytest
import torch

from policy.rollout import Sampling, sample_answers
from reward_models import SegmentRewardModel
from segrew.chat import ChatFormat
from segrew.language_models import load_causal_lm, load_tokenizer


def test_scores_are_means_of_the_segments_that_tile_the_answer(policy_dir, reward_dirs):
    device = torch.device("cpu")
    model = load_causal_lm(str(policy_dir), dtype=torch.float32, device=device)
    chat = ChatFormat.from_tokenizer(load_tokenizer(str(policy_dir)))
    reward_model = SegmentRewardModel.from_pretrained(reward_dirs["entropy"], device=device)
    prompts = [chat.prompt_ids([{"role": "user", "content": text}]) for text in ("Say hi.", "A colour.", "Go.", "Why?")]
    answers = sample_answers(model, chat, prompts, Sampling(max_new_tokens=9), torch.Generator().manual_seed(0))
    scored = reward_model.score_rows(answers.conversations, max_tokens=3, cached=False, generator=torch.Generator())
    assert len(scored) == 4
    for text, record in zip(answers.texts, scored, strict=True):
        assert "".join(segment.text for segment in record.segments) == text
        assert record.score == pytest.approx(sum(s.reward for s in record.segments) / len(record.segments), abs=1e-6)
